"""Reads JSON metadata (one list of objects) and JSONL metadata (an object per line), each object with its line."""

from __future__ import annotations

import io
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dsplit.dataset.faults import Fault
from dsplit.dataset.table import Record, Table, encoding_fault, physical_lines, streamed
from dsplit.errors import DataError, Problem

SPACE = " \t\r\n"


def read_jsonl(path: Path, source: str) -> Table:
    """The table in `path`; a line that is no JSON object carries the fault, blank lines do not count."""
    return streamed(source, partial(_jsonl, path, source))


def read_json(path: Path, source: str) -> Table:
    """The table in `path`; an item that is no object carries the fault.

    Raises DataError, with the line, where the file is not JSON or not one list.
    """
    return streamed(source, partial(_json, path, source))


def _jsonl(path: Path, source: str) -> Iterator[Record]:
    bad: dict[int, str] = {}
    parser = _Objects(source)
    for line, text in enumerate(physical_lines(path, source, bad), 1):
        if bad:
            yield Record(line, {}, (encoding_fault(source, line, bad.pop(line)),))
        elif text.strip(SPACE):
            yield parser.line(text, line)


def _json(path: Path, source: str) -> Iterator[Record]:
    """The records, each told from others on its line by its number in the list."""
    before: Record | None = None
    number = 0
    shared = False  # whether the record before stands on the line of the one before it
    for record in _listed(path, source):
        if before:
            same = before.line == record.line
            yield _numbered(before, number) if shared or same else before
            shared = same
        before, number = record, number + 1
    if before:
        yield _numbered(before, number) if shared else before


def _listed(path: Path, source: str) -> Iterator[Record]:
    bad: dict[int, str] = {}
    text, ends = _text(path, source, bad)
    if not text.strip(SPACE):
        return
    starts = _Lines(ends)
    numbers, parser = list(bad), _Objects(source)
    for start, end, value in _items(text, source, parser, starts):
        line, last = starts.at(start), starts.at(end)
        inside = numbers[bisect_left(numbers, line) : bisect_right(numbers, last)]
        faults = tuple(encoding_fault(source, n, bad[n]) for n in inside)
        yield Record(line, {}, faults) if faults else parser.record(value, line)


def _text(path: Path, source: str, bad: dict[int, str]) -> tuple[str, array[int]]:
    """The text of a file, and where each of its lines ends."""
    whole, ends = io.StringIO(newline=""), array("Q")
    for line in physical_lines(path, source, bad):
        whole.write(line)
        ends.append(whole.tell())
    return whole.getvalue(), ends


def _numbered(record: Record, item: int) -> Record:
    """The record, told from the others on its line by its number in the list."""
    faults = tuple(replace(fault, where=f"{fault.where} (item {item})") for fault in record.faults)
    return replace(record, item=item, faults=faults)


class _Lines:
    """Physical line numbers of ascending positions in a text, from where its lines end."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends, self.number = ends, 1

    def at(self, position: int) -> int:
        while position >= self.ends[self.number - 1] and self.number < len(self.ends):
            self.number += 1
        return self.number


class _Objects:
    """Parses JSON objects, and notes the keys that one object has twice."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.decoder = json.JSONDecoder(object_pairs_hook=self._pairs)
        self.doubled: list[str] = []

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                self.doubled.append(name)
            made[name] = value
        return made

    def line(self, text: str, line: int) -> Record:
        """The record of one line of JSONL."""
        text = text.rstrip(SPACE)
        try:
            value, end = self.decoder.raw_decode(text, len(text) - len(text.lstrip(SPACE)))
            if end < len(text):
                raise json.JSONDecodeError("more text after the object", text, end)
        except (ValueError, RecursionError) as error:
            self.doubled.clear()
            return self._faulty(line, f"not JSON ({_reason(error)})", "not JSON")
        return self.record(value, line)

    def record(self, value: Any, line: int) -> Record:
        """The record of a parsed value."""
        doubled, self.doubled = self.doubled, []
        if not isinstance(value, dict):
            hint = "; a file with one list is called .json" if isinstance(value, list) else ""
            return self._faulty(line, f"{_kind(value)}, not an object{hint}", "not an object")
        if doubled:
            names = ", ".join(f"'{name}'" for name in dict.fromkeys(doubled))
            return self._faulty(line, f"the object has {names} more than once", "doubled key")
        return Record(line, {name.strip(): cell for name, cell in value.items()})

    def _faulty(self, line: int, what: str, reason: str) -> Record:
        return Record(line, {}, (Fault(reason, f"{self.source}:{line}", what, "mend the line or drop it"),))


def _items(text: str, source: str, parser: _Objects, starts: _Lines) -> Iterator[tuple[int, int, Any]]:
    """Start, end and value of each item of the list in `text`."""

    def fail(at: int, what: str) -> DataError:
        return DataError("cannot read the metadata", [Problem(f"{source}:{starts.at(at)}", what)])

    def skip(at: int) -> int:
        while at < len(text) and text[at] in SPACE:
            at += 1
        return at

    at = skip(0)
    if text[at] != "[":
        raise fail(at, "expected a list of objects: [{...}, ...]; a file with an object per line is called .jsonl")
    at = skip(at + 1)
    closed = text[at : at + 1] == "]"
    while not closed:
        try:
            value, end = parser.decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise fail(error.pos, f"not JSON ({_reason(error)})") from error
        except (ValueError, RecursionError) as error:
            raise fail(at, f"not JSON ({_reason(error)})") from error
        yield at, end - 1, value
        at = skip(end)
        closed = text[at : at + 1] == "]"
        if not closed:
            if text[at : at + 1] != ",":
                raise fail(at, "not JSON (expected , or ] after an item of the list)")
            at = skip(at + 1)
    if skip(at + 1) < len(text):
        raise fail(skip(at + 1), "more text after the list")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
