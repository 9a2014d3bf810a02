"""Manifests: which rows a data set has, and under which keys their values lie. JSON Lines that a person can read.

The first line is the header; its `check` is the blake2b of everything else, so that a manifest is whole or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsplit.cache.files import write_file
from dsplit.cache.keys import key_of
from dsplit.errors import CacheError, UsageError

FORMAT = 2
FOREIGN = (".pth", ".pt")  # what the reference's stage 1 writes


@dataclass(frozen=True)
class Entry:
    """A row of a manifest.

    place: where the row stands in its metadata. size: target (W, H). columns: the columns that cross to stage 2, typed.
    keys: key per value. inputs: the keys of the columns that stage 1 read, to tell later what changed.
    """

    id: str
    place: str
    size: tuple[int, int]
    columns: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


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
    lines = "".join(_line(vars(row)) for row in manifest.rows)
    header = {"dsplit_manifest": FORMAT, "check": "", **manifest.header, "rows": len(manifest.rows)}
    header["check"] = key_of(_line(header), lines)
    return [_line(header).encode(), lines.encode()]


def read_manifest(path: Path) -> Manifest:
    """The manifest in `path`. Raises CacheError if it is damaged, edited, or of another version."""
    again = "run `dsplit cache` again"
    try:
        first, _, lines = path.read_bytes().decode().partition("\n")
        header = json.loads(first)
        if header["dsplit_manifest"] != FORMAT:
            raise CacheError(f"{path}: written by another version of dsplit; {again}")
        if header["check"] != key_of(_line({**header, "check": ""}), lines):
            raise CacheError(f"{path}: is damaged or was edited; {again}")
        rows = [Entry(**{**r, "size": tuple(r["size"])}) for r in map(json.loads, lines.splitlines())]
    except OSError as error:
        raise CacheError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError(f"{path}: is damaged; {again}") from error
    return Manifest(header, rows)


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
    names = sorted(p.stem for p in (folder / "manifests").glob("*.jsonl"))
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
