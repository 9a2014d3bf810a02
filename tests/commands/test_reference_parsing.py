"""The reference's two commands, as its document writes them, become these options."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions
from tests.commands.parsing import resolved

ORIGINS = (
    "Qwen/Qwen-Image:text_encoder/model*.safetensors,Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors,"
    "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors"
)
TARGETS = ",".join(
    [
        "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out",
        "img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1",
    ]
)
REFERENCE = """--max_pixels 1048576 --model_id_with_origin_paths "{origins}" --learning_rate 1e-4 --num_epochs 5
    --remove_prefix_in_ckpt "pipe.dit." --lora_base_model "dit" --lora_target_modules "{targets}" --lora_rank 32
    --use_gradient_checkpointing --dataset_num_workers 8 --find_unused_parameters"""


def test_the_references_stage_one_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "--model qwen-image --dataset_base_path data/x --dataset_metadata_path data/x/metadata.csv --dataset_repeat 1 "
        f'{REFERENCE} --offload_models "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors" '
        '--output_path "./models/train/Qwen-Image-LoRA-splited-cache" --task "sft:data_process"'
    ).format(origins=ORIGINS, targets=TARGETS)
    model, data, cache = resolved("cache", *shlex.split(words))
    assert model == ModelOptions(
        model="qwen-image",
        task="sft",
        trainable="transformer",
        model_id_with_origin_paths=ORIGINS,
        offload_models="Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors",
    )
    assert data == DataOptions(data="data/x", metadata="data/x/metadata.csv", max_pixels=1048576)
    assert cache == CacheOptions(out="./models/train/Qwen-Image-LoRA-splited-cache", workers=8)


def test_the_references_stage_two_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        '--model qwen-image --dataset_base_path "./models/train/Qwen-Image-LoRA-splited-cache" --dataset_repeat 50 '
        f'{REFERENCE} --offload_models "Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors" '
        '--output_path "./models/train/Qwen-Image-LoRA-splited" --task "sft:train"'
    ).format(origins=ORIGINS, targets=TARGETS)
    model, data, train = resolved("train", *shlex.split(words))
    assert (model.task, model.trainable) == ("sft", "transformer")
    assert data == DataOptions()
    assert train == TrainOptions(
        from_cache="./models/train/Qwen-Image-LoRA-splited-cache",
        out="./models/train/Qwen-Image-LoRA-splited",
        rank=32,
        targets=TARGETS,
        lr=1e-4,
        repeat=50,
        epochs=5,
        gradient_checkpointing=True,
        workers=8,
    )
