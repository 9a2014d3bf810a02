"""`dsplit tasks`: families and tasks, and how each is split."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dsplit.commands.families import named_family, shape_names
from dsplit.commands.options import Given, takes
from dsplit.commands.resolve import build, merge, task_of
from dsplit.commands.result import show, size
from dsplit.errors import UnitError
from dsplit.recipe import ModelOptions, listed
from dsplit.shapes import DTYPE_BYTES, evaluate

if TYPE_CHECKING:
    from dsplit.models.family import ModelFamily, Task
    from dsplit.units import Split

FLOAT = "bfloat16"  # the run's dtype on the machines that dsplit is for
WIDTH = 80


@takes(ModelOptions, only=("model", "model_path", "task", "trainable", "hub"))
def tasks(given: Given) -> None:
    """List model families and tasks; with --model, show how each task is split.

    Sizes are for a typical row. No weights are loaded.
    """
    detailed = any(given.get(name) for name in ("model", "model_path", "task", "trainable"))
    show(given, lambda: overview(given), lambda result: "\n".join(_lines(result, detailed)))


def overview(given: Given) -> dict[str, Any]:
    """The --json object: every family with every task, or those that `given` (model, task, trainable) names."""
    from dsplit.models.registry import registry

    options = build(ModelOptions, merge(given))
    found = registry()
    families, configs = list(found.families.values()), dict[str, Any]()
    if options.model or options.model_path:
        families = [named_family(options)]
        configs = shape_names(options, families[0])
    wanted = [found.task(task_of("tasks", options.task)[0])] if options.task else list(found.tasks.values())
    trained = listed(options.trainable)
    described = []
    broken = [{"name": b.name, "reason": b.reason} for b in found.broken]
    for family in families:
        names = {**family.config, **family.typical, **configs}
        try:
            own = {t.name: describe(family, t, trained, names) for t in wanted if t.name in family.tasks}
        except UnitError as error:
            if given.get("model") or given.get("model_path") or trained:
                raise
            broken.append({"name": family.name, "reason": str(error)})  # a plugin's mistake hides no other family
            continue
        if own:
            described.append({"name": family.name, "tasks": own})
    return {"families": described, "broken": broken}


def describe(family: ModelFamily, task: Task, trained: tuple[str, ...], names: Mapping[str, Any]) -> dict[str, Any]:
    """One family's split for one task. names: what the shape formulas read."""
    split = family.split(task, trained)
    return {
        "verified": bool(family.tasks[task.name]),
        "stage1": [u.name for u in split.stage1],
        "stage2": [u.name for u in split.stage2],
        "boundary": [_tensor(split, value, names) for value in split.boundary] + [_column(c) for c in split.columns],
        "components": {"stage1": list(split.stage1_components), "stage2": list(split.stage2_components)},
        "offload": {f"stage{n}": list(family.offloaded(split, n)) for n in (1, 2)},
    }


def _tensor(split: Split, value: str, names: Mapping[str, Any]) -> dict[str, Any]:
    unit = split.maker(value)
    dtype = unit.dtypes.get(value, "float")
    dtype = FLOAT if dtype == "float" else dtype
    if value not in unit.shapes:
        raise UnitError(f"unit '{unit.name}' states no shape for '{value}'")
    shape = evaluate(unit.shapes[value], names)
    return {"name": value, "shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * DTYPE_BYTES[dtype]}


def _column(name: str) -> dict[str, Any]:
    """A column that crosses: it lies in the manifest, as text."""
    return {"name": name, "shape": [], "dtype": "column", "bytes": 0}


def _lines(result: Mapping[str, Any], detailed: bool) -> Iterable[str]:
    """The overview for people, at most 80 columns wide."""
    for family in result["families"]:
        if not detailed:
            yield family["name"]
        for name, task in family["tasks"].items():
            verified = "split verified by tests" if task["verified"] else "split not verified"
            if detailed:
                yield from _details(f"{family['name']}, {name}: {verified}", task)
            else:
                yield f"  {name:<16} {verified}"
    if not result["families"]:
        yield "no family supports this"
    for plugin in result["broken"]:
        yield from _wrap(f"broken plugin {plugin['name']}: ", plugin["reason"])
    if not detailed and result["families"]:
        yield "how a family is split: dsplit tasks --model NAME"


def _details(title: str, task: Mapping[str, Any]) -> Iterable[str]:
    yield title
    for stage in ("stage1", "stage2"):
        label = f"stage {stage[-1]}"
        yield from _wrap(f"  {label:<11}", ", ".join(task[stage]) or "nothing")
        yield from _wrap(f"  {'loads':<11}", ", ".join(task["components"][stage]) or "nothing")
        yield from _wrap(f"  {'never loads':<11}", ", ".join(task["offload"][stage]) or "nothing")
        if stage == "stage1":
            yield f"  boundary    {size(sum(b['bytes'] for b in task['boundary']))} for a typical row"
            for b in task["boundary"]:
                shape = "x".join(map(str, b["shape"]))
                amount = "in the manifest" if b["dtype"] == "column" else f"{b['dtype']}  {size(b['bytes'])}"
                yield f"    {b['name']:<22} {shape:<14} {amount}"


def _wrap(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{label} {text}", WIDTH, subsequent_indent=" " * min(len(label) + 1, 14), break_on_hyphens=False
    )
