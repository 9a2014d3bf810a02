"""Several captions, flips, crops and dropout from the metadata to the losses, with the cache and without it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsplit.cache.rows import CachedRows
from dsplit.cache.run import run_cache
from dsplit.errors import CacheError, UsageError
from dsplit.models.registry import registry
from dsplit.recipe import CacheOptions, DataOptions, ValidateOptions
from dsplit.training.batches import Reader
from dsplit.training.rng import variant
from dsplit.validation.parity import check_parity
from tests import tiny
from tests.training.conftest import Made, loras, losses, metrics, model, same

CAPTIONS = (["a red circle", "one red circle on a white ground", "circle"], "a blue star", ["a star", "a cross"])
RAGGED = {"prompt_embeds": 0, "prompt_mask": 0}


def written(folder: Path) -> Path:
    """Three pictures of 96x64 with three, one and two captions."""
    folder.mkdir()
    rows = []
    for k, captions in enumerate(CAPTIONS):
        tiny.picture(folder / f"{k}.png", (96, 64), seed=k)
        rows.append({"image": f"{k}.png", "prompt": captions})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made_of(folder: Path, **options) -> Made:
    """The rows and their cache: windows of 64x64, plain and mirrored, left and right."""
    data = DataOptions(data=str(written(folder / "data")), resolution="64x64", flip=True, crops=2)
    made = Made(data, folder / "cache", model(**options))
    result = run_cache(made.model, made.data, CacheOptions(out=str(made.cache), workers=0))
    assert result["rows"] == 3
    return made


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_of(tmp_path_factory.mktemp("varied"))


def test_all_variants_are_encoded_once_and_changing_the_dropout_encodes_nothing(varied, tmp_path: Path):
    rows = CachedRows(varied.cache)
    assert [dict(rows.variants(i)) for i in range(3)] == [
        {"prompt": 3, "view": 4},
        {"view": 4},
        {"prompt": 2, "view": 4},
    ]
    varied.train(tmp_path / "o", max_steps=1, prompt_dropout=0.7)
    again = run_cache(varied.model, varied.data, CacheOptions(out=str(varied.cache), workers=0))
    assert set(again["encoded"].values()) <= {0}
    assert again["reused"] == {"encode_image": 12, "encode_prompt": 7}  # 6 captions and the empty one


def test_over_twelve_visits_each_caption_and_each_window_is_used_equally(varied):
    rows = CachedRows(varied.cache)
    reader = Reader(rows, RAGGED)
    embeds = [rows.values(0, {"prompt": k})["prompt_embeds"] for k in range(3)]
    latents = [rows.values(0, {"view": k})["latents"] for k in range(4)]
    assert len({tuple(e.flatten().tolist()) for e in embeds}) == 3
    assert len({tuple(x.flatten().tolist()) for x in latents}) == 4
    used: Counter = Counter()
    for visit in range(12):
        batch = reader.read([(0, visit)])
        (caption,) = [k for k in range(3) if torch.equal(batch["prompt_embeds"][0], embeds[k])]
        (window,) = [k for k in range(4) if torch.equal(batch["latents"][0], latents[k])]
        assert caption == variant(0, rows.ids[0], visit, "prompt", 3)
        assert window == variant(0, rows.ids[0], visit, "view", 4)
        used["prompt", caption] += 1
        used["view", window] += 1
    assert used == {**{("prompt", k): 4 for k in range(3)}, **{("view", k): 3 for k in range(4)}}


@pytest.mark.parametrize(
    ("made_with", "options"),
    [
        ({}, {"prompt_dropout": 0.3, "batch_size": 2}),
        ({"posterior": "sample"}, {"prompt_dropout": 0.5}),
        ({"trainable": "text_encoder"}, {"prompt_dropout": 0.3, "batch_size": 3}),
        ({"trainable": "vae"}, {"targets": "to_qkv,proj"}),
    ],
)
def test_split_and_unsplit_are_equal(varied, tmp_path: Path, made_with, options):
    made = made_of(tmp_path, **made_with) if made_with else varied
    options = {"epochs": 2, "repeat": 2, "lr": 1e-3, **options}
    made.train(tmp_path / "split", **options)
    made.train(tmp_path / "unsplit", split=False, **options)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "unsplit")
    assert sum(len(m["rows"]) for m in metrics(tmp_path / "split")) == 3 * 2 * 2  # the epoch's length is as ever
    split, unsplit = loras(tmp_path / "split"), loras(tmp_path / "unsplit")
    assert split
    assert all(same(split[name], unsplit[name]) for name in split)
    made.train(tmp_path / "workers", workers=2, **options)
    assert losses(tmp_path / "workers") == losses(tmp_path / "split")


def test_a_trained_text_encoder_reads_the_caption_drawn_or_the_empty_one(tmp_path: Path):
    rows = CachedRows(made_of(tmp_path, trainable="text_encoder").cache)
    reader = Reader(rows, {}, prompt_dropout=0.5)
    said = Counter(reader.read([(0, visit)])["prompt"][0] for visit in range(60))
    assert set(said) == {*CAPTIONS[0], ""}
    assert 15 <= said[""] <= 45
    assert all(n >= 2 for n in said.values())


def test_parity_compares_every_variant(varied, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    given = ValidateOptions(parity=True, parity_rows=3, from_cache=str(varied.cache))
    result = check_parity(varied.model, varied.data, given)
    assert (result["rows"], result["max_value"], result["max_loss"], result["ok"]) == (3, 0.0, 0.0, True)
    assert "parity: 3 rows, 12 variants" in capfd.readouterr().err  # 4 windows a row; captions in their stride
    with pytest.raises(
        CacheError, match=r"variants are \{'prompt': 3, 'view': 4\} in the cache, \{'prompt': 3, 'view'"
    ):
        check_parity(varied.model, replace(varied.data, flip=False), given)


def test_an_unsplit_run_refuses_what_the_family_forbids_before_anything_is_read(tmp_path: Path, monkeypatch):
    families = registry().families
    monkeypatch.setitem(families, "qwen-image", replace(families["qwen-image"], variants=("crops",)))
    made = Made(DataOptions(data=str(tmp_path / "nowhere"), flip=True), tmp_path, model())
    with pytest.raises(UsageError, match="qwen-image") as caught:
        made.train(tmp_path / "o", split=False)
    assert caught.value.exit_code == 2
    assert "--flip" in str(caught.value)
