"""The header of a manifest: everything that made the values, for people to read and for later runs to compare."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dsplit.cache.keys import code_version, digest_of
from dsplit.cache.plan import Planner
from dsplit.models.model import Model
from dsplit.recipe import DataOptions, ModelOptions, stated

LIBRARIES = ("dsplit", "torch", "diffusers", "transformers", "safetensors", "pillow", "numpy")


def header_of(
    model: Model,
    planner: Planner,
    parts: Mapping[str, Mapping[str, str]],
    empty: Mapping[str, str],
    options: tuple[ModelOptions, DataOptions],
    device: str,
    dtype: str,
) -> dict[str, Any]:
    """The header as plain values; `check` and `rows` are added when it is written.

    parts: per component the digests of its files.
    """
    model_options, data_options = options
    return {
        "family": model.family.name,
        "task": planner.task.name,
        "trainable": list(planner.trainable),
        "dtype": dtype,
        "device": device,
        "threads": model_options.threads,
        "model": {
            "name": model.name,
            "components": {name: digest_of(files) for name, files in parts.items()},
            "files": {name: dict(files) for name, files in parts.items()},
        },
        "units": {unit.name: code_version(unit) for unit in planner.split.stage1},
        "values": list(planner.split.boundary),
        "columns": list(planner.split.columns),
        "empty_prompt": dict(empty),
        "data": stated(data_options),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
