"""Where training starts from: the LoRA of a file instead of a new one, taken over as a whole or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsplit.console import say
from dsplit.errors import TrainingError, UsageError
from dsplit.training.lora import Adapter, tails
from dsplit.training.lora_files import State, alphas, read, settings
from dsplit.training.lora_fit import refuse_unfit


@dataclass(frozen=True)
class Start:
    """The LoRA in `path` as diffusers' keys, with the rank and the alpha that all its modules have."""

    path: Path
    state: State
    settings: Mapping[str, Any]
    rank: int
    alpha: float


def read_start(path: Path, rank: int | None, alpha: float | None) -> Start:
    """The LoRA to start from; rank, alpha: what the user states, None to take over the file's.

    Raises TrainingError for a file that holds no LoRA of one rank and one alpha, UsageError if the user states others.
    """
    state, metadata = read(path)
    ranks = {float(tensor.shape[0]) for key, tensor in state.items() if ".lora_A." in key}
    found = _single(path, "rank", ranks, rank), _single(path, "alpha", set(alphas(state, metadata).values()), alpha)
    return Start(path, state, settings(metadata), int(found[0]), found[1])


def _single(path: Path, name: str, found: set[float], stated: float | None) -> float:
    if len(found) != 1:
        several = ", ".join(f"{value:g}" for value in sorted(found))
        raise TrainingError(f"--init-lora {path}: its modules differ in {name} ({several}); a run has one for all")
    (value,) = found
    if stated is not None and not math.isclose(stated, value, rel_tol=1e-6):
        raise UsageError(f"--{name} {stated:g}, but --init-lora {path} has {name} {value:g}; leave --{name} out")
    return value


def check_start(start: Start, skeletons: Mapping[str, torch.nn.Module], plan: Mapping[str, Adapter]) -> None:
    """Raises ModelError or UsageError unless the file holds exactly the modules that the run adapts; loads nothing."""
    refuse_unfit(start.path, start.state, start.settings, skeletons, list(skeletons))
    own = {f"{name}.{module}" for name, adapter in plan.items() for module in adapter.modules}
    theirs = {key.partition(".lora_")[0] for key in start.state}
    odd = [f"'{sorted(own - theirs)[0]}' is not in the file"] if own - theirs else []
    odd += [f"'{sorted(theirs - own)[0]}' is in the file alone"] if theirs - own else []
    if odd:
        targets = ",".join(tails([module.partition(".")[2] for module in sorted(theirs)]))
        raise UsageError(
            f"--init-lora {start.path}: it adapts {len(theirs)} modules, this run {len(own)}: {'; '.join(odd)}; "
            f"state its own targets: --targets {targets}"
        )


def load_start(start: Start, components: Mapping[str, Any]) -> None:
    """Puts the file's weights in place of the new ones, which `inject` made; `check_start` has seen that they fit."""
    from peft import set_peft_model_state_dict

    for name in {key.partition(".")[0] for key in start.state}:
        weights = {k.removeprefix(f"{name}."): v for k, v in start.state.items() if k.startswith(f"{name}.")}
        result: Any = set_peft_model_state_dict(components[name], weights, adapter_name="default")
        unmatched = result.unexpected_keys
        if unmatched:
            raise TrainingError(f"--init-lora {start.path}: peft does not know {len(unmatched)} keys: {unmatched[0]}")
    count = len(start.state)
    say(f"{start.path}: {count} of {count} keys loaded")
