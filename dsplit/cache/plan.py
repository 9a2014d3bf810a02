"""What stage 1 runs: the jobs of a split, calls of them, and what is in memory together. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsplit.units import Split, Unit

if TYPE_CHECKING:
    from dsplit.dataset import Row

AXES = ("prompt", "view")  # columns that may have several values in a row


@dataclass(frozen=True)
class Job:
    """A unit of stage 1 whose outputs are stored.

    before: the units that must run first for each row, since nobody stores what they make. stored: the outputs that
    cross to stage 2. read: the values that come from the store. columns: what the job reads from the data set. lineage,
    sources: all units that make its values, and the columns that they start from, whatever is stored between.
    """

    unit: Unit
    before: tuple[Unit, ...]
    stored: tuple[str, ...]
    read: tuple[str, ...]
    columns: frozenset[str]
    lineage: tuple[Unit, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The columns with variants that its values depend on."""
        return axes_among(self.sources)

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
    def texts(self) -> list[str]:
        """The texts that it reads from the data set."""
        row = self.row
        return texts_of(row, self.job.columns) if row else [""]


def jobs_of(split: Split) -> list[Job]:
    """The jobs of a split, in an order in which each comes after those whose values it reads."""
    makers = {o: u for u in split.stage1 for o in u.outputs}
    jobs = []
    for unit in split.stage1:
        stored = tuple(o for o in unit.outputs if o in split.boundary)
        if stored:
            before, sources = _before(unit, makers, split.boundary)
            read = tuple(v for v in sources if v in split.boundary)
            columns = frozenset(v for v in sources if v not in makers)
            lineage, start = _before(unit, makers, ())
            jobs.append(Job(unit, before, stored, read, columns, (*lineage, unit), tuple(start)))
    return jobs


def axes_of(split: Split) -> dict[str, tuple[str, ...]]:
    """Per value of stage 1, stored or not, and per column that crosses, those of `AXES` that it depends on."""
    makers = {o: u for u in split.stage1 for o in u.outputs}
    return {v: axes_among(_before(u, makers, ())[1]) for v, u in makers.items()} | {
        name: axes_among([name]) for name in split.columns
    }


def axes_among(columns: Iterable[str]) -> tuple[str, ...]:
    """Those of `AXES` that are among `columns`, in their order."""
    found = set(columns)
    return tuple(axis for axis in AXES if axis in found)


def texts_of(row: Row, columns: Iterable[str]) -> list[str]:
    """The texts of these columns in `row`; paths of files are none."""
    values = (row.columns.get(name) for name in columns if name not in row.files)
    return [value for value in values if isinstance(value, str)] or [""]


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


def text_bytes(text: str) -> int:
    """The length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def groups(jobs: Mapping[str, Sequence[Call]], files: Iterable[str]) -> list[list[Sequence[Call]]]:
    """The calls, given per job, as they are run: per set of components; a job comes after those whose values it reads.

    Jobs that need none of the file columns `files` (captions) come first, so that the text encoder is gone before the
    pictures' turn.
    """
    makers = {value: batch[0].job for batch in jobs.values() for value in batch[0].job.stored}
    pictures = frozenset(files)

    def rank(job: Job) -> tuple[bool, int]:
        before = [rank(makers[value]) for value in job.read if value in makers]
        late = bool(job.columns & pictures) or any(b[0] for b in before)
        return late, 1 + max((b[1] for b in before), default=0)

    result: list[list[Sequence[Call]]] = []
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
