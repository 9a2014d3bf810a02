"""Runs of `dsplit train`: what users reported of other trainers (T01 to T07), and what a run leaves behind."""

import hashlib
import json
import math
from importlib.metadata import version

import pytest
import torch

from dsplit.commands.resolve import build
from dsplit.errors import TrainingError, UsageError
from dsplit.recipe import TrainOptions
from tests.training.conftest import loras, losses, make, metrics, model

UNUSED = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net")  # the last block's text side goes nowhere


def names(out):
    return sorted(p.name for p in out.iterdir())


def hashes(out):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*") if p.is_file()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_case_t01_rates_at_every_step(eight, tmp_path, accumulation):
    options = {"max_steps": 8, "lr": 1e-4, "gradient_accumulation_steps": accumulation}
    eight.train(tmp_path / "constant", lr_scheduler="constant", **options)
    assert [m["lr"] for m in metrics(tmp_path / "constant")] == [1e-4] * 8
    eight.train(tmp_path / "cosine", lr_scheduler="cosine", **options)
    expected = [5e-5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert [m["lr"] for m in metrics(tmp_path / "cosine")] == pytest.approx(expected, rel=1e-12)


def test_constant_with_a_warm_up_does_warm_up(three, tmp_path):
    three.train(tmp_path, max_steps=4, lr=1e-3, lr_warmup_steps=2)
    assert [m["lr"] for m in metrics(tmp_path)] == [0.0, 5e-4, 1e-3, 1e-3]


def test_case_t02_nothing_is_dropped(eight, tmp_path, capfd):
    result = eight.train(tmp_path / "o", batch_size=4, epochs=1)
    assert result["steps"] == 4
    lines = capfd.readouterr().err.splitlines()
    plan = next(k for k, line in enumerate(lines) if line.startswith("train: 8 rows in 3 buckets, 4 batches"))
    assert "4 steps" in lines[plan]
    assert sorted(line.strip() for line in lines[plan + 1 : plan + 4]) == [
        "64x64: 1 row, 1 batch",
        "64x96: 2 rows, 1 batch",
        "96x64: 5 rows, 2 batches",
    ]
    seen = [i for m in metrics(tmp_path / "o") for i in m["rows"]]
    assert len(seen) == len(set(seen)) == 8
    assert eight.train(tmp_path / "nine", batch_size=9)["steps"] == 3


def test_case_t03_checkpointing_keeps_gradients_and_losses(three, tmp_path):
    for name, checkpointing in (("plain", False), ("checkpointed", True)):
        three.train(tmp_path / name, max_steps=2, seed=1, gradient_checkpointing=checkpointing)
        lora = loras(tmp_path / name)["epoch-0.safetensors"]
        up = {k: v for k, v in lora.items() if ".lora_B." in k}
        assert len(up) == 48
        last = max(int(k.split("blocks.")[1].split(".")[0]) for k in up)
        idle = {k for k in up if any(f"blocks.{last}.{part}" in k for part in UNUSED)}
        assert {k for k, v in up.items() if v.abs().max() == 0} == idle
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "checkpointed"), abs=1e-6)
    assert len(losses(tmp_path / "plain")) == 2


def test_checkpointing_reaches_a_trained_text_encoder(three, tmp_path):
    made = make(tmp_path, 2, model(trainable="text_encoder"))
    made.train(tmp_path / "plain", max_steps=2)
    made.train(tmp_path / "checkpointed", max_steps=2, gradient_checkpointing=True)
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "checkpointed"), abs=1e-6)
    lora = loras(tmp_path / "checkpointed")["epoch-0.safetensors"]
    assert any(v.abs().max() > 0 for k, v in lora.items() if ".lora_B." in k)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("to_qq", [r"nothing matches 'to_qq' (nearest: to_q", "attn.to_k", "img_mlp.net.2"]),
        ("to_q,to_zzz", ["'to_zzz'", "attn.to_q"]),
        ("", ["--targets is empty"]),
        (" , ", ["--targets is empty"]),
    ],
)
def test_case_t04_wrong_targets_stop_before_the_data_is_read(three, tmp_path, monkeypatch, targets, said):
    def never(*args):
        raise AssertionError("the data was read")

    monkeypatch.setattr("dsplit.cache.rows.CachedRows.values", never)
    monkeypatch.setattr("dsplit.training.run.load_component", never)
    with pytest.raises(UsageError) as caught:
        three.train(tmp_path / "o", targets=targets)
    assert all(text in str(caught.value) for text in said), str(caught.value)
    assert not (tmp_path / "o").exists()


