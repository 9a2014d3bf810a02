"""The plugin registry: the families and tasks that installed distributions offer (entry-point group `dsplit`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

import pluggy

from dsplit import hookspecs
from dsplit.errors import UsageError
from dsplit.models.family import ModelFamily, Task

DEFAULT_TASK = "sft"
Thing = TypeVar("Thing", ModelFamily, Task)


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Registry:
    """Families and tasks by name, and the plugins that failed to load."""

    families: Mapping[str, ModelFamily]
    tasks: Mapping[str, Task]
    broken: tuple[BrokenPlugin, ...]

    def family(self, name: str) -> ModelFamily:
        """The family called `name`; raises UsageError with the nearest names."""
        return _pick(self.families, name, "model family", self.broken)

    def task(self, name: str | None) -> Task:
        """The task called `name`, the default one for None; raises UsageError with the nearest names."""
        return _pick(self.tasks, name or DEFAULT_TASK, "task", self.broken)


@functools.cache
def registry() -> Registry:
    """All families and tasks of the installed plugins; a broken plugin is listed and harms no other."""
    families: dict[str, ModelFamily] = {}
    tasks: dict[str, Task] = {}
    broken: list[BrokenPlugin] = []
    for point in sorted(entry_points(group="dsplit"), key=_built_ins_first):
        try:
            manager = pluggy.PluginManager("dsplit")
            manager.add_hookspecs(hookspecs)
            manager.register(point.load(), name=point.name)
            manager.check_pending()
            new_families = _named(manager.hook.dsplit_register_families(), ModelFamily, families)
            new_tasks = _named(manager.hook.dsplit_register_tasks(), Task, tasks)
            if not new_families and not new_tasks:
                raise ValueError("it registers no family and no task")
        except (Exception, SystemExit) as error:  # any fault of a stranger's module must stay its own
            broken.append(BrokenPlugin(f"{point.name} ({point.value})", f"{type(error).__name__}: {error}"))
            continue
        families |= new_families
        tasks |= new_tasks
    return Registry(families, tasks, tuple(broken))


def _built_ins_first(point: EntryPoint) -> tuple[bool, str]:
    """The order of loading: no other plugin can take a built-in's name."""
    return point.dist is None or point.dist.name != "dsplit", point.name


def _named(results: list, kind: type[Thing], taken: Mapping[str, Thing]) -> dict[str, Thing]:
    """The registered objects by name; raises where one has another type or a name that is taken."""
    named: dict[str, Thing] = {}
    for thing in (t for result in results for t in result):
        if not isinstance(thing, kind):
            raise TypeError(f"it registers {thing!r}, which is no {kind.__name__}")
        if thing.name in taken or thing.name in named:
            raise ValueError(f"it registers '{thing.name}', a name that is taken")
        named[thing.name] = thing
    return named


def _pick(things: Mapping[str, Thing], name: str, kind: str, broken: tuple[BrokenPlugin, ...]) -> Thing:
    if name in things:
        return things[name]
    near = get_close_matches(name, things, n=3) or sorted(things)
    message = f"unknown {kind} '{name}'; known: {', '.join(near)}"
    if broken:
        from dsplit.console import counted  # loads rich, which `dsplit tasks` can do without

        message += f" ({counted(len(broken), 'broken plugin')}: see `dsplit tasks`)"
    raise UsageError(message)
