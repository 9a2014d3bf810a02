"""Plans stage 1: which values the rows want, under which keys, and which calls of which units make them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dsplit.cache.keys import call_key, output_key, text_key
from dsplit.cache.manifest import Entry
from dsplit.cache.together import rows_of
from dsplit.dataset.packed import Source
from dsplit.errors import Problem
from dsplit.models.family import ModelFamily, Task
from dsplit.units import Split, Unit

if TYPE_CHECKING:
    from dsplit.dataset import Row

AXES = ("prompt", "view")  # columns that may have several values in a row


@dataclass(frozen=True)
class Job:
    """A unit of stage 1 whose outputs are stored.

    before: the units that must run first for each row, since nobody stores what they make. stored: the outputs that
    cross to stage 2. read: the values that come from the store. columns: what the job reads from the data set.
    """

    unit: Unit
    before: tuple[Unit, ...]
    stored: tuple[str, ...]
    read: tuple[str, ...]
    columns: frozenset[str]

    @property
    def components(self) -> frozenset[str]:
        """The components that must be in memory together."""
        return frozenset(c for u in (*self.before, self.unit) for c in u.components)


@dataclass(frozen=True)
class Call:
    """One run of a job on the inputs of `row` (None: the empty prompt).

    keys: key per stored output. given: key per value that is read from the store.
    """

    key: str
    job: Job
    row: Row | None
    keys: Mapping[str, str]
    given: Mapping[str, str]

    @property
    def share(self) -> int:
        """A number that spreads calls evenly over processes, the same in each of them."""
        return int(self.key[:12], 16)


@dataclass(frozen=True)
class Plan:
    """entries: the rows as in the manifest. calls: every distinct call, by key. empty: the keys of the empty prompt."""

    entries: tuple[Entry, ...]
    calls: Mapping[str, Call]
    empty: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> frozenset[str]:
        """The keys of all values that this data set refers to."""
        return frozenset(key for call in self.calls.values() for key in call.keys.values())

    @cached_property
    def _users(self) -> Mapping[str, list[Entry]]:
        users: dict[str, list[Entry]] = {}
        for entry in self.entries:
            for key in entry.all_keys:
                users.setdefault(key, []).append(entry)
        return users

    def missing(self, present: Any) -> list[Call]:
        """The calls of which some value is not in `present`."""
        return [c for c in self.calls.values() if any(key not in present for key in c.keys.values())]

    def with_faults(self, problems: Mapping[str, Sequence[Problem]]) -> tuple[Entry, ...]:
        """The entries, those of rows that could not be encoded with the reason; `problems` by call key."""
        faults = {p.where: p.what for found in problems.values() for p in found}
        return tuple(replace(entry, fault=faults.get(entry.place, "")) for entry in self.entries)

    def using(self, call: Call) -> list[Entry]:
        """The rows that need a value of `call`."""
        found = {entry.id: entry for key in call.keys.values() for entry in self._users.get(key, [])}
        return list(found.values())


class Planner:
    """Makes the keys and calls of rows for one family, task and set of trained components."""

    def __init__(
        self,
        family: ModelFamily,
        task: Task,
        trainable: tuple[str, ...],
        posterior: str = "mean",
        encode_batch: int = 1,
    ) -> None:
        self.task, self.posterior, self.encode_batch, self._family = task, posterior, encode_batch, family
        self.trainable = trainable or family.trainable
        self.split = family.split(task, trainable, posterior=posterior)
        self._guided = self.split
        if task.negative_if:
            self._guided = family.split(task, trainable, negative=True, posterior=posterior)
        self.axes = {n: a for s in (self._guided, self.split) for n, a in axes_of(s).items()}
        self._jobs = {id(s): jobs_of(s) for s in (self.split, self._guided)}

    @property
    def components(self) -> dict[str, str]:
        """The components that stage 1 loads, each with a unit that needs it."""
        return {c: u.name for u in reversed(self.split.stage1) for c in u.components}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that stage 1 reads; of files among them, the bytes enter the keys."""
        return self._guided.stage1_columns

    def split_of(self, row: Row) -> Split:
        """The split that holds for `row`: with the negative prompt only if the row needs it."""
        return self._guided if self.task.negative_if and self.task.negative_if(row.columns) else self.split

    def plan(self, rows: Sequence[Row], files: Mapping[Source, str], components: Mapping[str, str], dtype: str) -> Plan:
        """The plan for `rows`, given the keys of their files and the digests of the components."""
        calls: dict[str, Call] = {}
        entries = []
        for row in rows:
            split = self.split_of(row)
            keys = {name: text_key(value) for name, value in row.columns.items() if name not in row.files}
            keys |= {name: files[path] for name, path in row.files.items() if path in files}
            keys |= {"size": text_key(row.size), "view": text_key(list(row.view))}
            wanted: dict[str, str] = {}
            for call in self._calls(split, keys, components, dtype, row):
                calls.setdefault(call.key, call)
                wanted |= call.keys
            crossing = {name: row.columns[name] for name in split.columns if name in row.columns}
            read = {name: keys[name] for name in split.stage1_columns if name in keys and name != "size"}
            entries.append(Entry(row.id, row.place, row.size, crossing, {n: [k] for n, k in wanted.items()}, read))
        empty: dict[str, str] = {}  # jobs that read the prompt alone: prompt dropout and guidance need them
        for call in self._calls(self.split, {"prompt": text_key("")}, components, dtype, None):
            calls.setdefault(call.key, call)
            empty |= call.keys
        return Plan(tuple(entries), calls, empty)

    def _calls(
        self, split: Split, columns: Mapping[str, str], components: Mapping[str, str], dtype: str, row: Row | None
    ) -> Iterator[Call]:
        keys, made = dict(columns), {}
        for unit in split.stage1:
            if all(name in keys for name in unit.inputs):
                rows = rows_of(unit, self._family, self.encode_batch)
                made[unit.name] = call_key(unit, keys, components, dtype, rows)
                keys |= {o: output_key(made[unit.name], unit, o) for o in unit.outputs}
        for job in self._jobs[id(split)]:
            if job.unit.name in made:
                stored = {name: keys[name] for name in job.stored}
                yield Call(made[job.unit.name], job, row, stored, {name: keys[name] for name in job.read})


