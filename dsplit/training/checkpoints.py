"""The run folder: checkpoints that are whole or absent, when they are due, and the settings that made them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsplit.cache.files import write_file
from dsplit.errors import CacheError, TrainingError
from dsplit.training.batches import Step
from dsplit.training.lora import state
from dsplit.training.lora_files import serialised
from dsplit.training.metrics import METRICS, PICTURE

RECIPE = "recipe.json"
CHECKPOINT = re.compile(r"(epoch|step)-(\d+)\.safetensors")


def earlier_files(folder: Path) -> list[Path]:
    """What an earlier run left in `folder`: LoRA files, metrics, loss picture, recipe."""
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
    """Where a run saves, and when: every `save_steps` optimiser steps or every epoch; the last step once."""

    folder: Path
    components: Mapping[str, Any]
    trained: Sequence[str]
    lora_format: str
    total: int
    save_steps: int | None = None
    saved: list[Path] = field(default_factory=list)

    def begin(self, recipe: Mapping[str, Any]) -> None:
        """Removes the files of an earlier run, and those only; writes the recipe."""
        for path in earlier_files(self.folder):
            path.unlink()
        self._put(RECIPE, (json.dumps(recipe, indent=2, default=str) + "\n").encode())

    def after(self, number: int, step: Step) -> None:
        """Saves if a checkpoint is due after step `number` (from 1)."""
        last = number == self.total
        if self.save_steps is not None:
            if last or number % self.save_steps == 0:
                self._save(f"step-{number}.safetensors", number)
        elif last or step.ends_epoch:
            self._save(f"epoch-{step.epoch}.safetensors", number)

    def _save(self, name: str, number: int) -> None:
        """Raises TrainingError if a weight is not finite, and leaves the folder as it is."""
        tensors, metadata = state(self.components, self.trained, self.lora_format)
        bad = [k for k, v in tensors.items() if not torch.isfinite(v).all()]
        if bad:
            raise TrainingError(
                f"step {number}: {len(bad)} of {len(tensors)} LoRA tensors are not finite (NaN/Inf), e.g. '{bad[0]}'; "
                f"'{name}' was not written; lower --lr"
            )
        self._put(name, serialised(tensors, metadata))
        self.saved.append(self.folder / name)

    def _put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        try:
            write_file(path, [data])
        except CacheError as error:
            reason = getattr(error.__cause__, "strerror", None) or error.__cause__
            raise TrainingError(f"{path}: cannot write it: {reason}; earlier checkpoints are kept") from error
