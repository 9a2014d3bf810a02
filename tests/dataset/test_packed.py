"""Pictures within other files, opened in their place."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from dsplit.dataset.images import open_image, pillow, pixels
from dsplit.dataset.packed import Packed
from dsplit.dataset.parquet_cell import ParquetCell
from dsplit.dataset.pictures import inspect
from dsplit.errors import DataError
from tests import tiny
from tests.dataset.packs import parquet, picture

KINDS = ("png", "jpg", "webp", "gif", "bmp", "tif", "ppm")


def packed(folder: Path, data: bytes, name: str = "sub/a.png") -> Packed:
    path = folder / "shard.tar"
    path.write_bytes(b"before" + data + b"after")
    return Packed(path, 6, len(data), name)


def test_it_reads_as_a_file_of_just_these_bytes(tmp_path: Path) -> None:
    data = bytes(random.Random(0).randbytes(100_000))
    source, plain = packed(tmp_path, data), tmp_path / "plain"
    plain.write_bytes(data)
    rng = random.Random(1)
    with source.open("rb") as ours, plain.open("rb") as theirs:
        for _ in range(300):
            whence = rng.choice((os.SEEK_SET, os.SEEK_END))
            offset = rng.randrange(120_000) if whence == os.SEEK_SET else -rng.randrange(100_000)
            count = rng.choice((0, 1, 10, 9000, 200_000, -1))
            assert ours.seek(offset, whence) == theirs.seek(offset, whence) == ours.tell()
            assert ours.read(count) == theirs.read(count)
            assert ours.tell() == theirs.tell()
        assert ours.seek(0) == 0
        assert ours.read() == data
    assert ours.closed


def test_its_text_and_its_limits(tmp_path: Path) -> None:
    source = packed(tmp_path, b"abc")
    assert (str(source), source.text) == (f"{tmp_path}/shard.tar/sub/a.png", "shard.tar/sub/a.png")
    assert {source: 1}[Packed(tmp_path / "shard.tar", 6, 3, "sub/a.png")] == 1
    with source.open() as file, pytest.raises(OSError, match="write"):
        file.write(b"x")
    with pytest.raises(ValueError, match="only read"):
        source.open("wb")
    with pytest.raises(FileNotFoundError):
        Packed(tmp_path / "gone.tar", 0, 1, "a.png").open()


def test_a_file_that_became_shorter_ends_early(tmp_path: Path) -> None:
    source = packed(tmp_path, b"abcdef")
    os.truncate(source.container, 9)
    with source.open() as file:
        assert file.read() == b"abc"
    os.truncate(source.container, 2)
    with source.open() as file:
        assert file.read() == b""


def test_no_file_stays_open(tmp_path: Path) -> None:
    source = packed(tmp_path, picture(tmp_path))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        open_image(source)
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_what_its_file_gives(tmp_path: Path, kind: str) -> None:
    plain = tiny.picture(tmp_path / f"a.{kind}", (40, 24), 3)
    cell = ParquetCell(parquet(tmp_path / "a.parquet", {"image": [plain.read_bytes()]}), 0, 0, "image", 1, "a")
    for source in (packed(tmp_path, plain.read_bytes()), cell):
        assert np.array_equal(pixels(source, (16, 16)), pixels(plain, (16, 16)))
        with pillow():
            for whole in (False, True):
                assert inspect(source, 10_000, whole=whole) == inspect(plain, 10_000, whole=whole)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "gif"])
def test_half_a_picture_is_found_though_more_bytes_follow(tmp_path: Path, kind: str) -> None:
    data = picture(tmp_path, 1, (64, 64), kind)
    source = packed(tmp_path, data[: len(data) // 2])
    with pillow(), pytest.raises(DataError, match=r"truncated|cannot be decoded"):
        inspect(source, 10_000)
    with pytest.raises(DataError, match=r"shard\.tar/sub/a\.png: (truncated|cannot)"):
        open_image(source)


def test_cells_of_two_row_groups_in_any_order(tmp_path: Path) -> None:
    texts = [bytes([65 + i]) * (i + 1) for i in range(6)]
    path = parquet(tmp_path / "a.parquet", {"image": texts}, row_group_size=2)
    for i in (0, 5, 2, 1, 4, 3):
        with ParquetCell(path, i // 2, i % 2, "image", i + 1, "").open() as file:
            assert file.read() == texts[i]
    parquet(path, {"image": [b"changed"] * 6}, row_group_size=2)
    os.utime(path, ns=(1, 1))
    with ParquetCell(path, 0, 0, "image", 1, "").open() as file:
        assert file.read() == b"changed"


def test_a_cell_that_is_not_there(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"image": [b"x", None, b""]})
    for row, words in ((1, "no bytes"), (2, "0 bytes"), (9, "no bytes")):
        with pytest.raises(DataError, match=words):
            ParquetCell(path, 0, row, "image", row + 1, "").open()
    path.write_bytes(b"no longer Parquet")
    with pytest.raises(DataError, match="cannot be read"):
        ParquetCell(path, 0, 0, "image", 1, "").open()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        ParquetCell(path, 0, 0, "image", 1, "").open()
