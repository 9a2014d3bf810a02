"""What a run is to do: family, task, rows and the components to load, from a cache or from the data set itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dsplit.cache.header import model_differences
from dsplit.cache.plan import Planner
from dsplit.cache.rows import CachedRows
from dsplit.console import counted, warn
from dsplit.dataset import read_dataset
from dsplit.errors import CacheError, TrainingError
from dsplit.models.captions import perhaps_long, warn_of_cut
from dsplit.models.family import ModelFamily, Task
from dsplit.models.load import pick_dtype
from dsplit.models.locate import Model, find_family, locate
from dsplit.models.registry import registry
from dsplit.recipe import DataOptions, ModelOptions, TrainOptions, listed
from dsplit.training.batches import Rows
from dsplit.training.live import LiveRows


@dataclass(frozen=True)
class Job:
    """trained: the components to train. loaded: those to load, each with a unit that needs it.

    header: what made the cache; empty for an unsplit run. components: the loaded ones, empty at first; live rows
    encode with them.
    """

    family: ModelFamily
    task: Task
    trained: tuple[str, ...]
    model: Model
    dtype: torch.dtype
    loaded: Mapping[str, str]
    rows: Rows
    header: Mapping[str, Any] = field(default_factory=dict)
    components: dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """True for an unsplit run."""
        return not self.header

    def noise_process(self) -> Any:
        """The family's noise process, with the schedule of this model's scheduler config."""
        if self.model.has("scheduler"):
            return self.family.noise.build(self.model.config("scheduler"))
        warn(f"{self.model.name} has no scheduler folder: the schedule of {self.family.title}'s own weights is used")
        return self.family.noise.build()


def cached_job(model: ModelOptions, data: DataOptions, train: TrainOptions, device: torch.device) -> Job:
    """The job of stage 2: no encoder is located, required or loaded.

    Raises CacheError for a cache that is missing, incomplete, or made for another job than the options state.
    """
    stated_task = registry().task(model.task).name if model.task else None
    folder = Path(train.from_cache or "")
    rows = CachedRows(folder, train.name, skip_bad=data.skip_bad)
    if rows.left_out:
        warn(f"--skip-bad: {counted(rows.left_out, 'row')} of {folder} left out, values are missing")
    header = rows.header
    if not (model.model or model.model_path or model.model_id_with_origin_paths or model.model_paths):
        model = replace(model, model=header["model"]["name"])
    requested = {
        "family": find_family(model).name,
        "task": stated_task,
        "trainable": list(listed(model.trainable)),
        "dtype": str(pick_dtype(model.dtype, device)).removeprefix("torch.") if model.dtype else None,
    }
    refuse_other(folder, header, requested)
    family, task = registry().family(header["family"]), registry().task(header["task"])
    trained = tuple(header["trainable"])
    loaded = _needed(family, task, trained, stage1=False)
    dtype = pick_dtype(header["dtype"], device)
    found = _located(model, loaded)
    if differing := model_differences(header, found):
        lines = "\n".join(f"  {line}" for line in differing)
        raise CacheError(
            f"{folder}: the cache was made with another model than {found.name}\n{lines}\n"
            "run `dsplit cache` with this model, or train with the one of the cache"
        )
    return Job(family, task, trained, found, dtype, loaded, rows, header)


def live_job(model: ModelOptions, data: DataOptions, train: TrainOptions, device: torch.device) -> Job:
    """The job of an unsplit run: the same rows in the same order, encoded at every visit."""
    family, task = find_family(model), registry().task(model.task)
    planner = Planner(family, task, listed(model.trainable))
    dataset = read_dataset(data, family.columns_for(task), family.size_factor)
    for problem in (*dataset.warnings, *dataset.skipped):
        warn(str(problem))
    trained = listed(model.trainable) or family.trainable
    loaded = _needed(family, task, trained, stage1=True)
    components: dict[str, Any] = {}
    rows = LiveRows(dataset.rows, planner.split_of, components)
    dtype = pick_dtype(model.dtype, device)
    found = _located(model, loaded)
    warn_of_cut(found, perhaps_long(found, dataset.rows, planner.split_of))
    return Job(family, task, trained, found, dtype, loaded, rows, components=components)


def refuse_other(folder: Path, header: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raises CacheError naming every difference between the cache's header and what the user asked for.

    A requested value that is None or empty was not stated, and is taken from the cache.
    """
    differing = [
        f"  {name}: cached {_text(header[name])}, requested {_text(value)}"
        for name, value in requested.items()
        if value and value != header[name]
    ]
    if differing:
        lines = "\n".join(differing)
        raise CacheError(
            f"{folder}: the cache was made for another job\n{lines}\nrun `dsplit cache` with these options"
        )


def check_devices(rows: Rows) -> None:
    """Raises TrainingError if the noise of a row's seed was drawn on a device that this machine lacks."""
    if torch.cuda.is_available():
        return
    columns = [rows.columns(i) for i in range(len(rows.ids))]
    bad = [rows.place(i) for i, c in enumerate(columns) if c.get("rand_device") == "cuda" and c.get("seed") is not None]
    if bad:
        raise TrainingError(
            f"{bad[0]}: rand_device is cuda, but there is no CUDA device here to draw its noise on ({len(bad)} such "
            "rows); train on a GPU, or drop the seed"
        )


def _needed(family: ModelFamily, task: Task, trained: tuple[str, ...], *, stage1: bool) -> dict[str, str]:
    """The components that the run loads, each with a unit that needs it."""
    split = family.split(task, trained, negative=bool(task.negative_if))
    units = (*(split.stage1 if stage1 else ()), *split.stage2)
    return {c: u.name for u in units for c in u.components}


def _located(model: ModelOptions, loaded: Mapping[str, str]) -> Model:
    """The model, its needed components there and sound; raises UsageError or ModelError."""
    found = locate(model, fetch=(*loaded, *find_family(model).config_only), hub=model.hub)
    found.require(loaded, loaded)
    found.check(loaded)
    return found


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list | tuple) else str(value)
