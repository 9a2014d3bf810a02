"""The training loop: optimiser steps over the order of rows, each checked before it counts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from dsplit.console import Progress, say
from dsplit.errors import DsplitError, TrainingError
from dsplit.training.batches import Batch, Order, Reader, Share, Step
from dsplit.training.checkpoints import RunFolder
from dsplit.training.metrics import Metrics
from dsplit.training.objective import Objective
from dsplit.training.optimisers import Schedule
from dsplit.training.processes import Processes
from dsplit.training.rng import derived
from dsplit.training.state import Trainee, load_state
from dsplit.training.stopping import Signals, Stopped


@dataclass
class Loop:
    """What a run trains, on what, and how. clip: the largest norm of the gradient; 0 for any.

    resume: the folder of the state to go on from. workers: processes that read ahead.
    """

    objective: Objective
    reader: Reader
    order: Order
    schedule: Schedule
    run: RunFolder
    processes: Processes
    device: torch.device
    clip: float = 0.0
    resume: Path | None = None
    workers: int = 0

    def fit(self) -> Metrics:
        """Trains for `schedule.total` optimiser steps; gives back the metrics written.

        Raises TrainingError at the first loss or gradient that is not finite, before the weights are touched, and
        Stopped after a signal, with everything saved.
        """
        weights = self.objective.weights()
        optimizer, scheduler = self.schedule.build(list(weights.values()))
        accelerator = self.processes.accelerator
        model, optimizer = accelerator.prepare(self.objective, optimizer, device_placement=[False, False])
        trainee = Trainee(weights, optimizer, scheduler, accelerator.scaler, self.order.together)
        done = load_state(self.resume, trainee) if self.resume else 0
        if done:
            say(f"going on after step {done} of {self.schedule.total}, from {self.resume}")
        self.run.trainee = trainee
        batches = self._batches(done)
        with (
            Signals() as signals,
            Metrics(self.run.folder, done, writes=self.processes.main) as metrics,
            Progress("train", self.schedule.total, "steps", done=done) as progress,
        ):
            for number, step in enumerate(self.order.steps(self.schedule.total, done), start=done + 1):
                started = time.perf_counter()
                share = step.share(self.processes.rank, self.processes.world)
                read = [next(batches).to(self.device) for _ in share]
                self._seed(number)
                losses, stop = self._backward(model, read, share, step, signals.number)
                norm = self._checked(number, losses, step, list(weights.values()))
                lr = scheduler.get_last_lr()[0]
                optimizer.step()
                if not accelerator.optimizer_step_was_skipped:
                    scheduler.step()
                optimizer.zero_grad()
                loss, ids = float(losses.double().mean()), [self.order.ids[i] for b in step.batches for i, _ in b]
                seconds = time.perf_counter() - started
                metrics.write(
                    step=number, epoch=step.epoch, loss=loss, lr=lr, grad_norm=norm, rows_per_s=step.rows / seconds,
                    rows=ids,
                )  # fmt: skip
                self.run.after(number, step, stop)
                progress.advance(1, f"loss {loss:.4f}")
                if stop and number < self.schedule.total:
                    raise Stopped(stop, f"stopped after step {number}, all is saved; go on with --resume latest")
        return metrics

    def _seed(self, number: int) -> None:
        """For dropout, of the adapter or the model's own, the one thing that is not drawn per row."""
        rank = [self.processes.rank] if self.processes.rank else []
        torch.manual_seed(derived(self.order.seed, "step", number, *rank))

    def _batches(self, done: int) -> Iterator[Batch]:
        """This process's batches of every step in turn, read ahead by worker processes if there are any."""
        rank, world = self.processes.rank, self.processes.world
        steps = self.order.steps(self.schedule.total, done)
        visits = (visits for step in steps for visits, _ in step.share(rank, world))
        workers = min(self.workers, os.cpu_count() or 1)
        rows: Any = self.reader
        loader = DataLoader(rows, sampler=visits, batch_size=None, num_workers=workers, generator=torch.Generator())
        for batch in loader:
            if isinstance(batch, DsplitError):
                raise batch
            yield batch

    def _backward(
        self, model: Any, batches: Sequence[Batch], share: Sequence[Share], step: Step, signal: int
    ) -> tuple[torch.Tensor, int]:
        """Adds up the gradient of the mean loss over the rows of the step, of all processes.

        Gives back the loss of each row, (rows,), in the step's order, and the signal that any process got.
        """
        own = torch.zeros(len(share), self.order.batch_size + 1, dtype=torch.float32, device=self.device)
        own[0, -1] = signal
        scale = self.processes.world / step.rows  # the distributed model takes the mean over the processes
        for k, (batch, (_, weight)) in enumerate(zip(batches, share, strict=True)):
            with self.processes.accumulating(model, k == len(share) - 1):
                rows = model(batch)
                if not rows.requires_grad:
                    raise TrainingError("no adapted module takes part in the loss; choose other --targets")
                self.processes.accelerator.backward(rows.sum() * (weight * scale))
            own[k, : len(rows)] = rows.detach()
        everyone = self.processes.gathered(own)
        signals = everyone[:, 0, -1].max()
        losses = [
            everyone[b % self.processes.world, b // self.processes.world, : len(visits)]
            for b, visits in enumerate(step.batches)
        ]
        return torch.cat(losses), int(signals)

    def _checked(self, number: int, losses: torch.Tensor, step: Step, weights: list[torch.nn.Parameter]) -> float:
        """The gradient's norm before it is clipped. Raises TrainingError if it or a loss is not finite, naming rows."""
        accelerator = self.processes.accelerator
        if accelerator.scaler:
            accelerator.unscale_gradients()
        gradients = [w.grad for w in weights if w.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_([w for w in weights if w.grad is not None], self.clip, norm)
        *rows, gradient = torch.cat([losses.double(), norm.double().reshape(1)]).tolist()
        places = [self.reader.rows.place(i) for b in step.batches for i, _ in b] if not math.isfinite(sum(rows)) else []
        bad = [place for place, loss in zip(places, rows, strict=False) if not math.isfinite(loss)]
        if bad or (not math.isfinite(gradient) and not accelerator.scaler):  # a scaler skips such a step
            what = "the loss" if bad else "the gradient"
            where = bad or [self.reader.rows.place(i) for b in step.batches for i, _ in b]
            raise TrainingError(
                f"step {number}: {what} is not finite (NaN/Inf) on {', '.join(where)}; stopped before the weights "
                "were touched, checkpoints on disk are finite; lower --lr, or check that row"
            )
        return gradient
