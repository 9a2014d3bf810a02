"""`dsplit train`: from options to a trained LoRA in the run folder. What can be refused is refused before loading."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dsplit.cache import ranks
from dsplit.cache.files import claim_folder
from dsplit.console import counted, say, warn
from dsplit.errors import TrainingError, UsageError
from dsplit.models.load import load_component, pick_device, set_threads
from dsplit.recipe import OUT, DataOptions, ModelOptions, TrainOptions, stated
from dsplit.training.batches import Order, Reader, buckets, describe, ragged_axes
from dsplit.training.checkpoints import RunFolder, refuse_earlier
from dsplit.training.job import Job, cached_job, check_devices, live_job, refuse_dropout
from dsplit.training.loop import Loop
from dsplit.training.lora_files import refuse_format
from dsplit.training.lora_start import Start, read_start
from dsplit.training.method import method_of, refuse_mixture
from dsplit.training.objective import Objective
from dsplit.training.optimisers import Schedule, known_schedules
from dsplit.training.processes import Processes, own_device, precision_of
from dsplit.training.state import find_state, step_of

LR, RANK = 1e-4, 32  # where neither the user nor the family states them
BUCKETS_SHOWN = 12
LIBRARIES = ("dsplit", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors")


def run_train(model: ModelOptions, data: DataOptions, train: TrainOptions) -> dict[str, Any]:
    """Trains a LoRA, from a cache or unsplit; gives back the `--json` object of `dsplit train`.

    Raises UsageError, DataError, CacheError, ModelError or TrainingError before anything is loaded where it can, and
    TrainingError where training cannot go on.
    """
    started = time.monotonic()
    refuse_mixture(train)
    if not 0 <= train.prompt_dropout <= 1:
        raise UsageError(f"--prompt-dropout {train.prompt_dropout:g}: it is a share of visits, from 0 to 1")
    out = Path(train.out or OUT)
    state = find_state(train.resume, out) if train.resume else None
    if not state:
        refuse_earlier(out, train.overwrite)
    set_threads(model.threads)
    device = own_device(pick_device(model.device))
    processes = Processes(device, precision_of(train.mixed_precision, device))
    try:
        return _train(model, data, train, out, state, device, processes, started)
    finally:
        processes.close()


def _train(
    model: ModelOptions,
    data: DataOptions,
    train: TrainOptions,
    out: Path,
    state: Path | None,
    device: torch.device,
    processes: Processes,
    started: float,
) -> dict[str, Any]:
    job = (cached_job if train.from_cache else live_job)(model, data, train, device)
    if train.prompt_dropout:
        refuse_dropout(job)
    start = read_start(Path(train.init_lora), train.rank, train.alpha) if train.init_lora else None
    train = _resolved(train, job, start)
    method = method_of(job, train, start)
    check_devices(job.rows, job.split.columns)
    claim_folder(out)

    order = Order(
        job.rows.ids,
        buckets(job.rows, job.task.group_by),
        train.batch_size,
        train.repeat,
        train.gradient_accumulation_steps,
        train.seed,
        processes.world,
    )
    total = train.max_steps or order.steps_per_epoch * train.epochs
    if state and (done := step_of(state)) > total:
        raise TrainingError(f"{state}: is after step {done}, and the run ends at step {total}; state a --max-steps")
    _say_plan(job, order, total, train, device)
    dtypes = {name: method.dtype or job.dtype if name in job.trained else job.dtype for name in job.loaded}
    job.components.update({name: load_component(job.model, name, dtype, device) for name, dtype in dtypes.items()})
    saver = method.begin(job.components)
    for name in job.trained:
        _train_mode(name, job.components[name], train.gradient_checkpointing)
    process = job.noise_process()
    options, parts = asdict(train), job.components
    objective = Objective(
        job.family, job.task, parts, job.trained, process, train.seed, options, job.posterior, method.dtype
    )
    run = RunFolder(out, saver, total, train.save_steps, train.keep, processes.main)
    processes.wait()  # all have seen that no earlier run is there
    run.begin(_recipe(job, model, data, train, device, total), anew=not state)
    schedule = _schedule(train, total)
    reader = Reader(job.rows, ragged_axes(objective.widest), train.seed, train.prompt_dropout)
    workers = 0 if job.live else train.workers
    clip = train.max_grad_norm
    metrics = Loop(objective, reader, order, schedule, run, processes, device, clip, state, workers).fit()
    return {
        "steps": total,
        "epochs": math.ceil(total / order.steps_per_epoch),
        "rows": len(job.rows.ids),
        "first_loss": metrics.losses[0],
        "last_loss": metrics.losses[-1],
        "checkpoints": [str(path) for path in run.saved],
        "metrics": str(metrics.path),
        "seconds": round(time.monotonic() - started, 3),
    }


def _resolved(train: TrainOptions, job: Job, start: Start | None) -> TrainOptions:
    """The options, with those of the LoRA to start from and the family's defaults in place of what nobody stated.

    Raises UsageError for what cannot be.
    """
    defaults = job.family.defaults
    rank = start.rank if start else train.rank or int(defaults.get("rank", RANK))
    alpha = start.alpha if start else float(rank) if train.alpha is None else train.alpha
    lr = float(defaults.get("lr", LR)) if train.lr is None else train.lr
    schedules = known_schedules()
    if train.lr_scheduler not in schedules:
        raise UsageError(f"--lr-scheduler: unknown '{train.lr_scheduler}'; choose from {', '.join(schedules)}")
    for name, value in (("alpha", alpha), ("lr", lr)):
        if not 0 < value < torch.finfo(torch.float32).max:
            raise UsageError(f"--{name} {value:g}: it must be above 0 and a number of fp32")
    if train.lora_dropout >= 1:
        raise UsageError(f"--lora-dropout {train.lora_dropout:g}: it must be below 1")
    _schedule(train, 1).build([torch.nn.Parameter(torch.zeros(1, 1))])  # so that a wrong one is refused early
    refuse_format(train.lora_format, job.trained)
    if job.live and train.workers:
        warn("--workers: an unsplit run encodes in this process; ignored")
    return replace(train, rank=rank, alpha=alpha, lr=lr)


def _schedule(train: TrainOptions, total: int) -> Schedule:
    lr, decay, warmup = float(train.lr or 0), train.weight_decay, train.lr_warmup_steps
    return Schedule(train.lr_scheduler, lr, decay, warmup, total, train.optimizer, train.optimizer_args)


def _say_plan(job: Job, order: Order, total: int, train: TrainOptions, device: torch.device) -> None:
    """Says what is going to happen, before anything takes long."""
    counts = order.counts()
    batches = sum(n for _, n in counts.values())
    epochs = total / order.steps_per_epoch
    say(
        f"train: {counted(len(job.rows.ids), 'row')} in {counted(len(counts), 'bucket')}, "
        f"{counted(batches, 'batch')} per epoch, {counted(total, 'step')} ({counted(epochs, 'epoch')}); "
        f"{job.family.name} {job.task.name}, "
        f"{'from cache' if train.from_cache else 'unsplit'}, {_dtype(job.dtype)} on {device}, "
        f"lr {train.lr:g} {train.lr_scheduler}"
        + (f", prompt dropout {train.prompt_dropout:g}" if train.prompt_dropout else "")
        + (", latents drawn from the posterior" if job.posterior == "sample" else "")
    )
    for bucket, (rows, n) in list(counts.items())[:BUCKETS_SHOWN]:
        say(f"  {describe(bucket, job.task.group_by)}: {counted(rows, 'row')}, {counted(n, 'batch')}")
    if len(counts) > BUCKETS_SHOWN:
        say(f"  and {len(counts) - BUCKETS_SHOWN} more buckets")


def _train_mode(name: str, component: Any, checkpointing: bool) -> None:
    """Raises UsageError for a class that cannot be checkpointed. Never re-entrant: cached inputs need no gradient."""
    component.train()
    if not checkpointing:
        return
    enable = getattr(component, "activation_checkpointing_enable", None)  # transformers, of late
    enable = enable or getattr(component, "gradient_checkpointing_enable", None)  # transformers, before
    try:
        if enable:
            enable({"use_reentrant": False})
        else:
            component.enable_gradient_checkpointing()  # diffusers, where this is the default
    except (ValueError, AttributeError) as error:
        raise UsageError(f"--gradient-checkpointing: {name} does not support it ({error}); leave it out") from error


def _recipe(
    job: Job, model: ModelOptions, data: DataOptions, train: TrainOptions, device: torch.device, total: int
) -> dict[str, Any]:
    """All settings of the run, resolved, the versions of what ran, and what made the cache."""
    resolved = {
        "family": job.family.name,
        "task": job.task.name,
        "model": job.model.name,
        "trainable": job.trained,
        "dtype": _dtype(job.dtype),
        "posterior": job.posterior,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "steps": total,
        "rows": len(job.rows.ids),
        "processes": ranks.world(),
        "mixed_precision": precision_of(train.mixed_precision, device),
    }
    versions = {name: version(name) for name in LIBRARIES}
    groups = {"model": stated(model), "data": stated(data), "train": stated(train)}
    return {"command": "train", **groups, "resolved": resolved, "versions": versions, "cache": dict(job.header)}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
