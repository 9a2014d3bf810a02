"""Full fine-tuning: every weight, in fp32, saved as folders that diffusers loads, and exact when it goes on."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from dsplit.errors import TrainingError, UsageError
from tests import tiny
from tests.training.conftest import losses, make, metrics, model


def transformer(folder) -> dict[str, torch.Tensor]:
    return QwenImageTransformer2DModel.from_pretrained(folder, subfolder="transformer").state_dict()


def test_every_weight_is_trained_and_the_folder_loads(three, tmp_path):
    result = three.train(tmp_path / "o", rank=None, full=True, max_steps=3, lr=1e-3)
    assert result["checkpoints"] == [str(tmp_path / "o/epoch-0")]
    before = QwenImageTransformer2DModel.from_pretrained(tiny.QWEN_IMAGE, subfolder="transformer").state_dict()
    after = transformer(tmp_path / "o/epoch-0")
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name].float(), after[name])}
    last_text = "transformer_blocks.3.attn.to_add_out", "transformer_blocks.3.txt_mlp"  # no part in the loss
    assert {name for name in before if not name.startswith(last_text)} - moved == set()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_split_and_unsplit_are_equal_and_going_on_changes_no_bit(three, tmp_path):
    options = {"rank": None, "full": True, "lr": 1e-3, "optimizer": "muon", "save_steps": 2}
    three.train(tmp_path / "a", max_steps=4, **options)
    three.train(tmp_path / "b", split=False, max_steps=4, **options)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    three.train(tmp_path / "c", max_steps=2, **options)
    three.train(tmp_path / "c", max_steps=4, keep=1, resume="latest", **options)
    assert metrics(tmp_path / "c") == metrics(tmp_path / "a")
    assert not (tmp_path / "c/step-2").exists()
    a, c = transformer(tmp_path / "a/step-4"), transformer(tmp_path / "c/step-4")
    assert all(torch.equal(a[name], c[name]) for name in a)


def test_a_bf16_cache_trains_fp32_weights(tmp_path):
    made = make(tmp_path / "made", 2, model(dtype="bfloat16"))
    made.train(tmp_path / "o", rank=None, full=True, max_steps=2, lr=1e-6)
    after = transformer(tmp_path / "o/epoch-0")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    name = "transformer_blocks.0.attn.to_q.weight"
    rounded = after[name].to(torch.bfloat16).float()
    assert not torch.equal(rounded, after[name])  # steps this small would be lost in bf16


def test_options_of_a_lora_are_refused(three, tmp_path):
    with pytest.raises(UsageError, match="leave out --rank, --targets"):
        three.train(tmp_path / "o", full=True, targets="to_q")
    three.train(tmp_path / "o", rank=None, full=True, max_steps=1)
    with pytest.raises(TrainingError, match=r"holds an earlier run \(epoch-0, .*--overwrite"):
        three.train(tmp_path / "o", rank=None, full=True, max_steps=1)
    three.train(tmp_path / "o", max_steps=1, overwrite=True)
    assert not (tmp_path / "o/epoch-0").exists()
