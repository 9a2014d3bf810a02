"""The optimiser and the learning rate of each optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsplit.errors import UsageError


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
