"""`dsplit train --resume`: the options of the run that goes on, and what may differ from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsplit.errors import TrainingError, UsageError
from dsplit.recipe import OUT, DataOptions, ModelOptions, TrainOptions

RECIPE = "recipe.json"
GROUPS = ("model", "data", "train")
FREE = {  # what does not change what is learnt up to the step, and so may be stated anew
    *("resume", "out", "overwrite", "keep", "save_steps", "max_steps", "epochs", "workers", "num_processes"),
    *("device", "threads", "hub"),
}


def run_folder(train: TrainOptions) -> Path:
    """The folder of the run that --resume names."""
    named = Path(train.resume or "")
    if train.resume in (None, "latest"):
        return Path(train.out or OUT)
    folder = named if (named / RECIPE).is_file() else named.parent.parent
    if train.out and Path(train.out).absolute() != folder.absolute():
        raise UsageError(f"--resume {train.resume}: that run is in {folder}, not in --out {train.out}")
    return folder


def saved_options(folder: Path) -> dict[str, Any]:
    """The options of the run in `folder`. Raises TrainingError if there is none."""
    try:
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        values = {name: value for group in GROUPS for name, value in recipe[group].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise TrainingError(
            f"--resume: {folder} holds no run to go on with ({error}); start without --resume"
        ) from error
    return {name: value for name, value in values.items() if name not in ("resume", "overwrite", "num_processes")}


def refuse_changes(folder: Path, saved: Mapping[str, Any], now: tuple[ModelOptions, DataOptions, TrainOptions]) -> None:
    """Raises UsageError naming every option that the user states otherwise than the run in `folder` had it."""
    stated = {name: value for group in now for name, value in vars(group).items() if name not in FREE}
    differing = [
        f"  {name}: saved {saved.get(name)}, requested {value}"
        for name, value in stated.items()
        if value not in (None, []) and value != saved.get(name)
    ]
    if differing:
        lines = "\n".join(differing)
        raise UsageError(f"--resume: the run in {folder} was made otherwise\n{lines}\nleave these options out")
