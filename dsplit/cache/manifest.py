"""Manifests: which rows a data set has, and under which keys their values lie. JSON Lines that a person can read.

The first line is the header; its `check` is the blake2b of everything else, so that a manifest is whole or refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from dsplit.cache.keys import key_of
from dsplit.cache.shards import KEY
from dsplit.dataset.rows import Choice
from dsplit.errors import CacheError, UsageError

FORMAT = 3
CHUNK = 1 << 20
AGAIN = "run `dsplit cache` again"
FAULTS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of JSON that is not what it should be
Axes = Mapping[str, Sequence[str]]  # per value, the columns with variants that it depends on
NOTHING: Mapping[str, Any] = {}
OPTIONAL = ("variants", "fault")  # fields of a row that are left out where they are empty
_JSON = json.JSONEncoder(ensure_ascii=False)  # made once: there may be ten million rows
FOREIGN = (".pth", ".pt")  # what the reference's stage 1 writes


class Entry(NamedTuple):
    """A row of a manifest.

    place: where the row stands in its metadata. size: target (W, H). columns: the columns that cross to stage 2, typed;
    a list of all its variants for one that has several. keys: per value its keys, one per variant of the axes that the
    value depends on, the last axis running fastest. inputs: the keys of the columns that stage 1 read, to tell later
    what changed. variants: how many there are, per axis that has several. fault: why the row could not be encoded, if
    so.
    """

    id: str
    place: str
    size: tuple[int, int]
    columns: Mapping[str, Any] = NOTHING
    keys: Mapping[str, Sequence[str]] = NOTHING
    inputs: Mapping[str, str] = NOTHING
    variants: Mapping[str, int] = NOTHING
    fault: str = ""

    def key(self, value: str, axes: Iterable[str], choice: Choice) -> str:
        """The key of a value that depends on `axes`, with the variants chosen; of the first where nothing is chosen."""
        return self.keys[value][number(axes, self.variants, choice)]

    @property
    def all_keys(self) -> Iterator[str]:
        """The keys of all its values, in all variants."""
        return chain.from_iterable(self.keys.values())


@dataclass(frozen=True)
class Manifest:
    """header: what made the values. rows: one entry per row, in the data set's order."""

    header: Mapping[str, Any]
    rows: Sequence[Entry]


def manifest_path(folder: Path, name: str) -> Path:
    """Where the manifest called `name` lies. Raises UsageError for a name that is no plain file name."""
    if not re.fullmatch(r"[\w-][\w. -]*", name):
        raise UsageError(f"--name '{name}': use letters, digits, '-', '_' and '.'")
    return folder / "manifests" / f"{name}.jsonl"


def number(axes: Iterable[str], variants: Mapping[str, int], choice: Choice) -> int:
    """The place of the chosen variant among those of a value that depends on `axes`; the last axis runs fastest.

    variants: how many there are per axis that has several.
    """
    place = 0
    for axis in axes:
        if axis in variants:
            place = place * variants[axis] + (choice.get(axis) or 0)
    return place


def head_of(header: Mapping[str, Any], rows: int, digest: str) -> bytes:
    """The first line of a manifest of so many rows. digest: the hash of their lines."""
    head = {"dsplit_manifest": FORMAT, "check": "", **header, "rows": rows}
    return line_of({**head, "check": _check(head, digest)}).encode("utf-8", "surrogatepass")


def entry_line(entry: Entry) -> str:
    """A row as it stands in a manifest."""
    return line_of(
        {name: value for name, value in zip(entry._fields, entry, strict=True) if value or name not in OPTIONAL}
    )


def entry_of(line: bytes) -> Entry:
    """The row that a line of a manifest says."""
    row = json.loads(line)
    return Entry(**{**row, "size": tuple(row["size"])})


def line_of(value: Mapping[str, Any]) -> str:
    """`value` as a line of a manifest."""
    return _JSON.encode(value) + "\n"


def span_of(file: IO[bytes], start: int, end: int) -> bytes:
    """The bytes of an open file from `start` to `end`."""
    if hasattr(os, "pread"):  # processes that were forked share the file's position
        return os.pread(file.fileno(), end - start, start)
    file.seek(start)
    return file.read(end - start)


def _check(header: Mapping[str, Any], digest: str) -> str:
    """What vouches for a header, its own check left out, and for the lines that have this digest."""
    return key_of(line_of({**header, "check": ""}), digest)


