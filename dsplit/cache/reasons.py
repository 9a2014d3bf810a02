"""Why values are encoded anew: which parts of their keys differ from those of the manifest that is to be replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from dsplit.cache.keys import code_version
from dsplit.cache.manifest import Entry, Manifest
from dsplit.cache.plan import Call, ancestry
from dsplit.cache.together import rows_of
from dsplit.cache.work import Work
from dsplit.units import Unit

EXAMPLES = 3
FIRST = "first run under this name"
LOST = "not in the cache: an earlier run ended early, or the value was removed or damaged"
NEW_ROW = "new row"
NEW_VALUE = "not part of the earlier plan"


@dataclass
class Reason:
    """values: how many values of `unit` are encoded because `changed` changed. rows: where some of them stand."""

    unit: str
    changed: tuple[str, ...]
    values: int = 0
    rows: list[str] = field(default_factory=list)


def reasons(work: Work, missing: Iterable[Call], old: Manifest | None) -> list[Reason]:
    """Why each of the `missing` calls has to be made; calls with equal reasons together, the most frequent first.

    old: what the cache says so far under the same name.
    """
    found: dict[tuple[str, tuple[str, ...]], Reason] = {}
    compare = _Comparison(work, old) if old else None
    for call in missing:
        users = work.plan.using(call)
        unit, changed = call.job.unit.identity, compare.changed(call, users) if compare else (FIRST,)
        reason = found.setdefault((unit, changed), Reason(unit, changed))
        reason.values += 1
        if len(reason.rows) < EXAMPLES:
            reason.rows.append(users[0].place if users else "the empty prompt")
    return sorted(found.values(), key=lambda r: (-r.values, r.unit, r.changed))


class _Comparison:
    """The plan of now against an earlier manifest."""

    def __init__(self, work: Work, old: Manifest) -> None:
        self._work, self._old = work, old
        self._files = {column.name for column in work.model.family.columns if column.kind == "file"}
        self._known = {key for row in old.rows for key in row.all_keys} | set(old.header["empty_prompt"].values())
        self._before = match(work.plan.entries, old.rows, self._files)
        self._shared: dict[str, list[str]] = {}

    def changed(self, call: Call, users: Sequence[Entry]) -> tuple[str, ...]:
        """The parts of the call's key that changed; or the one thing that says it all."""
        if all(key in self._known for key in call.keys.values()):
            return (LOST,)
        split = self._work.planner.split_of(call.row) if call.row else self._work.planner.split
        units, columns = ancestry(call, split)
        name = call.job.unit.name
        if name not in self._shared:
            self._shared[name] = [
                *(line for unit in units for line in self._code(unit)),
                *self._components({c for u in units for c in u.components}),
                *self._dtype(),
                *self._rows(units),
            ]
        if not call.row:
            return tuple(self._shared[name]) or (NEW_VALUE,)
        pairs = [(entry, self._before[entry.id]) for entry in users if entry.id in self._before]
        if not pairs:
            return (NEW_ROW,)
        return (*self._columns(*pairs[0], columns), *self._shared[name]) or (NEW_VALUE,)

    def _columns(self, entry: Entry, before: Entry, columns: Iterable[str]) -> list[str]:
        found = []
        for name in columns:
            if name == "size":
                if entry.size != before.size:
                    found.append("size")
            elif name == "view" and entry.size != before.size:
                continue  # the window moves with the size
            elif entry.inputs.get(name) != before.inputs.get(name):
                found.append(f"{name} (source bytes)" if name in self._files else name)
        return found

    def _code(self, unit: Unit) -> list[str]:
        before = self._old.header["units"].get(unit.identity, "").split()
        now, labels = code_version(unit).split(), [f"module of {unit.identity}", f"version of {unit.identity}"]
        if before and len(before) != len(now):
            return [f"library files of {unit.identity}"]
        found = [f"{label}: {b} -> {n}" for label, b, n in zip(labels, before, now, strict=False) if b != n]
        return found + [s for s, b, n in zip(unit.sources, before[2:], now[2:], strict=False) if b != n]

    def _components(self, names: Iterable[str]) -> list[str]:
        now, before = (m.header["model"]["files"] for m in (self._work.manifest, self._old))
        return [line for name in sorted(names) for line in _file_changes(name, now[name], before.get(name, {}))]

    def _dtype(self) -> list[str]:
        before = self._old.header["dtype"]
        return [f"dtype: {before} -> {self._work.dtype}"] if before != self._work.dtype else []

    def _rows(self, units: Iterable[Unit]) -> list[str]:
        family, before = self._work.model.family, self._old.header.get("encode_batch", 1)
        now = self._work.planner.encode_batch
        changed = any(rows_of(unit, family, before) != rows_of(unit, family, now) for unit in units)
        return [f"encode_batch: {before} -> {now}"] if changed else []


def match(rows: Iterable[Entry], old: Iterable[Entry], files: set[str]) -> dict[str, Entry]:
    """By id of a row, the old row that it was before it was edited.

    That is the one with the same id, else one with the same source files, else one at the same place with a part in
    common. Each old row is taken once.
    """
    rows = list(rows)
    left = {entry.id: entry for entry in old}
    found = {row.id: left.pop(row.id) for row in rows if row.id in left}

    def take(key: Any, agree: Any) -> None:
        waiting: dict[Any, list[Entry]] = {}
        for entry in reversed(left.values()):
            waiting.setdefault(key(entry), []).append(entry)
        for row in rows:
            if row.id not in found and (those := waiting.get(key(row))) and agree(row, those[-1]):
                found[row.id] = left.pop(those.pop().id)

    take(lambda entry: _only(entry.inputs, files), lambda row, _: bool(_only(row.inputs, files)))
    take(
        lambda entry: PurePath(entry.place).name,
        lambda row, before: bool(set(row.inputs.items()) & set(before.inputs.items())),
    )
    return found


def _only(inputs: Mapping[str, str], names: set[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, key) for name, key in inputs.items() if name in names))


def _file_changes(component: str, now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return [
        f"{component}/{name}" + ("" if name in now and name in before else " (new)" if name in now else " (gone)")
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    ]
