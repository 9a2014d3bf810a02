"""A metadata file as read: its columns and its records with their line numbers, before any cell has a type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dsplit.dataset.faults import Fault
from dsplit.errors import DataError, Problem

LOOKED_AT = 1000  # records by which a file shows its columns
UTF8_REMEDY = "save the file as UTF-8 (an editor on Windows may have written it in another encoding)"


@dataclass(frozen=True)
class Record:
    """One record. line: its first physical line, 0 in a folder. cells: by the names found; that of a picture which lies
    within another file is a Packed or ParquetCell. faults: unusable if any.

    item: its number in the list, from 1, where others begin on the same line; else 0. source: the file that it stands
    in, where that is not the table's.
    """

    line: int
    cells: Mapping[str, Any]
    faults: tuple[Fault, ...] = ()
    item: int = 0
    source: str = ""


@dataclass(frozen=True)
class Table:
    """A metadata file or a plain folder.

    source: as the user gave it. columns: names found, in order, doubled ones twice. records: in the file's order.
    header: the place of the column names. warnings: what the user should know, but need not mend; may grow while
    the records are read. more: looks for further columns, where they are not all known before the end.
    """

    source: str
    columns: tuple[str, ...]
    records: Iterable[Record]
    header: str
    warnings: Sequence[Problem] = ()
    more: Callable[[], tuple[str, ...]] | None = None


def streamed(source: str, read: Callable[[], Iterator[Record]]) -> Table:
    """The table of records that name their own columns; `read` begins anew each time.

    Its columns are those of the first thousand records; `more` looks through all.
    """
    records = read()
    first = list(islice(records, LOOKED_AT))
    more = (lambda: _columns(read())) if len(first) == LOOKED_AT else None
    columns = _columns(first) or (more() if more else ())  # a thousand records may all have faults
    return Table(source, columns, chain(first, records), source, more=more)


def _columns(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for record in records for name in record.cells))


def not_utf8(line: str) -> str:
    """The first byte of `line` that is not UTF-8, as `byte 0x92`; empty if the line is text."""
    if line.isascii():
        return ""
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"byte 0x{ord(line[error.start]) - 0xDC00:02x}"
    return ""


def encoding_fault(source: str, line: int, byte: str) -> Fault:
    """The fault of a line that is not UTF-8."""
    return Fault("not UTF-8", f"{source}:{line}", f"{byte} is not UTF-8", UTF8_REMEDY)


def physical_lines(path: Path, source: str, bad: dict[int, str]) -> Iterator[str]:
    """The lines of a text file with their line ends, without a byte-order mark, exactly as written.

    Fills `bad` with line number -> byte for the lines that are not UTF-8; such bytes come out as lone surrogates.
    Raises DataError for a UTF-16 file.
    """
    with path.open("rb") as raw:
        if raw.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError("cannot read the metadata", [Problem(f"{source}:1", "UTF-16, not UTF-8", UTF8_REMEDY)])
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if byte := not_utf8(line):
                bad[number] = byte
            yield line
