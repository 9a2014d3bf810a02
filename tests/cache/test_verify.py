"""--verify and --status: every damage is named with its rows, used by nobody, and repaired by the next run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dsplit.cache import shards as format_
from dsplit.cache.draft import write_manifest
from dsplit.cache.manifest import Entry, Manifest, manifest_path
from dsplit.cache.rows import CachedRows
from dsplit.cache.status import run_status
from dsplit.cache.stock import take_stock
from dsplit.cache.store import Store, Writer
from dsplit.cache.verify import run_verify
from dsplit.errors import CacheError, DataError
from tests.cache.runs import cache, counts, shards
from tests.commandline import Dsplit

HEADER = {
    "family": "qwen-image",
    "task": "sft",
    "trainable": ["transformer"],
    "dtype": "float32",
    "posterior": "mean",
    "units": {},
    "model": {"name": "", "files": {}, "sizes": {}},
    "columns": [],
    "axes": {},
    "empty_prompt": {},
    "data": {},
}
VALUES = {f"{n:032x}": torch.full((3,), float(n)) for n in range(3)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A cache of three rows with one value each, in one shard of less than 1 kB."""
    write_values(Store(tmp_path), VALUES)
    rows = [Entry(key, f"data.csv:{n + 2}", (64, 64), {}, {"latents": [key]}) for n, key in enumerate(VALUES)]
    write_manifest(manifest_path(tmp_path, "default"), Manifest(HEADER, rows))
    return tmp_path


def write_values(store: Store, values: dict[str, torch.Tensor]) -> None:
    with Writer(store, "encode") as writer:
        for key, value in values.items():
            writer.put({key: value})


def flips(data: bytes) -> Iterator[bytes]:
    for position in range(len(data)):
        yield data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


def cuts(data: bytes) -> Iterator[bytes]:
    for length in range(len(data)):
        yield data[:length]


def read_all(folder: Path) -> list[bool]:
    """Which rows training gets; what it gets is right."""
    got = []
    try:
        rows = CachedRows(folder)
    except CacheError:
        return [False] * len(VALUES)
    for i, value in enumerate(VALUES.values()):
        try:
            assert torch.equal(rows.values(i)["latents"], value)
            got.append(True)
        except CacheError:
            got.append(False)
    return got


def repair(folder: Path) -> set[str]:
    """What `dsplit cache` does about damage, with the encoders left out; the keys that it had to make anew."""
    store = Store(folder)
    take_stock(store, VALUES, lambda told: [told])
    store.refresh()
    missing = {key: value for key, value in VALUES.items() if key not in store}
    write_values(store, missing)
    store.merge("encode")
    return set(missing)


@pytest.mark.parametrize(
    ("harms", "step"), [(flips, 17), (cuts, 17), *(pytest.param(h, 1, marks=pytest.mark.slow) for h in (flips, cuts))]
)
def test_every_damage_is_found_used_by_nobody_and_repaired(small: Path, harms: Any, step: int) -> None:
    (path,) = shards(small)
    good = path.read_bytes()
    head = 8 + int.from_bytes(good[:8], "little")
    assert run_verify(small)["ok"]
    for n, bad in islice(enumerate(harms(good)), None, None, step):
        path.write_bytes(bad)
        os.utime(path, ns=(n, n))  # as long after the write before as in life
        found = run_verify(small)
        assert not found["ok"], n
        lost = {place["row"] for value in found["damaged"] for place in value["rows"]}
        lost |= {gap["row"] for gap in found["missing"]}
        assert lost, n
        if n >= head and harms is flips:  # in a value: just that one
            assert len(lost) == 1
        else:
            assert found["unreadable"] == ([str(path)] if n < head else [])
        got = read_all(small)
        assert {f"data.csv:{i + 2}" for i, there in enumerate(got) if not there} >= lost
        assert repair(small) == {key for i, key in enumerate(VALUES) if f"data.csv:{i + 2}" in lost}
        assert shards(small) == [path]
        assert path.read_bytes() == good
    assert run_verify(small)["ok"]
    assert read_all(small) == [True] * 3


def test_damage_that_no_time_stamp_shows_is_found(small: Path) -> None:
    (path,) = shards(small)
    Store(small)
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Store(small).damaged == []  # the index knows the shard from before, and every value is good
    assert read_all(small) == [True] * 3
    assert run_verify(small)["unreadable"] == [str(path)]
    assert Store(small).damaged == [path]  # told
    assert repair(small) == set(VALUES)
    assert run_verify(small)["ok"]


