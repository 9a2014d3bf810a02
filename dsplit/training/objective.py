"""From a batch to the loss of each row: the units of stage 2, the denoiser, and the task's own lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsplit.models.family import ModelFamily, Task
from dsplit.training.batches import Batch
from dsplit.training.denoiser import Denoiser, late, run_units
from dsplit.training.rng import Rng
from dsplit.units import RNG


class Objective(torch.nn.Module):
    """`objective(batch)` -> the loss of each row, (B,) fp32.

    A module that holds the trained components, so that a wrapper (DDP) around it sees all that is trained.
    components: those of stage 2. process: the noise process. options: training options by name; the task takes its own.
    posterior: whether latents are its `mean`, or a `sample` drawn here. dtype: what values are cast to, or None.
    """

    def __init__(
        self,
        family: ModelFamily,
        task: Task,
        components: Mapping[str, Any],
        trained: Sequence[str],
        process: Any,
        seed: int,
        options: Mapping[str, Any],
        posterior: str = "mean",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.family, self.task, self.components, self.process, self.seed = family, task, components, process, seed
        self.trained = torch.nn.ModuleDict({name: components[name] for name in trained})
        self.options = {name: options[name] for name in task.options}
        guided = (False, True) if task.negative_if else (False,)
        self.splits = {g: family.split(task, tuple(trained), negative=g, posterior=posterior) for g in guided}
        self.widest = self.splits[guided[-1]]
        self.units = {g: late(split.stage2) for g, split in self.splits.items()}

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name."""
        return {name: w for name, w in self.trained.named_parameters() if w.requires_grad}

    def forward(self, batch: Batch) -> torch.Tensor:
        first = {name: column[0] for name, column in batch.columns.items()}
        once, each = self.units[bool(self.task.negative_if and self.task.negative_if(first))]
        rng = Rng(self.seed, batch.ids, batch.visits)
        if self.dtype:
            batch = batch.cast(self.dtype)
        known = run_units(once, {**batch.columns, **batch.values, RNG: rng}, self.components)
        batch = replace(batch, values={**batch.values, **{o: known[o] for u in once for o in u.outputs}})
        denoise = Denoiser(self.family, each, self.components, known, self.process)
        return self.task.loss(denoise, batch, rng, **self.options)
