"""Rows of an unsplit run: encoded anew at each visit, in place of being read from a cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dsplit.cache.encode import encode, inputs
from dsplit.units import Split

if TYPE_CHECKING:
    from dsplit.dataset import Row


class LiveRows:
    """The interface of CachedRows over a data set and loaded encoders; the values are equal bit for bit.

    split_of: the split that holds for a row (with or without the negative prompt).
    """

    def __init__(self, rows: Sequence[Row], split_of: Callable[[Row], Split], components: Mapping[str, Any]) -> None:
        self._rows, self._split_of, self._components = rows, split_of, components
        self.ids: Sequence[str] = [row.id for row in rows]

    def place(self, i: int) -> str:
        """Where row `i` is written: `data/metadata.csv:17`."""
        return self._rows[i].place

    def group(self, i: int) -> Hashable:
        """The target size (W, H)."""
        return self._rows[i].size

    def columns(self, i: int) -> dict[str, Any]:
        """The columns that cross into stage 2."""
        row = self._rows[i]
        known = {**row.columns, "size": row.size}
        return {name: known[name] for name in self._split_of(row).columns}

    def values(self, i: int) -> dict[str, torch.Tensor]:
        """The boundary values, without the batch axis."""
        row = self._rows[i]
        split = self._split_of(row)
        values = encode(split.stage1, inputs(row), self._components)
        return {name: values[name][0] for name in split.boundary}
