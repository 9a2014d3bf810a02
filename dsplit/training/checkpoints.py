"""The run folder: checkpoints that are whole or absent, when they are due, and the settings that made them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsplit.errors import TrainingError
from dsplit.training.batches import Step
from dsplit.training.metrics import METRICS, PICTURE
from dsplit.training.saving import CHECKPOINT, Saver, put, remove
from dsplit.training.state import FOLDER as STATES
from dsplit.training.state import Trainee, save_state, states

RECIPE = "recipe.json"


def earlier_files(folder: Path) -> list[Path]:
    """What an earlier run left in `folder`: checkpoints, metrics, loss picture, recipe."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if CHECKPOINT.fullmatch(p.name) or p.name in (METRICS, PICTURE, RECIPE))


def refuse_earlier(folder: Path, overwrite: bool) -> None:
    """Raises TrainingError if `folder` holds an earlier run that may not be replaced.

    A run that died before its first step left nothing to lose, and does not count.
    """
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder}: is a file, not a folder; give another folder with --out")
    found = earlier_files(folder)
    precious = [p for p in found if CHECKPOINT.fullmatch(p.name) or (p.name == METRICS and p.stat().st_size)]
    if precious and not overwrite:
        names = ", ".join(p.name for p in found[:4]) + (" ..." if len(found) > 4 else "")
        raise TrainingError(
            f"{folder}: holds an earlier run ({names}); give another folder with --out, or --overwrite to replace it"
        )


@dataclass
class RunFolder:
    """Where a run saves, and when: every `save_steps` optimiser steps or every epoch; the last step once.

    saver: writes the checkpoints. keep: how many of them and of the states stay, the newest; None: all checkpoints, the
    newest state. writes: False in all processes but one. trainee: what the state is made of.
    """

    folder: Path
    saver: Saver
    total: int
    save_steps: int | None = None
    keep: int | None = None
    writes: bool = True
    trainee: Trainee | None = None
    saved: list[Path] = field(default_factory=list)

    def begin(self, recipe: Mapping[str, Any], *, anew: bool = True) -> None:
        """Writes the recipe; `anew`: removes the files of an earlier run, and those only."""
        if not self.writes:
            return
        if anew:
            shutil.rmtree(self.folder / STATES, ignore_errors=True)
            for path in earlier_files(self.folder):
                remove(path)
        put(self.folder / RECIPE, (json.dumps(recipe, indent=2, default=str) + "\n").encode())

    def after(self, number: int, step: Step, stop: int = 0) -> None:
        """Saves if a checkpoint is due after step `number` (from 1), or the run is about to `stop`."""
        last = number == self.total
        due = number % self.save_steps == 0 if self.save_steps is not None else step.ends_epoch
        if not self.writes or not (last or due or stop):
            return
        by_epoch = self.save_steps is None and (last or due)
        path = self.saver.save(self.folder, f"epoch-{step.epoch}" if by_epoch else f"step-{number}", number)
        self.saved = [earlier for earlier in self.saved if earlier != path] + [path]
        if self.trainee:
            save_state(self.folder, number, self.trainee)
            self._forget()

    def _forget(self) -> None:
        """Removes the states and checkpoints that are not to be kept."""
        for path in list(states(self.folder).values())[: -(self.keep or 1)]:
            shutil.rmtree(path, ignore_errors=True)
        if self.keep:  # those of an earlier part of the run too
            found = [path for path in earlier_files(self.folder) if CHECKPOINT.fullmatch(path.name)]
            for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)[: -self.keep]:
                remove(path)
            self.saved = [path for path in self.saved if path.exists()]
