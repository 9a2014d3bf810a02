"""A checked row of the data set, and the data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dsplit.dataset.packed import Packed, Source
from dsplit.errors import Problem

_JSON = json.JSONEncoder(ensure_ascii=False)  # made once: there may be ten million rows


class View(NamedTuple):
    """A window of the scaled picture: its left and top edge in pixels; flip: mirrored after the crop."""

    left: int
    top: int
    flip: bool = False


WHOLE = View(0, 0)
Choice = Mapping[str, int | None]  # column -> the number of its variant; None: the empty text


@dataclass(frozen=True)
class Row:
    """A usable row.

    id: 32 hex digits, blake2b over the row's columns as written and its occurrence number among identical rows.
    source: the metadata file or folder, as the user gave it. line: physical line in it (the header is 1), 0 for a
    plain folder. columns: typed values by canonical name; a file column holds the path as written, with / separators.
    files: per file column its absolute path, or where within another file it lies. image_size: W, H of the picture as
    shown. size: target W, H. item: its number in a JSON list where several begin on that line, else 0. view: the window
    of the picture that is used. variants: all values of the columns that have several (`prompt`: captions, `view`:
    windows); columns and view hold the first.
    """

    id: str
    source: str
    line: int
    columns: Mapping[str, Any]
    files: Mapping[str, Source]
    image_size: tuple[int, int]
    size: tuple[int, int]
    item: int = 0
    view: View = WHOLE
    variants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def pick(self, choice: Choice) -> Row:
        """The row as it is with these variants; the columns that `choice` does not name stay as they are."""
        picked: dict[str, Any] = {
            name: "" if k is None else self.variants[name][k]
            for name, k in choice.items()
            if k is None or name in self.variants
        }
        view = picked.pop("view", self.view)
        return replace(self, columns={**self.columns, **picked}, view=view)

    @property
    def place(self) -> str:
        """Where an editor finds the row: `data/metadata.csv:17`, or the picture of a plain folder."""
        return place(self.source, self.line, self.columns, self.item)


@dataclass(frozen=True)
class Dataset:
    """All usable rows, in the order of the metadata; the faults of rows left out by --skip-bad; and warnings."""

    rows: Sequence[Row]
    skipped: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def place(source: str, line: int, cells: Mapping[str, Any], item: int = 0) -> str:
    """`source:line`, `source:line (item 3)`, or the path of the picture where there are no lines."""
    if not line:
        image = cells.get("image", "")
        return str(Path(source, image.text if isinstance(image, Packed) else str(image)))
    return f"{source}:{line} (item {item})" if item else f"{source}:{line}"


def row_id(written: Mapping[str, str], occurrence: int) -> str:
    """32 hex digits for the cells as written, independent of their order, and the occurrence among identical rows."""
    text = _JSON.encode([sorted(written.items()), occurrence])
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
