"""Runs that go on: bit for bit as if they had never stopped, wherever and however they did."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsplit.errors import TrainingError
from dsplit.training.state import find_state, states
from tests.training.conftest import loras, metrics, same

SEED = 20261201


def last(out: Path) -> dict:
    return list(loras(out).values())[-1]


def command(cache: Path, out: Path, *words: str) -> list[str]:
    options = ["--rank", "4", "--threads", "1", "--device", "cpu", *words]
    return [sys.executable, "-m", "dsplit", "train", "--from-cache", str(cache), "--out", str(out), *options]


@pytest.mark.parametrize("stop", [1, 3, 5])  # three rows: within the first epoch, at its end, within the second
def test_stopping_changes_no_bit(three, tmp_path, stop):
    options = {"lr": 1e-2, "lr_scheduler": "cosine", "lr_warmup_steps": 2, "save_steps": 1}
    three.train(tmp_path / "whole", max_steps=6, **options)
    out = tmp_path / "o"
    with pytest.raises(Exception, match=f"stopped after step {stop}, all is saved"):
        three.train(out, max_steps=6, **_signalled_at(stop), **options)
    three.train(out, max_steps=6, resume="latest", **options)
    assert metrics(out) == metrics(tmp_path / "whole")
    assert loras(out).keys() == loras(tmp_path / "whole").keys()
    assert all(same(a, b) for a, b in zip(loras(out).values(), loras(tmp_path / "whole").values(), strict=True))
    assert [*states(out)] == [6]


def _signalled_at(step: int) -> dict:
    """A signal comes while step `step` is being computed."""
    from dsplit.training import loop

    seed = loop.Loop._seed

    def at(self, number: int) -> None:
        seed(self, number)
        if number == step:
            loop.Loop._seed = seed
            os.kill(os.getpid(), signal.SIGTERM)

    loop.Loop._seed = at
    return {}


def test_accumulated_batches_with_dropped_prompts_go_on(eight, tmp_path):
    options = {"batch_size": 2, "gradient_accumulation_steps": 2, "prompt_dropout": 0.5, "lr": 1e-2, "repeat": 2}
    three_epochs = {"max_steps": 9, **options}
    eight.train(tmp_path / "whole", **three_epochs)
    eight.train(tmp_path / "o", **{**three_epochs, "max_steps": 4})
    eight.train(tmp_path / "o", resume="latest", **three_epochs)
    assert metrics(tmp_path / "o") == metrics(tmp_path / "whole")
    assert same(last(tmp_path / "o"), last(tmp_path / "whole"))


def test_an_unsplit_run_goes_on(three, tmp_path):
    three.train(tmp_path / "whole", split=False, max_steps=4, lr=1e-2)
    three.train(tmp_path / "o", split=False, max_steps=2, lr=1e-2)
    three.train(tmp_path / "o", split=False, max_steps=4, lr=1e-2, resume="latest")
    assert same(last(tmp_path / "o"), last(tmp_path / "whole"))


def test_which_states_and_checkpoints_are_kept(three, tmp_path):
    three.train(tmp_path / "a", max_steps=6, save_steps=2)
    assert ([*states(tmp_path / "a")], [*loras(tmp_path / "a")]) == (
        [6],
        ["step-2.safetensors", "step-4.safetensors", "step-6.safetensors"],
    )
    three.train(tmp_path / "b", max_steps=6, save_steps=2, keep=2)
    assert ([*states(tmp_path / "b")], [*loras(tmp_path / "b")]) == (
        [4, 6],
        ["step-4.safetensors", "step-6.safetensors"],
    )
    assert sorted(p.name for p in (tmp_path / "b/state/step-6").iterdir()) == [
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]


def test_a_run_that_is_complete_stays_as_it_is(three, tmp_path):
    three.train(tmp_path, max_steps=2)
    before, lines = last(tmp_path), metrics(tmp_path)
    assert three.train(tmp_path, max_steps=2, resume="latest")["steps"] == 2
    assert (metrics(tmp_path), same(last(tmp_path), before)) == (lines, True)
    with pytest.raises(TrainingError, match="is after step 2, and the run ends at step 1; state a --max-steps"):
        three.train(tmp_path, max_steps=1, resume="latest")


def test_states_that_cannot_be_used_are_refused(three, tmp_path):
    with pytest.raises(TrainingError, match="holds no state to go on from"):
        three.train(tmp_path / "none", max_steps=2, resume="latest")
    out = tmp_path / "o"
    three.train(out, max_steps=1)
    with pytest.raises(TrainingError, match=r"other weights are trained:\n.*saved 4x128, requested 2x128"):
        three.train(out, max_steps=2, rank=2, resume="latest")
    with pytest.raises(TrainingError, match="batches per step: saved 1, requested 2"):
        three.train(out, max_steps=2, gradient_accumulation_steps=2, resume="latest")
    (out / "state/step-1/optimizer.safetensors").write_bytes(b"cut")
    with pytest.raises(TrainingError, match="step-1: cannot go on from it"):
        three.train(out, max_steps=2, resume="latest")
    assert find_state(str(out / "state/step-1"), tmp_path) == out / "state/step-1"


@pytest.mark.slow
def test_the_command_takes_what_the_run_had(three, tmp_path):
    out = tmp_path / "o"
    first = command(three.cache, out, "--max-steps", "2", "--lr", "0.01", "--repeat", "2")
    subprocess.run(first, check=True, capture_output=True)
    again = [sys.executable, "-m", "dsplit", "train", "--resume", "latest", "--out", str(out)]
    refused = subprocess.run([*again, "--lr", "0.1", "--rank", "8"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "  rank: saved 4, requested 8\n  lr: saved 0.01, requested 0.1\n" in refused.stderr
    subprocess.run([*again, "--max-steps", "4"], check=True, capture_output=True)
    three.train(tmp_path / "whole", max_steps=4, lr=0.01, repeat=2)
    assert same(last(out), last(tmp_path / "whole"))
    assert json.loads((out / "recipe.json").read_text())["train"]["lr"] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_the_run(three, tmp_path, number, code):
    out = tmp_path / "o"
    run = subprocess.Popen(command(three.cache, out, "--max-steps", "100000"), stderr=subprocess.PIPE, text=True)
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        time.sleep(0.05)
    run.send_signal(number)
    _, told = run.communicate(timeout=60)
    assert run.returncode == code
    (step,) = states(out)
    assert f"stopped after step {step}, all is saved; go on with --resume latest" in told
    assert metrics(out)[-1]["step"] == step
    assert (out / f"step-{step}.safetensors").exists()


@pytest.mark.slow
def test_kill_9_at_twenty_moments(three, tmp_path):
    """Measure 4 of the training issue: whatever the moment, --resume latest works and ends with the same weights."""
    whole = tmp_path / "whole"
    options = ("--max-steps", "40", "--save-steps", "2", "--lr", "0.01", "--keep", "2")
    started = time.monotonic()
    subprocess.run(command(three.cache, whole, *options), check=True, capture_output=True)
    length = time.monotonic() - started
    moments = random.Random(SEED)
    for k in range(20):
        out = tmp_path / str(k)
        run = subprocess.Popen(command(three.cache, out, *options), stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.4, 1.0) * length)
        run.kill()
        run.wait()
        resume = ("--resume", "latest") if states(out) else ("--overwrite",)
        done = subprocess.run(command(three.cache, out, *options, *resume), capture_output=True, text=True)
        assert done.returncode == 0, (k, done.stderr)
        assert same(last(out), last(whole)), k
        assert metrics(out) == metrics(whole)
        assert [*states(out)] == [38, 40]
