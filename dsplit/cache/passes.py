"""Forward passes of an encoder over rows of equal shapes; in smaller, fixed parts once memory has run out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsplit.cache.encode import encode
from dsplit.cache.plan import Call, Job
from dsplit.console import counted, warn
from dsplit.errors import CacheError
from dsplit.units import Unit

FULL = ("out of memory", "not enough memory", "can't allocate memory")  # the words of torch's allocators
REMEDY = (
    "make the pictures smaller (--max-pixels), use another --dtype or --device, or close other programs; "
    "what was encoded is kept"
)


class Passes:
    """Runs `units` of `job`. rows: of one pass, halved for good whenever memory runs out."""

    def __init__(self, job: Job, units: Sequence[Unit], components: Mapping[str, Any], rows: int) -> None:
        self._job, self._units, self._components = job, units, components
        self._rows = rows
        made = {output for unit in units for output in unit.outputs}
        self._reads = {name for unit in units for name in unit.inputs if name not in made}

    def run(self, inputs: Sequence[tuple[Call, Mapping[str, Any]]]) -> Iterator[tuple[list[Call], dict[str, Any]]]:
        """Per pass, its calls and what was made of their `inputs`, batch axis first, in the calls' order.

        Raises CacheError where memory does not suffice for a single row.
        """
        done = 0
        while done < len(inputs):
            part = inputs[done : done + self._rows]
            made = self._made([values for _, values in part])
            if made is None:  # outside of the handler, whose traceback keeps the tensors of the failed pass
                free_memory()
                self._halve(part)
                continue
            done += len(part)
            yield [call for call, _ in part], made

    def _made(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """What the units make of `rows`; None if that is more than memory holds."""
        try:
            return encode(self._units, self._joined(rows), self._components)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, MemoryError) and not any(words in str(error).lower() for words in FULL):
                raise
            return None

    def _joined(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        import torch

        if len(rows) == 1:
            return rows[0]
        columns = {name: [row[name] for row in rows] for name in self._reads}
        return {
            name: torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [item for part in parts for item in part]
            for name, parts in columns.items()
        }

    def _halve(self, part: Sequence[tuple[Call, Any]]) -> None:
        unit, row = self._job.unit.identity, part[0][0].row
        if len(part) == 1:
            where = f"{row.place} ({row.size[0]}x{row.size[1]})" if row else "the empty prompt"
            raise CacheError(f"{where}: memory does not suffice for {unit}, even for this row alone; {REMEDY}")
        while self._rows >= len(part):
            self._rows //= 2
            warn(f"{unit}: out of memory; from here on {counted(self._rows, 'row')} per forward pass", anyone=True)


def free_memory() -> None:
    """Gives back what is no longer used, on the device too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
