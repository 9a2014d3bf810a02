"""Shards: sealed safetensors files that carry their own key table, and a checksum for every byte in them.

A value is a tensor named by its key. The header's metadata holds one entry, `dsplit`: JSON with the format's number,
the unit, and a crc32 per key over key, dtype, shape and bytes. The file is named by the blake2b of its header, which
thus vouches for everything: a shard is either exactly what was written, or found out. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsplit.cache.files import write_file
from dsplit.errors import CacheError

FORMAT = 1
HEADER_LIMIT = 100_000_000  # as the safetensors library has it
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a value lies: shard, dtype (`float32`), shape, byte range in the file, checksum."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Value:
    """A value as bytes, before it is written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray


class Damaged(Exception):
    """A shard or a value in it is not what was written."""


def checksum(key: str, dtype: str, shape: Sequence[int], data: bytes | bytearray) -> int:
    """crc32 over the value's key, dtype, shape and bytes."""
    return zlib.crc32(data, zlib.crc32(f"{key} {dtype} {','.join(map(str, shape))}".encode()))


def write_shard(folder: Path, unit: str, values: Mapping[str, Value]) -> dict[str, Entry]:
    """Seals `values` (by key) as one shard in `folder` and says where each of them lies. Raises CacheError."""
    order = sorted(values, key=lambda key: (-DTYPES[values[key].dtype][1], key))  # wide dtypes first: all stay aligned
    header: dict[str, object] = {}
    sums, position = {}, 0
    for key in order:
        v = values[key]
        sums[key] = checksum(key, v.dtype, v.shape, v.data)
        end = position + len(v.data)
        header[key] = {"dtype": DTYPES[v.dtype][0], "shape": list(v.shape), "data_offsets": [position, end]}
        position = end
    table = json.dumps({"format": FORMAT, "unit": unit, "crc32": sums}, separators=(",", ":"))
    text = json.dumps({"__metadata__": {"dsplit": table}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    path = folder / f"{_name(head)}.safetensors"
    write_file(path, [head, *(values[key].data for key in order)])
    return _entries(path, json.loads(text), sums, len(head))


def read_table(path: Path) -> dict[str, Entry]:
    """The values that a shard holds, by key; reads its header only.

    Raises Damaged if the header is not what was written, CacheError for a shard of a newer format, OSError.
    """
    with path.open("rb") as file:
        length = int.from_bytes(size := file.read(8), "little")
        if len(size) < 8 or length > HEADER_LIMIT:
            raise Damaged(f"{path}: its header is damaged")
        text = file.read(length)
    if _name(size + text) != path.name.partition(".")[0]:
        raise Damaged(f"{path}: its header is damaged")
    try:
        header = json.loads(text)
        table = json.loads(header.pop("__metadata__")["dsplit"])
        if table["format"] == FORMAT:
            return _entries(path, header, table["crc32"], 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: not a shard of dsplit ({error})") from error
    raise CacheError(f"{path}: written by another version of dsplit (format {table['format']}, here {FORMAT})")


def read_value(key: str, entry: Entry) -> Value:
    """The value of `key`, its checksum compared. Raises Damaged, or OSError if the shard is gone."""
    data = bytearray(max(entry.end - entry.start, 0))
    with entry.shard.open("rb", buffering=0) as file:
        file.seek(entry.start)
        got = file.readinto(data)
        while got < len(data) and (more := file.readinto(memoryview(data)[got:])):
            got += more
    if got < len(data) or checksum(key, entry.dtype, entry.shape, data) != entry.checksum:
        raise Damaged(f"{entry.shard}: the value {key} is damaged")
    return Value(entry.dtype, entry.shape, data)


def merge(folder: Path, unit: str, target: int, broken: Collection[Path] = ()) -> None:
    """Joins the small shards of `unit` in `folder` into shards of about `target` bytes.

    Old shards are deleted once the new ones are safe; one that another process took away meanwhile is left to that
    process, and one with a damaged value stays as it is. `broken`: shards whose damaged values were made anew; their
    good values move, and they go.
    """
    rest = [p for p in sorted(folder.glob("*.safetensors")) if p in broken or p.stat().st_size < target // 2]
    while len(rest) > 1 or any(path in broken for path in rest):
        batch: list[Path] = []
        values: dict[str, Value] = {}
        size = 0
        while rest and size < target:
            path = rest.pop()
            found = _whole(path, path in broken)
            if found is not None:
                batch.append(path)
                values |= found
                size += sum(len(v.data) for v in found.values())
        if len(batch) > 1 or any(path in broken for path in batch):
            made = {entry.shard for entry in write_shard(folder, unit, values).values()} if values else set()
            _delete(path for path in batch if path not in made)


def _whole(path: Path, broken: bool) -> dict[str, Value] | None:
    """The values of a shard; None if it went away or is damaged, or without the damaged ones if it is `broken`."""
    values = {}
    try:
        for key, entry in read_table(path).items():
            try:
                values[key] = read_value(key, entry)
            except Damaged:
                if not broken:
                    return None
    except Damaged:
        return values if broken else None
    except OSError:
        return None
    return values


def _delete(paths: Iterable[Path]) -> None:
    """Removes shards whose values are safe elsewhere; raises CacheError if the system does not let go."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(f"{path}: cannot delete it: {error.strerror}") from error


def _name(head: bytes) -> str:
    return hashlib.blake2b(head, digest_size=16).hexdigest()


def _entries(path: Path, header: Mapping[str, dict], sums: Mapping[str, int], start: int) -> dict[str, Entry]:
    entries = {}
    for key, field in header.items():
        if key == "__metadata__":
            continue
        dtype, shape = _NAMES[field["dtype"]], tuple(field["shape"])
        first, last = field["data_offsets"]
        if last - first != math.prod(shape) * DTYPES[dtype][1]:
            raise ValueError(f"the size of {key} does not fit its shape")
        entries[key] = Entry(path, dtype, shape, start + first, start + last, sums[key])
    return entries
