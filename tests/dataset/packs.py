"""Data sets within files: tar shards and Parquet, made of bytes in memory."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from tests import tiny


def picture(folder: Path, seed: int = 0, size: tuple[int, int] = (64, 64), kind: str = "png") -> bytes:
    """The bytes of one of tiny's pictures; a file in `folder` comes and goes."""
    path = tiny.picture(folder / f".{seed}.{kind}", size, seed)
    data = path.read_bytes()
    path.unlink()
    return data


def shard(path: Path, members: Iterable[tuple[str, bytes | str | tarfile.TarInfo]], **options: Any) -> Path:
    """A tar of (name, content) in this order; content may be a TarInfo without bytes, such as a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
                continue
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """A Parquet file of these columns: lists, or pyarrow arrays where the type matters."""
    import pyarrow
    from pyarrow.parquet import write_table

    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(pyarrow.table(columns), path, **options)
    return path


def pixels(data: bytes) -> list[int]:
    """The first pixel of a picture, to tell it from others."""
    with Image.open(io.BytesIO(data)) as image:
        return list(image.convert("RGB").getpixel((0, 0)))  # type: ignore[arg-type]
