"""Device and dtype by name, found without importing torch where that can be had."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from dsplit.errors import UsageError
from dsplit.models.load import DTYPES, pick_device, pick_dtype
from dsplit.recipe import ModelOptions


def device_and_dtype(options: ModelOptions) -> tuple[str, str]:
    """The device and the dtype that the options mean on this machine, as torch writes them.

    Raises UsageError for a device that is not there and for an unknown dtype.
    """
    if options.device == "cpu" or (options.device is None and _cpu_only()):
        if options.dtype is not None and options.dtype not in DTYPES:
            raise UsageError(f"unknown dtype '{options.dtype}'; use float32, bfloat16 or float16")
        return "cpu", DTYPES[options.dtype or "float32"]
    device = pick_device(options.device)
    return str(device), str(pick_dtype(options.dtype, device)).removeprefix("torch.")


def _cpu_only() -> bool:
    """True if the installed torch was built for no accelerator; says its small version module, read by itself."""
    spec = importlib.util.find_spec("torch")
    if sys.platform == "darwin" or spec is None or spec.origin is None:
        return False
    source = Path(spec.origin).with_name("version.py")
    version_spec = importlib.util.spec_from_file_location("_torch_version", source)
    if version_spec is None or version_spec.loader is None or not source.is_file():
        return False
    version = importlib.util.module_from_spec(version_spec)
    version_spec.loader.exec_module(version)
    return not any(getattr(version, name, None) for name in ("cuda", "hip", "rocm", "xpu"))
