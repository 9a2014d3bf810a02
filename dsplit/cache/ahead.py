"""Reads and decodes the pictures of coming rows in worker processes, while the encoder is busy with earlier ones."""

from __future__ import annotations

import importlib
import os
import time
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
TRIED = 4  # calls decoded in this process first, to see what they take
WORTH = 0.003  # seconds a call; handing over what a worker made takes half a millisecond, starting workers far more


def decoded(
    calls: Sequence[Call], units: Sequence[Unit], stamps: Mapping[Path, Stamp], workers: int
) -> Iterator[tuple[Call, dict[str, Any] | str]]:
    """Per call, in order, its inputs and what `units` (without components) make of them; or what is wrong, in words.

    The first ones are decoded here; worker processes start if these took long enough for that to pay.

    stamps: what the files were when their keys were made; a file that changed since is a fault.
    """
    tasks = _Tasks(calls, units, stamps)
    workers = min(workers, len(calls) // CALLS_PER_WORKER, os.cpu_count() or 1) if units else 0
    seconds = 0.0
    for k, call in enumerate(calls):
        if k == TRIED and workers and seconds > TRIED * WORTH:
            break
        started = time.perf_counter()
        values = tasks[k]
        seconds += time.perf_counter() - started
        yield call, values
    else:
        return
    from torch.utils.data import DataLoader, Subset

    rest: Any = Subset(tasks, range(k, len(calls)))  # type: ignore[arg-type]
    loader: Any = DataLoader(rest, batch_size=None, collate_fn=_same, num_workers=workers)
    yield from zip(calls[k:], loader, strict=True)


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
