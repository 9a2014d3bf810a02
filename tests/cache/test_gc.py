"""--gc: what nobody needs goes, what anybody needs stays, whatever runs beside it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsplit.cache import gc
from dsplit.cache import holds as holds_module
from dsplit.cache import run as run_module
from dsplit.cache.gc import run_gc
from dsplit.cache.holds import holds
from dsplit.cache.manifest import manifest_path, read_manifest
from dsplit.cache.rows import CachedRows
from dsplit.cache.store import Store
from dsplit.cache.verify import run_verify
from dsplit.errors import CacheError
from tests.cache.runs import cache, child, counts, shards
from tests.commandline import Dsplit


def edited(metadata: Path) -> Path:
    """The data set without its second row, whose caption and picture no other row has."""
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(lines[:2] + lines[3:]))
    return metadata


def found(result: dict[str, Any]) -> dict[str, int]:
    return {unit: len(values) for unit, values in result["values"].items()}


UNWANTED = {"encode_image": 1, "encode_prompt": 2}  # latents; embeddings and their mask


def test_a_dry_run_lists_and_changes_nothing(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    assert found(run_gc(out, remove=False)) == {}
    cache(out, edited(metadata))
    before = {path: path.read_bytes() for path in shards(out)}
    result = run_gc(out, remove=False)
    assert found(result) == UNWANTED
    assert result["bytes"] == sum(v["bytes"] for values in result["values"].values() for v in values) > 0
    assert (result["removed"], result["left"], result["in_use"]) == (False, [], [])
    assert {path: path.read_bytes() for path in shards(out)} == before


def test_yes_removes_just_that(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    digest = cache(out, edited(metadata))["digest"]
    size = sum(path.stat().st_size for path in shards(out))
    result = run_gc(out, remove=True)
    assert (found(result), result["removed"], result["left"]) == (UNWANTED, True, [])
    assert sum(path.stat().st_size for path in shards(out)) < size - result["bytes"]
    assert found(run_gc(out, remove=False)) == {}
    assert run_verify(out)["ok"]
    again = cache(out, metadata)
    assert (counts(again), again["digest"]) == ({"encode_image": (0, 3), "encode_prompt": (0, 2)}, digest)


def test_what_another_data_set_needs_stays(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, metadata, name="all")
    cache(out, edited(metadata))
    assert found(run_gc(out, remove=True)) == {}
    manifest_path(out, "all").unlink()
    assert found(run_gc(out, remove=True)) == UNWANTED


def test_a_shard_that_nobody_needs_goes_whole(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, metadata, resolution="32x32")
    assert found(run_gc(out, remove=True)) == {"encode_image": 4}
    assert all(CachedRows(out).values(i) for i in range(4))


def test_beside_a_reader(copy: tuple[Path, Path]) -> None:
    """A run keeps the rows that it began with, though its data set has others by now."""
    metadata, out = copy
    rows = CachedRows(out)
    before = [rows.values(i) for i in range(4)]
    reader = pickle.loads(pickle.dumps(rows))  # as a worker process has it
    cache(out, edited(metadata))
    result = run_gc(out, remove=True)
    assert found(result) == {}
    assert result["in_use"] == [f"process {os.getpid()} on {holds_module.host_name()}"]
    del reader  # a worker that ends lets nothing go
    assert len(holds(out)) == 1
    for i in range(4):
        assert all(value.equal(before[i][name]) for name, value in rows.values(i).items())
    del rows
    assert holds(out) == []
    assert found(run_gc(out, remove=True)) == UNWANTED


def test_a_reader_follows_values_into_their_new_shard(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, edited(metadata))
    rows = CachedRows(out)
    before = shards(out)
    assert found(run_gc(out, remove=True)) == UNWANTED
    assert not set(before) & set(shards(out))
    assert all(rows.values(i) for i in range(3))


def test_holds_of_the_dead_do_not_count(copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, out = copy

    def work() -> None:
        rows = CachedRows(out)
        assert holds(out)
        del rows.__dict__["_hold"].__dict__["let_go"]
        os._exit(7)  # without letting go, as after kill -9

    assert child(work) == 7
    assert len(list((out / "holds").iterdir())) == 1
    assert holds(out) == []
    cache(out, metadata)
    assert list((out / "holds").iterdir()) == []
    foreign = out / "holds" / "default.elsewhere.1.0.jsonl"
    foreign.write_bytes(manifest_path(out, "default").read_bytes())
    assert holds(out) == [foreign]
    old = time.time() - holds_module.LOST_SECONDS - 10
    os.utime(foreign, (old, old))
    assert holds(out) == []


def at(moment: str, module: Any, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> list[Any]:
    """`act` is done once, just before `module.moment` is called next; gives what it said."""
    real, said = getattr(module, moment), []

    def called(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(module, moment, real)
        said.append(act())
        return real(*args, **kwargs)

    monkeypatch.setattr(module, moment, called)
    return said


@pytest.mark.parametrize(
    ("moment", "module", "taken"),
    [
        ("write_manifest", run_module, True),  # before the manifest says what is wanted: removed, encoded again
        ("Hold", run_module, False),  # after it: spared
        ("Stage1", run_module, False),
    ],
)
def test_beside_a_run_that_wants_the_values_again(
    copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, moment: str, module: Any, taken: bool
) -> None:
    metadata, out = copy
    whole = metadata.read_text()
    cache(out, edited(metadata))
    metadata.write_text(whole)
    said = at(moment, module, monkeypatch, lambda: found(run_gc(out, remove=True)))
    result = cache(out, metadata)
    assert said == [UNWANTED if taken else {}]
    assert counts(result) == {"encode_image": (taken, 4 - taken), "encode_prompt": (taken, 3 - taken)}
    assert run_verify(out)["ok"]


def encodes_one(result: dict[str, Any]) -> None:
    assert counts(result)["encode_image"] == (1, 3)


@pytest.mark.parametrize("moment", ["_remove", "_hide", "_users"])
def test_a_run_that_begins_meanwhile_keeps_its_values(
    copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    metadata, out = copy
    whole = metadata.read_text()
    cache(out, edited(metadata))
    metadata.write_text(whole)
    if moment == "_users":
        users, calls = gc._users, []

        def later(folder: Path) -> set[str]:
            if len(calls) == 1:  # a shard is hidden at this moment, so another process misses its value
                assert child(lambda: encodes_one(cache(out, metadata))) == 0
            calls.append(folder)
            return users(folder)

        monkeypatch.setattr(gc, "_users", later)
    else:
        at(moment, gc, monkeypatch, lambda: cache(out, metadata))
    result = run_gc(out, remove=True)
    assert len(result["left"]) == 2
    assert run_verify(out)["ok"]
    assert all(CachedRows(out).values(i) for i in range(4))


@pytest.mark.parametrize("point", ["join", "replace", "unlink"])
def test_kill_9_loses_nothing_that_is_wanted(copy: tuple[Path, Path], point: str) -> None:
    metadata, out = copy
    cache(out, edited(metadata))

    def work() -> None:
        def die(*_: Any, **__: Any) -> None:
            os._exit(9)

        if point == "unlink":
            Path.unlink = die  # type: ignore[method-assign, assignment]
        elif point == "replace":
            os.replace = die
        else:
            gc.shards.join = die
        run_gc(out, remove=True)

    assert child(work) == 9
    assert run_verify(out)["ok"]
    assert counts(cache(out, metadata)) == {"encode_image": (0, 3), "encode_prompt": (0, 2)}
    assert list(out.rglob("*.tmp")) == []
    run_gc(out, remove=True)
    assert found(run_gc(out, remove=False)) == {}


def test_a_damaged_manifest_stops_it(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, metadata, name="other")
    path = manifest_path(out, "other")
    path.write_bytes(path.read_bytes()[:-5])
    before = shards(out)
    with pytest.raises(CacheError, match=r"other\.jsonl: is damaged"):
        run_gc(out, remove=True)
    path.unlink()
    manifest_path(out, "default").unlink()
    with pytest.raises(CacheError, match=r"no cache in .*: no entries"):
        run_gc(out, remove=True)
    assert shards(out) == before


def test_damage_that_a_row_needs_is_left_for_the_next_run(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, edited(metadata))
    row = read_manifest(manifest_path(out, "default")).rows[0]
    entry = Store(out).entry(row.keys["latents"][0])
    data = bytearray(entry.shard.read_bytes())
    data[entry.start] ^= 1
    entry.shard.write_bytes(data)
    result = run_gc(out, remove=True)
    assert result["left"] == [str(entry.shard)]
    (value,) = run_verify(out)["damaged"]
    assert [place["row"] for place in value["rows"]] == [row.place]
    assert counts(cache(out, metadata)) == {"encode_image": (1, 2), "encode_prompt": (0, 2)}
    assert run_verify(out)["ok"]


def test_a_shard_that_cannot_be_read_goes(copy: tuple[Path, Path]) -> None:
    _, out = copy
    path = out / "shards" / "encode_image" / f"{'0' * 32}.safetensors"
    path.write_bytes(b"no shard")
    result = run_gc(out, remove=True)
    assert (result["damaged"], found(result)) == ([str(path)], {})
    assert not path.exists()
    assert run_verify(out)["ok"]


def test_the_command(copy: tuple[Path, Path], dsplit: Dsplit) -> None:
    metadata, out = copy
    done = dsplit("cache", "--gc", "--out", out)
    assert (done.code, done.out) == (0, "every value is needed\n")
    cache(out, edited(metadata))
    done = dsplit("cache", "--gc", "--out", out)
    assert "encode_image: 1 values" in done.out
    assert "a dry run; --yes removes them" in done.out
    done = dsplit("cache", "--gc", "--yes", "--out", out)
    assert done.out.endswith("removed\n")
    assert dsplit("cache", "--gc", "--out", out).out == "every value is needed\n"
    for words in (["--yes"], ["--gc", "--verify"], ["--gc", "--dry-run"]):
        assert dsplit("cache", *words, "--out", out).code == 2
