"""Which rows each step sees, in what order, and how rows of different length become one batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dsplit.errors import DsplitError, TrainingError
from dsplit.shapes import ragged_axis
from dsplit.training.rng import sort_key
from dsplit.units import Split

Visit = tuple[int, int]  # row number, visit


class Rows(Protocol):
    """What training reads; CachedRows and LiveRows are two of them."""

    @property
    def ids(self) -> Sequence[str]: ...
    def place(self, i: int) -> str: ...
    def columns(self, i: int) -> dict[str, Any]: ...
    def group(self, i: int) -> Hashable: ...
    def values(self, i: int) -> dict[str, torch.Tensor]: ...


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


@dataclass(frozen=True)
class Step:
    """One optimiser step: its batches, its epoch (from 0), whether it is the last of the epoch."""

    batches: Sequence[Sequence[Visit]]
    epoch: int
    ends_epoch: bool

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))


@dataclass(frozen=True)
class Order:
    """The order of rows: every row `repeat` times per epoch, in batches of one bucket; nothing is dropped.

    A visit has its place by (seed, row id, visit), so that a row more or less does not move the others. What a bucket
    cannot fill forms a smaller batch. The last step of an epoch takes the batches that are left.
    """

    ids: Sequence[str]
    buckets: Sequence[Hashable]  # of each row
    batch_size: int = 1
    repeat: int = 1
    accumulation: int = 1
    seed: int = 0

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
        return math.ceil(sum(batches for _, batches in self.counts().values()) / self.accumulation)

    def steps(self, total: int) -> Iterator[Step]:
        """The first `total` steps, epoch after epoch."""
        done, epoch = 0, 0
        while done < total:
            batches = self.batches(epoch)
            for start in range(0, len(batches), self.accumulation):
                if done == total:
                    return
                done += 1
                stop = start + self.accumulation
                yield Step(batches[start:stop], epoch, stop >= len(batches))
            epoch += 1


def buckets(rows: Rows, group_by: Sequence[str]) -> list[Hashable]:
    """The bucket of each row: its size, and the columns that a batch must have in common."""
    if not group_by:
        return [(rows.group(i),) for i in range(len(rows.ids))]
    columns = (rows.columns(i) for i in range(len(rows.ids)))
    return [(rows.group(i), *(c[name] for name in group_by)) for i, c in enumerate(columns)]


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
    """Reads batches: `reader[[(row, visit), ...]]`. Holds nothing but data, so that worker processes can have it."""

    rows: Rows
    ragged: Mapping[str, int]

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
        values = [self.rows.values(i) for i in numbers]
        columns = [self.rows.columns(i) for i in numbers]
        return Batch(
            values={k: stack(k, [v[k] for v in values], self.ragged.get(k), places) for k in values[0]},
            columns={k: [c[k] for c in columns] for k in columns[0]},
            ids=[self.rows.ids[i] for i in numbers],
            visits=[visit for _, visit in visits],
            places=places,
        )


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
