"""A LoRA file of any format lands on the pipeline as diffusers' own loader would put it there, or is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsplit.errors import ModelError, TrainingError
from dsplit.recipe import ValidateOptions
from dsplit.validation.adapter import LoraFile
from dsplit.validation.pipeline import draw
from tests import tiny
from tests.validation.conftest import WriteLora

PROMPT, SIZE = "a large red circle on a blue background", (64, 64)


def picture(pipeline) -> np.ndarray:
    return np.asarray(draw(pipeline, PROMPT, SIZE, ValidateOptions(steps=2)))


def changed(path: Path, change) -> Path:
    """The file with `change(state)` applied, its metadata kept."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(change(load_file(path)), path.with_name("changed.safetensors"), metadata=metadata)
    return path.with_name("changed.safetensors")


@pytest.mark.parametrize(
    ("lora_format", "alpha"), [("diffusers", 4), ("diffusers", 7), ("comfyui", 7), ("diffsynth", 7)]
)
def test_every_format_gives_the_pictures_of_diffusers_own_loader(
    tmp_path: Path, pipeline, write_lora: WriteLora, lora_format: str, alpha: float
) -> None:
    theirs = QwenImagePipeline.from_pretrained(tiny.QWEN_IMAGE, dtype=torch.float32, local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    before = picture(theirs)
    assert np.array_equal(picture(pipeline), before)
    reference = write_lora(tmp_path / "reference.safetensors", "diffusers", alpha=alpha)
    theirs.load_lora_weights(tmp_path, weight_name=reference.name)

    lora = LoraFile.read(write_lora(tmp_path / "lora.safetensors", lora_format, alpha=alpha))
    lora.check(pipeline, ("transformer",))
    assert lora.attach(pipeline, 1.0) == 48  # 12 targets in 4 blocks
    after = picture(pipeline)
    assert np.array_equal(after, picture(theirs))
    assert np.abs(after.astype(int) - before).max() > 20


def test_scale_is_that_of_diffusers_and_zero_is_the_base(tmp_path: Path, pipeline, write_lora: WriteLora) -> None:
    before = picture(pipeline)
    path = write_lora(tmp_path / "lora.safetensors", rank=4, alpha=8)
    lora = LoraFile.read(path)
    lora.attach(pipeline, 0.0)
    assert np.array_equal(picture(pipeline), before)
    pipeline.unload_lora_weights()
    lora.attach(pipeline, 0.5)
    half = picture(pipeline)
    pipeline.unload_lora_weights()
    pipeline.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="theirs")
    pipeline.set_adapters(["theirs"], [0.5])
    assert np.array_equal(half, picture(pipeline))
    assert not np.array_equal(half, before)


def test_a_lora_of_the_text_encoder_works_too(tmp_path: Path, pipeline, write_lora: WriteLora) -> None:
    before = picture(pipeline)
    lora = LoraFile.read(write_lora(tmp_path / "lora.safetensors", alpha=40, part="text_encoder"))
    lora.check(pipeline, ("transformer",))
    assert lora.attach(pipeline, 1.0) == len(lora.state) // 2 > 0
    assert not np.array_equal(picture(pipeline), before)


def test_foreign_keys_are_refused_with_an_example_of_each_side(tmp_path: Path, pipeline) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({f"other.block.{k}.lora_{s}.weight": torch.zeros(4, 4) for k in range(3) for s in "AB"}, path)
    with pytest.raises(ModelError, match="0 of 6 keys fit") as error:
        LoraFile.read(path).check(pipeline, ("transformer",))
    assert "'other.block.0.lora_A.weight' (4, 4)" in str(error.value)
    assert "the model has 'transformer." in str(error.value)


def test_one_key_of_another_shape_is_enough_to_refuse(tmp_path: Path, pipeline, write_lora: WriteLora) -> None:
    key = "transformer.transformer_blocks.1.attn.to_q.lora_A.weight"

    def narrower(state: dict) -> dict:
        return {**state, key: state[key][:, :-8].contiguous()}

    path = changed(write_lora(tmp_path / "lora.safetensors"), narrower)
    with pytest.raises(ModelError, match="95 of 96 keys fit") as error:
        LoraFile.read(path).check(pipeline, ("transformer",))
    assert f"'{key}' (4, 120)" in str(error.value)
    assert "'transformer.transformer_blocks.1.attn.to_q' (128, 128)" in str(error.value)


def test_a_halved_rank_is_refused_with_both_ranks(tmp_path: Path, pipeline, write_lora: WriteLora) -> None:
    def halved(state: dict) -> dict:
        return {k: (v[:2] if "lora_A" in k else v[:, :2]).contiguous() for k, v in state.items()}

    path = changed(write_lora(tmp_path / "lora.safetensors"), halved)
    with pytest.raises(ModelError, match=r"ranks of '.+' differ: lora_A 2, lora_B 2, the file's own settings 4"):
        LoraFile.read(path).check(pipeline, ("transformer",))


def test_a_lost_half_of_a_pair_is_refused(tmp_path: Path, pipeline, write_lora: WriteLora) -> None:
    key = "transformer.transformer_blocks.1.attn.to_q.lora_{}.weight"

    def torn(state: dict) -> dict:
        return {k: v for k, v in state.items() if k != key.format("B")}

    path = changed(write_lora(tmp_path / "lora.safetensors"), torn)
    with pytest.raises(ModelError, match=r"to_q\.lora_A\.weight' has no lora_B"):
        LoraFile.read(path).check(pipeline, ("transformer",))


def test_a_file_without_a_lora_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(TrainingError, match="holds no LoRA"):
        LoraFile.read(tmp_path / "a.safetensors")
