"""`dsplit tasks`: what it says of each family and task."""

from __future__ import annotations

import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dsplit.cli import main
from dsplit.models import registry as registry_module
from tests import tiny


def result(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["tasks", "--json", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def qwen_image(found: dict) -> dict:
    return next(f["tasks"] for f in found["families"] if f["name"] == "qwen-image")


def test_qwen_image_supervised(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys)
    assert found["broken"] == []
    assert qwen_image(found)["sft"] == {
        "verified": True,
        "stage1": ["load_image", "encode_image", "encode_prompt"],
        "stage2": ["denoise"],
        "boundary": [
            {"name": "latents", "shape": [16, 1, 128, 128], "dtype": "bfloat16", "bytes": 2 * 16 * 128 * 128},
            {"name": "prompt_embeds", "shape": [100, 3584], "dtype": "bfloat16", "bytes": 2 * 100 * 3584},
            {"name": "prompt_mask", "shape": [100], "dtype": "bool", "bytes": 100},
        ],
        "components": {"stage1": ["vae", "text_encoder", "tokenizer"], "stage2": ["transformer"]},
        "offload": {"stage1": ["transformer"], "stage2": ["vae", "text_encoder"]},
    }


def test_the_columns_of_distillation_cross(capsys: pytest.CaptureFixture[str]) -> None:
    task = qwen_image(result(capsys, "--task", "direct_distill:train"))
    assert list(task) == ["direct_distill"]
    crossing = [b["name"] for b in task["direct_distill"]["boundary"]]
    assert crossing[:3] == ["latents", "prompt_embeds", "prompt_mask"]
    assert set(crossing[3:]) == {"seed", "rand_device", "num_inference_steps", "cfg_scale"}


def test_a_trained_text_encoder_makes_the_prompt_cross(capsys: pytest.CaptureFixture[str]) -> None:
    task = qwen_image(result(capsys, "--model", "qwen-image", "--task", "sft", "--trainable", "text_encoder"))["sft"]
    assert [(b["name"], b["bytes"]) for b in task["boundary"]] == [("latents", 524288), ("prompt", 0)]
    assert task["stage2"] == ["encode_prompt", "denoise"]
    assert task["components"]["stage1"] == ["vae"]


def test_a_folder_gives_the_shapes_of_its_own_weights(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((tiny.QWEN_IMAGE / "text_encoder" / "config.json").read_text())
    width = config["text_config"]["hidden_size"] if "text_config" in config else config["hidden_size"]
    channels = json.loads((tiny.QWEN_IMAGE / "vae" / "config.json").read_text())["z_dim"]
    boundary = qwen_image(result(capsys, "--model", str(tiny.QWEN_IMAGE)))["sft"]["boundary"]
    assert boundary[0]["shape"] == [channels, 1, 128, 128]
    assert boundary[1]["shape"] == [100, width]
    assert width != 3584


def test_a_repo_that_is_not_here_is_known_by_its_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = result(capsys, "--model", "Qwen/Qwen-Image")
    assert [f["name"] for f in found["families"]] == ["qwen-image"]


@pytest.mark.parametrize("words", [[], ["--model", "qwen-image"], ["--task", "sft", "--trainable", "text_encoder,vae"]])
def test_people_read_it_in_80_columns(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["tasks", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "qwen-image" in text
    assert "verified by tests" in text
    if words[:1] == ["--model"]:
        for part in ("load_image, encode_image, encode_prompt", "16x1x128x128", "bfloat16  524 kB", "1.24 MB"):
            assert part in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--task", "stf"], "unknown task 'stf'; known: sft"),
        (["--trainable", "unet", "--model", "qwen-image"], "no component 'unet'"),
    ],
)
def test_unknown_names_are_usage_errors(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["tasks", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_broken_plugin_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = EntryPoint("bad", "no_such_module_anywhere", "dsplit")
    real = registry_module.entry_points
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [*real(group=group), broken])
    registry_module.registry.cache_clear()
    try:
        found = result(capsys)
        assert main(["tasks"]) == 0
    finally:
        registry_module.registry.cache_clear()
    assert qwen_image(found)["sft"]["verified"] is True
    assert [b["name"] for b in found["broken"]] == ["bad (no_such_module_anywhere)"]
    assert "ModuleNotFoundError" in found["broken"][0]["reason"]
    assert "broken plugin bad (no_such_module_anywhere)" in capsys.readouterr().out.replace(os.linesep, "\n")
