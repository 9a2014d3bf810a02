"""What a run takes from its model and its rows: the schedule of sigma, and the columns that cross."""

import json
import shutil

import pytest
import torch

from dsplit.dataset import Row
from dsplit.models.locate import locate
from dsplit.models.registry import registry
from dsplit.recipe import ModelOptions
from dsplit.training.job import Job
from dsplit.training.live import LiveRows
from dsplit.units import Split
from tests import tiny

LATENTS = torch.zeros(1, 16, 1, 8, 8)
HALF = torch.tensor([0.5])


def job(folder) -> Job:
    task = registry().task("sft")
    model = locate(ModelOptions(model=str(folder)))
    return Job(model.family, task, ("transformer",), model, torch.float32, {}, LiveRows([], lambda row: None, {}))


def test_sigma_is_drawn_through_the_shift_of_the_models_own_scheduler(tmp_path, capsys):
    folder = tiny.qwen_image(tmp_path / "model")
    config = folder / "scheduler" / "scheduler_config.json"
    fixed = json.loads(config.read_text()) | {"use_dynamic_shifting": False, "shift": 7.0}
    config.write_text(json.dumps(fixed))
    sigma = job(folder).noise_process().shift(HALF, LATENTS)
    assert sigma.item() == pytest.approx(7 * 0.5 / (1 + 6 * 0.5))
    assert capsys.readouterr().err == ""


def test_a_model_without_a_scheduler_is_warned_of(tmp_path, capsys):
    folder = tiny.qwen_image(tmp_path / "model")
    shutil.rmtree(folder / "scheduler")
    default = job(folder).noise_process()
    assert default.shift(HALF, LATENTS) == job(tiny.QWEN_IMAGE).noise_process().shift(HALF, LATENTS)
    assert "has no scheduler folder: the schedule of Qwen-Image's own weights is used" in capsys.readouterr().err


def test_the_size_crosses_in_an_unsplit_run_as_from_a_cache():
    row = Row("0", "metadata.csv", 2, {"prompt": "a cat"}, {}, (70, 70), (64, 48))
    split = Split((), (), (), ("prompt", "size"))
    assert LiveRows([row], lambda _: split, {}).columns(0) == {"prompt": "a cat", "size": (64, 48)}
