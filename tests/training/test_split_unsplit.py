"""The promise: the same seed gives the same losses and weights, bit for bit, with the cache and without it."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsplit.cache.rows import CachedRows
from dsplit.training.batches import Reader
from tests import tiny
from tests.training.conftest import loras, losses, make, metrics, model, same


@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "gradient_accumulation_steps": 2, "repeat": 3}])
def test_sft_split_and_unsplit_are_equal(three, tmp_path, options):
    three.train(tmp_path / "split", max_steps=5, lr=1e-3, **options)
    three.train(tmp_path / "unsplit", split=False, max_steps=5, lr=1e-3, **options)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "unsplit")
    assert len(set(losses(tmp_path / "split"))) == 5
    split, unsplit = loras(tmp_path / "split"), loras(tmp_path / "unsplit")
    assert split.keys() == unsplit.keys()
    assert all(same(split[name], unsplit[name]) for name in split)


def test_direct_distill_split_and_unsplit_are_equal(distill, tmp_path):
    """Seeds, a row without, two step counts, guidance with negative prompts."""
    distill.train(tmp_path / "split", max_steps=8, lr=1e-3, batch_size=2)
    distill.train(tmp_path / "unsplit", split=False, max_steps=8, lr=1e-3, batch_size=2)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "unsplit")
    assert all(
        same(a, b)
        for a, b in zip(loras(tmp_path / "split").values(), loras(tmp_path / "unsplit").values(), strict=True)
    )


@pytest.mark.parametrize("trained", ["text_encoder", "transformer,text_encoder"])
def test_a_trained_text_encoder_moves_the_split_and_is_trained_both_ways(tmp_path, trained):
    made = make(tmp_path, 3, model(trainable=trained))
    made.train(tmp_path / "split", max_steps=3, lr=1e-3)
    made.train(tmp_path / "unsplit", split=False, max_steps=3, lr=1e-3)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "unsplit")
    lora = loras(tmp_path / "split")["epoch-0.safetensors"]
    assert same(lora, loras(tmp_path / "unsplit")["epoch-0.safetensors"])
    assert {k.partition(".")[0] for k in lora} == set(trained.split(","))
    text = [v for k, v in lora.items() if k.startswith("text_encoder.") and ".lora_B." in k]
    assert any(v.abs().max() > 0 for v in text)


def test_a_trained_text_encoder_reads_negative_prompts_too(tmp_path):
    made = make(
        tmp_path,
        2,
        model(task="direct_distill", trainable="text_encoder"),
        num_inference_steps=[2, 2],
        cfg_scale=[1, 3],
        negative_prompt=["", "blurry"],
    )
    made.train(tmp_path / "split", max_steps=2, lr=1e-3)
    made.train(tmp_path / "unsplit", split=False, max_steps=2, lr=1e-3)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "unsplit")


def test_a_reader_can_be_handed_to_a_process_that_is_spawned(three):
    reader = Reader(CachedRows(three.cache), {"prompt_embeds": 0, "prompt_mask": 0})
    batch, other = reader[[(0, 0), (2, 1)]], pickle.loads(pickle.dumps(reader))[[(0, 0), (2, 1)]]
    assert batch.values.keys() == other.values.keys() == {"latents", "prompt_embeds", "prompt_mask"}
    assert all(torch.equal(batch[k], other[k]) for k in batch.values)
    assert batch["latents"].shape == (2, 16, 1, 8, 8)


def test_workers_read_ahead_without_changing_a_bit(three, tmp_path):
    three.train(tmp_path / "none", max_steps=4, batch_size=2)
    three.train(tmp_path / "two", max_steps=4, batch_size=2, workers=2)
    assert metrics(tmp_path / "none") == metrics(tmp_path / "two")


def test_stage_2_needs_no_encoder_no_tokenizer_and_no_source(tmp_path):
    """All of them are deleted before training, and the losses stay what they were."""
    folder = tiny.qwen_image(tmp_path / "model")
    made = make(tmp_path, 2, model(model=str(folder)))
    made.train(tmp_path / "before", max_steps=2)
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        shutil.rmtree(folder / name)
    shutil.rmtree(tmp_path / "data")
    made.train(tmp_path / "after", max_steps=2)
    assert losses(tmp_path / "before") == losses(tmp_path / "after")


WATCHED = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import safetensors
inner = safetensors.safe_open
def watched(path, *args, **options):  # reads in Rust, which no audit hook sees
    opened.append(str(path))
    return inner(path, *args, **options)
safetensors.safe_open = watched
import safetensors.torch
safetensors.torch.safe_open = watched
from dsplit.cli import main
try:
    main()
finally:
    print(*(path for path in opened if path.endswith(".safetensors") and "demo/model" in path), sep="\\n")
"""


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stage_2_opens_no_weight_file_of_an_encoder(three, tmp_path, split):
    """Every file that the process opens is watched; unsplit, the same watch sees the encoders' files."""
    source = ["--from-cache", str(three.cache)] if split else ["--data", str(three.data.data)]
    args = ["train", "--model", str(tiny.QWEN_IMAGE), *source, "--out", str(tmp_path / "o"), "--max-steps", "1"]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *args, "--device", "cpu"], capture_output=True, text=True, timeout=100
    )
    opened = [Path(line) for line in done.stdout.splitlines() if "demo/model/" in line]
    parts = {path.parent.name for path in opened}
    assert parts == ({"transformer"} if split else {"transformer", "vae", "text_encoder"}), done.stderr


def test_bf16_base_has_fp32_lora_and_equal_losses(tmp_path):
    made = make(tmp_path, 2, model(dtype="bfloat16"))
    made.train(tmp_path / "split", max_steps=3, lr=1e-6)
    made.train(tmp_path / "unsplit", split=False, max_steps=3, lr=1e-6)
    assert losses(tmp_path / "split") == losses(tmp_path / "unsplit")
    lora = loras(tmp_path / "split")["epoch-1.safetensors"]
    assert {v.dtype for v in lora.values()} == {torch.float32}
    moved = [v.abs().max() for k, v in lora.items() if ".lora_B." in k and "attn.to_q" in k]
    assert moved
    assert all(0 < v < 1e-5 for v in moved)
