"""Shards: sealed safetensors files that carry their own key table, and a checksum for every byte in them.

A value is a tensor named by its key. The header's metadata holds one entry, `dsplit`: JSON with the format's number,
the unit, and a crc32 per key over key, dtype, shape and bytes. The file is named by the blake2b of its header, which
thus vouches for everything: a shard is either exactly what was written, or found out. No torch here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dsplit.cache.files import write_file
from dsplit.errors import CacheError

try:
    from isal.isal_zlib import crc32  # the same figures, ten times as fast
except ImportError:  # no wheel for this machine
    from zlib import crc32

FORMAT = 1
HEADER_LIMIT = 100_000_000  # as the safetensors library has it
MOST_VALUES = 100_000  # of a merged shard, which keeps its header well below that limit
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
KEY = re.compile("[0-9a-f]{32}")
_NAMES = {code: name for name, (code, _) in DTYPES.items()}


class Entry(NamedTuple):
    """Where a value lies: shard, dtype (`float32`), shape, byte range in the file, checksum."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: int


class Value(NamedTuple):
    """A value as bytes, before it is written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray


class Field(NamedTuple):
    """What a shard's header says of a value, its place aside."""

    dtype: str
    shape: tuple[int, ...]
    length: int
    checksum: int


class Damaged(Exception):
    """A shard or a value in it is not what was written."""


def checksum(key: str, dtype: str, shape: Sequence[int], data: bytes | bytearray) -> int:
    """crc32 over the value's key, dtype, shape and bytes."""
    return crc32(data, crc32(f"{key} {dtype} {','.join(map(str, shape))}".encode()))


def write_shard(folder: Path, unit: str, values: Mapping[str, Value]) -> dict[str, Entry]:
    """Seals `values` (by key) as one shard in `folder` and says where each of them lies. Raises CacheError."""
    fields = {k: Field(v.dtype, v.shape, len(v.data), checksum(k, v.dtype, v.shape, v.data)) for k, v in values.items()}
    return _seal(folder, unit, fields, lambda key: values[key].data)


