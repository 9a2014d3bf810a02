"""Reads CSV metadata: cells exactly as written, each record with its physical line."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsplit.dataset.faults import Fault
from dsplit.dataset.table import Record, Table, encoding_fault, physical_lines
from dsplit.errors import DataError

LONGEST_CELL = 2**31 - 1  # the largest limit that the csv module takes everywhere
QUOTE_REMEDY = "put a text with commas, quotes or line breaks between double quotes, and double the quotes inside it"


def read_csv(path: Path, source: str) -> Table:
    """The table in `path`; a record whose quoting, encoding or number of fields is wrong carries the fault.

    A short record is one whose last cells are absent. Raises DataError where the header cannot be read.
    """
    csv.field_size_limit(LONGEST_CELL)
    lines = _lines(path, source)
    for line, fields, faults in lines:
        if faults:
            raise DataError("cannot read the header of the metadata", [f.problem for f in faults])
        if not _is_blank(fields, None):
            header = tuple(name.strip() for name in fields)
            return Table(source, header, _records(lines, header, source), f"{source}:{line}")
    return Table(source, (), (), f"{source}:1")


def _lines(path: Path, source: str) -> Iterator[tuple[int, list[str], tuple[Fault, ...]]]:
    """The first physical line of each record, its fields, and what is wrong with its quoting or encoding."""
    bad: dict[int, str] = {}
    reader = csv.reader(physical_lines(path, source, bad), strict=True)
    while True:
        line = reader.line_num + 1
        fields: list[str] = []
        faults: tuple[Fault, ...] = ()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            faults = (_quoting_fault(source, line, str(error)),)
        if bad:
            faults = (*(encoding_fault(source, n, bad.pop(n)) for n in list(bad)), *faults)
        yield line, fields, faults


def _records(
    lines: Iterable[tuple[int, list[str], tuple[Fault, ...]]], header: tuple[str, ...], source: str
) -> Iterator[Record]:
    for line, fields, faults in lines:
        if not faults and _is_blank(fields, header):
            continue
        if not faults and len(fields) > len(header):
            faults = (_count_fault(source, line, len(fields), header),)
        yield Record(line, {} if faults else dict(zip(header, fields, strict=False)), faults)


def _is_blank(fields: list[str], header: tuple[str, ...] | None) -> bool:
    """True for a line without text; in a table of one column, a quoted empty cell is a cell."""
    return not fields or (len(fields) == 1 and not fields[0].strip() and (header is None or len(header) > 1))


def _count_fault(source: str, line: int, count: int, header: tuple[str, ...]) -> Fault:
    what = f"{count} fields, expected {len(header)} ({', '.join(header)})"
    return Fault("wrong number of fields", f"{source}:{line}", what, QUOTE_REMEDY)


def _quoting_fault(source: str, line: int, error: str) -> Fault:
    what = "a quote opened here is never closed" if "unexpected end" in error else f"wrong quoting ({error})"
    return Fault("wrong quoting", f"{source}:{line}", what, QUOTE_REMEDY)
