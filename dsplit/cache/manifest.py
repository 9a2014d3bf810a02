"""Manifests: which rows a data set has, and under which keys their values lie. JSON Lines that a person can read.

The first line is the header; its `check` is the blake2b of everything else, so that a manifest is whole or refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsplit.cache.files import write_file
from dsplit.cache.keys import key_of
from dsplit.cache.shards import KEY
from dsplit.errors import CacheError, UsageError

FORMAT = 2
CHUNK = 1 << 20
AGAIN = "run `dsplit cache` again"
FAULTS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of JSON that is not what it should be
FOREIGN = (".pth", ".pt")  # what the reference's stage 1 writes


@dataclass(frozen=True)
class Entry:
    """A row of a manifest.

    place: where the row stands in its metadata. size: target (W, H). columns: the columns that cross to stage 2, typed.
    keys: key per value. inputs: the keys of the columns that stage 1 read, to tell later what changed. fault: why the
    row could not be encoded, if so.
    """

    id: str
    place: str
    size: tuple[int, int]
    columns: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""


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


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest, replacing the one of the same name. Raises CacheError."""
    write_file(path, _lines(manifest))


def manifest_bytes(manifest: Manifest) -> int:
    """The size of the file that `write_manifest` would write."""
    return sum(map(len, _lines(manifest)))


def _lines(manifest: Manifest) -> list[bytes]:
    lines = "".join(_line({k: v for k, v in vars(row).items() if k != "fault" or v}) for row in manifest.rows)
    header = {"dsplit_manifest": FORMAT, "check": "", **manifest.header, "rows": len(manifest.rows)}
    header["check"] = key_of(_line(header), lines)
    return [_line(header).encode(), lines.encode()]


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
            if self.header["check"] != self._check():
                raise CacheError(f"{path}: is damaged or was edited; {AGAIN}")
            columns, empty = self.header.get("columns", []), self.header.get("empty_prompt", {})
            if type(columns) is not list or not all(isinstance(name, str) for name in columns):
                raise TypeError("no list of columns")
            if not all(map(KEY.fullmatch, empty.values())):
                raise ValueError("not a key")
        except OSError as error:
            raise CacheError(f"{path}: cannot be read: {error.strerror}") from error
        except FAULTS as error:
            raise CacheError(f"{path}: is damaged; {AGAIN}") from error

    def _check(self) -> str:
        """As `key_of` of the header line without its check, and of all other lines."""
        head = _line({**self.header, "check": ""}).encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(len(head).to_bytes(8, "little") + head, digest_size=16)
        digest.update((self._end - self._start).to_bytes(8, "little"))
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
            yield from row.keys.values()

    def row(self, start: int, end: int) -> Entry:
        """The row that lies there."""
        if hasattr(os, "pread"):  # processes that were forked share the file's position
            return self._entry(os.pread(self._file.fileno(), end - start, start))
        self._file.seek(start)
        return self._entry(self._file.read(end - start))

    def _entry(self, line: bytes) -> Entry:
        try:
            row = json.loads(line)
            entry = Entry(**{**row, "size": tuple(row["size"])})
            texts = (entry.id, entry.place, entry.fault, *entry.keys, *entry.columns, *entry.inputs)
            if [type(n) for n in entry.size] != [int, int] or not all(isinstance(text, str) for text in texts):
                raise TypeError("a field of another type")
            if not all(map(KEY.fullmatch, entry.keys.values())):
                raise ValueError("not a key")
        except FAULTS as error:
            raise CacheError(f"{self.path}: is damaged; {AGAIN}") from error
        return entry


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


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
