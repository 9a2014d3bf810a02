"""Metrics on a disk that is full, or does not take the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsplit.errors import TrainingError
from dsplit.training.metrics import Metrics, smooth


def test_a_full_disk_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    told = r"metrics\.jsonl: cannot write it: No space left on device; checkpoints on disk are kept"
    with pytest.raises(TrainingError, match=told), Metrics(tmp_path) as metrics:
        metrics.write(step=1, loss=0.5)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: cannot write it: No such file"):
        Metrics(tmp_path / "gone").__enter__()


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loss.png" / "in the way").mkdir(parents=True)
    with Metrics(tmp_path) as metrics:
        for step in range(1, 4):
            metrics.write(step=step, loss=0.5)
    assert "loss.png: cannot write it: " in capsys.readouterr().err
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_smoothing_is_unbiased() -> None:
    assert smooth([2.0] * 7) == pytest.approx([2.0] * 7)
    assert smooth([0.0, 1.0]) == pytest.approx([0.0, 1 / 1.8])
