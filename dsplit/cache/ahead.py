"""Reads and decodes the pictures of coming rows in worker processes, while the encoder is busy with earlier ones."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsplit.cache.encode import encode, inputs
from dsplit.cache.keys import Stamp, stamp_of
from dsplit.cache.plan import Call
from dsplit.errors import DataError
from dsplit.units import Unit

CALLS_PER_WORKER = 4  # fewer are decoded before a worker has started


def decoded(
    calls: Sequence[Call], units: Sequence[Unit], stamps: Mapping[Path, Stamp], workers: int
) -> Iterator[tuple[Call, dict[str, Any] | str]]:
    """Per call, in order, its inputs and what `units` (without components) make of them; or what is wrong, in words.

    stamps: what the files were when their keys were made; a file that changed since is a fault.
    """
    tasks = _Tasks(calls, units, stamps)
    workers = min(workers, len(calls) // CALLS_PER_WORKER, os.cpu_count() or 1) if units else 0
    if not workers:
        yield from zip(calls, map(tasks.__getitem__, range(len(calls))), strict=True)
        return
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(tasks, batch_size=None, collate_fn=_same, num_workers=workers)  # type: ignore[arg-type]
    yield from zip(calls, loader, strict=True)


class _Tasks:
    """What the workers do, by number. Units travel as the name of the module variable that holds them."""

    def __init__(self, calls: Sequence[Call], units: Sequence[Unit], stamps: Mapping[Path, Stamp]) -> None:
        self._units = tuple(units)
        self._inputs = [inputs(c.row) if c.row else {"prompt": [""]} for c in calls]
        files = [[p for n, p in c.row.files.items() if n in c.job.columns] if c.row else [] for c in calls]
        self._stamps = [[(path, stamps[path]) for path in paths] for paths in files]

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, i: int) -> dict[str, Any] | str:
        try:
            values = encode(self._units, self._inputs[i], {})
            for path, stamp in self._stamps[i]:
                if stamp_of(path) != stamp:
                    return f"'{path}' changed while the cache was made"
        except (DataError, OSError, ValueError) as error:
            return str(error)
        return values

    def __getstate__(self) -> dict[str, Any]:
        names = [(u.function.__module__, u.function.__qualname__, replace(u, function=None)) for u in self._units]  # type: ignore[arg-type]
        return {**self.__dict__, "_units": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        def found(module: str, name: str, unit: Unit) -> Unit:
            thing = getattr(importlib.import_module(module), name)
            return replace(unit, function=thing.function if isinstance(thing, Unit) else thing)

        self.__dict__.update(state, _units=tuple(found(*name) for name in state["_units"]))


def _same(sample: Any) -> Any:
    return sample
