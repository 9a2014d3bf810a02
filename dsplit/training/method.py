"""How components are trained: by a LoRA, or with all of their weights. Each is checked before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dsplit.console import counted, say
from dsplit.errors import UsageError
from dsplit.recipe import TrainOptions
from dsplit.training.job import Job
from dsplit.training.lora import Adapter, adapters, inject, skeleton
from dsplit.training.lora_start import Start, check_start, load_start
from dsplit.training.saving import ComponentFolders, LoraFiles, Saver

OF_LORA = ("rank", "alpha", "targets", "init_lora", "lora_dropout")


class Method(Protocol):
    """dtype: what the trained components and all that they read are loaded in; None: as everything else."""

    @property
    def dtype(self) -> torch.dtype | None: ...

    def begin(self, components: Mapping[str, Any]) -> Saver:
        """Makes the loaded components trainable, and gives back what saves them."""


@dataclass(frozen=True)
class Lora:
    """plan: the modules of each trained component. start: the file to go on from."""

    plan: Mapping[str, Adapter]
    start: Start | None
    train: TrainOptions
    dtype: torch.dtype | None = None

    def begin(self, components: Mapping[str, Any]) -> Saver:
        train, plan = self.train, self.plan
        weights = inject(
            components, plan, int(train.rank or 0), float(train.alpha or 0), train.seed, train.lora_dropout
        )
        if train.targets:
            counts = (f"{entry} {n}" for adapter in plan.values() for entry, n in adapter.counts.items())
            say(f"--targets, modules matched: {', '.join(counts)}")
        adapted = ", ".join(f"{counted(len(a.modules), 'module')} of {n}" for n, a in plan.items())
        count, dtype = sum(w.numel() for w in weights), str(weights[0].dtype).removeprefix("torch.")
        say(f"LoRA: {adapted}; rank {train.rank}, alpha {train.alpha:g}, {count:,} weights in {dtype}")
        if self.start:
            load_start(self.start, components)
        return LoraFiles(components, tuple(plan), train.lora_format)


@dataclass(frozen=True)
class Full:
    """trained: the components of which every weight is trained, in fp32 whatever the model's dtype."""

    trained: tuple[str, ...]
    dtype: torch.dtype | None = torch.float32

    def begin(self, components: Mapping[str, Any]) -> Saver:
        for name in self.trained:
            components[name].requires_grad_(True)
        counts = ", ".join(f"{sum(w.numel() for w in components[n].parameters()):,} of {n}" for n in self.trained)
        say(f"full fine-tuning: all weights, {counts}, in float32")
        return ComponentFolders(components, self.trained)


def method_of(job: Job, train: TrainOptions, start: Start | None) -> Method:
    """What the options ask for. Raises UsageError for targets that match nothing, and a LoRA that does not fit."""
    skeletons = {name: skeleton(job.model, name) for name in job.trained}
    if train.full:
        return Full(job.trained)
    plan = adapters(skeletons, train.targets, job.family.lora_targets, job.family.trainable)
    if start:
        check_start(start, skeletons, plan)
    return Lora(plan, start, train)


def refuse_mixture(train: TrainOptions) -> None:
    """Raises UsageError if options of a LoRA are stated for full fine-tuning."""
    stated = [f"--{name.replace('_', '-')}" for name in OF_LORA if getattr(train, name)]
    if train.full and stated:
        raise UsageError(f"--full trains all weights and makes no LoRA; leave out {', '.join(stated)}")
