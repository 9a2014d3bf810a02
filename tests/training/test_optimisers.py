"""Every optimiser trains, takes its arguments, and goes on exactly."""

from __future__ import annotations

import shutil

import pytest
import torch

from dsplit.errors import UsageError
from dsplit.training.muon import Muon
from dsplit.training.optimisers import Schedule, optimizer_class, parsed
from tests.training.conftest import loras, losses, metrics, same


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "prodigy", "torch.optim.SGD"])
def test_going_on_changes_no_bit(three, tmp_path, name):
    options = {"optimizer": name, "lr": 1e-3, "lr_scheduler": "linear", "max_steps": 4}
    three.train(tmp_path / "whole", **options)
    three.train(tmp_path / "p", **{**options, "keep": 9, "save_steps": 2})
    shutil.rmtree(tmp_path / "p/state/step-4")
    three.train(tmp_path / "p", **options, resume="latest")
    assert metrics(tmp_path / "p") == metrics(tmp_path / "whole")
    assert same(list(loras(tmp_path / "p").values())[-1], list(loras(tmp_path / "whole").values())[-1])


def test_muon_turns_matrices_and_adamw_the_rest():
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))
    twins = [torch.nn.Parameter(w.detach().clone()) for w in (matrix, vector)]
    ours = Muon([matrix, vector], lr=0.1, weight_decay=0.0)
    theirs = [
        torch.optim.Muon([twins[0]], lr=0.1, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twins[1]], lr=0.1, weight_decay=0.0),
    ]
    for step in range(3):
        for group in (*ours.param_groups, *(o.param_groups[0] for o in theirs)):
            group["lr"] = 0.1 / (step + 1)  # as a schedule does
        for weight in (matrix, vector, *twins):
            weight.grad = torch.full_like(weight, step + 1.0)
        ours.step()
        for optimizer in theirs:
            optimizer.step()
    assert torch.equal(matrix, twins[0])
    assert torch.equal(vector, twins[1])


def test_arguments():
    assert parsed("betas=[0.9, 0.99],eps=1e-6,amsgrad=true,mode=fast") == {
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "amsgrad": True,
        "mode": "fast",
    }
    with pytest.raises(UsageError, match="--optimizer-args 'eps': write name=value"):
        parsed("eps")
    optimizer, _ = Schedule("constant", 1e-3, 0.1, 0, 4, "adamw", "eps=0.5").build([torch.nn.Parameter(torch.ones(2))])
    assert (optimizer.defaults["eps"], optimizer.defaults["weight_decay"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adam", "unknown 'adam'; choose from adamw, .*; did you mean adamw"),
        ("no_such_module.Adam", "No module named 'no_such_module'; install it"),
        ("torch.optim.Adamm", "torch.optim has no Adamm"),
        ("pathlib.Path", "it is no torch.optim.Optimizer"),
    ],
)
def test_wrong_names(name, told):
    with pytest.raises(UsageError, match=told):
        optimizer_class(name)


def test_a_wrong_argument_is_refused_before_anything_loads(three, tmp_path, monkeypatch):
    monkeypatch.setattr("dsplit.training.run.load_component", None)
    with pytest.raises(UsageError, match=r"--optimizer adamw: .*'speed'; change --optimizer-args"):
        three.train(tmp_path / "o", optimizer_args="speed=3")
    assert not (tmp_path / "o").exists()


def test_the_first_step_runs_at_the_configured_rate_and_warm_up_climbs(three, tmp_path):
    three.train(tmp_path / "a", max_steps=2, lr=1e-3)
    assert [m["lr"] for m in metrics(tmp_path / "a")] == [1e-3, 1e-3]
    three.train(tmp_path / "b", max_steps=4, lr=1e-3, lr_warmup_steps=4)
    assert [m["lr"] for m in metrics(tmp_path / "b")] == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4])


def test_gradients_are_clipped_to_the_norm(three, tmp_path):
    options = {"max_steps": 1, "lr": 1.0, "optimizer": "torch.optim.SGD", "weight_decay": 0.0}
    three.train(tmp_path / "free", max_grad_norm=0, **options)
    norm = metrics(tmp_path / "free")[0]["grad_norm"]
    three.train(tmp_path / "half", max_grad_norm=norm / 2, **options)
    assert metrics(tmp_path / "half")[0]["grad_norm"] == norm
    (free,), (half,) = loras(tmp_path / "free").values(), loras(tmp_path / "half").values()
    for name in (n for n in free if "lora_B" in n):  # they start at zero
        torch.testing.assert_close(half[name], free[name] / 2, rtol=1e-4, atol=1e-9)


def test_dropout_of_the_adapter_is_drawn_anew_at_each_step_and_repeats(three, tmp_path):
    for name in ("a", "b"):
        three.train(tmp_path / name, max_steps=3, lr=1e-2, lora_dropout=0.5)
    three.train(tmp_path / "without", max_steps=3, lr=1e-2)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a")[1:] != losses(tmp_path / "without")[1:]


def test_targets_by_pattern_and_all_of_the_blocks(three, tmp_path, capsys):
    three.train(tmp_path / "a", max_steps=1, targets=r"re:transformer_blocks\.[01]\.attn\.to_[qk]")
    (tensors,) = loras(tmp_path / "a").values()
    modules = {name.rpartition(".lora_")[0].removeprefix("transformer.") for name in tensors}
    assert modules == {f"transformer_blocks.{n}.attn.to_{k}" for n in (0, 1) for k in "qk"}
    assert r"modules matched: re:transformer_blocks\.[01]\.attn\.to_[qk] 4" in capsys.readouterr().err
    three.train(tmp_path / "b", max_steps=1, targets="auto")
    (tensors,) = loras(tmp_path / "b").values()
    assert len(tensors) == 2 * 14 * 4  # per block: attention 8, two feed-forwards of 2, two modulations
    with pytest.raises(UsageError, match=r"no regular expression"):
        three.train(tmp_path / "c", targets="re:(")
    with pytest.raises(UsageError, match=r"nothing matches 're:nothing'"):
        three.train(tmp_path / "c", targets="re:nothing")