class ManifestFile:
    """An open manifest, its check compared: header, and rows one at a time.

    It stays the same if another manifest takes its name. shown: the path that errors name. Raises CacheError if it is
    damaged, edited, or of another version.
    """

    def __init__(self, file: Path, shown: Path | None = None) -> None:
        self.path = path = shown or file
        try:
            self._file = file.open("rb")
            first = self._file.readline()
            self.header: Mapping[str, Any] = json.loads(first)
            self._start, self._end = len(first), os.fstat(self._file.fileno()).st_size
            if self.header["dsplit_manifest"] != FORMAT:
                raise CacheError(f"{path}: written by another version of dsplit; {AGAIN}")
            if self.header["check"] != _check(self.header, self._digest()):
                raise CacheError(f"{path}: is damaged or was edited; {AGAIN}")
            columns, empty = self.header.get("columns", []), self.header.get("empty_prompt", {})
            if type(columns) is not list or not all(map(_is_text, columns)):
                raise TypeError("no list of columns")
            if not all(map(KEY.fullmatch, empty.values())):
                raise ValueError("not a key")
            self._axes: Mapping[str, list[str]] = self.header.get("axes", {})
            if not all(type(axes) is list and all(map(_is_text, axes)) for axes in self._axes.values()):
                raise TypeError("no lists of axes")
        except OSError as error:
            raise CacheError(f"{path}: cannot be read: {error.strerror}") from error
        except FAULTS as error:
            raise CacheError(f"{path}: is damaged; {AGAIN}") from error

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        while chunk := self._file.read(CHUNK):
            digest.update(chunk)
        return digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        """Each row, with the place in the file where it ends (it begins where the one before ends)."""
        self._file.seek(self._start)
        end = self._start
        for line in self._file:
            end += len(line)
            yield end, self._entry(line)

    @property
    def start(self) -> int:
        """The place where the first row begins."""
        return self._start

    def keys(self) -> Iterator[str]:
        """The keys of all values that it refers to, those of the empty prompt first; some come several times."""
        yield from self.header.get("empty_prompt", {}).values()
        for _, row in self:
            yield from row.all_keys

    def row(self, start: int, end: int) -> Entry:
        """The row that lies there."""
        return self._entry(span_of(self._file, start, end))

    def _entry(self, line: bytes) -> Entry:
        try:
            entry = entry_of(line)
            texts = (entry.id, entry.place, entry.fault, *entry.keys, *entry.columns, *entry.inputs, *entry.variants)
            tables = (entry.columns, entry.keys, entry.inputs, entry.variants)
            good = [type(n) for n in entry.size] == [int, int] and all(type(table) is dict for table in tables)
            if not good or not all(map(_is_text, texts)):
                raise TypeError("a field of another type")
            if any(type(n) is not int or n < 2 for n in entry.variants.values()):
                raise ValueError("no number of variants")
            for name in (*entry.keys, *entry.columns):
                self._check_variants(entry, name)
        except FAULTS as error:
            raise CacheError(f"{self.path}: is damaged; {AGAIN}") from error
        return entry

    def _check_variants(self, entry: Entry, name: str) -> None:
        """Raises ValueError or TypeError unless `entry` has just the variants of `name` that it should."""
        several = [entry.variants[axis] for axis in self._axes.get(name, ()) if axis in entry.variants]
        listed: Any = entry.keys.get(name, entry.columns.get(name) if several else [None])
        if type(listed) is not list or len(listed) != math.prod(several):
            raise ValueError("another number of variants")
        if name in entry.keys and not all(map(KEY.fullmatch, listed)):
            raise ValueError("not a key")
        if name == "view" and name in entry.columns:
            for view in listed if several else [entry.columns[name]]:
                if [type(part) for part in view] != [int, int, bool]:
                    raise TypeError("no window")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def read_manifest(path: Path) -> Manifest:
    """The manifest in `path`, as a whole. Raises CacheError as `ManifestFile` does."""
    file = ManifestFile(path)
    return Manifest(file.header, tuple(entry for _, entry in file))


def manifests(folder: Path) -> list[Path]:
    """The manifests of the cache in `folder`, by name."""
    return sorted(p for p in (folder / "manifests").glob("*.jsonl") if not p.name.startswith("."))


def cache_manifests(folder: Path) -> list[Path]:
    """The manifests of the cache in `folder`, at least one. Raises CacheError that says what is there instead."""
    return manifests(folder) or [find_manifest(folder, "default")]


def digest_of(path: Path) -> str:
    """The check of a manifest as its header has it, not compared with the rows; empty if there is none."""
    try:
        with path.open("rb") as file:
            return str(json.loads(file.readline())["check"])
    except (OSError, *FAULTS):
        return ""


def find_manifest(folder: Path, name: str) -> Path:
    """The manifest called `name` in the cache `folder`. Raises CacheError that says what is there instead."""
    path = manifest_path(folder, name)
    if path.is_file():
        return path
    refuse_foreign(folder)
    if not folder.exists():
        raise CacheError(f"no cache in {folder}: does not exist; make it with `dsplit cache --out {folder}`")
    if not folder.is_dir() or (not (folder / "manifests").is_dir() and any(folder.iterdir())):
        raise CacheError(f"no cache in {folder}: not a cache folder; make one with `dsplit cache`")
    if path.exists():
        raise CacheError(f"{path}: is no file; move it away and run `dsplit cache` again")
    names = [p.stem for p in manifests(folder)]
    if names:
        raise CacheError(f"no cache called '{name}' in {folder}: it has {', '.join(names)}; choose with --name")
    raise CacheError(f"no cache in {folder}: no entries; fill it with `dsplit cache --out {folder}`")


def refuse_foreign(folder: Path) -> None:
    """Raises CacheError if `folder` holds a cache of the reference, which is pickled, and no cache of dsplit."""
    if not folder.is_dir() or (folder / "manifests").is_dir():
        return
    found = next((p for pattern in ("*", "*/*") for p in folder.glob(pattern) if p.suffix in FOREIGN), None)
    if found:
        raise CacheError(
            f"{folder}: holds pickled files of another program's cache ({found.relative_to(folder).as_posix()}), "
            "which dsplit never reads, since loading them can run code; "
            "run `dsplit cache` on the original data set into an empty folder"
        )
