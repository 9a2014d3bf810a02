"""Small inputs for the tests of the data set."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from dsplit.dataset import Dataset, read_dataset
from dsplit.errors import DataError
from dsplit.models.family import Column
from dsplit.recipe import DataOptions
from tests import tiny

COLUMNS = (Column("image", "file"), Column("prompt"))
DISTILL = (
    *COLUMNS,
    Column("seed", "int", required=False),
    Column("rand_device", required=False, choices=("cpu", "cuda"), needed_with="seed"),
    Column("num_inference_steps", "int", minimum=2),
    Column("cfg_scale", "float", required=False, default=1.0),
)


def pictures(folder: Path, *names: str, size: tuple[int, int] = (64, 64)) -> None:
    """Pictures in `folder`, made where needed."""
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        tiny.picture(folder / name, size, seed)


def metadata(folder: Path, content: str | bytes, name: str = "metadata.csv") -> Path:
    """A metadata file with exactly this content; text as UTF-8."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, kinds: tuple[Column, ...] = COLUMNS, *, decode: bool = False, **options: Any) -> Dataset:
    """The data set of a metadata file, with a model factor of 16."""
    return read_dataset(DataOptions(metadata=str(path), **options), kinds, 16, decode=decode)


def faults(path: Path, kinds: tuple[Column, ...] = COLUMNS, *, decode: bool = False, **options: Any) -> list[str]:
    """The faults that reading raises, `LINE: what` each (without the path of the metadata file)."""
    with pytest.raises(DataError) as raised:
        read(path, kinds, decode=decode, **options)
    return [str(p).removeprefix(f"{path}:") for p in raised.value.problems]


def png(size: tuple[int, int], depth: int, kind: int, rows: list[bytes], *before: bytes, after: bytes = b"") -> bytes:
    """A PNG file made by hand: bit depth, colour type, raw rows, chunks before and after the pixels."""
    header = struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [chunk(b"IHDR", header), *before, chunk(b"IDAT", data), after, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
