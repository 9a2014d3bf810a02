"""Runs units on one row: the one place that does it, so that cached and uncached training compute the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsplit.units import Unit

if TYPE_CHECKING:
    from dsplit.dataset import Row


def inputs(row: Row) -> dict[str, list[Any]]:
    """The columns of `row` as a batch of one: texts, numbers, a file per file column, `size` (W, H), `view`."""
    return {name: [value] for name, value in {**row.columns, **row.files, "size": row.size, "view": row.view}.items()}


def encode(units: Sequence[Unit], values: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    """`values` and everything that `units`, run in this order, make of them; every tensor has the batch axis first.

    No gradients are recorded. Raises UnitError where a unit does not give what it declares.
    """
    import torch

    known = dict(values)
    with torch.no_grad():
        for unit in units:
            known |= unit(known, components)
    return known
