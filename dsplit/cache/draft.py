"""The rows of a manifest while it is being made: on disk in a file without a name, so that a million need no memory."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, overload

from dsplit.cache.files import write_file
from dsplit.cache.manifest import Entry, Manifest, entry_line, entry_of, head_of, span_of
from dsplit.cache.rowtable import Ids
from dsplit.errors import CacheError

TOGETHER = 1000  # rows read with one another
CHUNK = 1 << 20


class Draft(Sequence[Entry]):
    """Rows, in the data set's order. Raises CacheError if the disk of temporary files gives out.

    digest: the hash of all lines.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="dsplit-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._ends = array("Q")
        self._ids = bytearray()
        self._hash = hashlib.blake2b(digest_size=16)
        self._unwritten: list[bytes] = []
        for entry in entries:
            self.add(entry.id, entry_line(entry))

    def add(self, id: str, line: str) -> None:
        """Adds a row: its id and what the manifest says of it."""
        data = line.encode("utf-8", "surrogatepass")
        self._ends.append(self.size + len(data))
        self._ids += bytes.fromhex(id)
        self._unwritten.append(data)
        if len(self._unwritten) == TOGETHER:
            self._write()

    @property
    def size(self) -> int:
        """The length of all lines."""
        return self._ends[-1] if self._ends else 0

    @property
    def digest(self) -> str:
        self._write()
        return self._hash.hexdigest()

    @property
    def ids(self) -> Ids:
        """The ids of the rows."""
        return Ids(bytes(self._ids))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> Entry: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Entry]: ...
    def __getitem__(self, i: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        k = range(len(self))[i]
        return entry_of(self._read(self._start(k), self._ends[k]))

    def __iter__(self) -> Iterator[Entry]:
        return map(entry_of, self._lines())

    def chunks(self) -> Iterator[bytes]:
        """All lines, as they stand in a manifest."""
        for start in range(0, self.size, CHUNK):
            yield self._read(start, min(start + CHUNK, self.size))

    def by_id(self) -> list[int]:
        """The numbers of the rows, sorted by their ids."""
        ids = bytes(self._ids)
        return sorted(range(len(self)), key=lambda i: ids[16 * i : 16 * i + 16])

    def changed(self, change: Callable[[Entry], Entry | None]) -> Draft:
        """The rows as `change` makes them, without those of which it makes nothing."""
        return Draft(filter(None, map(change, self)))

    def _lines(self) -> Iterator[bytes]:
        for first in range(0, len(self), TOGETHER):
            last = min(first + TOGETHER, len(self))
            base = self._start(first)
            data = self._read(base, self._ends[last - 1])
            start = 0
            for k in range(first, last):
                end = self._ends[k] - base
                yield data[start:end]
                start = end

    def _start(self, i: int) -> int:
        return self._ends[i - 1] if i else 0

    def _read(self, start: int, end: int) -> bytes:
        self._write()
        return span_of(self._file, start, end)

    def _write(self) -> None:
        if not self._unwritten:
            return
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._hash.update(data)
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            where = tempfile.gettempdir()
            raise CacheError(f"{where}: cannot write there: {error.strerror}; set TMPDIR to another folder") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest, replacing the one of the same name. Raises CacheError."""
    rows = _draft(manifest.rows)
    write_file(path, chain([head_of(manifest.header, len(rows), rows.digest)], rows.chunks()))


def manifest_bytes(manifest: Manifest) -> int:
    """The size of the file that `write_manifest` would write."""
    rows = _draft(manifest.rows)
    return len(head_of(manifest.header, len(rows), rows.digest)) + rows.size


def _draft(rows: Sequence[Entry]) -> Draft:
    return rows if isinstance(rows, Draft) else Draft(rows)
