"""The field cases of stage 1 (C01 to C08) from end to end: command line in; exit code, messages and values out."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsplit.cache.encode import encode
from dsplit.cache.manifest import manifest_path, read_manifest
from dsplit.cache.rows import CachedRows
from dsplit.cache.shards import write_shard
from dsplit.cache.store import Store, value_of
from dsplit.cli import main
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.models.registry import registry
from dsplit.recipe import ModelOptions
from dsplit.training.batches import Reader
from tests import tiny
from tests.cache.runs import child
from tests.commandline import MODEL, Dsplit, cache_words, names_below
from tests.dataset.make import metadata


def test_c01_a_picture_replaced_at_equal_size_and_time_and_another_resolution(dsplit: Dsplit, tmp_path: Path) -> None:
    for k in range(3):
        tiny.picture(tmp_path / f"img{k}.bmp", seed=k)
    path = metadata(tmp_path, "image,prompt\n" + "".join(f"img{k}.bmp,a thing\n" for k in range(3)))
    out = tmp_path / "cache"

    def images(*more: str) -> tuple[int, int]:
        result = dsplit(*cache_words(path, out), *more).result
        return result["encoded"]["encode_image"], result["reused"]["encode_image"]

    def latents() -> list[torch.Tensor]:
        return [CachedRows(out).values(i)["latents"] for i in range(3)]

    assert images() == (3, 0)
    first, before = latents(), (tmp_path / "img0.bmp").stat()
    tiny.picture(tmp_path / "img0.bmp", seed=9)
    os.utime(tmp_path / "img0.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (tmp_path / "img0.bmp").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert images() == (1, 2)
    assert [torch.equal(a, b) for a, b in zip(first, latents(), strict=True)] == [False, True, True]
    assert images() == (0, 3)
    assert images("--resolution", "32x32") == (3, 0)
    assert {tuple(value.shape[-2:]) for value in latents()} == {(4, 4)}


def test_c03_nan_latents_are_named_and_never_stored(dsplit: Dsplit, tmp_path: Path) -> None:
    path, model = tiny.dataset(tmp_path / "data", 3), tiny.qwen_image(tmp_path / "model")
    weights = next((model / "vae").glob("*.safetensors"))
    tensors = load_file(weights)
    tensors["encoder.conv_in.bias"].view(-1)[0] = float("nan")
    save_file(tensors, weights)
    done = dsplit(*cache_words(path, tmp_path / "cache", model=model))
    assert done.code == 1
    assert f"{path}:2: NaN/Inf in latents ('img00.png'); check the precision of vae (--dtype float32)" in done.err
    stored = [v for p in (tmp_path / "cache").rglob("*.safetensors") for v in load_file(p).values()]
    assert stored
    assert all(torch.isfinite(v).all() for v in stored if v.is_floating_point())
    refused = dsplit("train", "--model", MODEL, "--from-cache", tmp_path / "cache", "--out", tmp_path / "o")
    assert (refused.code, "cache incomplete: 0 of 3 rows" in refused.err) == (1, True)


def test_c06_every_prompt_dropped_trains_on_the_empty_prompts_embedding(dsplit: Dsplit, tmp_path: Path) -> None:
    """The text encoder is gone by then; what is used is what it makes of ""."""
    path, model = tiny.dataset(tmp_path / "data", 3), tiny.qwen_image(tmp_path / "model")
    out = tmp_path / "cache"
    assert dsplit(*cache_words(path, out, model=model)).result["encoded"]["encode_prompt"] == 4
    found = locate(ModelOptions(model=str(model)))
    parts = {name: load_component(found, name, torch.float32, "cpu") for name in ("text_encoder", "tokenizer")}
    unit = next(u for u in registry().family("qwen-image").units if u.name == "encode_prompt")
    expected = encode([unit], {"prompt": [""]}, parts)
    for name in ("text_encoder", "tokenizer", "vae"):
        shutil.rmtree(model / name)

    def losses(run: str, *more: str) -> list[float]:
        steps = ("--max-steps", "2", "--rank", "4", "--threads", "1", "--device", "cpu", "--json")
        words = ("train", "--model", model, "--from-cache", out, "--out", tmp_path / run, *steps, *more)
        assert dsplit(*words).result["steps"] == 2
        return [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]

    dropped, kept = losses("dropped", "--prompt-dropout", "1.0"), losses("kept")
    assert dropped != kept
    reader = Reader(CachedRows(out), {"prompt_embeds": 0, "prompt_mask": 0}, prompt_dropout=1.0)
    batch = reader.read([(0, 0), (1, 0), (2, 5)])
    for k in range(3):
        assert torch.equal(batch["prompt_embeds"][k], expected["prompt_embeds"][0])
        assert torch.equal(batch["prompt_mask"][k], expected["prompt_mask"][0])
    (shard,) = (out / "shards" / "encode_prompt").glob("*.safetensors")
    store, there = Store(out), set(load_file(shard))
    rows = read_manifest(manifest_path(out, "default")).rows
    needed = {key: value_of(store.get(key)) for row in rows for key in row.all_keys if key in there}
    shard.unlink()
    write_shard(shard.parent, "encode_prompt", needed)
    assert losses("other") == kept  # the empty prompt's values are gone, and nothing else needs them
    words = ("train", "--model", model, "--from-cache", out, "--out", tmp_path / "o", "--prompt-dropout", "0.1")
    refused = dsplit(*words)
    assert (refused.code, "needs the values of the empty prompt" in refused.err) == (1, True)
    assert "run `dsplit cache` again" in refused.err
    assert not (tmp_path / "o").exists()
    too_much = dsplit("train", "--model", model, "--from-cache", out, "--prompt-dropout", "1.5")
    assert (too_much.code, "--prompt-dropout 1.5: it is a share of visits, from 0 to 1" in too_much.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("header.csv", "image,prompt\n", "0 rows below the column names"),
        ("empty.csv", "", "the file holds nothing"),
        ("empty.jsonl", "", "the file holds nothing"),
        ("allbad.csv", "image,prompt\nno1.png,x\nno2.png,x\n", "2 of 2 rows have faults: 2 file not found"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--skip-bad",)])
def test_c07_nothing_usable_is_no_success(
    dsplit: Dsplit, tmp_path: Path, name: str, text: str, why: str, more: tuple[str, ...]
) -> None:
    path = metadata(tmp_path, text, name)
    done = dsplit(*cache_words(path, tmp_path / "cache"), *more)
    assert (done.code, f"error: 0 usable rows in '{path}' ({why})" in done.err) == (1, True)
    done = dsplit("train", "--model", MODEL, "--from-cache", tmp_path / "cache", "--out", tmp_path / "o")
    assert (done.code, f"error: no cache in {tmp_path / 'cache'}: does not exist" in done.err) == (1, True)


def test_c07_training_from_what_is_no_cache(dsplit: Dsplit, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tiny.dataset(tmp_path / "data", 1)
    before = names_below(tmp_path)
    for folder, why in (("nothing", "does not exist"), ("empty", "no entries"), ("data", "not a cache folder")):
        done = dsplit("train", "--model", MODEL, "--from-cache", tmp_path / folder, "--out", tmp_path / "o")
        assert (done.code, f"error: no cache in {tmp_path / folder}: {why}" in done.err) == (1, True)
    assert names_below(tmp_path) == before


def test_c08_a_limit_of_one_kib_per_file_then_none(
    dsplit: Dsplit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = cache_words(tiny.dataset(tmp_path / "data", 3), tmp_path / "cache")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        assert main(words) == 1

    assert child(limited) == 0
    said = capfd.readouterr().err
    assert "cannot write it: File too large" in said
    assert f"error: {tmp_path / 'cache'}" in said
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    done = dsplit(*words)
    assert (done.code, done.result["rows"]) == (0, 3)
    train = ("train", "--model", MODEL, "--from-cache", tmp_path / "cache", "--out", tmp_path / "o", "--max-steps", 1)
    assert dsplit(*train).code == 0
