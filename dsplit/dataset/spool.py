"""Rows of a data set, kept in an unnamed temporary file: 8 bytes of memory each, however many there are."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from dsplit.dataset.packed import Packed, Source
from dsplit.dataset.parquet_cell import ParquetCell
from dsplit.dataset.rows import Row
from dsplit.dataset.views import views_of

BLOCK = 1 << 16
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


class Rows(Sequence[Row]):
    """Rows in the order in which they were added. crops, flip: which windows of its picture each row has."""

    def __init__(self, crops: int = 1, flip: bool = False) -> None:
        self._crops, self._flip = crops, flip
        self._file = tempfile.TemporaryFile("w+b", buffering=BLOCK, prefix="dsplit-rows-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._ends = array("Q", [0])
        self._lock = threading.Lock()
        self._dirty = False
        self._whole: Rows | None = None  # what these are a part of, so that its file stays open

    def add(self, row: Row) -> None:
        """Appends a row; its view and the views among its variants are made anew when it is read."""
        captions = row.variants.get("prompt", ())
        files = {name: _file(source) for name, source in row.files.items()}
        cells = [row.id, row.source, row.line, row.columns, files, row.image_size, row.size, row.item, captions]
        line = _encode(cells).encode("ascii")
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))
        self._dirty = True

    def first(self, count: int | None) -> Rows:
        """The rows before row `count`; None: all."""
        if count is None or count >= len(self):
            return self
        part = Rows.__new__(Rows)
        part.__dict__.update(self.__dict__)
        self._flush()
        part._ends, part._dirty, part._whole = self._ends[: count + 1], False, self
        return part

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | Sequence[Row]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        k = range(len(self))[i]
        return self._row(self._read(self._ends[k], self._ends[k + 1]))

    def __iter__(self) -> Iterator[Row]:
        start, count = 0, len(self)
        while start < count:  # as many whole rows as fit into a block, at least one
            stop = start + 1
            while stop < count and self._ends[stop + 1] - self._ends[start] <= BLOCK:
                stop += 1
            begin = self._ends[start]
            data = self._read(begin, self._ends[stop])
            for k in range(start, stop):
                yield self._row(data[self._ends[k] - begin : self._ends[k + 1] - begin])
            start = stop

    def _read(self, start: int, end: int) -> bytes:
        self._flush()
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), end - start, start)
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start)

    def _flush(self) -> None:
        with self._lock:
            if self._dirty:
                self._file.flush()
                self._dirty = False

    def _row(self, line: bytes) -> Row:
        id_, source, number, columns, files, (w, h), (width, height), item, captions = json.loads(line)
        views = views_of((w, h), (width, height), self._crops, self._flip)
        variants: dict[str, tuple[Any, ...]] = {"prompt": tuple(captions)} if captions else {}
        if len(views) > 1:
            variants["view"] = views
        sources = {name: _source(text) for name, text in files.items()}
        return Row(id_, source, number, columns, sources, (w, h), (width, height), item, views[0], variants)


def _file(source: Source) -> Any:
    """Where the bytes of a file lie, as JSON."""
    if isinstance(source, Path):
        return str(source)
    return [type(source).__name__, {**vars(source), "container": str(source.container)}]


def _source(cell: Any) -> Source:
    if isinstance(cell, str):
        return Path(cell)
    kind: type[Packed] | type[ParquetCell] = Packed if cell[0] == "Packed" else ParquetCell
    fields: Mapping[str, Any] = cell[1]
    return kind(**{**fields, "container": Path(fields["container"])})
