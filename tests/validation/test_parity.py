"""--parity: zero where split and unsplit agree, and a difference where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsplit.cache.run import run_cache
from dsplit.cli import main
from dsplit.errors import CacheError
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, ValidateOptions
from dsplit.validation.parity import check_parity, choices, difference
from dsplit.validation.run import run_validate
from tests import tiny

MODEL = ModelOptions(model=str(tiny.QWEN_IMAGE), device="cpu", threads=1)
PARITY = ValidateOptions(parity=True, parity_rows=3)
ZERO = {"rows": 3, "max_value": 0.0, "max_loss": 0.0, "max_gradient": 0.0, "tolerance": 0.0, "ok": True}


def data(folder: Path, **columns) -> DataOptions:
    tiny.dataset(folder, 4, sizes=((64, 64), (96, 64)), **columns)
    return DataOptions(data=str(folder))


def with_cache(options: ModelOptions, rows: DataOptions, folder: Path) -> Path:
    run_cache(options, rows, CacheOptions(out=str(folder), workers=0))
    return folder


def test_sft_is_equal_bit_for_bit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check_parity(MODEL, data(tmp_path / "data"), PARITY) == ZERO
    told = capfd.readouterr().err
    for value in ("latents", "prompt_embeds", "prompt_mask"):
        assert f"parity: {value}: largest difference 0" in told


def test_direct_distill_is_equal_bit_for_bit_with_and_without_guidance(tmp_path: Path) -> None:
    rows = data(
        tmp_path / "data",
        seed=[1, 2, 3, 4],
        rand_device=["cpu"] * 4,
        num_inference_steps=[2, 2, 3, 2],
        cfg_scale=[1, 4, 1, 1],
    )
    model = ModelOptions(model=str(tiny.QWEN_IMAGE), device="cpu", threads=1, task="direct_distill")
    assert check_parity(model, rows, PARITY) == ZERO


def test_a_given_cache_is_compared_and_left_as_it_is(tmp_path: Path) -> None:
    rows = data(tmp_path / "data")
    cache = with_cache(MODEL, rows, tmp_path / "cache")
    before = {p: p.read_bytes() for p in cache.rglob("*") if p.is_file()}
    given = ValidateOptions(parity=True, parity_rows=9, from_cache=str(cache))
    assert check_parity(MODEL, rows, given) == {**ZERO, "rows": 4}
    assert {p: p.read_bytes() for p in cache.rglob("*") if p.is_file()} == before


def test_a_given_cache_says_what_was_not_stated(tmp_path: Path) -> None:
    rows = data(tmp_path / "data", seed=[1] * 4, rand_device=["cpu"] * 4, num_inference_steps=[2] * 4)
    made_for = replace(MODEL, task="direct_distill", trainable="text_encoder", dtype="bfloat16")
    cache = with_cache(made_for, rows, tmp_path / "cache")
    given = ValidateOptions(parity=True, parity_rows=9, from_cache=str(cache))
    assert check_parity(MODEL, rows, given) == {**ZERO, "rows": 4}


def test_a_cache_of_other_weights_is_found_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = data(tmp_path / "data")
    other = tiny.qwen_image(tmp_path / "other")
    weights = other / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    key = "encoder.conv_in.weight"
    save_file({**state, key: state[key] * 1.01}, weights, metadata={"format": "pt"})
    cache = with_cache(ModelOptions(model=str(other), device="cpu", threads=1), rows, tmp_path / "cache")

    words = ["--model", str(tiny.QWEN_IMAGE), "--data", str(tmp_path / "data"), "--from-cache", str(cache)]
    words += ["--parity", "--out", str(tmp_path / "out"), "--threads", "1", "--json"]
    capfd.readouterr()
    assert main(["validate", *words]) == 1
    result = json.loads(capfd.readouterr().out)
    assert result["parity"]["ok"] is False
    assert min(result["parity"][name] for name in ("max_value", "max_loss", "max_gradient")) > 0
    assert result["parity"]["rows"] == 4
    assert (result["images"], result["grid"]) == ([], None)  # there is no LoRA here
    assert "different" in Path(result["report"]).read_text()
    assert main(["validate", *words, "--tolerance", "1000"]) == 0


def test_a_row_that_the_cache_lacks_is_named(tmp_path: Path) -> None:
    rows = data(tmp_path / "data")
    cache = with_cache(MODEL, rows, tmp_path / "cache")
    metadata = tmp_path / "data" / "metadata.csv"
    metadata.write_text(metadata.read_text().replace("number 1", "number one"))
    given = ValidateOptions(parity=True, parity_rows=3, from_cache=str(cache))
    with pytest.raises(CacheError, match=r"1 of 3 rows are not in the cache, e\.g\. .*metadata\.csv:3"):
        check_parity(MODEL, rows, given)


def test_a_cache_of_another_size_is_named(tmp_path: Path) -> None:
    rows = data(tmp_path / "data")
    cache = with_cache(MODEL, DataOptions(data=rows.data, resolution="32x32"), tmp_path / "cache")
    given = ValidateOptions(parity=True, from_cache=str(cache))
    with pytest.raises(CacheError, match=r"'latents' is \(16, 1, 4, 4\) in the cache, \(16, 1, 8, 8\) now"):
        check_parity(MODEL, rows, given)


def test_parity_without_a_lora_draws_nothing(tmp_path: Path) -> None:
    options = ValidateOptions(parity=True, parity_rows=1, out=str(tmp_path / "out"))
    result = run_validate(MODEL, data(tmp_path / "data"), options, tmp_path / "runs")
    assert result == {
        "images": [],
        "grid": None,
        "report": str(tmp_path / "out/report.html"),
        "parity": {**ZERO, "rows": 1},
    }
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["recipe.json", "report.html"]


def test_every_variant_is_compared_and_axes_are_combined_only_where_a_value_needs_it() -> None:
    assert choices({}, [["prompt"]]) == [{}]
    three = [{"prompt": 0, "view": 0}, {"prompt": 1, "view": 1}, {"prompt": 2, "view": 0}]
    assert choices({"prompt": 3, "view": 2}, [["view"], ["prompt"]]) == three
    both = choices({"prompt": 3, "view": 2}, [["view"], ["view", "prompt"]])
    assert both == [{"prompt": p, "view": v} for p in range(3) for v in range(2)]
    assert choices({"prompt": 2}, [["view", "prompt"]]) == [{"prompt": 0}, {"prompt": 1}]


def test_the_sampled_posterior_is_equal_bit_for_bit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sampled = replace(MODEL, posterior="sample")
    rows = data(tmp_path / "data")
    assert check_parity(sampled, rows, PARITY) == ZERO
    assert "parity: latents_logvar: largest difference 0" in capfd.readouterr().err
    cache = with_cache(sampled, rows, tmp_path / "cache")
    given = ValidateOptions(parity=True, parity_rows=3, from_cache=str(cache))
    assert check_parity(MODEL, rows, given) == ZERO  # which posterior it is, the cache says


def test_a_difference_counts_nan_as_infinite_and_bools_as_one() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert difference(nan, torch.ones(2)) == torch.inf
    assert difference(nan, nan) == torch.inf
    assert difference(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5])) == 0.5