def join(folder: Path, unit: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Seals values that lie in other shards as one new shard in `folder`, one value in memory at a time.

    Raises Damaged for a value that is damaged or went away (then nothing is written), CacheError.
    """

    def data(key: str) -> bytes | bytearray:
        try:
            return read_value(key, entries[key]).data
        except OSError as error:  # must not be taken for a fault of the file that is written
            raise Damaged(f"{entries[key].shard}: cannot be read: {error.strerror}") from error

    fields = {k: Field(e.dtype, e.shape, e.end - e.start, e.checksum) for k, e in entries.items()}
    return _seal(folder, unit, fields, data)


def _seal(
    folder: Path, unit: str, fields: Mapping[str, Field], data: Callable[[str], bytes | bytearray]
) -> dict[str, Entry]:
    order = sorted(fields, key=lambda key: (-DTYPES[fields[key].dtype][1], key))  # wide dtypes first: all stay aligned
    header: dict[str, dict] = {}
    position = 0
    for key in order:
        f = fields[key]
        end = position + f.length
        header[key] = {"dtype": DTYPES[f.dtype][0], "shape": list(f.shape), "data_offsets": [position, end]}
        position = end
    sums = {key: fields[key].checksum for key in order}
    table = json.dumps({"format": FORMAT, "unit": unit, "crc32": sums}, separators=(",", ":"))
    text = json.dumps({"__metadata__": {"dsplit": table}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    path = folder / f"{_name(head)}.safetensors"
    write_file(path, itertools.chain([head], map(data, order)))
    return _entries(path, header, sums, len(head))


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: not a shard of dsplit ({error})") from error
    raise CacheError(f"{path}: written by another version of dsplit (format {table['format']}, here {FORMAT})")


def read_value(key: str, entry: Entry) -> Value:
    """The value of `key`, its checksum compared. Raises Damaged, or OSError if the shard is gone."""
    try:
        data = _bytes_at(entry.shard, entry.start, entry.end - entry.start)
        good = len(data) == entry.end - entry.start
        good = good and checksum(key, entry.dtype, entry.shape, data) == entry.checksum
    except (MemoryError, OverflowError):  # a header that was tampered with promises more than there can be
        good = False
    if not good:
        raise Damaged(f"{entry.shard}: the value {key} is damaged")
    return Value(entry.dtype, entry.shape, data)


def _bytes_at(path: Path, start: int, length: int) -> bytes | bytearray:
    """`length` bytes of a file, or as many as it has. Without `open`, which takes a fifth of the time of a read."""
    if not hasattr(os, "preadv"):  # Windows
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return bytearray(file.read(length))
    data = bytearray(length)
    handle = os.open(path, os.O_RDONLY)
    try:
        got = os.preadv(handle, (data,), start)
        while got < length and (more := os.preadv(handle, (memoryview(data)[got:],), start + got)):
            got += more
    finally:
        os.close(handle)
    return data if got == length else b""


def merge(folder: Path, unit: str, target: int, broken: Collection[Path] = ()) -> None:
    """Joins the small shards of `unit` in `folder` into shards of about `target` bytes.

    Old shards are deleted once the new ones are safe; one that another process took away meanwhile is left to that
    process, and one with a damaged value stays as it is. `broken`: shards whose damaged values were made anew; their
    good values move, and they go.
    """
    rest = [p for p in sorted(folder.glob("*.safetensors")) if p in broken or p.stat().st_size < target // 2]
    while len(rest) > 1 or any(path in broken for path in rest):
        batch: list[Path] = []
        entries: dict[str, Entry] = {}
        size = 0
        while rest and size < target and len(entries) < MOST_VALUES:
            path = rest.pop()
            table = _movable(path, path in broken)
            if table is not None:
                batch.append(path)
                entries |= table
                size += sum(e.end - e.start for e in table.values())
        if len(batch) > 1 or any(path in broken for path in batch):
            try:
                made = {entry.shard for entry in join(folder, unit, entries).values()} if entries else set()
            except Damaged:
                sound = [p for p in batch if p in broken or _sound(p)]
                rest += sound if len(sound) < len(batch) else []
            else:
                _delete(path for path in batch if path not in made)


def _movable(path: Path, broken: bool) -> dict[str, Entry] | None:
    """The values of a shard that are to move, of a `broken` one the good ones; None if it is to stay or went away."""
    try:
        table = read_table(path)
    except Damaged:
        return {} if broken else None
    except OSError:
        return None
    if broken:
        return {key: entry for key, entry in table.items() if good(key, entry)}
    return table if len(table) < MOST_VALUES // 2 else None


def _sound(path: Path) -> bool:
    try:
        return all(good(key, entry) for key, entry in read_table(path).items())
    except (Damaged, OSError):
        return False


def good(key: str, entry: Entry) -> bool:
    """True if the value of `key` can be read there and is what was written."""
    try:
        read_value(key, entry)
    except (Damaged, OSError):
        return False
    return True


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
    """The table that a header spells out; raises ValueError, KeyError or TypeError where it is none."""
    entries = {}
    for key, field in header.items():
        if key == "__metadata__":
            continue
        dtype, shape = _NAMES[field["dtype"]], tuple(field["shape"])
        first, last = field["data_offsets"]
        if not all(type(n) is int and 0 <= n < 2**62 for n in (*shape, first, last, sums[key])):
            raise ValueError(f"the numbers of {key} are none")
        if last - first != math.prod(shape) * DTYPES[dtype][1]:
            raise ValueError(f"the size of {key} does not fit its shape")
        if not KEY.fullmatch(key):
            raise ValueError(f"{key} is no key")
        entries[key] = Entry(path, dtype, shape, start + first, start + last, sums[key])
    return entries
