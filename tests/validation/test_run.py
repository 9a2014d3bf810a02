"""`dsplit validate`: what it draws, where everything lands, and what it refuses before drawing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsplit.cli import main
from dsplit.errors import CacheError, UsageError
from dsplit.recipe import DataOptions, ModelOptions, ValidateOptions
from dsplit.validation.run import find_lora, run_validate, slug
from tests import tiny
from tests.validation.conftest import WriteLora

MODEL = ModelOptions(model=str(tiny.QWEN_IMAGE), device="cpu", threads=1)
PROMPTS = ["a large red circle on a blue background", "a small green star on a pink background"]


def run(lora: Path | None, out: Path, folder: Path = Path("runs/lora"), **options) -> dict:
    options = {"steps": 2, "size": "64x64", "prompt": PROMPTS, **options}
    return run_validate(
        MODEL, DataOptions(), ValidateOptions(lora=str(lora) if lora else None, out=str(out), **options), folder
    )


def pixels(path: str) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


@pytest.fixture
def lora(tmp_path: Path, write_lora: WriteLora) -> Path:
    (tmp_path / "run").mkdir()
    return write_lora(tmp_path / "run" / "epoch-0.safetensors")


def test_every_prompt_is_drawn_both_ways_at_the_same_seed(tmp_path: Path, lora: Path) -> None:
    result = run(lora, tmp_path / "out", seed=5)
    assert [(i["prompt"], i["seed"]) for i in result["images"]] == [(p, 5) for p in PROMPTS]
    assert result["parity"] is None
    for image in result["images"]:
        base, with_lora = pixels(image["base"]), pixels(image["lora"])
        assert base.shape == with_lora.shape == (64, 64, 3)
        assert np.abs(base - with_lora).max() > 20
    same = run(lora, tmp_path / "again", seed=5, lora_scale=0.0)
    for first, second in zip(result["images"], same["images"], strict=True):
        assert np.array_equal(pixels(first["base"]), pixels(second["base"]))
        assert np.array_equal(pixels(second["base"]), pixels(second["lora"]))
    other = run(lora, tmp_path / "other", seed=6, prompt=PROMPTS[:1])
    assert not np.array_equal(pixels(other["images"][0]["base"]), pixels(result["images"][0]["base"]))


def test_all_files_are_below_out_and_the_working_folder_stays_empty(
    tmp_path: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd").chmod(0o555)
    monkeypatch.chdir(tmp_path / "cwd")
    before = set(tmp_path.rglob("*"))
    result = run(lora, Path("../res/deep"), prompt=[])
    assert not list((tmp_path / "cwd").iterdir())
    new = {str(p.relative_to(tmp_path)) for p in set(tmp_path.rglob("*")) - before if p.is_file()}
    assert new == {
        "res/deep/grid.png",
        "res/deep/report.html",
        "res/deep/recipe.json",
        "res/deep/images/01-a-dog-base.png",
        "res/deep/images/01-a-dog-lora.png",
    }
    assert result["images"][0]["prompt"] == "a dog"
    assert result["grid"] == os.path.join("../res/deep", "grid.png")
    recipe = json.loads((tmp_path / "res/deep/recipe.json").read_text())
    assert recipe["command"] == "validate"
    assert recipe["validate"]["steps"] == 2
    assert recipe["model"]["model"] == str(tiny.QWEN_IMAGE)


def test_results_lie_beside_the_lora_and_the_report_shows_its_loss_curve(tmp_path: Path, lora: Path) -> None:
    Image.new("RGB", (30, 20), "red").save(lora.parent / "loss.png")
    options = ValidateOptions(steps=2, size="64x64")
    result = run_validate(MODEL, DataOptions(), options, lora.parent)  # names no LoRA: the newest of the run
    assert result["report"] == str(lora.parent / "validate" / "report.html")
    report = Path(result["report"]).read_text()
    assert "Training loss" in report
    assert "epoch-0.safetensors" in report
    assert report.count("data:image/png;base64,") == 3


def test_guidance_uses_the_negative_prompt(tmp_path: Path, lora: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = run(lora, tmp_path / "a", prompt=PROMPTS[:1])
    guided = run(lora, tmp_path / "b", prompt=PROMPTS[:1], cfg=4.0)
    assert not np.array_equal(pixels(plain["images"][0]["base"]), pixels(guided["images"][0]["base"]))
    assert "96 of 96 keys loaded, 0 unmatched, 48 modules patched" in capfd.readouterr().err


def test_the_newest_lora_is_found(tmp_path: Path) -> None:
    for k, name in enumerate(["epoch-1", "epoch-10", "epoch-2", ".half"]):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(b"")
        os.utime(path, (1000 + k, 1000 + k))
    assert find_lora(None, tmp_path, needed=True) == tmp_path / "epoch-2.safetensors"
    assert find_lora(str(tmp_path), tmp_path / "other", needed=True) == tmp_path / "epoch-2.safetensors"
    assert find_lora(str(tmp_path / "epoch-1.safetensors"), tmp_path, needed=True) == tmp_path / "epoch-1.safetensors"


def test_no_lora_is_an_error_unless_none_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no LoRA file \(\*\.safetensors\) in it; name one with --lora"):
        find_lora(None, tmp_path, needed=True)
    assert find_lora(None, tmp_path, needed=False) is None
    with pytest.raises(UsageError, match="nope: no such file or folder"):
        find_lora(str(tmp_path / "nope"), tmp_path, needed=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1}, "--steps 1: .*use 2 or more"),
        ({"size": "64"}, "--size 64: write WxH"),
        ({"size": "65x64"}, "--size 65x64: Qwen-Image draws multiples of 16 only"),
        ({"size": "0x64"}, "--size 0x64: Qwen-Image draws multiples of 16 only"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, lora: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(lora, tmp_path / "out", **options)
    assert not list(tmp_path.rglob("*.png"))


def test_an_out_folder_that_is_a_file_is_refused(tmp_path: Path, lora: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(CacheError, match=r"/f: is a file, not a folder; give another folder with --out"):
        run(lora, tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"


def test_a_foreign_lora_ends_the_command_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({f"other.block.0.lora_{s}.weight": torch.zeros(4, 4) for s in "AB"}, tmp_path / "foreign.safetensors")
    words = [
        "--model",
        str(tiny.QWEN_IMAGE),
        "--lora",
        str(tmp_path / "foreign.safetensors"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(["validate", *words]) == 1
    captured = capfd.readouterr()
    assert "0 of 2 keys fit" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not list(tmp_path.rglob("*.png"))


def test_a_slug_is_a_safe_part_of_a_file_name() -> None:
    assert slug("A Red/../Cat: «é» 7") == "a-red-cat-7"
    assert slug("猫") == "prompt"
    assert len(slug("word " * 40)) <= 48
