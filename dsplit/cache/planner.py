"""Plans stage 1: which values the rows want, under which keys, and which calls of which units make them. No torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsplit.cache.calls import NO_ROW, Calls, CallTable, KeySet, Present
from dsplit.cache.draft import Draft
from dsplit.cache.keys import CallKeys, output_part, text_key, value_key
from dsplit.cache.manifest import Entry, entry_line, number
from dsplit.cache.plan import AXES, Call, Job, axes_of, jobs_of, text_bytes, texts_of
from dsplit.cache.together import rows_of
from dsplit.dataset.packed import Source
from dsplit.dataset.rows import Choice
from dsplit.errors import Problem
from dsplit.models.family import ModelFamily, Task
from dsplit.units import Split, Unit

if TYPE_CHECKING:
    from dsplit.dataset import Row

FIRST: Sequence[Choice] = ({},)  # of a row without variants
Keyed = Collection[str] | KeySet
Keys = dict[str, list[str]]  # of columns and values of a row, per variant of the axes that they depend on


@dataclass(frozen=True)
class Plan:
    """entries: the rows as in the manifest. calls: every distinct call. empty: keys of the empty prompt's values."""

    entries: Draft
    calls: Calls
    empty: Mapping[str, str]

    def missing(self, present: Present) -> Calls:
        """The calls of which some value is not there."""
        return self.calls.without(present)

    def using(self, keys: Keyed) -> Iterator[tuple[int, set[str]]]:
        """The numbers of the rows that need a value with one of `keys`, and which of them; reads all rows."""
        for i, entry in enumerate(self.entries if keys else ()):
            if found := {key for key in entry.all_keys if key in keys}:
                yield i, found

    def makers(self, keys: Collection[str]) -> list[Call]:
        """The calls that make the values with these keys."""
        table = self.calls.table
        return [
            table.call(number) for number in self.calls.numbers if any(key in keys for key in table.value_keys(number))
        ]

    def spread(self, problems: Mapping[str, Sequence[Problem]]) -> dict[str, list[Problem]]:
        """The faults of calls, by the calls' keys: for each row that needs a value of the call."""
        makers = {key: call.key for call in self._of(problems) for key in call.keys.values()}
        found: dict[str, list[Problem]] = {key: [] for key in problems}
        for i, keys in self.using(makers):
            place = self.entries[i].place
            for call in {makers[key] for key in keys}:
                found[call] += [replace(problem, where=place) for problem in problems[call]]
        return {key: rows or list(problems[key]) for key, rows in found.items()}

    def with_faults(self, problems: Mapping[str, Sequence[Problem]]) -> Draft:
        """The entries, those of rows that could not be encoded with the reason; `problems` by call key."""
        faults = {p.where: p.what for found in problems.values() for p in found}
        return self.entries.changed(lambda entry: entry._replace(fault=faults.get(entry.place, "")))

    def without(self, problems: Collection[str]) -> Plan:
        """The plan without these calls, by their keys, and without the rows that need a value of them."""
        lost = {key for call in self._of(problems) for key in call.keys.values()}
        kept = self.entries.changed(lambda entry: None if any(key in lost for key in entry.all_keys) else entry)
        empty = {name: key for name, key in self.empty.items() if key not in lost}
        return Plan(kept, self.calls.where(lambda key: key not in problems), empty)

    def _of(self, keys: Collection[str]) -> Calls:
        return self.calls.where(lambda key: key in keys)


class Planner:
    """Makes the keys and calls of rows for one family, task and set of trained components.

    posterior: latents are its `mean` or a `sample`. encode_batch: rows per forward pass. axes: per value and crossing
    column, the columns with variants that it depends on, if any.
    """

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
        crossing = {*self._guided.boundary, *self._guided.columns, *self.split.boundary, *self.split.columns}
        known = {**axes_of(self._guided), **axes_of(self.split)}
        self.axes = {name: axes for name, axes in known.items() if name in crossing and axes}

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
        jobs: list[Job] = []
        texts = {column.name for column in self._family.columns_for(self.task) if column.kind == "text"}
        call_keys = functools.partial(self._call_keys, components, dtype)
        makers = {id(split): _Maker(split, jobs, texts, call_keys) for split in (self.split, self._guided)}
        table = CallTable(jobs, rows, self.axes)
        for i, row in enumerate(rows):
            split = self.split_of(row)
            maker = makers[id(split)]
            keys = column_keys(row, maker.columns, files)
            variants = {axis: len(row.variants[axis]) for axis in AXES if axis in row.variants}
            read = {name: some[0] for name, some in keys.items() if name != "size"}
            if variants:
                read |= {axis: text_key(list(row.variants[axis])) for axis in variants if axis in read}
            maker.add_calls(table, i, row, keys, variants)
            stored = {name: keys[name] for name in split.boundary if name in keys}
            entry = Entry(row.id, row.place, row.size, crossing(row, split.columns), stored, read, variants)
            table.entries.add(row.id, entry_line(entry))
            table.size_of.append(table.sizes.setdefault(row.size, len(table.sizes)))
        keys = {"prompt": [text_key("")]}
        makers[id(self.split)].add_calls(table, NO_ROW, None, keys, {})
        table.empty |= {name: keys[name][0] for name in self.split.boundary if name in keys}
        return Plan(table.entries, Calls(table, range(len(table.keys))), table.empty)

    def _call_keys(self, components: Mapping[str, str], dtype: str, unit: Unit) -> CallKeys:
        return CallKeys(unit, components, dtype, rows_of(unit, self._family, self.encode_batch))


