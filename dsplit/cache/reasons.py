"""Why values are encoded anew: which parts of their keys differ from those of the manifest that is to be replaced."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dsplit.cache.calls import NO_ROW, Calls, KeySet
from dsplit.cache.earlier import Earlier, Match
from dsplit.cache.keys import code_version
from dsplit.cache.manifest import Entry
from dsplit.cache.together import rows_of
from dsplit.cache.work import Work
from dsplit.units import Unit

EXAMPLES = 3
FIRST = "first run under this name"
LOST = "not in the cache: an earlier run ended early, or the value was removed or damaged"
NEW_ROW = "new row"
LABELS = {"view": "view (--crops, --flip)"}
NEW_VALUE = "not part of the earlier plan"


@dataclass
class Reason:
    """values: how many values of `unit` are encoded because `changed` changed. rows: where some of them stand."""

    unit: str
    changed: tuple[str, ...]
    values: int = 0
    rows: list[str] = field(default_factory=list)


def reasons(work: Work, missing: Calls, old: Earlier | None) -> list[Reason]:
    """Why each of the `missing` calls has to be made; calls with equal reasons together, the most frequent first.

    old: what the cache says so far under the same name.
    """
    found: dict[tuple[str, tuple[str, ...]], Reason] = {}
    compare = _Comparison(work, missing, old) if old else None
    table = missing.table
    for number in missing.numbers:
        unit, changed = table.job(number).unit.identity, compare.changed(number) if compare else (FIRST,)
        reason = found.setdefault((unit, changed), Reason(unit, changed))
        reason.values += 1
        if len(reason.rows) < EXAMPLES:
            i = table.row_of[number]
            reason.rows.append("the empty prompt" if i == NO_ROW else table.entries[i].place)
    return sorted(found.values(), key=lambda r: (-r.values, r.unit, r.changed))


class _Comparison:
    """The plan of now against an earlier manifest."""

    def __init__(self, work: Work, missing: Calls, old: Earlier) -> None:
        self._work, self._old, self._table = work, old, missing.table
        self._files = {column.name for column in work.model.family.columns if column.kind == "file"}
        self._before = Match(self._table.entries, old, self._files)
        self._shared: dict[str, list[str]] = {}
        self._later = self._later_users(missing)

    def changed(self, number: int) -> tuple[str, ...]:
        """The parts of the key of this call that changed; or the one thing that says it all."""
        table, job = self._table, self._table.job(number)
        if self._lost(number):
            return (LOST,)
        name = job.unit.name
        if name not in self._shared:
            self._shared[name] = [
                *(line for unit in job.lineage for line in self._code(unit)),
                *self._components({c for u in job.lineage for c in u.components}),
                *self._dtype(),
                *self._rows(job.lineage),
            ]
        i = table.row_of[number]
        if i == NO_ROW:
            return tuple(self._shared[name]) or (NEW_VALUE,)
        i = self._later.get(number, i)
        before = self._before[i]
        if before is None:
            return (NEW_ROW,)
        columns = self._columns(table.entries[i], self._old[before], job.sources)
        return (*columns, *self._shared[name]) or (NEW_VALUE,)

    def _lost(self, number: int) -> bool:
        return all(key in self._old.known for key in self._table.value_keys(number))

    def _later_users(self, missing: Calls) -> dict[int, int]:
        """Of calls whose first row is new, the first row that is not, if there is one."""
        table, open_, numbers = self._table, KeySet(), array("I")
        for number in missing.numbers:
            i = table.row_of[number]
            if i != NO_ROW and self._before[i] is None and not self._lost(number):
                open_.add(table.value_keys(number)[0])
                numbers.append(number)
        found: dict[int, int] = {}
        for i, keys in self._work.plan.using(open_):
            if self._before[i] is not None:
                for key in keys:
                    found.setdefault(numbers[open_.find(key) or 0], i)
        return found

    def _columns(self, entry: Entry, before: Entry, columns: Iterable[str]) -> list[str]:
        found = []
        for name in columns:
            if name == "size":
                if entry.size != before.size:
                    found.append("size")
            elif name == "view" and entry.size != before.size and not self._windows_changed():
                pass  # it follows from the size
            elif entry.inputs.get(name) != before.inputs.get(name):
                found.append(f"{name} (source bytes)" if name in self._files else LABELS.get(name, name))
        return found

    def _windows_changed(self) -> bool:
        """True if --flip or --crops are not what they were."""
        now, before = (m.header["data"] for m in (self._work.manifest, self._old))
        return any(now.get(name) != before.get(name) for name in ("flip", "crops"))

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


def _file_changes(component: str, now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return [
        f"{component}/{name}" + ("" if name in now and name in before else " (new)" if name in now else " (gone)")
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    ]
