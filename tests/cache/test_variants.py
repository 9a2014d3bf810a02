"""Several captions and windows of a row: each is encoded once, kept by all that reads a cache, and read by choice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplit.cache.draft import write_manifest
from dsplit.cache.gc import run_gc
from dsplit.cache.manifest import Manifest, manifest_path, read_manifest
from dsplit.cache.reasons import LABELS
from dsplit.cache.rows import CachedRows
from dsplit.cache.status import run_status
from dsplit.cache.store import Store
from dsplit.cache.verify import run_verify
from dsplit.dataset.rows import View
from dsplit.errors import CacheError, DataError
from tests import tiny
from tests.cache.runs import cache, counts, shards
from tests.cache.test_faults import poisoned

CAPTIONS: Sequence[Any] = (["a red circle", "a circle", "red"], "a blue square", ["a circle", "a blue square"])
WINDOWS = {"resolution": "32x32", "crops": 2, "flip": True}  # of 64x32: left and right, plain and mirrored


def written(folder: Path, captions: Sequence[Any] = CAPTIONS) -> Path:
    """Three pictures of 64x32 with three, one and two captions, four distinct ones."""
    folder.mkdir(exist_ok=True)
    for k in range(3):
        if not (folder / f"{k}.png").exists():
            tiny.picture(folder / f"{k}.png", (64, 32), seed=k)
    rows = [{"image": f"{k}.png", "prompt": prompt} for k, prompt in enumerate(captions)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "metadata.jsonl"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    metadata = written(tmp_path / "data")
    return metadata, tmp_path / "cache", cache(tmp_path / "cache", metadata, **WINDOWS)


def test_every_variant_is_encoded_once_and_equal_captions_are_shared(made: Any) -> None:
    metadata, out, result = made
    assert counts(result) == {"encode_image": (12, 0), "encode_prompt": (5, 0)}  # four captions and the empty one
    assert counts(cache(out, metadata, **WINDOWS)) == {"encode_image": (0, 12), "encode_prompt": (0, 5)}
    manifest = read_manifest(manifest_path(out, "default"))
    assert manifest.header["axes"] == {"latents": ["view"], "prompt_embeds": ["prompt"], "prompt_mask": ["prompt"]}
    assert [row.variants for row in manifest.rows] == [{"prompt": 3, "view": 4}, {"view": 4}, {"prompt": 2, "view": 4}]
    first, second, third = (row.keys["prompt_embeds"] for row in manifest.rows)
    assert third == [first[1], second[0]]
    assert len({*first, *second, manifest.header["empty_prompt"]["prompt_embeds"]}) == 5


def test_a_choice_reads_what_a_row_of_that_variant_alone_has(made: Any, tmp_path: Path) -> None:
    rows = CachedRows(made[1])
    assert [dict(rows.variants(i)) for i in range(3)] == [
        {"prompt": 3, "view": 4},
        {"view": 4},
        {"prompt": 2, "view": 4},
    ]
    for k, caption in enumerate(CAPTIONS[0]):
        cache(tmp_path / "alone", written(tmp_path / "data", [caption, *CAPTIONS[1:]]), resolution="32x32")
        alone = CachedRows(tmp_path / "alone").values(0)
        for name in ("prompt_embeds", "prompt_mask"):
            assert torch.equal(rows.values(0, {"prompt": k})[name], alone[name])
    latents = [rows.values(0, {"view": k, "prompt": 2})["latents"] for k in range(4)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(latents, 2))
    assert torch.equal(rows.values(0)["latents"], latents[0])
    assert torch.equal(rows.values(1, {"view": 3})["latents"], CachedRows(made[1]).values(1, {"view": 3})["latents"])


def test_a_dropped_prompt_is_the_empty_one(made: Any) -> None:
    rows, empty = CachedRows(made[1]), CachedRows(made[1]).header["empty_prompt"]
    for i in range(3):
        found = rows.values(i, {"prompt": None, "view": 1})
        assert torch.equal(found["prompt_embeds"], Store(made[1]).get(empty["prompt_embeds"]))
        assert torch.equal(found["latents"], rows.values(i, {"view": 1})["latents"])


def test_another_caption_costs_one_encode_and_no_latent(made: Any) -> None:
    metadata, out, result = made
    written(metadata.parent, [[*CAPTIONS[0], "one more"], *CAPTIONS[1:]])
    (why,) = cache(out, metadata, why=True, **WINDOWS)["why"]
    assert (why["unit"], why["changed"], why["values"]) == ("encode_prompt", ("prompt",), 1)
    again = cache(out, metadata, **WINDOWS)
    assert counts(again) == {"encode_image": (0, 12), "encode_prompt": (1, 5)}
    assert again["digest"] != result["digest"]
    assert run_gc(out, remove=False)["values"] == {}  # the new row has all that the old one had
    written(metadata.parent, CAPTIONS)
    assert cache(out, metadata, **WINDOWS)["digest"] == result["digest"]
    unwanted = run_gc(out, remove=True)["values"]
    assert {unit: len(values) for unit, values in unwanted.items()} == {"encode_prompt": 2}
    assert run_verify(out)["ok"]


def test_other_windows_are_told_from_another_size(made: Any) -> None:
    metadata, out, _ = made
    more = {**WINDOWS, "crops": 3}
    assert [(r["changed"], r["values"]) for r in cache(out, metadata, why=True, **more)["why"]] == [
        ((LABELS["view"],), 6)
    ]
    smaller = {**WINDOWS, "resolution": "16x16"}
    assert [(r["changed"], r["values"]) for r in cache(out, metadata, why=True, **smaller)["why"]] == [(("size",), 12)]
    both = {"resolution": "16x16"}
    found = cache(out, metadata, why=True, **both)["why"]
    assert [(r["changed"], r["values"]) for r in found] == [(("size", LABELS["view"]), 3)]


def test_every_variant_counts_as_part_of_its_row(made: Any) -> None:
    metadata, out, result = made
    entry = Store(out).entry(read_manifest(manifest_path(out, "default")).rows[0].keys["latents"][3])
    data = bytearray(entry.shard.read_bytes())
    data[entry.start] ^= 1
    entry.shard.write_bytes(data)
    (damaged,) = run_verify(out)["damaged"]
    assert [(place["row"].rpartition(":")[2], place["value"]) for place in damaged["rows"]] == [("1", "latents")]
    rows = CachedRows(out)
    assert rows.values(0, {"view": 2})
    with pytest.raises(CacheError, match=r"metadata\.jsonl:1: latents: .* damaged"):
        rows.values(0, {"view": 3})
    again = cache(out, metadata, **WINDOWS)
    assert (again["encoded"], again["digest"]) == ({"encode_image": 1, "encode_prompt": 0}, result["digest"])
    for path in shards(out):
        if path.parent.name == "encode_prompt":
            path.unlink()
    (missing,) = {gap["value"] for gap in run_status(out)["sets"]["default"]["missing"]} - {"prompt_mask"}
    assert missing == "prompt_embeds"
    with pytest.raises(CacheError, match="cache incomplete: 0 of 3 rows"):
        CachedRows(out)


def test_a_digest_does_not_depend_on_order_or_history(made: Any, tmp_path: Path) -> None:
    lines = made[0].read_text().splitlines(keepends=True)
    made[0].write_text("".join(lines[::-1]))
    assert cache(tmp_path / "new", made[0], **WINDOWS)["digest"] == made[2]["digest"]
    assert cache(tmp_path / "new", made[0], resolution="32x32")["digest"] != made[2]["digest"]


def test_captions_that_cross_to_stage_2(tmp_path: Path) -> None:
    metadata = written(tmp_path / "data")
    result = cache(tmp_path / "cache", metadata, trainable="transformer,text_encoder")
    assert counts(result) == {"encode_image": (3, 0)}
    rows = CachedRows(tmp_path / "cache")
    assert rows.header["axes"] == {"latents": ["view"], "prompt": ["prompt"]}
    assert [rows.columns(0, {"prompt": k})["prompt"] for k in (0, 1, 2)] == CAPTIONS[0]
    assert [rows.columns(i)["prompt"] for i in range(3)] == ["a red circle", "a blue square", "a circle"]
    assert [rows.columns(i, {"prompt": None})["prompt"] for i in range(3)] == [""] * 3
    assert rows.values(0, {"prompt": None}).keys() == {"latents"}


def test_windows_that_cross_to_stage_2(tmp_path: Path) -> None:
    metadata = written(tmp_path / "data")
    cache(tmp_path / "cache", metadata, **WINDOWS)
    path = manifest_path(tmp_path / "cache", "default")
    manifest = read_manifest(path)
    views = [[0, 0, False], [32, 0, True]]
    several = [row._replace(columns={"view": views * 2}) for row in manifest.rows[:2]]
    one = manifest.rows[2]._replace(
        columns={"view": views[1]}, variants={}, keys={name: keys[:1] for name, keys in manifest.rows[2].keys.items()}
    )
    header = {**manifest.header, "columns": ["view"], "axes": {**manifest.header["axes"], "view": ["view"]}}
    write_manifest(path, Manifest(header, [*several, one]))
    rows = CachedRows(tmp_path / "cache")
    assert rows.columns(0, {"view": 3}) == {"view": View(32, 0, True)}
    assert rows.columns(2, {"view": 3}) == {"view": View(32, 0, True)}
    assert isinstance(rows.columns(0)["view"], View)


def test_a_variant_that_cannot_be_encoded_costs_its_row(tmp_path: Path) -> None:
    metadata, model = written(tmp_path / "data"), poisoned(tmp_path / "model")
    with pytest.raises(DataError) as error:
        cache(tmp_path / "cache", metadata, model, **WINDOWS)
    assert str(error.value).count("NaN/Inf in latents ('1.png')") == 4
    assert "3 of 3 rows could not be encoded" in str(error.value)


@pytest.mark.parametrize("change", ["fewer", "more", "text", "none", "one axis"])
def test_a_row_with_another_number_of_keys_is_refused(made: Any, change: str) -> None:
    path = manifest_path(made[1], "default")
    manifest = read_manifest(path)
    row = manifest.rows[0]
    keys = row.keys["latents"]
    other: Any = {"fewer": keys[:3], "more": [*keys, keys[0]], "text": keys[0], "none": [], "one axis": keys}[change]
    variants = {"prompt": 3} if change == "one axis" else row.variants
    changed = row._replace(keys={**row.keys, "latents": other}, variants=variants)
    write_manifest(path, Manifest(manifest.header, [changed, *manifest.rows[1:]]))
    with pytest.raises(CacheError, match=r"default\.jsonl: is damaged"):
        read_manifest(path)