class _Maker:
    """Makes the keys of what stage 1 of a split makes of a row. texts: columns that are texts. jobs: of the plan, to
    which those of the split are added."""

    def __init__(self, split: Split, jobs: list[Job], texts: Set[str], call_keys: Callable[[Unit], CallKeys]) -> None:
        self.columns = split.stage1_columns
        self._axes = {**{name: (name,) for name in AXES}, **axes_of(split)}
        own = {}
        for job in jobs_of(split):
            if job not in jobs:
                jobs.append(job)
            own[job.unit.name] = jobs.index(job), job.columns & texts
        alone = -1, frozenset[str]()  # a unit whose outputs are not stored
        self._units = [
            (
                unit,
                call_keys(unit),
                [(name, output_part(unit, name)) for name in unit.outputs],
                *own.get(unit.name, alone),
            )
            for unit in split.stage1
        ]

    def add_calls(self, table: CallTable, i: int, row: Row | None, keys: Keys, variants: Mapping[str, int]) -> None:
        """Adds the calls for the columns in `keys` to the table, and the keys of what they make to `keys`.

        variants: how many there are per axis that has several.
        """
        for unit, call_keys, outputs, job, texts in self._units:
            try:
                inputs = [keys[name] for name in unit.inputs]
            except KeyError:
                continue  # of the empty prompt
            if variants:
                choices: Sequence[Choice] = self._choices(unit, variants)
                made = [call_keys.of(self._inputs(unit, keys, variants, choice)) for choice in choices]
            else:
                choices, made = FIRST, [call_keys.of([some[0] for some in inputs])]
            for output, part in outputs:
                keys[output] = [value_key(call, part) for call in made]
            if job >= 0:
                for k, (call, choice) in enumerate(zip(made, choices, strict=True)):
                    table.add(call, job, i, k, _length(row, choice, texts) if row and texts else 0)

    def _inputs(self, unit: Unit, keys: Keys, variants: Mapping[str, int], choice: Choice) -> list[str]:
        """The keys of the unit's inputs for the variants chosen."""
        return [keys[name][number(self._axes.get(name, ()), variants, choice)] for name in unit.inputs]

    def _choices(self, unit: Unit, variants: Mapping[str, int]) -> list[Choice]:
        """The variants of what the unit depends on, in the order of their numbers."""
        axes = [axis for axis in self._axes[unit.outputs[0]] if axis in variants]
        numbers = itertools.product(*(range(variants[axis]) for axis in axes))
        return [dict(zip(axes, chosen, strict=True)) for chosen in numbers]


def column_keys(row: Row, columns: Sequence[str], files: Mapping[Source, str]) -> Keys:
    """The keys of those of `columns` that the row has; of each variant, where there are several."""
    found = {}
    for name in columns:
        if name in row.files:
            if key := files.get(row.files[name]):
                found[name] = [key]
        elif name == "size":
            found[name] = [_size_key(row.size)]
        elif name == "view":
            found[name] = [_view_key(*view) for view in row.variants.get("view", (row.view,))]
        elif name in row.variants:
            found[name] = [text_key(value) for value in row.variants[name]]
        elif name in row.columns:
            found[name] = [text_key(row.columns[name])]
    return found


def crossing(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    """What a manifest says of those of `columns` that the row has; `size` has its own place there."""
    known = {**row.columns, "view": row.view, **row.variants} if columns else {}
    return {name: known[name] for name in columns if name in known}


@functools.lru_cache(4096)
def _size_key(size: tuple[int, int]) -> str:
    return text_key(size)


@functools.lru_cache(4096)
def _view_key(left: int, top: int, flip: bool) -> str:
    return text_key([left, top, flip])


def _length(row: Row, choice: Choice, columns: Collection[str]) -> int:
    """The bytes of the longest of the row's texts in `columns`."""
    texts = texts_of(row.pick(choice) if choice else row, columns)
    return max(map(text_bytes, texts))
