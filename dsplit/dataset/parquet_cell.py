"""A picture in a cell of a Parquet file, read with the row group around it and never written to disk."""

from __future__ import annotations

import functools
import io
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsplit.dataset.faults import Refusal

GROUPS_HELD = 2  # row groups in memory: rows are read in order, by threads that may straddle two of them
_lock = threading.Lock()


@dataclass(frozen=True, order=True)
class ParquetCell:
    """The bytes in row `row` (from 0) of row group `group` of `container`; column: `image`, or `image.bytes`.

    It does what is asked of the Path of a picture, as Packed does. line: the row's number in the file, from 1. text:
    the cell as written: the path that is stored beside the bytes, or `image#17`.
    """

    container: Path
    group: int
    row: int
    column: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.container}:{self.line} ({self.column})"

    @property
    def span(self) -> str:
        """The part of the container that it is, under which its digest is remembered."""
        return f"{self.group}/{self.row}/{self.column}"

    def open(self, mode: str = "rb") -> IO[bytes]:
        """A seekable file of the cell's bytes. Raises OSError for the file, Refusal for the cell."""
        if mode != "rb":
            raise ValueError(f"{self}: a packed file is only read, not opened as '{mode}'")
        status = self.container.stat()
        with _lock:  # threads that come to a new row group at once must not each read it
            cells = _cells(self.container, (status.st_size, status.st_mtime_ns), self.group, self.column)
        data = cells[self.row].as_py() if self.row < len(cells) else None
        if not data:
            what = "the cell is empty (0 bytes)" if data == b"" else "the cell holds no bytes"
            raise Refusal("empty file", what, "drop the row")
        return io.BytesIO(data)


@functools.lru_cache(maxsize=GROUPS_HELD)
def _cells(path: Path, stamp: tuple[int, int], group: int, column: str) -> Any:
    """The bytes column of one row group as a pyarrow array; stamp: so that a changed file is read again."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            name, _, inner = column.partition(".")
            cells = file.read_row_group(group, columns=[column], use_threads=False).column(name).combine_chunks()
            return cells.field(inner) if inner else cells
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal("corrupt", f"the row group cannot be read ({error})", "copy the file again") from error
