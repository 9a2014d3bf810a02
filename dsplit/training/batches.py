"""Which rows each step sees, in what order and as which variant, and how rows of different length become one batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dsplit.dataset.rows import Choice
from dsplit.errors import DsplitError, TrainingError
from dsplit.shapes import ragged_axis
from dsplit.training.rng import chance, sort_key, variant
from dsplit.units import Split

Visit = tuple[int, int]  # row number, visit
Share = tuple[Sequence[Visit], float]  # a batch, and its weight: 0 for one that only keeps a process busy
FIRST: Choice = {}  # the first variant of everything


class Rows(Protocol):
    """What training reads; CachedRows and LiveRows are two of them.

    variants: how many variants row `i` has, per axis that has several (`{"prompt": 3, "view": 2}`). columns, values: as
    they are with the variants chosen; an axis that `choice` leaves out has its first, `None` is the empty prompt.
    """

    @property
    def ids(self) -> Sequence[str]: ...
    def place(self, i: int) -> str: ...
    def group(self, i: int) -> Hashable: ...
    def variants(self, i: int) -> Mapping[str, int]: ...
    def columns(self, i: int, choice: Choice = FIRST) -> dict[str, Any]: ...
    def values(self, i: int, choice: Choice = FIRST) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Batch:
    """Rows of one bucket: `batch["latents"]` is a tensor (B, ...), `batch["seed"]` a list of B.

    values: by name, with the batch axis. columns: by name, lists. ids, visits, places: of each row.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, list]
    ids: Sequence[str]
    visits: Sequence[int]
    places: Sequence[str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.columns[name]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        return replace(self, values={k: v.to(device, non_blocking=True) for k, v in self.values.items()})

    def cast(self, dtype: torch.dtype) -> Batch:
        """The same batch with its floating values in `dtype`."""
        return replace(self, values={k: v.to(dtype) if v.is_floating_point() else v for k, v in self.values.items()})


@dataclass(frozen=True)
class Step:
    """One optimiser step: its batches, its epoch (from 0), whether it is the last of the epoch."""

    batches: Sequence[Sequence[Visit]]
    epoch: int
    ends_epoch: bool

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))

    def share(self, rank: int, world: int) -> list[Share]:
        """The batches of process `rank` of `world`; all get as many, so that none waits for another.

        A process for which none is left takes the step's first once more, with weight 0.
        """
        shares: list[Share] = [(visits, 1.0) for visits in self.batches[rank::world]]
        missing = math.ceil(len(self.batches) / world) - len(shares)
        return shares + [(self.batches[0], 0.0)] * missing


@dataclass(frozen=True)
class Order:
    """The order of rows: every row `repeat` times per epoch, in batches of one bucket; nothing is dropped.

    A visit has its place by (seed, row id, visit), so that a row more or less does not move the others. What a bucket
    cannot fill forms a smaller batch. A step takes `accumulation` batches per process, the last one of an epoch those
    that are left.
    """

    ids: Sequence[str]
    buckets: Sequence[Hashable]  # of each row
    batch_size: int = 1
    repeat: int = 1
    accumulation: int = 1
    seed: int = 0
    world: int = 1

    def batches(self, epoch: int) -> list[list[Visit]]:
        """All batches of an epoch; each stands where the order has its first row."""
        visits = [(i, epoch * self.repeat + r) for r in range(self.repeat) for i in range(len(self.ids))]
        visits.sort(key=lambda v: sort_key(self.seed, "order", self.ids[v[0]], v[1]))
        full: list[list[Visit]] = []
        filling: dict[Hashable, list[Visit]] = {}
        for row, visit in visits:
            batch = filling.get(self.buckets[row])
            if batch is None or len(batch) == self.batch_size:
                batch = filling[self.buckets[row]] = []
                full.append(batch)
            batch.append((row, visit))
        return full

    def counts(self) -> dict[Hashable, tuple[int, int]]:
        """Per bucket: rows, and batches per epoch."""
        rows = Counter(self.buckets)
        return {b: (n, math.ceil(n * self.repeat / self.batch_size)) for b, n in rows.items()}

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(sum(batches for _, batches in self.counts().values()) / self.together)

    @property
    def together(self) -> int:
        """The batches of a step, of all processes."""
        return self.accumulation * self.world

    def steps(self, total: int, done: int = 0) -> Iterator[Step]:
        """The steps after the first `done`, up to the step `total`, epoch after epoch."""
        each = self.steps_per_epoch
        while done < total:
            epoch = done // each
            batches = self.batches(epoch)
            for start in range(done % each * self.together, len(batches), self.together):
                if done == total:
                    return
                done += 1
                stop = start + self.together
                yield Step(batches[start:stop], epoch, stop >= len(batches))