def test_case_t04_spaces_are_trimmed_and_modules_counted(three, tmp_path, capfd):
    three.train(tmp_path / "o", max_steps=1, targets=" to_q , to_k ")
    assert "LoRA: 8 modules of transformer; rank 4, alpha 4" in capfd.readouterr().err
    modules = {k.split(".lora_")[0].rpartition(".")[2] for k in loras(tmp_path / "o")["epoch-0.safetensors"]}
    assert modules == {"to_q", "to_k"}


def test_case_t05_a_diverging_run_stops_and_keeps_finite_files(three, tmp_path):
    with pytest.raises(TrainingError) as caught:
        three.train(tmp_path / "o", max_steps=6, save_steps=1, lr=1e30)
    done = len(metrics(tmp_path / "o"))
    assert done < 6
    message = str(caught.value)
    assert message.startswith(f"step {done + 1}: the loss is not finite (NaN/Inf) on ")
    assert "metadata.csv:" in message
    files = loras(tmp_path / "o")
    assert len(files) == done
    assert all(torch.isfinite(v).all() for lora in files.values() for v in lora.values())


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": 1e39}, {"alpha": 0.0}, {"alpha": math.nan}])
def test_rates_and_alphas_that_cannot_be_are_refused(three, tmp_path, options):
    (name,) = options
    with pytest.raises(UsageError, match=f"--{name} .* must be above 0"):
        three.train(tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()


def test_checkpointing_of_a_class_without_it_is_refused(three, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusers.QwenImageTransformer2DModel._supports_gradient_checkpointing", False)
    with pytest.raises(UsageError, match="--gradient-checkpointing: transformer does not support it"):
        three.train(tmp_path / "o", gradient_checkpointing=True)


def test_case_t07_save_interval_and_last_step(three, tmp_path):
    three.train(tmp_path / "five", max_steps=5, save_steps=2)
    assert sorted(loras(tmp_path / "five")) == ["step-2.safetensors", "step-4.safetensors", "step-5.safetensors"]
    three.train(tmp_path / "four", max_steps=4, save_steps=2)
    assert sorted(loras(tmp_path / "four")) == ["step-2.safetensors", "step-4.safetensors"]


def test_epochs_are_saved_from_0_and_the_running_one_last(three, tmp_path):
    result = three.train(tmp_path / "two", epochs=2, repeat=2)
    assert (result["steps"], result["epochs"], result["rows"]) == (12, 2, 3)
    assert sorted(loras(tmp_path / "two")) == ["epoch-0.safetensors", "epoch-1.safetensors"]
    result = three.train(tmp_path / "five", epochs=9, max_steps=5)
    assert (result["steps"], result["epochs"]) == (5, 2)
    assert sorted(loras(tmp_path / "five")) == ["epoch-0.safetensors", "epoch-1.safetensors"]
    assert [m["epoch"] for m in metrics(tmp_path / "five")] == [0, 0, 0, 1, 1]


def test_case_t07_a_run_is_replaced_only_when_asked(three, tmp_path, monkeypatch):
    out = tmp_path / "o"
    three.train(out, max_steps=3, save_steps=2)
    (out / "notes.txt").write_text("mine")
    (out / "other.safetensors").write_bytes(b"mine too")
    before = hashes(out)
    with monkeypatch.context() as patch:
        patch.setattr("dsplit.training.run.cached_job", None)  # refused before anything is looked at
        with pytest.raises(TrainingError, match=r"holds an earlier run \(.*step-2.safetensors.*--overwrite"):
            three.train(out, max_steps=1)
    assert hashes(out) == before
    with pytest.raises(UsageError, match="to_qq"):
        three.train(out, max_steps=1, overwrite=True, targets="to_qq")
    assert hashes(out) == before  # a run that cannot start removes nothing
    three.train(out, max_steps=1, overwrite=True)
    assert names(out) == [
        "epoch-0.safetensors", "loss.png", "metrics.jsonl", "notes.txt", "other.safetensors", "recipe.json", "state",
    ]  # fmt: skip
    assert (out / "other.safetensors").read_bytes() == b"mine too"


def test_a_run_that_died_before_its_first_step_does_not_block_the_next(three, tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    assert three.train(tmp_path, max_steps=1)["steps"] == 1
    with pytest.raises(TrainingError, match="holds an earlier run"):
        three.train(tmp_path, max_steps=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [("save_steps", 0), ("save_steps", -1), ("epochs", 0), ("max_steps", 0), ("repeat", 0), ("batch_size", 0),
     ("rank", 0)],
)  # fmt: skip
def test_case_t07_numbers_below_one_are_usage_errors_that_name_the_option(option, value):
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')}.*{value}"):
        build(TrainOptions, {option: value})


def test_the_recipe_holds_all_settings_resolved(three, tmp_path):
    three.train(tmp_path / "o", max_steps=1, rank=None, lr=None)
    recipe = json.loads((tmp_path / "o" / "recipe.json").read_text())
    assert recipe["train"]["rank"] == 32
    assert recipe["train"]["alpha"] == 32
    assert recipe["train"]["lr"] == 1e-4
    assert recipe["train"]["seed"] == 0
    assert recipe["resolved"]["family"] == "qwen-image"
    assert recipe["resolved"]["dtype"] == "float32"
    assert recipe["resolved"]["threads"] == 1
    assert recipe["versions"]["torch"] == version("torch")
    assert set(recipe["versions"]) >= {"torch", "diffusers", "peft", "dsplit"}
    assert recipe["cache"]["data"]["data"] == three.data.data


def test_what_a_run_gives_back(three, tmp_path):
    out = tmp_path / "o"
    result = three.train(out, max_steps=3)
    written = metrics(out)
    assert list(written[0]) == ["step", "epoch", "loss", "lr", "grad_norm", "rows"]
    assert [m["step"] for m in written] == [1, 2, 3]
    assert result["first_loss"] == written[0]["loss"]
    assert result["last_loss"] == written[-1]["loss"]
    assert result["checkpoints"] == [str(out / "epoch-0.safetensors")]
    assert result["metrics"] == str(out / "metrics.jsonl")
    assert result["seconds"] > 0
    assert json.loads(json.dumps(result)) == result
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list(out.glob(".*"))


def test_a_batch_and_its_rows_accumulated_give_the_same_weights(tmp_path):
    """Captions of different length are padded; 1e-5 is for the padded batch."""
    made = make(tmp_path, 4, prompts=["a", "a large red circle", "a blue star on green", "a cross"])
    made.train(tmp_path / "batch", epochs=1, batch_size=4, lr=1e-3)
    made.train(tmp_path / "rows", epochs=1, gradient_accumulation_steps=4, lr=1e-3)
    assert losses(tmp_path / "batch") == pytest.approx(losses(tmp_path / "rows"), abs=1e-5)
    assert metrics(tmp_path / "batch")[0]["rows"] == metrics(tmp_path / "rows")[0]["rows"]


def test_gradients_of_uneven_batches_weigh_every_row_alike(tmp_path):
    """Five rows: a batch of 3 and one of 2, accumulated, give the gradient of the five rows' mean."""
    made = make(tmp_path, 5, prompts=["a red star"])
    sgd = {}
    for name, options in {
        "uneven": {"batch_size": 3, "gradient_accumulation_steps": 2},
        "one": {"batch_size": 5},
    }.items():
        made.train(tmp_path / name, epochs=1, lr=1.0, optimizer="torch.optim.SGD", weight_decay=0.0, **options)
        sgd[name] = loras(tmp_path / name)["epoch-0.safetensors"]
    moved = [k for k in sgd["one"] if ".lora_B." in k and sgd["one"][k].abs().max() > 0]
    assert len(moved) > 30
    for key in moved:
        assert torch.allclose(sgd["uneven"][key], sgd["one"][key], atol=1e-5)
