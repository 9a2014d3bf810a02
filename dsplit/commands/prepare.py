"""`dsplit prepare`: a run folder, its data set checked, its weights fetched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.commands.families import named_family, needed_components, shape_names
from dsplit.commands.options import Given, takes
from dsplit.commands.resolve import resolve
from dsplit.commands.result import show, size
from dsplit.commands.template import template
from dsplit.console import counted
from dsplit.errors import ModelError, UsageError
from dsplit.recipe import DataOptions, ModelOptions, PrepareOptions, listed
from dsplit.toml_file import NAME, PATHS, PERHAPS_PATHS

if TYPE_CHECKING:
    from dsplit.models.model import Model

Origin = tuple[str, Path]  # a repo, and the folder that its files go to
ALONE = ("verify", "demo", "check")  # each is the whole job


@takes(ModelOptions, DataOptions, PrepareOptions)
def prepare(given: Given) -> None:
    """Make a run folder: check the data set, fetch the weights, write dsplit.toml.

    Fetches only what is missing or damaged. --dataset fetches a data set; --check, --verify and --demo do only that.
    """
    if len(both := [n for n in ALONE if given.get(n)]) > 1:
        raise UsageError(f"--{both[0]} and --{both[1]} are two jobs; do them one after the other")
    show(given, lambda: _prepare(given), _text)


def _prepare(given: Given) -> dict[str, Any]:
    if given.get("verify"):
        return verify(Path(given["verify"]))
    if given.get("demo"):
        from dsplit.demo import write_demo

        write_demo(Path(given["demo"]))
        return {"demo": given["demo"]}
    folder = Path(given.get("out") or ".")
    model, data, options = resolve("prepare", given, PrepareOptions, folder)
    if options.stage not in (None, 1, 2):
        raise UsageError(f"--stage {options.stage}: there are two stages, 1 and 2")
    sources = (model.model, model.model_path, model.model_id_with_origin_paths, model.model_paths)
    if options.check:
        if not (data.data or data.metadata):
            raise UsageError("--check: name the data set by --data, --metadata or both")
    elif not any((*sources, data.data, data.metadata, options.dataset)):
        raise UsageError("nothing to prepare: give --model, --data or both; --demo FOLDER writes an example")
    result: dict[str, Any] = {}
    if options.dataset:
        from dsplit.models.fetch import fetch_dataset

        target = Path(options.local_dir) if options.local_dir else None
        target = fetch_dataset(options.dataset, hub=model.hub, include=options.include, local_dir=target)
        result["dataset"] = str(target)
        if not {"model", "data", "metadata", "out"} & set(given):
            return result
    if options.check:
        return result | check(model, data)
    from dsplit.cache.files import claimed

    with claimed(folder):
        return result | _run_folder(folder, given, model, data, options)


def _run_folder(
    folder: Path, given: Given, model: ModelOptions, data: DataOptions, options: PrepareOptions
) -> dict[str, Any]:
    """Checks the data, fetches the weights and writes dsplit.toml, in this order."""
    from dsplit.models.model import MODELS

    origin, model = source(model, options)
    result = check(model, data) if data.data or data.metadata else {}
    if model.model or model.model_path:
        result["weights"] = weights(origin, model, options.stage)
    names = {f.name for group in (ModelOptions, DataOptions) for f in fields(group)}
    stated = {n: v for n, v in given.items() if n in names}
    if origin and (origin[1] != MODELS / origin[0] or folder.resolve() != Path.cwd()):
        stated["model_path"] = str(origin[1])  # else the name alone finds ./models/REPO
    return result | {"toml": write_toml(folder, stated, overwrite=options.overwrite)}


def verify(folder: Path) -> dict[str, Any]:
    """Checks every weight file below `folder` without loading any; raises ModelError with all faults."""
    from dsplit.console import warn
    from dsplit.models import weights

    for note in weights.notes(folder) if folder.exists() else ():
        warn(str(note))
    if found := weights.faults(folder):
        raise ModelError("\n".join([f"{folder}: {counted(len(found), 'fault')}", *(f"  {p}" for p in found)]))
    return {"verified": str(folder)}


def source(model: ModelOptions, options: PrepareOptions) -> tuple[Origin | None, ModelOptions]:
    """The repo to fetch from and the folder for it (None: nothing is to be fetched), and the model, its index there."""
    from dsplit.models.fetch import fetch_model
    from dsplit.models.locate import find_place
    from dsplit.models.places import offline

    text = model.model_path or model.model
    if not text or not options.fetch or options.check or model.model_id_with_origin_paths:
        return None, model
    place = find_place(text, model.hub)
    folder = options.local_dir if not options.dataset else None
    if folder and not place.repo:
        raise UsageError(f"--local-dir {folder}: {text} is a folder, there is nothing to fetch")
    if not place.repo or (offline() and model.hub == "huggingface"):
        return None, model
    origin = place.repo, Path(folder) if folder else place.folder
    if folder or not (place.family or (place.folder / "model_index.json").is_file()):
        fetch_model(place.repo, hub=model.hub, components=(), local_dir=origin[1])
    return origin, replace(model, model_path=folder) if folder else model


def check(model: ModelOptions, data: DataOptions) -> dict[str, Any]:
    """Reads the data set wholly, no model: rows, buckets, encodes needed, and the size of the cache.

    Raises DataError with the faults of all rows.
    """
    from dsplit.cache.estimate import value_bytes
    from dsplit.cache.keys import key_of
    from dsplit.cache.planner import Planner
    from dsplit.console import warn
    from dsplit.dataset import read_dataset
    from dsplit.models.registry import registry

    family = named_family(model)
    planner = Planner(family, registry().task(model.task), listed(model.trainable), model.posterior or "mean")
    found = read_dataset(data, family.columns_for(planner.task), family.size_factor, decode=True)
    for problem in found.warnings:
        warn(str(problem))
    for problem in found.skipped:
        warn(f"left out: {problem}")
    # equal pictures are told apart only by hashing their bytes, which stage 1 does: here a path stands for them
    files = {path: key_of(str(path)) for row in found.rows for path in row.files.values()}
    dtype = model.dtype or "bfloat16"
    calls = planner.plan(found.rows, files, dict.fromkeys(planner.components, ""), dtype).calls
    return {
        "family": family.name,
        "rows": len(found.rows),
        "skipped": len(found.skipped),
        "warnings": len(found.warnings),
        "buckets": {f"{w}x{h}": n for (w, h), n in Counter(r.size for r in found.rows).most_common()},
        "encodes": dict(calls.counts()),
        "bytes": sum(value_bytes(calls, shape_names(model, family), dtype).values()),
        "dtype": dtype,
    }


def weights(origin: Origin | None, model: ModelOptions, stage: int | None) -> dict[str, str]:
    """The folder of each component that the stage needs (None: both), without faults.

    origin: compared with what is here first; missing and wrong files are fetched. Raises UsageError or ModelError for
    what is lacking or damaged.
    """
    from dsplit.models.fetch import fetch_model
    from dsplit.models.locate import locate

    family = named_family(model)
    units = needed_components(family, model, stage)
    if origin:
        fetch_model(origin[0], hub=model.hub, components=list(units), local_dir=origin[1])
    found: Model = locate(model, hub=model.hub)
    found.require([c for c, unit in units.items() if unit], units)
    present = [c for c in units if found.has(c)]
    found.check(present)
    return {c: str(found.part(c).folder) for c in present}


def write_toml(folder: Path, stated: Mapping[str, Any], *, overwrite: bool) -> str:
    """Writes `folder`/dsplit.toml with the stated options, their paths made to start there; gives back its path.

    One that is there is left as it is unless `overwrite`.
    """
    from dsplit.cache.files import write_file
    from dsplit.console import warn

    path = folder / NAME
    if path.exists() and not overwrite:
        if stated:
            names = ", ".join(f"--{n.replace('_', '-')}" for n in stated)
            warn(f"{path} exists and is left as it is; {names} are not written into it (--overwrite replaces it)")
        return str(path)
    sections = {
        section: {f.name: _seen_from(folder, f.name, stated[f.name]) for f in fields(group) if f.name in stated}
        for section, group in (("model", ModelOptions), ("data", DataOptions))
    }
    write_file(path, [template(sections).encode()])
    return str(path)


def _seen_from(folder: Path, name: str, value: Any) -> Any:
    """A path seen from `folder`; absolute ones, and names of families and repos, stay as they are."""
    is_path = name in PATHS or (name in PERHAPS_PATHS and Path(value).exists())
    if not is_path or Path(value).is_absolute():
        return value
    return Path(os.path.relpath(value, folder)).as_posix()


def _text(result: Mapping[str, Any]) -> str:
    lines = []
    if "verified" in result:
        lines.append(f"{result['verified']}: every weight file is complete")
    if "demo" in result:
        lines.append(f"{result['demo']}: the demo; in it, run dsplit cache, dsplit train --from-cache, dsplit validate")
    if "dataset" in result:
        lines.append(f"data set: {result['dataset']}")
    if "rows" in result:
        left_out = f", {result['skipped']} left out" if result["skipped"] else ""
        shown = f"{counted(result['rows'], 'row')} in {counted(len(result['buckets']), 'bucket')}{left_out}"
        lines.append(f"{shown}, for {result['family']}")
        lines += [f"  {bucket}: {n}" for bucket, n in result["buckets"].items()]
        encodes = ", ".join(f"{unit} {n}" for unit, n in result["encodes"].items())
        lines.append(f"to encode: {encodes}; about {size(result['bytes'])} of cache in {result['dtype']}")
    lines += [f"{component}: {folder}" for component, folder in result.get("weights", {}).items()]
    if "toml" in result:
        lines.append(f"settings: {result['toml']}")
    return "\n".join(lines)
