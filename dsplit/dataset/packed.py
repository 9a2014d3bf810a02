"""A picture that lies within a larger file: a member of a tar shard, opened in its place and never written to disk."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dsplit.dataset.parquet_cell import ParquetCell

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True, order=True)
class Packed:
    """`size` bytes of `container` from `offset` on; name: what they are called in there, with / separators.

    It does what is asked of the Path of a picture: `open("rb")`, a text for messages, equality and a hash.
    """

    container: Path
    offset: int
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.container}/{self.name}"

    @property
    def text(self) -> str:
        """The cell as written: `shard-000.tar/000001.jpg`."""
        return f"{self.container.name}/{self.name}"

    @property
    def span(self) -> str:
        """The part of the container that it is, under which its digest is remembered."""
        return f"{self.offset}+{self.size}"

    def open(self, mode: str = "rb") -> IO[bytes]:
        """A seekable file of just these bytes. Raises OSError where the container cannot be opened."""
        if mode != "rb":
            raise ValueError(f"{self}: a packed file is only read, not opened as '{mode}'")
        return io.BufferedReader(_Window(io.FileIO(self.container), self.offset, self.size))


class _Window(io.RawIOBase):
    """The `size` bytes of `file` from `start` on; it owns `file`."""

    def __init__(self, file: io.FileIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer)[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(into)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


Source = Path | Packed | ParquetCell  # where the bytes of a file column lie
