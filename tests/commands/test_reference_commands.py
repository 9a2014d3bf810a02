"""The reference's two commands, with only the launcher, the model and the data paths changed, run to their end."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from dsplit.cli import main
from tests import tiny

ORIGINS = (
    "{m}:text_encoder/model*.safetensors,{m}:vae/diffusion_pytorch_model.safetensors,"
    "{m}:transformer/diffusion_pytorch_model*.safetensors"
)
TARGETS = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,"
    "img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1"
)
SHARED = f"""--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --lora_base_model "dit"
    --lora_target_modules "{TARGETS}" --lora_rank 32 --use_gradient_checkpointing --dataset_num_workers 8
    --find_unused_parameters"""
STAGE1 = f"""--dataset_base_path data/x --dataset_metadata_path data/x/metadata.csv --max_pixels 1048576
    --dataset_repeat 1 --model_id_with_origin_paths "{ORIGINS}"
    --offload_models "{{m}}:transformer/diffusion_pytorch_model*.safetensors"
    {SHARED} --output_path "./models/train/Qwen-Image-LoRA-splited-cache" --task "sft:data_process" """
STAGE2 = f"""--dataset_base_path "./models/train/Qwen-Image-LoRA-splited-cache" --max_pixels 1048576 --dataset_repeat 50
    --model_id_with_origin_paths "{ORIGINS}"
    --offload_models "{{m}}:text_encoder/model*.safetensors,{{m}}:vae/diffusion_pytorch_model.safetensors"
    {SHARED} --output_path "./models/train/Qwen-Image-LoRA-splited" --task "sft:train" """


def launch(command: str, words: str, model: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "dsplit", command]
    words = [*launcher, "--model", "qwen-image", *shlex.split(words.format(m=model))]
    return subprocess.run(words, env={**os.environ}, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_references_two_commands_run_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.dataset(tmp_path / "data" / "x", 1, sizes=[(32, 32)])
    model = tiny.qwen_image(tmp_path / "weights")
    first = launch("cache", STAGE1, model)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("ignores training options") == 1
    second = launch("train", STAGE2, model)
    assert second.returncode == 0, second.stderr
    out = tmp_path / "models" / "train" / "Qwen-Image-LoRA-splited"
    assert sorted(p.name for p in out.glob("*.safetensors")) == [f"epoch-{n}.safetensors" for n in range(5)]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5 * 50
    with safe_open(out / "epoch-4.safetensors", framework="np") as file:
        name = next(key for key in file.keys() if key.endswith("to_q.lora_A.weight"))  # noqa: SIM118
        assert file.get_tensor(name).shape[0] == 32


def test_cache_says_once_what_it_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.dataset(tmp_path / "x", 1, sizes=[(32, 32)])
    words = ["cache", "--model", str(tiny.QWEN_IMAGE), "--data", "x", "--learning_rate", "1e-4", "--rank", "4"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err.count("`dsplit cache` ignores training options: --lr, --rank") == 1
    assert captured.out.startswith("1 row in cache, ")
    assert "digest:" in captured.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train --model qwen-image --extra_inputs edit_image", "--extra-inputs: qwen-image does not read edit_image"),
        ("cache --model qwen-image --data x --extra_inputs image,y", "--extra-inputs: qwen-image does not read y"),
        ("cache --task sft:train", "use `dsplit train --from-cache --task sft`"),
        ("train --task sft:data_process", "use `dsplit cache --task sft`"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err
