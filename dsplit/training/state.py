"""What a run needs to go on exactly: weights, optimiser, schedule and counters, as safetensors and JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsplit.cache.files import write_file
from dsplit.errors import CacheError, TrainingError

FOLDER, NAME = "state", re.compile(r"step-(\d+)")
WEIGHTS, OPTIMIZER, COUNTERS = "weights.safetensors", "optimizer.safetensors", "state.json"
FORMAT = 1


@dataclass(frozen=True)
class Trainee:
    """What changes in training. weights: by name. scaler: accelerate's gradient scaler (fp16), or None.
    batches: those of a step, of all processes."""

    weights: Mapping[str, torch.nn.Parameter]
    optimizer: Any
    scheduler: Any
    scaler: Any = None
    batches: int = 1


def save_state(folder: Path, step: int, trainee: Trainee) -> Path:
    """Writes the state after optimiser step `step` below the run folder `folder`: whole, or not at all.

    Raises TrainingError where it cannot be written, or the optimiser keeps what is neither tensor nor plain value.
    """
    from safetensors.torch import save

    target = folder / FOLDER / f"step-{step}"
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    tensors, plain = _flat(trainee.optimizer.state_dict())
    counters = {
        "dsplit_state": FORMAT,
        "step": step,
        "batches": trainee.batches,
        "optimizer": plain,
        "scheduler": _plain("the schedule", _values(trainee.scheduler.state_dict())),
        "scaler": trainee.scaler.state_dict() if trainee.scaler else None,
    }
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write_file(beside / WEIGHTS, [save({n: w.detach().cpu().contiguous() for n, w in trainee.weights.items()})])
        write_file(beside / OPTIMIZER, [save(tensors)])
        write_file(beside / COUNTERS, [(json.dumps(counters, indent=1) + "\n").encode()])
        shutil.rmtree(target, ignore_errors=True)
        os.replace(beside, target)
    except (OSError, CacheError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise TrainingError(f"{target}: cannot write it: {error}; earlier checkpoints are kept") from error
    return target


def load_state(path: Path, trainee: Trainee) -> int:
    """The step of the state in the folder `path`, put into `trainee`. Raises TrainingError if it does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        counters = json.loads((path / COUNTERS).read_text(encoding="utf-8"))
        weights, tensors = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
        if counters["dsplit_state"] != FORMAT:
            raise ValueError("it was written by another version of dsplit")
        if counters["batches"] != trainee.batches:
            raise ValueError(f"batches per step: saved {counters['batches']}, requested {trainee.batches}")
        _check_fit(path, weights, trainee.weights)
        with torch.no_grad():
            for name, weight in trainee.weights.items():
                weight.copy_(weights[name])
        trainee.optimizer.load_state_dict(_whole(tensors, counters["optimizer"]))
        trainee.scheduler.load_state_dict(counters["scheduler"])
        if trainee.scaler and counters["scaler"]:
            trainee.scaler.load_state_dict(counters["scaler"])
        return int(counters["step"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TrainingError(f"{path}: cannot go on from it ({error}); choose another state with --resume") from error


def step_of(path: Path) -> int:
    """The optimiser step after which the state in the folder `path` was saved. Raises TrainingError."""
    try:
        return int(json.loads((path / COUNTERS).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: cannot go on from it ({error}); choose another state with --resume") from error


def states(folder: Path) -> dict[int, Path]:
    """The whole states below the run folder `folder`, by step."""
    found = {}
    for path in (folder / FOLDER).glob("step-*"):
        if (match := NAME.fullmatch(path.name)) and (path / COUNTERS).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def find_state(resume: str, folder: Path) -> Path:
    """The folder of the state that --resume names: `latest`, a run folder, or a state. Raises TrainingError."""
    place = folder if resume == "latest" else Path(resume)
    if (place / COUNTERS).is_file():
        return place
    found = states(place)
    if not found:
        raise TrainingError(f"--resume {resume}: {place / FOLDER} holds no state to go on from; start without --resume")
    return found[max(found)]


def _check_fit(path: Path, saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    differing = [
        f"  {name}: saved {_shape(saved.get(name))}, requested {_shape(own.get(name))}"
        for name in sorted({*saved, *own})
        if _shape(saved.get(name)) != _shape(own.get(name))
    ]
    if differing:
        more = f"\n  and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError("other weights are trained:\n" + "\n".join(differing[:5]) + more)


def _shape(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else "x".join(map(str, tensor.shape))


def _flat(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimiser's state as tensors by `number.name`, and everything else as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{name}"] = value.detach().cpu().contiguous()
            else:
                values.setdefault(str(number), {})[name] = value
    groups = [{k: v for k, v in group.items() if not isinstance(v, torch.Tensor)} for group in state["param_groups"]]
    for k, group in enumerate(state["param_groups"]):  # capturable optimisers keep the rate in a tensor
        tensors |= {f"group.{k}.{name}": v.detach().cpu() for name, v in group.items() if isinstance(v, torch.Tensor)}
    return tensors, _plain("the optimiser", {"state": values, "param_groups": groups})


def _whole(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
    groups = [dict(group) for group in plain["param_groups"]]
    for group in groups:
        group |= {name: tuple(v) for name, v in group.items() if name == "betas"}  # JSON has no tuples
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        if first == "group":
            number, _, key = rest.partition(".")
            groups[int(number)][key] = tensor
        else:
            state.setdefault(int(first), {})[rest] = tensor
    return {"state": state, "param_groups": groups}


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without its functions, which are built anew."""
    return {name: value for name, value in state.items() if name != "lr_lambdas"} | (
        {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {}
    )


def _plain(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TrainingError(f"{what} keeps something that cannot be saved ({error}); choose another one") from error