def buckets(rows: Rows, group_by: Sequence[str]) -> list[Hashable]:
    """The bucket of each row: its size, and the columns that a batch must have in common."""
    found: dict[Hashable, Hashable] = {}  # equal buckets are one object: there may be a million rows
    result = []
    for i in range(len(rows.ids)):
        columns = rows.columns(i) if group_by else {}
        bucket = (rows.group(i), *(columns[name] for name in group_by))
        result.append(found.setdefault(bucket, bucket))
    return result


def describe(bucket: Hashable, group_by: Sequence[str]) -> str:
    """`64x96`, `64x64 num_inference_steps=4`."""
    assert isinstance(bucket, tuple)
    size, *columns = bucket
    name = "x".join(map(str, size)) if isinstance(size, tuple) else str(size)
    return " ".join([name, *(f"{k}={v}" for k, v in zip(group_by, columns, strict=True))])


def ragged_axes(split: Split) -> dict[str, int]:
    """The ragged axis of every boundary value that has one, counted without the batch axis."""
    shapes = {value: u.shapes.get(value, "1") for u in split.stage1 for value in u.outputs}
    axes = {value: ragged_axis(shapes[value]) for value in split.boundary}
    return {value: axis for value, axis in axes.items() if axis is not None}


@dataclass(frozen=True)
class Reader:
    """Reads batches: `reader[[(row, visit), ...]]`. Holds nothing but data, so that worker processes can have it.

    seed: of the variants drawn. prompt_dropout: the share of visits whose prompt is empty.
    """

    rows: Rows
    ragged: Mapping[str, int]
    seed: int = 0
    prompt_dropout: float = 0.0

    def __getitem__(self, visits: Sequence[Visit]) -> Batch | DsplitError:
        """The batch; or the error, given back so that it leaves a worker process without a traceback in its message."""
        try:
            return self.read(visits)
        except DsplitError as error:
            return error

    def read(self, visits: Sequence[Visit]) -> Batch:
        """The rows of `visits` as one batch, on the CPU or where live encoders left them."""
        numbers = [i for i, _ in visits]
        places = [self.rows.place(i) for i in numbers]
        choices = [self.choice(i, visit) for i, visit in visits]
        values = [self.rows.values(i, choice) for i, choice in zip(numbers, choices, strict=True)]
        columns = [self.rows.columns(i, choice) for i, choice in zip(numbers, choices, strict=True)]
        return Batch(
            values={k: stack(k, [v[k] for v in values], self.ragged.get(k), places) for k in values[0]},
            columns={k: [c[k] for c in columns] for k in columns[0]},
            ids=[self.rows.ids[i] for i in numbers],
            visits=[visit for _, visit in visits],
            places=places,
        )

    def choice(self, i: int, visit: int) -> Choice:
        """The variants of row `i` at a visit; `prompt` is None where it is dropped."""
        row_id = self.rows.ids[i]
        axes = self.rows.variants(i).items()
        drawn: dict[str, int | None] = {axis: variant(self.seed, row_id, visit, axis, n) for axis, n in axes}
        if chance(self.seed, row_id, visit, "prompt dropout") < self.prompt_dropout:
            drawn["prompt"] = None
        return drawn


def stack(name: str, rows: Sequence[torch.Tensor], ragged: int | None, places: Sequence[str]) -> torch.Tensor:
    """The rows' tensors as one (B, ...), padded with zeros (False) along the ragged axis to the longest.

    Raises TrainingError where shapes differ along any other axis.
    """
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    if ragged is not None:
        longest = max(r.shape[ragged] for r in rows)
        rows = [_padded(r, ragged, longest) for r in rows]
    if len({r.shape for r in rows}) > 1:
        shapes = "; ".join(f"{p}: {tuple(r.shape)}" for p, r in zip(places, rows, strict=True))
        raise TrainingError(f"rows of one batch have '{name}' of different shapes ({shapes}); use --batch-size 1")
    return torch.stack(list(rows))


def _padded(row: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    missing = length - row.shape[axis]
    if not missing:
        return row
    shape = list(row.shape)
    shape[axis] = missing
    return torch.cat([row, row.new_zeros(shape)], dim=axis)
