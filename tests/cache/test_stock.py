"""Values that are reused are read once: a shard that was seen whole is read again only when it changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dsplit.cache import shards as shards_module
from dsplit.cache import stock
from dsplit.cache.keys import stamp_of
from dsplit.cache.rows import CachedRows
from dsplit.cache.shards import read_table
from dsplit.cache.store import Store
from dsplit.cache.verify import run_verify
from dsplit.errors import CacheError
from tests.cache.runs import cache, counts

NOTHING = {"encode_image": (0, 4), "encode_prompt": (0, 3)}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The shard of each value that is read from now on."""
    found: list[Path] = []
    real = shards_module._bytes_at

    def counted(path: Path, start: int, length: int) -> bytes | bytearray:
        found.append(path)
        return real(path, start, length)

    monkeypatch.setattr(shards_module, "_bytes_at", counted)
    return found


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was written 20 ms ago counts as one that does not change any more."""
    monkeypatch.setattr(stock, "FRESH_SECONDS", 0.02)


def flip(path: Path) -> None:
    """Flips a bit of the last value, and sets the mtime back."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    time.sleep(0.05)


def images(out: Path) -> Path:
    return next((out / "shards" / "encode_image").iterdir())


def test_a_shard_is_read_once(copy: tuple[Path, Path], reads: list[Path], settled: None) -> None:
    metadata, out = copy
    time.sleep(0.05)
    assert counts(cache(out, metadata)) == NOTHING
    assert len(reads) == 4 + 2 * 3
    reads.clear()
    assert counts(cache(out, metadata)) == NOTHING
    assert reads == []
    os.utime(images(out), (1, 1))  # of the one that changed all is read
    assert counts(cache(out, metadata)) == NOTHING
    assert reads == [images(out)] * 4
    reads.clear()
    assert run_verify(out)["ok"]
    assert len(reads) == 4 + 2 * 3


def test_one_that_changed_just_now_is_read_again(copy: tuple[Path, Path], reads: list[Path]) -> None:
    metadata, out = copy
    images(out).touch()
    cache(out, metadata)
    reads.clear()
    cache(out, metadata)
    assert set(reads) >= {images(out)}


def test_a_flipped_bit_is_found_though_its_mtime_is_set_back(
    copy: tuple[Path, Path], settled: None, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata, out = copy
    time.sleep(0.05)
    digest = cache(out, metadata)["digest"]
    path = images(out)
    flip(path)
    result = cache(out, metadata)
    assert counts(result) == {"encode_image": (1, 3), "encode_prompt": (0, 3)}
    assert result["digest"] == digest
    assert f"{path}: the value " in capsys.readouterr().err
    assert run_verify(out)["ok"]
    assert counts(cache(out, metadata)) == NOTHING


def test_a_header_that_was_damaged_unseen_by_the_index(copy: tuple[Path, Path], settled: None) -> None:
    metadata, out = copy
    time.sleep(0.05)
    digest = cache(out, metadata)["digest"]
    path = images(out)
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = cache(out, metadata)
    assert counts(result) == {"encode_image": (4, 0), "encode_prompt": (0, 3)}
    assert result["digest"] == digest
    assert run_verify(out)["ok"]


@pytest.mark.parametrize("finder", ["verify", "training"])
def test_damage_without_any_change_is_forgotten_as_seen_once_somebody_finds_it(
    copy: tuple[Path, Path], settled: None, finder: str
) -> None:
    metadata, out = copy
    time.sleep(0.05)
    cache(out, metadata)
    flip(images(out))
    Store(out).index.note_seen(images(out), stamp_of(images(out)))  # as if the disk had done it
    assert counts(cache(out, metadata)) == NOTHING
    if finder == "verify":
        assert len(run_verify(out)["damaged"]) == 1
    else:
        rows = CachedRows(out)
        bad = [i for i in range(4) if not readable(rows, i)]
        assert len(bad) == 1
    assert counts(cache(out, metadata)) == {"encode_image": (1, 3), "encode_prompt": (0, 3)}


def readable(rows: CachedRows, i: int) -> bool:
    try:
        return bool(rows.values(i))
    except CacheError:
        return False


def test_shards_without_reused_values_are_left_alone(copy: tuple[Path, Path]) -> None:
    _, out = copy
    store = Store(out)
    assert stock.unseen(store, ["a" * 32]) == []
    assert stock.unseen(store, read_table(images(out))) == [images(out)]
