"""Reads WebDataset shards: tar files whose members `KEY.jpg`, `KEY.txt`, `KEY.json` make one row per key."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dsplit.dataset.captions import PICTURES, without_line_end
from dsplit.dataset.faults import Fault, Refusal
from dsplit.dataset.packed import Packed
from dsplit.dataset.table import UTF8_REMEDY, Record, Table, not_utf8, streamed
from dsplit.dataset.tar_members import fault_of, members
from dsplit.errors import Problem

USED = PICTURES | {".txt", ".caption", ".json"}
LONGEST_TEXT = 1 << 24  # bytes; a longer one is no caption
MEND = "mend it in the shard, or leave its key out"


@dataclass
class Sample:
    """What a shard holds under one key: pictures and texts by column, and `names`, the members that they come from.

    members: the names of all. object: that of the `.json`. faults: what cannot be used.
    """

    key: str
    members: set[str] = field(default_factory=set)
    cells: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    object: dict[str, Any] | None = None
    faults: list[Refusal] = field(default_factory=list)

    @property
    def pictures(self) -> list[Packed]:
        return [cell for cell in self.cells.values() if isinstance(cell, Packed)]

    @property
    def name(self) -> str:
        """The name of its first picture, or its key."""
        return next((picture.name for picture in self.pictures), self.key)


def read_shards(paths: Sequence[Path], source: str) -> Table:
    """One record per key that has a picture, shard by shard; only headers and texts are read.

    source: the folder of the shards as the user gave it. What is passed over is told in warnings.
    """
    warnings: list[Problem] = []

    def records() -> Iterator[Record]:
        unused: Counter[str] = Counter()
        orphans: list[str] = []
        for path in paths:
            yield from _records(path.absolute(), str(Path(source, path.name)), unused, orphans)
        told = {
            "captions without a picture": ", ".join(orphans),
            "members of no use here": ", ".join(f"*{ending} ({n})" for ending, n in unused.most_common()),
        }
        warnings[:] = [Problem(source, f"{what}: {names}") for what, names in told.items() if names]

    return replace(streamed(source, records), warnings=warnings)


def _records(path: Path, shown: str, unused: Counter[str], orphans: list[str]) -> Iterator[Record]:
    """The rows of one shard in the order of their first members; of one that is not whole, a fault and no row."""
    try:
        samples = _samples(path, unused)
    except Refusal as refusal:
        yield Record(0, {}, (refusal.at(shown),))
        return
    except OSError as error:
        yield Record(0, {}, (Fault("unreadable file", shown, f"cannot be read: {error.strerror}"),))
        return
    for sample in samples.values():
        if sample.pictures or sample.faults:
            yield _record(sample, shown)
        else:
            orphans.append(f"{shown}/{sample.key}")


def _samples(path: Path, unused: Counter[str]) -> dict[str, Sample]:
    samples: dict[str, Sample] = {}
    with path.open("rb") as file:
        for member in members(file):
            name = PurePosixPath(member.name).as_posix()
            folder, _, base = name.rpartition("/")
            if member.isdir() or base.startswith("."):  # ._x: what macOS packs beside each x
                continue
            stem, _, ending = base.partition(".")
            column, _, kind = ending.rpartition(".")
            kind = kind.lower()
            if f".{kind}" not in USED or (column and kind == "json"):
                unused[f".{ending}" if ending else base] += 1
                continue
            key = f"{folder}/{stem}" if folder else stem
            sample = samples.setdefault(key, Sample(key))
            try:
                if not_utf8(name):
                    raise Refusal("not UTF-8", f"the name {name!a} is not UTF-8", "rename it")
                if fault := fault_of(member):
                    raise fault
                if name in sample.members:
                    raise Refusal("two of a name", f"the shard holds '{name}' twice", "leave one of them out")
                sample.members.add(name)
                packed = Packed(path, member.offset_data, member.size, name)
                _add(sample, column, f".{kind}", packed, file)
            except Refusal as refusal:
                sample.faults.append(refusal)
    return samples


def _add(sample: Sample, column: str, kind: str, member: Packed, file: IO[bytes]) -> None:
    """Files `member` under its column: `KEY.jpg` is the image, `KEY.edit.jpg` the column `edit`."""
    if kind == ".json":
        sample.object = _object(member.name, _text(member, file))
        return
    column = column or ("image" if kind in PICTURES else "prompt")
    earlier = sample.names.setdefault(column, member.name)
    if kind in PICTURES:
        if earlier != member.name:
            what = f"'{earlier}' and '{member.name}' are both the {column} of one key"
            raise Refusal("two pictures", what, "leave one of them out, or call it KEY.COLUMN.jpg")
        if not member.size:
            raise Refusal("empty file", f"'{member.name}' is empty (0 bytes)", "pack it again or leave it out")
        sample.cells[column] = member
        return
    text = without_line_end(_text(member, file))
    if sample.cells.setdefault(column, text) != text:
        raise Refusal("two captions", f"'{earlier}' and '{member.name}' differ", "leave one of them out")


def _text(member: Packed, file: IO[bytes]) -> str:
    if member.size > LONGEST_TEXT:
        raise Refusal("too long", f"'{member.name}' has {member.size} bytes, more than {LONGEST_TEXT}", MEND)
    file.seek(member.offset)
    try:
        return file.read(member.size).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"'{member.name}' is not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start})"
        raise Refusal("not UTF-8", what, UTF8_REMEDY) from error


def _object(name: str, text: str) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        if len(made) < len(found):
            twice = next(key for key, n in Counter(key for key, _ in found).items() if n > 1)
            raise Refusal("doubled key", f"'{name}' has '{twice}' more than once", MEND)
        return made

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except Refusal:
        raise
    except (ValueError, RecursionError) as error:
        raise Refusal("not JSON", f"'{name}' is not JSON ({error})", MEND) from error
    if not isinstance(value, dict):
        raise Refusal("not an object", f"'{name}' holds no object: {{...}}", MEND)
    return {key.strip(): cell for key, cell in value.items()}


def _record(sample: Sample, shown: str) -> Record:
    """The row of `sample`: its pictures and texts, and what its object says beside them."""
    for column, cell in (sample.object or {}).items():
        if cell is None or column not in sample.cells:
            sample.cells.setdefault(column, cell)
            continue
        name, stated = sample.names[column], sample.cells[column]
        if cell not in ((name, PurePosixPath(name).name) if isinstance(stated, Packed) else (stated,)):
            what = f"'{name}' and the '{column}' in '{sample.key}.json' differ"
            sample.faults.append(Refusal("conflict", what, "leave one of the two out"))
    if not sample.faults and sample.object is None and not any(isinstance(cell, str) for cell in sample.cells.values()):
        what = f"no caption {sample.key}.txt and no {sample.key}.json"
        sample.faults.append(Refusal("no caption", what, "add one to the shard; it may be empty"))
    where = f"{shown}/{sample.name}"
    faults = tuple(refusal.at(where) for refusal in sample.faults)
    return Record(0, {} if faults else sample.cells, faults)
