"""Small caches that the training tests share, and the options of a short run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsplit.cache.run import run_cache
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions
from dsplit.training.run import run_train
from tests import tiny


@pytest.fixture(autouse=True)
def threads(one_thread):
    """One for all tests here."""


def model(**options) -> ModelOptions:
    return ModelOptions(**{"model": str(tiny.QWEN_IMAGE), "device": "cpu", "threads": 1, **options})


@dataclass(frozen=True)
class Made:
    """A data set and its cache."""

    data: DataOptions
    cache: Path
    model: ModelOptions

    def train(self, out: Path, *, split: bool = True, model: ModelOptions | None = None, **options) -> dict:
        """A run of rank 4 from the cache, or unsplit."""
        options = {"rank": 4, "from_cache": str(self.cache) if split else None, "out": str(out), **options}
        return run_train(model or self.model, DataOptions() if split else self.data, TrainOptions(**options))


def make(folder: Path, count: int = 3, model_options: ModelOptions | None = None, **columns) -> Made:
    """A data set of `count` rows and its cache, in `folder`."""
    tiny.dataset(folder / "data", count, **columns)
    made = Made(DataOptions(data=str(folder / "data")), folder / "cache", model_options or model())
    run_cache(made.model, made.data, CacheOptions(out=str(made.cache), workers=0))
    return made


@pytest.fixture(scope="session")
def three(tmp_path_factory) -> Made:
    """Three rows of 64x64 with captions of different length."""
    prompts = ["a large red circle", "a blue star", "a small green cross on a yellow background"]
    return make(tmp_path_factory.mktemp("three"), 3, prompts=prompts)


@pytest.fixture(scope="session")
def eight(tmp_path_factory) -> Made:
    """Case T02: one row of 64x64, two of 64x96, five of 96x64."""
    sizes = [(64, 64), (64, 96), (64, 96), *[(96, 64)] * 5]
    return make(tmp_path_factory.mktemp("eight"), 8, sizes=sizes)


@pytest.fixture(scope="session")
def distill(tmp_path_factory) -> Made:
    """direct_distill: seeds, one row without, two step counts, guidance in two rows."""
    return make(
        tmp_path_factory.mktemp("distill"),
        4,
        model(task="direct_distill"),
        seed=[3, 4, "", 5],
        rand_device=["cpu", "cpu", "", "cpu"],
        num_inference_steps=[2, 2, 3, 3],
        cfg_scale=[1, 2.5, 1, 2.5],
        negative_prompt=["", "blurry", "", "a grey picture"],
    )


TIMES = ("rows_per_s", "memory_gb")  # differ from run to run


def metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl, without what the clock and the machine say."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: figure for name, figure in line.items() if name not in TIMES} for line in lines]


def losses(out: Path) -> list[float]:
    return [m["loss"] for m in metrics(out)]


def loras(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The LoRA files of a run folder, by name."""
    return {p.name: load_file(p) for p in sorted(out.glob("*.safetensors"))}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
