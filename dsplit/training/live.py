"""Rows of an unsplit run: encoded anew at each visit, in place of being read from a cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dsplit.cache.encode import encode, inputs
from dsplit.training.batches import FIRST
from dsplit.units import Split

if TYPE_CHECKING:
    from dsplit.dataset import Row
    from dsplit.dataset.rows import Choice


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

    def variants(self, i: int) -> Mapping[str, int]:
        """How many variants row `i` has, per axis that has several."""
        return {axis: len(values) for axis, values in self._rows[i].variants.items()}

    def columns(self, i: int, choice: Choice = FIRST) -> dict[str, Any]:
        """The columns that cross into stage 2, with the variants chosen."""
        row = self._rows[i].pick(choice)
        known = {**row.columns, "size": row.size, "view": row.view}
        return {name: known[name] for name in self._split_of(row).columns}

    def values(self, i: int, choice: Choice = FIRST) -> dict[str, torch.Tensor]:
        """The boundary values of the row with the variants chosen, without the batch axis."""
        row = self._rows[i].pick(choice)
        split = self._split_of(row)
        values = encode(split.stage1, inputs(row), self._components)
        return {name: values[name][0] for name in split.boundary}
