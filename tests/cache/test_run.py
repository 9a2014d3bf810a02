"""Stage 1 on the tiny Qwen-Image: only what changed is encoded, and nothing wrong is ever kept."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsplit.cache import stage1
from dsplit.cache.encode import encode, inputs
from dsplit.cache.rows import CachedRows
from dsplit.dataset import read_dataset
from dsplit.errors import CacheError, UsageError
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.recipe import DataOptions, ModelOptions
from tests import tiny
from tests.cache.runs import cache, counts, shards


def test_equal_captions_once_and_the_empty_one_always(made: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, result = made
    assert counts(result) == {"encode_image": (4, 0), "encode_prompt": (3, 0)}
    assert result["rows"] == 4
    assert [p.parent.name for p in shards(out)] == ["encode_image", "encode_prompt"]


def test_the_empty_prompt_is_cached_unasked(tmp_path: Path) -> None:
    result = cache(tmp_path / "cache", tiny.dataset(tmp_path / "data", 1))
    assert result["encoded"] == {"encode_image": 1, "encode_prompt": 2}
    header = CachedRows(tmp_path / "cache").header
    assert set(header["empty_prompt"]) == {"prompt_embeds", "prompt_mask"}


def test_cached_values_are_those_of_the_units(made: tuple[Path, Path, dict[str, Any]]) -> None:
    metadata, out, _ = made
    rows = CachedRows(out)
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    components = {n: load_component(model, n, torch.float32, "cpu") for n in ("vae", "text_encoder", "tokenizer")}
    split = model.family.split(sft())
    dataset = read_dataset(DataOptions(metadata=str(metadata)), model.family.columns_for(sft()), 16)
    assert list(rows.ids) == [row.id for row in dataset.rows]
    for i, row in enumerate(dataset.rows):
        plain = encode(split.stage1, inputs(row), components)
        cached = rows.values(i)
        assert set(cached) == {"latents", "prompt_embeds", "prompt_mask"}
        for name, value in cached.items():
            assert torch.equal(value, plain[name][0]), name
        assert rows.group(i) == row.size == ((64, 64), (96, 64))[i % 2]
        assert cached["latents"].shape == (16, 1, row.size[1] // 8, row.size[0] // 8)
        assert rows.place(i).endswith(f"metadata.csv:{i + 2}")


def sft() -> Any:
    from dsplit.models.registry import registry

    return registry().task("sft")


def test_nothing_changed_nothing_encoded_nothing_loaded(
    copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, out = copy
    monkeypatch.setattr(stage1, "load_component", None)
    before = [p.stat().st_mtime_ns for p in shards(out)]
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (0, 3)}
    assert [p.stat().st_mtime_ns for p in shards(out)] == before


def test_an_edited_caption_costs_one_text(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    metadata.write_text(metadata.read_text().replace("a blue square", "a green square"))
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (1, 2)}


def test_a_repainted_picture_with_its_mtime_set_back_costs_one_latent(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, metadata)
    first = CachedRows(out).values(0)["latents"]
    picture = metadata.parent / "img00.png"
    times = picture.stat()
    tiny.picture(picture, (64, 64), seed=99)
    os.utime(picture, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert counts(cache(out, metadata)) == {"encode_image": (1, 3), "encode_prompt": (0, 3)}
    assert not torch.equal(CachedRows(out).values(0)["latents"], first)
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (0, 3)}


def test_another_size_costs_no_text(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    assert counts(cache(out, metadata, resolution="32x32")) == {"encode_image": (4, 0), "encode_prompt": (0, 3)}
    rows = CachedRows(out)
    assert {rows.group(i) for i in range(4)} == {(32, 32)}
    assert rows.header["data"]["resolution"] == "32x32"
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (0, 3)}  # both sizes are kept


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("vae/config.json", {"encode_image": (4, 0), "encode_prompt": (0, 3)}),
        ("tokenizer/tokenizer_config.json", {"encode_image": (0, 4), "encode_prompt": (3, 0)}),
    ],
)
def test_a_changed_component_is_found(copy: tuple[Path, Path], tmp_path: Path, file: str, expected: dict) -> None:
    metadata, out = copy
    model = tiny.qwen_image(tmp_path / "model")
    assert cache(out, metadata, model)["encoded"] == {"encode_image": 0, "encode_prompt": 0}  # where it lies is nothing
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "dsplit_test": 1}))
    assert counts(cache(out, metadata, model)) == expected


def test_the_digest_does_not_depend_on_how_it_was_made(
    made: tuple[Path, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, _, result = made
    monkeypatch.setattr("dsplit.cache.store.HAND_OVER", 1)
    lines = metadata.read_text().splitlines(keepends=True)
    turned = metadata.with_name("turned.csv")
    turned.write_text("".join([lines[0], *reversed(lines[1:])]))
    part = metadata.with_name("part.csv")
    part.write_text("".join([lines[0], *lines[2:4]]))
    out = tmp_path / "cache"
    assert cache(out, part)["digest"] != result["digest"]
    assert cache(out, turned, workers=2)["digest"] == result["digest"]


def test_each_call_says_which_rows_it_is_about(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(lines[:2]))
    cache(out, metadata)
    assert len(CachedRows(out)) == 1
    metadata.write_text("".join(lines))
    cache(out, metadata, name="all")
    assert (len(CachedRows(out)), len(CachedRows(out, "all"))) == (1, 4)


def test_only_one_component_group_is_in_memory(
    made: tuple[Path, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[tuple[str, weakref.ref]] = []
    seen = []

    def load(model: Any, name: str, *rest: Any) -> Any:
        seen.append((name, [n for n, ref in alive if ref() is not None]))
        loaded = load_component(model, name, *rest)
        alive.append((name, weakref.ref(loaded)))
        return loaded

    monkeypatch.setattr(stage1, "load_component", load)
    cache(tmp_path / "cache", made[0])
    assert seen == [("text_encoder", []), ("tokenizer", ["text_encoder"]), ("vae", [])]
    assert [n for n, ref in alive if ref() is not None] == []


def test_negative_prompts_only_where_they_are_needed(tmp_path: Path) -> None:
    columns = {"num_inference_steps": [2, 2, 2], "cfg_scale": [1.0, 4.0, 1.0], "negative_prompt": ["x", "a dog", "y"]}
    metadata = tiny.dataset(tmp_path / "data", 3, prompts=["a dog", "a cat", "a cow"], **columns)
    result = cache(tmp_path / "cache", metadata, task="direct_distill")
    assert result["encoded"] == {"encode_image": 3, "encode_prompt": 4}  # a dog, a cat, a cow and ""; x, y are not
    rows = CachedRows(tmp_path / "cache")
    plain, guided = rows.values(0), rows.values(1)
    assert "negative_prompt_embeds" not in plain
    assert torch.equal(guided["negative_prompt_embeds"], plain["prompt_embeds"])
    assert rows.columns(1)["cfg_scale"] == 4.0
    assert rows.columns(1)["num_inference_steps"] == 2
    assert counts(cache(tmp_path / "cache", metadata, task="direct_distill"))["encode_prompt"] == (0, 4)
    assert counts(cache(tmp_path / "cache", metadata, task="sft"))["encode_prompt"] == (0, 4)  # one cache for all tasks


def test_a_trained_text_encoder_crosses_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(stage1, "load_component", lambda m, n, *r: loaded.append(n) or load_component(m, n, *r))
    metadata = tiny.dataset(tmp_path / "data", 1)
    result = cache(tmp_path / "cache", metadata, trainable="transformer,text_encoder")
    assert result["encoded"] == {"encode_image": 1}
    assert loaded == ["vae"]
    assert CachedRows(tmp_path / "cache").columns(0) == {"prompt": "a large red circle number 0"}


def test_what_has_no_weights_cannot_be_trained(tmp_path: Path) -> None:
    metadata = tiny.dataset(tmp_path / "data", 1)
    with pytest.raises(UsageError, match="--trainable tokenizer: it has no weights to train"):
        cache(tmp_path / "cache", metadata, trainable="transformer,tokenizer")
    assert not (tmp_path / "cache" / "manifests").exists()


def test_no_file_of_a_cache_is_a_pickle(made: tuple[Path, Path, dict[str, Any]]) -> None:
    files = [p for p in made[1].rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".safetensors", ".jsonl", ".json"}
    for path in (p for p in files if p.suffix == ".safetensors"):
        assert load_file(path)
    source = Path(stage1.__file__).parent
    for module in source.glob("*.py"):
        assert "import pickle" not in module.read_text()
        assert "torch.load" not in module.read_text()


def test_out_that_cannot_be_a_cache_is_refused_before_all_else(tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "metadata.csv"
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"file: is a file, not a folder; give another folder with --out"):
        cache(tmp_path / "file", nowhere)
    with pytest.raises(CacheError, match=r"file/below: cannot write there: Not a directory"):
        cache(tmp_path / "file" / "below", nowhere)
    (tmp_path / "old" / "0").mkdir(parents=True)
    (tmp_path / "old" / "0" / "0.pth").touch()
    with pytest.raises(CacheError, match=r"run `dsplit cache` on the original data set"):
        cache(tmp_path / "old", nowhere)
    with pytest.raises(UsageError, match="--name"):
        cache(tmp_path / "new", nowhere, name="../x")


def cut(said: str) -> list[str]:
    return [line for line in said.splitlines() if "tokens" in line]


def test_long_captions_are_warned_of_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["short", "word " * 600, "word " * 100, "word " * 600]
    metadata = tiny.dataset(tmp_path / "data", 4, prompts=prompts)
    cache(tmp_path / "cache", metadata, dry_run=True)
    (warning,) = cut(capsys.readouterr().err)
    assert "prompt: only the first 512 tokens count" in warning
    assert [f"metadata.csv:{line} (" in warning for line in (2, 3, 4, 5)] == [False, True, False, True]
    for encoded, options in ((4, {}), (0, {}), (0, {"trainable": "transformer,text_encoder"})):
        result = cache(tmp_path / "cache", metadata, **options)
        assert result["encoded"].get("encode_prompt", 0) == encoded
        assert cut(capsys.readouterr().err) == [warning]


def test_captions_whose_values_are_short_are_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tiny.dataset(tmp_path / "data", 1, prompts=["x" * 500])  # perhaps cut, by its bytes alone
    cache(tmp_path / "cache", metadata)
    loaded = []
    monkeypatch.setattr("dsplit.models.captions.load_component", lambda *args: loaded.append(args))
    assert cache(tmp_path / "cache", metadata)["reused"]["encode_prompt"] == 2
    assert (loaded, cut(capsys.readouterr().err)) == ([], [])


def test_only_negative_prompts_that_are_read_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"num_inference_steps": [2, 2], "cfg_scale": [1.0, 4.0], "negative_prompt": ["word " * 600] * 2}
    metadata = tiny.dataset(tmp_path / "data", 2, prompts=["a dog", "a cat"], **columns)
    cache(tmp_path / "cache", metadata, task="direct_distill")
    (warning,) = cut(capsys.readouterr().err)
    assert "negative_prompt: only the first 512 tokens count" in warning
    assert [f"metadata.csv:{line} (" in warning for line in (2, 3)] == [False, True]


def test_the_plan_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = tiny.dataset(tmp_path / "data", 3, sizes=((64, 64), (64, 64), (96, 64)))
    result = cache(tmp_path / "cache", metadata)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "plan: 3 rows in 2 buckets (64x64: 2, 96x64: 1), on cpu in float32"
    assert second.startswith("to encode: encode_image 3 of 3 distinct, encode_prompt 4 of 4 distinct; about ")
    estimate = float(second.split("about ")[1].split(" MB")[0]) * 1e6
    assert abs(estimate - result["bytes"]) < 0.4 * result["bytes"]  # the tokens of captions are a guess
