"""A row on its way from the metadata to a checked row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsplit.dataset.columns import Cells
from dsplit.dataset.faults import Fault
from dsplit.dataset.packed import Source
from dsplit.dataset.sizes import Size

if TYPE_CHECKING:
    from dsplit.dataset.pictures import Picture


@dataclass
class Draft:
    """Its cells, then its files, their pictures, its target size, and the faults found so far."""

    line: int
    where: str
    cells: Cells
    faults: list[Fault]
    source: str
    files: dict[str, Source] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)
    size: Size = (0, 0)
    item: int = 0

    @property
    def picture(self) -> Picture:
        """The picture that gives the row its size: that of the first file column."""
        return next(iter(self.pictures.values()))
