"""What a checkpoint is: a LoRA file, or the trained components as diffusers folders. Whole, or not there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dsplit.cache.files import temporary_name, write_file
from dsplit.errors import CacheError, TrainingError
from dsplit.training.lora import state
from dsplit.training.lora_files import serialised

CHECKPOINT = re.compile(r"(epoch|step)-(\d+)(\.safetensors)?")


class Saver(Protocol):
    """Writes checkpoints. `save(folder, "step-3", 3)` gives back the path written, or raises TrainingError."""

    def save(self, folder: Path, name: str, step: int) -> Path: ...


@dataclass(frozen=True)
class LoraFiles:
    """`step-3.safetensors`: the LoRA of the trained components, in one of the three layouts."""

    components: Mapping[str, Any]
    trained: Sequence[str]
    layout: str

    def save(self, folder: Path, name: str, step: int) -> Path:
        """Raises TrainingError if a weight is not finite, and leaves the folder as it is."""
        path = folder / f"{name}.safetensors"
        tensors, metadata = state(self.components, self.trained, self.layout)
        refuse_not_finite(tensors.items(), "LoRA tensors", path, step)
        put(path, serialised(tensors, metadata))
        return path


@dataclass(frozen=True)
class ComponentFolders:
    """`step-3/transformer/`: the trained components, as `from_pretrained(..., subfolder="transformer")` loads them."""

    components: Mapping[str, Any]
    trained: Sequence[str]

    def save(self, folder: Path, name: str, step: int) -> Path:
        """Raises TrainingError if a weight is not finite, and leaves the folder as it is."""
        path = folder / name
        beside = temporary_name(path)
        for component in self.trained:
            refuse_not_finite(self.components[component].named_parameters(), f"weights of {component}", path, step)
        try:
            shutil.rmtree(beside, ignore_errors=True)
            for component in self.trained:
                self.components[component].save_pretrained(beside / component)
            remove(path)
            os.replace(beside, path)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise TrainingError(f"{path}: cannot write it: {error}; earlier checkpoints are kept") from error
        return path


def refuse_not_finite(tensors: Iterable[tuple[str, torch.Tensor]], what: str, path: Path, step: int) -> None:
    """Raises TrainingError naming a tensor that holds NaN or infinity."""
    every = list(tensors)
    bad = [name for name, tensor in every if not torch.isfinite(tensor).all()]
    if bad:
        raise TrainingError(
            f"step {step}: {len(bad)} of {len(every)} {what} are not finite (NaN/Inf), e.g. '{bad[0]}'; "
            f"'{path.name}' was not written; lower --lr"
        )


def put(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all. Raises TrainingError."""
    try:
        write_file(path, [data])
    except CacheError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise TrainingError(f"{path}: cannot write it: {reason}; earlier checkpoints are kept") from error


def remove(path: Path) -> None:
    """Takes away a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
