"""A checked row of the data set, and the data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsplit.errors import Problem

_JSON = json.JSONEncoder(ensure_ascii=False)  # made once: there may be ten million rows


@dataclass(frozen=True)
class Row:
    """A usable row.

    id: 32 hex digits, blake2b over the row's columns as written and its occurrence number among identical rows.
    source: the metadata file or folder, as the user gave it. line: physical line in it (the header is 1), 0 for a
    plain folder. columns: typed values by canonical name; a file column holds the path as written, with / separators.
    files: absolute path per file column. image_size: W, H of the picture as shown. size: target W, H. item: its number
    in a JSON list where several begin on that line, else 0.
    """

    id: str
    source: str
    line: int
    columns: Mapping[str, Any]
    files: Mapping[str, Path]
    image_size: tuple[int, int]
    size: tuple[int, int]
    item: int = 0

    @property
    def place(self) -> str:
        """Where an editor finds the row: `data/metadata.csv:17`, or the picture of a plain folder."""
        return place(self.source, self.line, self.columns, self.item)


@dataclass(frozen=True)
class Dataset:
    """All usable rows, in the order of the metadata; the faults of rows left out by --skip-bad; and warnings."""

    rows: tuple[Row, ...]
    skipped: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def place(source: str, line: int, cells: Mapping[str, Any], item: int = 0) -> str:
    """`source:line`, `source:line (item 3)`, or the path of the picture where there are no lines."""
    if not line:
        return str(Path(source, str(cells.get("image", ""))))
    return f"{source}:{line} (item {item})" if item else f"{source}:{line}"


def row_id(written: Mapping[str, str], occurrence: int) -> str:
    """32 hex digits for the cells as written, independent of their order, and the occurrence among identical rows."""
    text = _JSON.encode([sorted(written.items()), occurrence])
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