def test_verify_names_rows_and_the_next_run_encodes_just_those(copy: tuple[Path, Path], dsplit: Dsplit) -> None:
    metadata, out = copy
    digest = cache(out, metadata)["digest"]
    done = dsplit("cache", "--verify", "--out", out)
    assert (done.code, done.out.splitlines()[-1]) == (0, "all is well")
    latents, prompts = (next((out / "shards" / unit).iterdir()) for unit in ("encode_image", "encode_prompt"))
    for path, place in ((latents, -1), (prompts, -1)):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
    done = dsplit("cache", "--verify", "--out", out, "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert [value["shard"] for value in found["damaged"]] == [str(latents), str(prompts)]
    assert [place["value"] for place in found["damaged"][0]["rows"]] == ["latents"]
    assert all(row["set"] == "default" for value in found["damaged"] for row in value["rows"])
    done = dsplit("cache", "--verify", "--out", out)
    assert done.code == 1
    assert f"{latents}: the value " in done.out
    assert f"is damaged: {found['damaged'][0]['rows'][0]['row']} latents (in default)" in done.out
    assert "run `dsplit cache` again: it encodes just what is missing" in done.out
    result = cache(out, metadata)
    assert (result["encoded"], result["digest"]) == ({"encode_image": 1, "encode_prompt": 1}, digest)
    assert run_verify(out)["ok"]


def test_a_missing_shard_and_a_damaged_manifest_are_no_whole_cache(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, metadata, name="other")
    path = manifest_path(out, "other")
    path.write_bytes(path.read_bytes()[:-1])
    next((out / "shards" / "encode_image").iterdir()).unlink()
    found = run_verify(out)
    assert not found["ok"]
    assert found["manifests"] == [f"{path}: is damaged or was edited; run `dsplit cache` again"]
    assert [(gap["value"], gap["why"]) for gap in found["missing"]] == [("latents", "not encoded yet")] * 4
    assert len({gap["row"] for gap in found["missing"]}) == 4
    status = run_status(out)
    assert status["sets"]["other"] == {"fault": found["manifests"][0]}
    assert status["unwanted"] is None


def test_status_of_a_whole_cache(copy: tuple[Path, Path], dsplit: Dsplit) -> None:
    _, out = copy
    rows = CachedRows(out)
    found = dsplit("cache", "--status", "--out", out, "--json").result
    assert {u: (t["values"], t["shards"]) for u, t in found["units"].items()} == {
        "encode_image": (4, 1),
        "encode_prompt": (6, 1),
    }
    data = sum(v.nbytes for i in range(4) for v in (rows.values(i)["latents"],))
    assert found["units"]["encode_image"]["bytes"] == data
    of = found["sets"]["default"]
    assert (of["rows"], of["whole"], of["missing"], of["family"]) == (4, 4, [], "qwen-image")
    assert found["unwanted"] == {"values": 0, "bytes": 0}
    assert found["in_use"] == [f"process {os.getpid()} on {next((out / 'holds').iterdir()).name.split('.')[1]}"]
    text = dsplit("cache", "--status", "--out", out).out
    assert "encode_image: 4 values, 20.5 kB in 1 shard(s)" in text
    assert "default: 4 of 4 rows are whole (qwen-image, sft, float32, " in text


def test_status_says_why(copy: tuple[Path, Path], tmp_path: Path, dsplit: Dsplit) -> None:
    metadata, _ = copy
    out = tmp_path / "new"
    picture = metadata.parent / "img01.png"
    Image.effect_noise((96, 64), 90).convert("RGB").save(picture)
    data = bytearray(picture.read_bytes())
    middle = data.index(b"IDAT") + 12
    data[middle : middle + 8] = bytes(8)  # its header and its end are as they should be
    picture.write_bytes(data)
    with pytest.raises(DataError):
        cache(out, metadata)
    (gap,) = run_status(out)["sets"]["default"]["missing"]
    assert gap["row"].endswith("metadata.csv:3")
    assert gap["value"] == "latents"
    assert "img01.png" in gap["why"]
    with pytest.raises(CacheError, match=r"metadata\.csv:3: latents missing \(.*img01\.png"):
        CachedRows(out)
    assert "3 of 4 rows are whole" in dsplit("cache", "--status", "--out", out).out
    next((out / "shards" / "encode_prompt").iterdir()).write_bytes(b"junk")
    found = run_status(out)
    assert len(found["unreadable"]) == 1
    why = {gap["row"][-1]: gap["why"] for gap in found["sets"]["default"]["missing"] if gap["value"] == "prompt_embeds"}
    assert why.pop("3") == gap["why"]
    assert why == dict.fromkeys("245", "its shard is damaged, or it was never encoded")
    assert counts(cache(out, metadata, skip_bad=True))["encode_image"] == (0, 3)
    assert run_verify(out)["ok"]


@pytest.mark.parametrize("option", ["--status", "--verify", "--gc"])
def test_no_cache_is_an_error_and_makes_none(tmp_path: Path, dsplit: Dsplit, option: str) -> None:
    done = dsplit("cache", option, "--out", tmp_path / "nothing")
    assert done.code == 1
    assert "no cache in" in done.err
    assert list(tmp_path.iterdir()) == []


def test_verify_of_many_rows_lists_some_and_counts_the_rest(small: Path, dsplit: Dsplit) -> None:
    rows = [Entry(f"{n:032x}", f"data.csv:{n}", (64, 64), {}, {"latents": ["f" * 32]}) for n in range(30)]
    write_manifest(manifest_path(small, "default"), Manifest(HEADER, rows))
    out = dsplit("cache", "--verify", "--out", small).out
    assert out.count("latents missing") == 20
    assert "and 10 more (--json lists all)" in out


def test_a_checksum_is_not_asked_of_what_is_not_there(small: Path) -> None:
    """A header that promises more than there is: nothing is reserved for it."""
    (path,) = shards(small)
    key, entry = next(iter(format_.read_table(path).items()))
    huge = entry._replace(end=entry.start + 2**60)
    with pytest.raises(format_.Damaged):
        format_.read_value(key, huge)