def jobs_of(split: Split) -> list[Job]:
    """The jobs of a split, in an order in which each comes after those whose values it reads."""
    makers = {o: u for u in split.stage1 for o in u.outputs}
    jobs = []
    for unit in split.stage1:
        stored = tuple(o for o in unit.outputs if o in split.boundary)
        if stored:
            before, sources = _before(unit, makers, split.boundary)
            read = tuple(v for v in sources if v in split.boundary)
            jobs.append(Job(unit, before, stored, read, frozenset(v for v in sources if v not in makers)))
    return jobs


def axes_of(split: Split) -> dict[str, tuple[str, ...]]:
    """Per value that crosses to stage 2, and per column that does, those of `AXES` that it depends on, if any."""
    makers = {o: u for u in split.stage1 for o in u.outputs}
    columns = {v: set(_before(makers[v], makers, ())[1]) for v in split.boundary} | {v: {v} for v in split.columns}
    return {v: axes for v, read in columns.items() if (axes := tuple(axis for axis in AXES if axis in read))}


def ancestry(call: Call, split: Split) -> tuple[list[Unit], list[str]]:
    """All units that make the values of `call`, and the columns that they start from, whatever is stored between."""
    before, columns = _before(call.job.unit, {o: u for u in split.stage1 for o in u.outputs}, ())
    return [*before, call.job.unit], columns


def _before(unit: Unit, makers: Mapping[str, Unit], stored: Sequence[str]) -> tuple[tuple[Unit, ...], list[str]]:
    """The units to run before `unit`, in order, and the columns and stored values that they and it start from."""
    before: dict[str, Unit] = {}
    sources: dict[str, None] = {}
    for value in unit.inputs:
        maker = makers.get(value)
        if maker is None or value in stored:
            sources[value] = None
            continue
        earlier, found = _before(maker, makers, stored)
        before |= {u.name: u for u in (*earlier, maker)}
        sources |= dict.fromkeys(found)
    return tuple(before.values()), list(sources)


def groups(calls: Iterable[Call], files: Iterable[str]) -> list[list[list[Call]]]:
    """The calls as they are run: per set of components, per job; a job comes after those whose values it reads.

    Jobs that need none of the file columns `files` (captions) come first, so that the text encoder is gone before the
    pictures' turn.
    """
    jobs: dict[str, list[Call]] = {}
    for call in calls:
        jobs.setdefault(call.job.unit.name, []).append(call)
    makers = {value: batch[0].job for batch in jobs.values() for value in batch[0].job.stored}
    pictures = frozenset(files)

    def rank(job: Job) -> tuple[bool, int]:
        before = [rank(makers[value]) for value in job.read if value in makers]
        late = bool(job.columns & pictures) or any(b[0] for b in before)
        return late, 1 + max((b[1] for b in before), default=0)

    result: list[list[list[Call]]] = []
    for batch in sorted(jobs.values(), key=lambda batch: rank(batch[0].job)):
        job = batch[0].job
        earliest = max((k for k, g in enumerate(result) for b in g if set(b[0].job.stored) & set(job.read)), default=0)
        for group in result[earliest:]:
            if group[0][0].job.components == job.components:
                group.append(batch)
                break
        else:
            result.append([batch])
    return result
