"""What a run is to do: family, task, rows and the components to load, from a cache or from the data set itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dsplit.cache.header import model_differences
from dsplit.cache.planner import Planner
from dsplit.cache.rows import CachedRows
from dsplit.console import counted, warn
from dsplit.dataset import read_dataset
from dsplit.dataset.views import refuse_variants
from dsplit.errors import CacheError, TrainingError, UsageError
from dsplit.models.captions import perhaps_long, warn_of_cut
from dsplit.models.family import ModelFamily, Task
from dsplit.models.load import pick_dtype
from dsplit.models.locate import Model, find_family, locate
from dsplit.models.registry import registry
from dsplit.recipe import DataOptions, ModelOptions, TrainOptions, listed
from dsplit.training.batches import Rows
from dsplit.training.live import LiveRows
from dsplit.units import Split


@dataclass(frozen=True)
class Job:
    """trained: the components to train. loaded: those to load, each with a unit that needs it.

    posterior: whether latents are its `mean`, or a `sample` drawn at each visit. header: what made the cache; empty for
    an unsplit run. components: the loaded ones, empty at first; live rows encode with them.
    """

    family: ModelFamily
    task: Task
    trained: tuple[str, ...]
    model: Model
    dtype: torch.dtype
    loaded: Mapping[str, str]
    rows: Rows
    posterior: str = "mean"
    header: Mapping[str, Any] = field(default_factory=dict)
    components: dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """True for an unsplit run."""
        return not self.header

    @property
    def split(self) -> Split:
        """The split of all that a row can need, with the negative prompt where the task has one."""
        return split_of(self.family, self.task, self.trained, self.posterior)

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
        "posterior": model.posterior,
    }
    refuse_other(folder, header, requested)
    family, task = registry().family(header["family"]), registry().task(header["task"])
    trained, posterior = tuple(header["trainable"]), header["posterior"]
    loaded = _needed(split_of(family, task, trained, posterior), stage1=False)
    dtype = pick_dtype(header["dtype"], device)
    found = _located(model, loaded)
    if differing := model_differences(header, found):
        lines = "\n".join(f"  {line}" for line in differing)
        raise CacheError(
            f"{folder}: the cache was made with another model than {found.name}\n{lines}\n"
            "run `dsplit cache` with this model, or train with the one of the cache"
        )
    return Job(family, task, trained, found, dtype, loaded, rows, posterior, header)


def live_job(model: ModelOptions, data: DataOptions, train: TrainOptions, device: torch.device) -> Job:
    """The job of an unsplit run: the same rows in the same order, encoded at every visit."""
    family, task = find_family(model), registry().task(model.task)
    posterior = model.posterior or "mean"
    planner = Planner(family, task, listed(model.trainable), posterior)
    refuse_variants(family.name, family.variants, data)
    dataset = read_dataset(data, family.columns_for(task), family.size_factor)
    for problem in (*dataset.warnings, *dataset.skipped):
        warn(str(problem))
    trained = listed(model.trainable) or family.trainable
    loaded = _needed(split_of(family, task, trained, posterior), stage1=True)
    components: dict[str, Any] = {}
    rows = LiveRows(dataset.rows, planner.split_of, components)
    dtype = pick_dtype(model.dtype, device)
    found = _located(model, loaded)
    warn_of_cut(found, perhaps_long(found, dataset.rows, planner.split_of))
    return Job(family, task, trained, found, dtype, loaded, rows, posterior, components=components)


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


def refuse_dropout(job: Job) -> None:
    """Raises UsageError if the job has no prompt to drop, or its cache can have no value for the empty one.

    CacheError if the cache could have it, but it cannot be read.
    """
    if "prompt" not in (*job.split.stage1_columns, *job.split.columns):
        raise UsageError(f"--prompt-dropout: {job.family.name} reads no prompt; leave it out")
    if job.live:
        return
    axes, twins = job.header["axes"], job.header["empty_prompt"]
    twinless = [value for value in job.split.boundary if "prompt" in axes.get(value, ()) and value not in twins]
    if twinless:
        raise UsageError(
            f"--prompt-dropout: the cache has no {', '.join(twinless)} of the empty prompt, since more of a row than "
            "its prompt makes it; leave the option out, or train without --from-cache"
        )
    try:
        job.rows.values(0, {"prompt": None})
    except CacheError as error:
        raise CacheError(f"--prompt-dropout needs the values of the empty prompt: {error}") from error


def check_devices(rows: Rows, crossing: Sequence[str]) -> None:
    """Raises TrainingError if the noise of a row's seed was drawn on a device that this machine lacks.

    crossing: the columns that cross; no row is read unless `rand_device` is one of them.
    """
    if "rand_device" not in crossing or torch.cuda.is_available():
        return
    first, bad = 0, 0
    for i in range(len(rows.ids)):
        columns = rows.columns(i)
        if columns["rand_device"] == "cuda" and columns["seed"] is not None:
            first, bad = first if bad else i, bad + 1
    if bad:
        raise TrainingError(
            f"{rows.place(first)}: rand_device is cuda, but there is no CUDA device here to draw its noise on ({bad} "
            "such rows); train on a GPU, or drop the seed"
        )


def split_of(family: ModelFamily, task: Task, trained: tuple[str, ...], posterior: str) -> Split:
    """The split of all that a row can need, with the negative prompt where the task has one."""
    return family.split(task, trained, negative=bool(task.negative_if), posterior=posterior)


def _needed(split: Split, *, stage1: bool) -> dict[str, str]:
    """The components that the run loads, each with a unit that needs it."""
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
