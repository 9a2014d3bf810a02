"""Training in two processes: the same noise, losses and weights as in one, at equal rows per step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.conftest import Made, loras, losses, metrics

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dsplit"]
ALL_LINEAR = "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,net.2,img_mod.1,txt_mod.1,proj"


def launched(made: Made, out: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A run in two processes."""
    options = ["--out", str(out), "--rank", "4", "--threads", "1", "--device", "cpu", "--json", *words]
    done = subprocess.run(
        [*TORCHRUN, "train", "--from-cache", str(made.cache), *options], capture_output=True, text=True, timeout=120
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def world(out: Path) -> int:
    return json.loads((out / "recipe.json").read_text())["resolved"]["processes"]


@pytest.mark.parametrize("batch", [1, 2])
def test_two_processes_equal_one(eight, tmp_path, batch):
    launched(eight, tmp_path / "two", "--batch-size", str(batch), "--max-steps", "6", "--lr", "0.01")
    options = {"batch_size": batch, "gradient_accumulation_steps": 2, "max_steps": 6, "lr": 0.01}
    eight.train(tmp_path / "one", **options)
    assert world(tmp_path / "two") == 2
    assert [m["rows"] for m in metrics(tmp_path / "two")] == [m["rows"] for m in metrics(tmp_path / "one")]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    for a, b in zip(loras(tmp_path / "two").values(), loras(tmp_path / "one").values(), strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=0)  # Adam's first steps magnify rounding


def test_every_row_is_seen_once_by_one_of_them(eight, tmp_path):
    launched(eight, tmp_path, "--batch-size", "4", "--epochs", "1")
    seen = [row for line in metrics(tmp_path) for row in line["rows"]]
    assert world(tmp_path) == 2
    assert (len(seen), len(set(seen))) == (8, 8)
    assert len(metrics(tmp_path)) == 2  # four batches: 1, 2, 4 and 1 rows


@pytest.mark.parametrize("accumulation", [1, 2])
def test_case_t01_the_schedule_counts_optimiser_steps(eight, tmp_path, accumulation):
    options = ("--lr-scheduler", "cosine", "--lr", "1e-4", "--max-steps", "8", "--repeat", "2")
    launched(eight, tmp_path, *options, "--gradient-accumulation-steps", str(accumulation))
    expected = [1e-4, 9.619398e-5, 8.535534e-5, 6.913417e-5, 5e-5, 3.086583e-5, 1.464466e-5, 3.806023e-6]
    assert world(tmp_path) == 2
    assert [m["lr"] for m in metrics(tmp_path)] == pytest.approx(expected, rel=1e-6)


def test_case_t08_unused_parameters_stop_nobody(three, tmp_path):
    launched(three, tmp_path, "--targets", ALL_LINEAR, "--max-steps", "3")
    assert world(tmp_path) == 2
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3]


def test_a_run_in_two_processes_goes_on(eight, tmp_path):
    launched(eight, tmp_path / "whole", "--max-steps", "4", "--lr", "0.01")
    launched(eight, tmp_path / "o", "--max-steps", "2", "--lr", "0.01")
    launched(eight, tmp_path / "o", "--max-steps", "4", "--lr", "0.01", "--resume", "latest")
    assert metrics(tmp_path / "o") == metrics(tmp_path / "whole")
    (a,), (b,) = loras(tmp_path / "o").values(), loras(tmp_path / "whole").values()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_reason_is_told_once_and_all_end(three, tmp_path):
    done = launched(three, tmp_path, "--targets", "to_qq", check=False)
    assert done.returncode != 0
    assert done.stderr.count("nothing matches 'to_qq'") == 1


def test_the_command_starts_the_processes_itself(three, tmp_path):
    words = ["--from-cache", str(three.cache), "--out", str(tmp_path), "--rank", "4", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "dsplit", "train", *words, "--max-steps", "2", "--num-processes", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    assert world(tmp_path) == 2
