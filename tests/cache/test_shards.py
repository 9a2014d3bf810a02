"""Shards: what is written comes back, anything else is found out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dsplit.cache import shards
from dsplit.cache.shards import Damaged, Value, merge, read_table, read_value, write_shard
from dsplit.cache.stock import look, take_stock
from dsplit.cache.store import Store, Writer, value_of
from dsplit.errors import CacheError

TENSORS = {
    "a" * 32: torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b" * 32: torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c" * 32: torch.tensor([True, False, True]),
    "d" * 32: torch.tensor(7, dtype=torch.int64),
    "e" * 32: torch.zeros(0, 4),
}


def written(folder: Path) -> Path:
    entries = write_shard(folder, "encode", {key: value_of(tensor) for key, tensor in TENSORS.items()})
    return next(iter(entries.values())).shard


def whole(path: Path) -> bool:
    """True if nothing tells the shard from an undamaged one."""
    try:
        for key, entry in read_table(path).items():
            read_value(key, entry)
    except (Damaged, CacheError):
        return False
    return True


def test_values_come_back_through_the_store(tmp_path: Path) -> None:
    written(tmp_path / "shards" / "encode")
    store = Store(tmp_path)
    for key, tensor in TENSORS.items():
        assert store.get(key).dtype == tensor.dtype
        assert torch.equal(store.get(key), tensor)
    assert "f" * 32 not in store


def test_the_safetensors_library_reads_a_shard(tmp_path: Path) -> None:
    with safe_open(written(tmp_path), "pt") as file:
        assert set(file.keys()) == set(TENSORS)
        assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in TENSORS.items())


def test_equal_content_gives_the_same_file(tmp_path: Path) -> None:
    first = written(tmp_path / "one")
    entries = write_shard(tmp_path / "two", "encode", {k: value_of(TENSORS[k]) for k in reversed(TENSORS)})
    second = next(iter(entries.values())).shard
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = written(tmp_path)
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x41]) + good[position + 1 :])
        assert not whole(path), f"byte {position} of {len(good)}"
    path.write_bytes(good)
    assert whole(path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = written(tmp_path)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert not whole(path), f"{length} of {len(good)} bytes"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_foreign_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, named: bool) -> None:
    head = len(data).to_bytes(8, "little") + data
    name = shards._name(head) if named else "0" * 32
    path = tmp_path_factory.mktemp("shard") / f"{name}.safetensors"
    path.write_bytes(head)
    assert not whole(path)


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(shards, "FORMAT", 2)
    with pytest.raises(CacheError, match=r"another version of dsplit \(format 1, here 2\)"):
        read_table(path)


def test_merge_keeps_every_value_in_one_shard(tmp_path: Path) -> None:
    folder = tmp_path / "shards" / "encode"
    for key, tensor in TENSORS.items():
        write_shard(folder, "encode", {key: value_of(tensor)})
    store = Store(tmp_path)
    store.merge("encode")
    assert len(list(folder.iterdir())) == 1
    assert all(torch.equal(store.get(key), tensor) for key, tensor in TENSORS.items())


def test_merge_stops_at_the_target_size(tmp_path: Path) -> None:
    for n in range(10):
        write_shard(tmp_path, "encode", {f"{n:032}": Value("uint8", (100,), bytes(100))})
    merge(tmp_path, "encode", target=1000)
    tables = [read_table(path) for path in tmp_path.iterdir()]
    assert len(tables) == 1  # ten values fit the target, whatever their headers take
    write_shard(tmp_path, "encode", {"f" * 32: Value("uint8", (100,), bytes(100))})
    merge(tmp_path, "encode", target=200)
    assert len(list(tmp_path.iterdir())) == 2  # the large one is left alone


def test_a_reader_follows_a_merge_by_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "shards" / "encode"
    for key, tensor in TENSORS.items():
        write_shard(folder, "encode", {key: value_of(tensor)})
    reader = Store(tmp_path)
    Store(tmp_path).merge("encode")
    assert all(torch.equal(reader.get(key), tensor) for key, tensor in TENSORS.items())


def test_a_damaged_value_is_named_and_the_rest_survives_its_repair(tmp_path: Path) -> None:
    path = written(tmp_path / "shards" / "encode")
    key = "a" * 32
    start = read_table(path)[key].start
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    store = Store(tmp_path)
    with pytest.raises(CacheError, match=f"{path.name}: the value {key} is damaged; run `dsplit cache` again"):
        store.get(key)
    assert look(store, [path]) == {path: [key]}
    take_stock(store, TENSORS, lambda told: [told])
    assert key not in store
    with Writer(store, "encode") as writer:
        writer.put({key: TENSORS[key]})
    store.merge("encode")
    for repaired in (store, Store(tmp_path)):
        assert look(repaired, path.parent.iterdir()) == {file: [] for file in path.parent.iterdir()}
        assert all(torch.equal(repaired.get(k), tensor) for k, tensor in TENSORS.items())
    assert len(list(path.parent.iterdir())) == 1


def test_a_shard_with_a_damaged_header_does_not_count(tmp_path: Path) -> None:
    path = written(tmp_path / "shards" / "encode")
    path.write_bytes(b"\xff" * 20)
    store = Store(tmp_path)
    assert store.damaged == [path]
    assert "a" * 32 not in store
    store.merge("encode")
    assert not path.exists()


def test_a_writer_commits_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsplit.cache.store.HAND_OVER", 2)
    store = Store(tmp_path)
    with Writer(store, "encode") as writer:
        for n in range(5):
            writer.put({f"{n:032}": torch.tensor([n])})
        assert (
            Store(tmp_path).index.totals()["encode"]["values"] >= 2
        )  # the first commit is sealed, the second may be under way
    assert sorted(len(read_table(p)) for p in (tmp_path / "shards" / "encode").iterdir()) == [1, 2, 2]
    assert store.get(f"{4:032}").item() == 4


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    store = Store(tmp_path)
    with (
        pytest.raises(CacheError, match=r"safetensors: cannot write it: No space left on device"),
        Writer(store, "encode") as writer,
    ):
        writer.put({"a" * 32: TENSORS["a" * 32]})
    assert list((tmp_path / "shards" / "encode").iterdir()) == []
