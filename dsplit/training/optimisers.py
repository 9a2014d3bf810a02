"""The optimiser and the learning rate of each optimiser step."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from dsplit.errors import UsageError
from dsplit.recipe import listed

KNOWN = {  # what --optimizer may name beside a dotted path -> the class, and the extra that brings it
    "adamw": ("torch.optim.AdamW", ""),
    "adamw8bit": ("bitsandbytes.optim.AdamW8bit", "bitsandbytes"),
    "adafactor": ("torch.optim.Adafactor", ""),
    "prodigy": ("prodigyopt.Prodigy", "prodigy"),
    "muon": ("dsplit.training.muon.Muon", ""),
}


@dataclass(frozen=True)
class Schedule:
    """The optimiser by name, with its options, and the learning rate over its steps: a schedule of diffusers.

    optimizer: one of KNOWN, or a dotted path. arguments: what its class takes beside weights, rate and decay.
    """

    name: str
    lr: float
    weight_decay: float
    warmup: int
    total: int
    optimizer: str = "adamw"
    arguments: str | None = None

    def build(self, weights: Sequence[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        """The optimiser and its scheduler, which counts optimiser steps whatever the number of processes.

        Raises UsageError for arguments that the optimiser does not take, and for what the schedule does not allow.
        """
        from diffusers.optimization import get_scheduler

        make, arguments = optimizer_class(self.optimizer), parsed(self.arguments)
        try:
            optimizer = make(weights, **{"lr": self.lr, "weight_decay": self.weight_decay, **arguments})
        except (TypeError, ValueError) as error:
            raise UsageError(f"--optimizer {self.optimizer}: {error}; change --optimizer-args") from error
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


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class that --optimizer names. Raises UsageError for a name that is none, or is not installed."""
    path, extra = KNOWN.get(name.lower(), (name, ""))
    module, _, cls = path.rpartition(".")
    if not module:
        near = get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]}?" if near else "or state a class by its dotted path"
        raise UsageError(f"--optimizer: unknown '{name}'; choose from {', '.join(KNOWN)}; {hint}")
    try:
        found = getattr(importlib.import_module(module), cls)
    except ImportError as error:
        remedy = f"pip install 'dsplit[{extra}]'" if extra else "install it, or mend the path"
        raise UsageError(f"--optimizer {name}: {error}; {remedy}") from error
    except AttributeError as error:
        raise UsageError(f"--optimizer {name}: {module} has no {cls}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UsageError(f"--optimizer {name}: it is no torch.optim.Optimizer")
    return found


def parsed(arguments: str | None) -> dict[str, Any]:
    """`betas=[0.9,0.99],eps=1e-6` -> keyword arguments; values are JSON where they can be, else texts.

    Raises UsageError for a part without a name.
    """
    found: dict[str, Any] = {}
    for part in _parts(listed(arguments)):
        name, sign, text = part.partition("=")
        if not sign or not name.strip().isidentifier():
            raise UsageError(f"--optimizer-args '{part}': write name=value, comma-separated")
        try:
            value = json.loads(text.lower() if text in ("True", "False") else text)
        except ValueError:
            value = text
        found[name.strip()] = tuple(value) if isinstance(value, list) else value
    return found


def _parts(pieces: Iterable[str]) -> list[str]:
    """The pieces, those of a list put together again: its commas separate no arguments."""
    parts: list[str] = []
    for piece in pieces:
        if parts and parts[-1].count("[") > parts[-1].count("]"):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts
