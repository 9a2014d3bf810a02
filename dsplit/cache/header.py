"""The header of a manifest: everything that made the values, for people to read and for later runs to compare."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsplit.cache.keys import below, code_version, digest_of, file_digest
from dsplit.cache.planner import Planner
from dsplit.errors import CacheError
from dsplit.models.model import Model
from dsplit.recipe import DataOptions, ModelOptions, stated

LIBRARIES = ("dsplit", "torch", "diffusers", "transformers", "safetensors", "pillow", "numpy")
KINDS: dict[str, type] = {  # of what later runs read
    "family": str,
    "task": str,
    "trainable": list,
    "dtype": str,
    "posterior": str,
    "units": dict,
    "columns": list,
    "axes": dict,
    "empty_prompt": dict,
    "data": dict,
    "rows": int,
}


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
        "posterior": planner.posterior,
        "device": device,
        "threads": model_options.threads,
        "encode_batch": planner.encode_batch,
        "model": {
            "name": model.name,
            "components": {name: digest_of(files) for name, files in parts.items()},
            "files": {name: dict(files) for name, files in parts.items()},
            "sizes": {name: _sizes(model, name) for name in parts},
        },
        "units": {unit.name: code_version(unit) for unit in planner.split.stage1},
        "values": list(planner.split.boundary),
        "columns": list(planner.split.columns),
        "axes": {name: list(axes) for name, axes in planner.axes.items()},
        "empty_prompt": dict(empty),
        "data": stated(data_options),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Raises CacheError unless the header of the manifest at `path` says all that training reads in it."""
    model = header.get("model", {})
    good = all(isinstance(header.get(name), kind) for name, kind in KINDS.items())
    good = good and all(isinstance(name, str) for list_ in ("trainable", "columns") for name in header[list_])
    good = good and all(isinstance(version, str) for version in header["units"].values())
    good = good and isinstance(model, dict) and isinstance(model.get("name"), str)
    good = good and _is_table(model.get("files"), str) and _is_table(model.get("sizes"), int)
    if not good:
        raise CacheError(f"{path}: its first line is not what dsplit writes; run `dsplit cache` again")
    if not header["rows"]:
        raise CacheError(f"{path}: has no rows; run `dsplit cache` again")


def _is_table(value: Any, kind: type) -> bool:
    """True for `{component: {file: kind}}`."""
    if not isinstance(value, dict) or not all(isinstance(files, dict) for files in value.values()):
        return False
    return all(isinstance(entry, kind) for files in value.values() for entry in files.values())


def model_differences(header: Mapping[str, Any], model: Model) -> list[str]:
    """`vae/config.json: cached 1f0c..., requested 93aa...`, per file of `model` that is not as it made the cache.

    Weight files are compared by their size, without opening them; all others by their bytes. Stage 2 needs neither, so
    what is absent on either side does not count.
    """
    found = []
    for name, files in header["model"]["files"].items():
        if name not in model.parts:
            continue
        for path in model.files(name):
            file = below(path, model.parts[name].folder)
            before: str = files.get(file, "")
            size = header["model"]["sizes"].get(name, {}).get(file)
            with contextlib.suppress(OSError):
                if path.suffix == ".safetensors":
                    before, now = (f"{size} bytes" if size is not None else ""), f"{path.stat().st_size} bytes"
                else:
                    now = file_digest(path) if before else ""
                if before and before != now:
                    found.append(f"{name}/{file}: cached {before}, requested {now}")
    return found


def _sizes(model: Model, name: str) -> dict[str, int]:
    folder = model.parts[name].folder
    return {below(path, folder): path.stat().st_size for path in model.files(name)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
