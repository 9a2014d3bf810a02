"""Loads one component of a model, and picks device, dtype and thread count."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from dsplit.console import counted
from dsplit.errors import ModelError, UsageError
from dsplit.models.model import Model

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
    "fp16": "float16",
}  # fmt: skip


def load_component(model: Model, name: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    """The component as its real class, frozen, in eval mode, in `dtype` on `device`; tokenizers and schedulers plain.

    Reads only the component's own folder, never the network. Raises ModelError if it cannot be loaded or if its file
    lacks weights that the class needs (from_pretrained would fill them with random numbers).
    """
    component = model.family.component(name)
    part = model.part(name)
    cls = _import(component.cls)
    _no_bars()
    try:
        if component.weights:
            loaded = _with_weights(cls, part.folder, part.variant, dtype).to(device)
        else:
            loaded = cls.from_pretrained(part.folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        model.check([name])  # says it in words, where the files are to blame
        raise ModelError(f"{part.folder}: cannot be loaded as {component.cls}: {error}") from error
    return component.prepare(loaded) if component.prepare else loaded


def pick_device(text: str | None) -> torch.device:
    """The device called `text`, or the best there is; under a launcher, this process's own GPU.

    Raises UsageError for a device that this machine does not have.
    """
    import torch

    if text is None:
        text = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{text}'; use cpu, cuda, cuda:1 or mps") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"device '{text}' is not here: torch sees {counted(count, 'CUDA device')}; use --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device 'mps' is not here; use --device cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % count)
    return device


def pick_dtype(text: str | None, device: torch.device) -> torch.dtype:
    """The dtype called `text`; by default bfloat16 on CUDA, else float32. Raises UsageError for any other name."""
    import torch

    if text is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if text not in DTYPES:
        raise UsageError(f"unknown dtype '{text}'; use float32, bfloat16 or float16")
    return getattr(torch, DTYPES[text])


def set_threads(count: int | None) -> None:
    """Fixes torch's CPU threads; None leaves them. Raises UsageError below 1."""
    import torch

    if count is None:
        return
    if count < 1:
        raise UsageError(f"--threads {count}: at least 1 is needed")
    torch.set_num_threads(count)


def _with_weights(cls: Any, folder: Any, variant: str | None, dtype: torch.dtype) -> Any:
    loaded, info = cls.from_pretrained(
        folder, dtype=dtype, variant=variant, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{folder}: its weights lack {len(missing)} tensors of {cls.__name__}, e.g. '{missing[0]}'")
    return loaded.eval().requires_grad_(False)


def _no_bars() -> None:
    """Turns the libraries' own progress bars off; stderr is for dsplit's lines."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _import(path: str) -> Any:
    """The class at `path`, module and name. Raises ModelError if the installed libraries lack it."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"the class {path} is not installed ({error}); update {module.split('.')[0]}") from error
