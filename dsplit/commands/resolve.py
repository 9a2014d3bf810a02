"""Command line > dsplit.toml > defaults, resolved into the option groups of a command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

from dsplit.commands.options import Given, value_type
from dsplit.commands.reference import BARE
from dsplit.errors import UsageError
from dsplit.recipe import DataOptions, ModelOptions
from dsplit.toml_file import NAME, read_toml

Group = TypeVar("Group")
CACHE = "cache"  # the folder of the cache where nothing names it
NOTHING: Mapping[str, Any] = {}
WEIGHTS = ("model_path", "model_id_with_origin_paths", "model_paths")
REPLACES = {  # a stated option -> the options of weaker layers that would win over it, or contradict it
    "model_path": ("model_id_with_origin_paths", "model_paths"),
    "model_id_with_origin_paths": ("model_paths",),
    "model_paths": ("model_id_with_origin_paths",),
    "resolution": ("width", "height"),
    "width": ("resolution",),
    "height": ("resolution",),
    "max_pixels": ("resolution", "width", "height"),
    "epochs": ("max_steps",),
}
SUFFIXES = {"data_process": "cache", "train": "train"}  # of the reference's --task, and the command that does it


def resolve(
    command: str,
    given: Given,
    group: type[Group],
    folder: Path | None = None,
    saved: Mapping[str, Any] = NOTHING,
) -> tuple[ModelOptions, DataOptions, Group]:
    """The options of a command: what `given` states, else dsplit.toml in `folder`, else `saved`, else the defaults.

    Raises UsageError for a value that its option does not allow, wherever it stands.
    """
    sections = read_toml(folder or Path())
    cache = sections["cache"]
    values = merge(saved, sections["model"], sections["data"], sections.get(command, {}), given)
    stage = ""
    if isinstance(values.get("task"), str):
        values["task"], stage = task_of(command, values["task"])
    if command == "train" and stage == "train":
        values.setdefault("from_cache", BARE)
    _place_base_path(values, given)
    if values.get("from_cache") == "":
        raise UsageError("--from-cache: an empty name; leave it out to take the cache folder of dsplit.toml")
    if values.get("from_cache") == BARE:
        values["from_cache"] = cache.get("out", CACHE)
    if command in ("train", "validate"):
        values.setdefault("name", cache.get("name", "default"))
    return build(ModelOptions, values), build(DataOptions, values), build(group, values)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """What `layers` state together, the weakest first: a later way of saying the same replaces an earlier one.

    Across layers, what excludes each other is in REPLACES. The last stated of --model and --model-path gives the
    weights; a --model that only names a family leaves those that another layer names.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        said = [name for name, value in layer.items() if value not in (None, "")]
        dropped = {old for name in said for old in REPLACES.get(name, ()) if old not in layer}
        if "model" in said and not _is_family(layer["model"]):
            dropped |= {name for name in WEIGHTS if name not in layer}
            if "model_path" in said and said.index("model_path") < said.index("model"):
                dropped.add("model_path")
        values = {k: v for k, v in (values | dict(layer)).items() if k not in dropped}
    return values


def _is_family(name: Any) -> bool:
    from dsplit.models.registry import registry

    return name in list(registry().families)


def _place_base_path(values: dict[str, Any], given: Given) -> None:
    """Puts the reference's --dataset_base_path where it belongs: the cache in stage 2, else the data set."""
    path = values.pop("dataset_base_path", None)
    cache = values.get("from_cache")
    if path is None:
        return
    if cache is None:
        values["data"] = path
    elif cache in (BARE, path) or "from_cache" not in given:
        values["from_cache"] = path
    else:
        raise UsageError(f"--from-cache {cache} and --dataset-base-path {path} both name the cache; give one of them")


def task_of(command: str, task: str) -> tuple[str, str]:
    """The task and the stage that the reference's suffix names (`sft:train` -> `sft`, `train`; `sft` -> `sft`, ``).

    Raises UsageError where the suffix is the other stage's, or none.
    """
    base, colon, suffix = task.partition(":")
    if not colon:
        return base, ""
    if suffix not in SUFFIXES:
        raise UsageError(f"--task {task}: unknown stage '{suffix}'; write {base}, {base}:data_process or {base}:train")
    right = SUFFIXES[suffix]
    if command in SUFFIXES.values() and command != right:
        remedy = "dsplit cache" if right == "cache" else "dsplit train --from-cache"
        raise UsageError(f"`dsplit {command}` cannot do --task {task}; use `{remedy} --task {base}`")
    return base, suffix


def build(group: type[Group], values: Mapping[str, Any]) -> Group:
    """The group with those of `values` that it has; raises UsageError for a wrong type, choice or range."""
    known = {f.name: f for f in fields(group)}  # type: ignore[arg-type]
    return group(**{n: _checked(known[n], v) for n, v in values.items() if n in known})


def _checked(field: Field, value: Any) -> Any:
    kind = value_type(field)
    name = "--" + field.name.replace("_", "-")
    if kind is float and type(value) is int:
        value = float(value)
    if kind == list[str]:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise UsageError(f"{name}: {value!r} is no list of texts")
    elif value is not None and type(value) is not kind:
        raise UsageError(f"{name}: {value!r} in {NAME} should be {kind.__name__}")
    if kind is float and value is not None and not math.isfinite(value):
        raise UsageError(f"{name}: {value} is no finite number")
    choices, minimum = field.metadata["choices"], field.metadata["minimum"]
    if choices and value is not None and value not in choices:
        raise UsageError(f"{name}: unknown '{value}'; choose from {', '.join(choices)}")
    if minimum is not None and value is not None and not value >= minimum:
        raise UsageError(f"{name}: {value} is below {minimum}, the smallest allowed")
    return value
