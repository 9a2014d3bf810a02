"""The training loop: optimiser steps over the order of rows, each checked before it counts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from dsplit.console import Progress
from dsplit.errors import DsplitError, TrainingError, UsageError
from dsplit.training.batches import Batch, Order, Reader, Step
from dsplit.training.checkpoints import RunFolder
from dsplit.training.metrics import Metrics
from dsplit.training.objective import Objective
from dsplit.training.rng import derived


@dataclass(frozen=True)
class Schedule:
    """The learning rate over optimiser steps: a schedule of diffusers by name, and its warm-up."""

    name: str
    lr: float
    weight_decay: float
    warmup: int
    total: int

    def build(self, weights: Sequence[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        """AdamW and its scheduler, which counts optimiser steps whatever the number of processes."""
        from diffusers.optimization import get_scheduler

        optimizer = torch.optim.AdamW(weights, lr=self.lr, weight_decay=self.weight_decay)
        name = "constant_with_warmup" if self.name == "constant" and self.warmup else self.name
        try:
            return optimizer, get_scheduler(
                name, optimizer, num_warmup_steps=self.warmup, num_training_steps=self.total
            )
        except (ValueError, AttributeError) as error:
            raise UsageError(f"--lr-scheduler {self.name}: {error}") from error


def known_schedules() -> list[str]:
    """The names of diffusers' schedules that need nothing but a warm-up."""
    from diffusers.optimization import SchedulerType

    return [s.value for s in SchedulerType if s is not SchedulerType.PIECEWISE_CONSTANT]


def fit(
    objective: Objective,
    weights: Sequence[torch.nn.Parameter],
    reader: Reader,
    order: Order,
    schedule: Schedule,
    run: RunFolder,
    device: torch.device,
    workers: int = 0,
) -> Metrics:
    """Trains `weights` for `schedule.total` optimiser steps; gives back the metrics written.

    Raises TrainingError at the first loss or gradient that is not finite, before the weights are touched.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # a launcher's own must not divide again
    )
    optimizer, scheduler = schedule.build(weights)
    model, optimizer = accelerator.prepare(objective, optimizer, device_placement=[False, False])
    batches = _batches(reader, order, schedule.total, workers)
    with Metrics(run.folder) as metrics, Progress("train", schedule.total, "steps") as progress:
        for number, step in enumerate(order.steps(schedule.total), start=1):
            torch.manual_seed(derived(order.seed, "step", number))  # dropout of the model's own, if it has any
            read = [next(batches).to(device) for _ in step.batches]
            losses = _backward(accelerator, model, read, step)
            loss = _checked(number, losses, read, weights)
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ids = [i for batch in read for i in batch.ids]
            metrics.write(step=number, epoch=step.epoch, loss=loss, lr=lr, rows=ids)
            run.after(number, step)
            progress.advance(1, f"loss {loss:.4f}")
    return metrics


def _batches(reader: Reader, order: Order, total: int, workers: int) -> Iterator[Batch]:
    """The batches of every step in turn, read ahead by worker processes if there are any."""
    workers = min(workers, os.cpu_count() or 1)
    visits = (batch for step in order.steps(total) for batch in step.batches)
    loader = DataLoader(reader, sampler=visits, batch_size=None, num_workers=workers, generator=torch.Generator())  # type: ignore[arg-type, var-annotated]
    for batch in loader:
        if isinstance(batch, DsplitError):
            raise batch
        yield batch


def _backward(accelerator: Any, model: Any, batches: Sequence[Batch], step: Step) -> torch.Tensor:
    """Adds up the gradient of the mean loss over the rows of the step; the loss of each row, (rows,)."""
    losses = []
    for batch in batches:
        rows = model(batch)
        if not rows.requires_grad:
            raise TrainingError("no adapted module takes part in the loss; choose other --targets")
        accelerator.backward(rows.sum() / step.rows)
        losses.append(rows.detach())
    return torch.cat(losses)


def _checked(
    number: int, losses: torch.Tensor, batches: Sequence[Batch], weights: Sequence[torch.nn.Parameter]
) -> float:
    """The mean loss. Raises TrainingError if it or a gradient is not finite, naming step and rows."""
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    *rows, gradient = torch.cat([losses.double(), norm.double().reshape(1)]).tolist()
    places = [p for batch in batches for p in batch.places]
    bad = [p for p, loss in zip(places, rows, strict=True) if not math.isfinite(loss)]
    if bad or not math.isfinite(gradient):
        what = "the loss" if bad else "the gradient"
        raise TrainingError(
            f"step {number}: {what} is not finite (NaN/Inf) on {', '.join(bad or places)}; stopped before the weights "
            "were touched, checkpoints on disk are finite; lower --lr, or check that row"
        )
    return float(losses.mean())
