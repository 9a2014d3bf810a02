"""The index: it follows the shards, and can be lost, damaged or locked away at any time without harm."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
from pathlib import Path

import pytest

from dsplit.cache import index as index_module
from dsplit.cache.host import index_path
from dsplit.cache.index import Index
from dsplit.cache.shards import Value, write_shard
from dsplit.cache.store import Store
from dsplit.errors import CacheError
from tests.cache.runs import child


def key(n: int) -> str:
    return f"{n:032x}"


def value(n: int) -> Value:
    return Value("uint8", (4,), n.to_bytes(4, "little"))


def wrote(cache: Path, *numbers: int) -> Path:
    entries = write_shard(cache / "shards" / "encode", "encode", {key(n): value(n) for n in numbers})
    return entries[key(numbers[0])].shard


def read(store: Store, *numbers: int) -> list[int]:
    return [int.from_bytes(store.read(key(n)).data, "little") for n in numbers]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return index_path(tmp_path / "shards")


def test_it_lies_outside_the_cache_and_is_of_this_host(tmp_path: Path, file: Path) -> None:
    wrote(tmp_path, 1)
    assert read(Store(tmp_path), 1) == [1]
    assert file.is_file()
    assert not file.is_relative_to(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


def test_it_follows_the_shards(tmp_path: Path) -> None:
    first = wrote(tmp_path, 1, 2)
    store = Store(tmp_path)
    second = wrote(tmp_path, 3)
    assert key(3) not in store
    assert read(store, 3) == [3]  # a value that is not known is looked for
    first.unlink()
    store.refresh()
    assert store.present([key(n) for n in range(5)]) == {key(3)}
    assert [p.shard for p in store.index.find(key(3))] == [second]
    assert store.index.totals() == {"encode": {"values": 1, "bytes": 4, "shards": 1}}


@pytest.mark.parametrize("harm", ["deleted", "emptied", "garbage", "cut short", "another database"])
def test_a_lost_or_damaged_index_is_made_anew(tmp_path: Path, file: Path, harm: str) -> None:
    for n in range(0, 3000, 100):
        wrote(tmp_path, *range(n, n + 100))
    store = Store(tmp_path)
    assert read(store, 7) == [7]
    store.index.db.close()
    if harm == "deleted":
        file.unlink()
    elif harm == "another database":
        file.unlink()
        other = sqlite3.connect(file)
        other.execute("CREATE TABLE entries (name)")
        other.close()
    else:
        data = file.read_bytes()
        file.write_bytes({"emptied": b"", "garbage": b"\x99" * 5000, "cut short": data[: len(data) // 2]}[harm])
    again = Store(tmp_path)
    assert read(again, 0, 7, 2999) == [0, 7, 2999]
    assert again.present([key(n) for n in range(3001)]) == {key(n) for n in range(3000)}


def test_an_index_that_breaks_while_it_is_open_is_made_anew(tmp_path: Path, file: Path) -> None:
    for n in range(0, 3000, 100):
        wrote(tmp_path, *range(n, n + 100))
    store = Store(tmp_path)
    with file.open("r+b") as handle:
        handle.seek(100)
        handle.write(b"\xff" * (file.stat().st_size - 100))
    assert read(store, *range(0, 3000, 10)) == list(range(0, 3000, 10))


def test_an_index_that_lies_is_not_believed(tmp_path: Path) -> None:
    wrote(tmp_path, 1, 2)
    store = Store(tmp_path)
    store.index.db.execute("UPDATE entries SET start = start + 1")
    assert read(store, 1, 2) == [1, 2]
    assert read(Store(tmp_path), 1, 2) == [1, 2]


def test_without_a_place_to_write_it_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrote(tmp_path, 1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSPLIT_INDEX", str(tmp_path / "file"))
    store = Store(tmp_path)
    assert store.index.path is None
    assert read(store, 1) == [1]
    assert read(pickle.loads(pickle.dumps(store)), 1) == [1]
    monkeypatch.setenv("DSPLIT_INDEX", str(tmp_path / "other"))
    place = index_path(tmp_path / "shards")
    place.mkdir(parents=True)  # a folder where the file should be
    assert read(Store(tmp_path), 1) == [1]
    assert "the index is kept in memory ($DSPLIT_INDEX: another folder)" in capsys.readouterr().err


def test_it_survives_forks_and_pickling(tmp_path: Path) -> None:
    wrote(tmp_path, 1)
    store = Store(tmp_path)

    def work() -> None:
        assert read(store, 1) == [1]
        wrote(tmp_path, 2)
        assert read(store, 2) == [2]

    assert child(work) == 0
    assert read(store, 1, 2) == [1, 2]
    assert read(pickle.loads(pickle.dumps(store)), 1, 2) == [1, 2]


def test_processes_that_make_it_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(index_module, "BATCH", 30)  # many transactions
    for n in range(0, 1000, 20):
        wrote(tmp_path, *range(n, n + 20))

    def work() -> None:
        assert Store(tmp_path).present([key(n) for n in range(1001)]) == {key(n) for n in range(1000)}

    pids = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            try:
                work()
            except BaseException:
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    db = sqlite3.connect(file)
    assert db.execute("SELECT count(*), count(DISTINCT key) FROM entries").fetchone() == (1000, 1000)
    assert db.execute("SELECT count(*), sum(count) FROM shards").fetchone() == (50, 1000)
    db.close()


def test_a_moved_cache_has_its_own_index(tmp_path: Path) -> None:
    wrote(tmp_path / "one", 1)
    assert read(Store(tmp_path / "one"), 1) == [1]
    shutil.move(tmp_path / "one", tmp_path / "two")
    wrote(tmp_path / "one", 2)
    assert read(Store(tmp_path / "two"), 1) == [1]
    store = Store(tmp_path / "one")
    assert read(store, 2) == [2]
    assert key(1) not in store


def test_what_is_known_of_a_manifest_goes_when_a_value_does(tmp_path: Path) -> None:
    first, second = wrote(tmp_path, 1), wrote(tmp_path, 2)
    index = Index(tmp_path / "shards")
    index.sync()
    index.keep_rows("digest", (b"1", b"2", b"3", "[]"), index.state(), {"digest"})
    assert index.rows("digest") == (b"1", b"2", b"3", "[]")
    wrote(tmp_path, 1, 2)  # a merge: the values are elsewhere before they go
    first.unlink()
    index.sync()
    assert index.rows("digest") is not None
    second.unlink()
    next((tmp_path / "shards" / "encode").iterdir()).unlink()
    index.sync()
    assert index.rows("digest") is None


def test_a_manifest_is_not_kept_if_a_value_went_meanwhile(tmp_path: Path) -> None:
    path = wrote(tmp_path, 1)
    index = Index(tmp_path / "shards")
    index.sync()
    state = index.state()
    index.forget(key(1), path)
    index.keep_rows("digest", (b"", b"", b"", "[]"), state, {"digest"})
    assert index.rows("digest") is None


def test_indexes_that_nobody_opens_are_removed(tmp_path: Path, file: Path) -> None:
    wrote(tmp_path, 1)
    old = file.with_name("0123-1.sqlite")
    old.touch()
    os.utime(old, (0, 0))
    Store(tmp_path)
    assert not old.exists()
    assert file.exists()


def test_an_unreadable_shard_is_named_once_and_comes_back_when_mended(tmp_path: Path) -> None:
    path = wrote(tmp_path, 1)
    good = path.read_bytes()
    path.write_bytes(b"\0" + good[1:])
    os.utime(path, (1, 1))
    store = Store(tmp_path)
    assert store.damaged == [path]
    with pytest.raises(KeyError):
        store.read(key(1))
    path.write_bytes(good)
    assert read(store, 1) == [1]
    assert store.damaged == []


def test_a_shard_of_a_newer_format_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote(tmp_path, 1)
    monkeypatch.setattr("dsplit.cache.shards.FORMAT", 2)
    with pytest.raises(CacheError, match="another version of dsplit"):
        Store(tmp_path)
