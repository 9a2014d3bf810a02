"""Encodes what is missing: one component group in memory at a time, decoding ahead of it, writing behind it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsplit.cache.ahead import Decoded, decoded
from dsplit.cache.calls import by_job
from dsplit.cache.keys import Stamp
from dsplit.cache.passes import Passes, free_memory
from dsplit.cache.plan import Call, groups
from dsplit.cache.planner import Plan
from dsplit.cache.store import Store, Writer
from dsplit.cache.together import Shapes, batches, rows_of, uncounted
from dsplit.console import Progress, say
from dsplit.dataset.packed import Source
from dsplit.errors import Problem
from dsplit.models.load import load_component, pick_device, set_threads
from dsplit.models.model import Model

if TYPE_CHECKING:
    import torch


@dataclass
class Outcome:
    """encoded: calls made, per unit. problems: what could not be encoded, by call key, at the first row with it."""

    encoded: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[Problem]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage1:
    """What the encoding of a plan needs: the model, where values go, and how it runs.

    watch: told of each call and the seconds it took, decoding and storing included. encode_batch: rows of equal shapes
    per forward pass.
    """

    plan: Plan
    model: Model
    store: Store
    dtype: str
    device: str
    stamps: Mapping[Source, Stamp]
    workers: int
    threads: int | None = None
    watch: Callable[[Call, float], None] | None = None
    encode_batch: int = 1

    def run(self, calls: Sequence[Call]) -> Outcome:
        """Makes and stores the values of `calls`. A row that cannot be encoded is a problem of its own.

        Raises ModelError for weights that cannot be loaded, CacheError if the disk gives out; what was sealed stays.
        """
        import torch

        jobs = by_job(calls)
        self.model.check({name for batch in jobs.values() for name in batch[0].job.components})
        set_threads(self.threads)
        dtype, device = getattr(torch, self.dtype), pick_device(self.device)
        outcome = Outcome()
        for group in groups(jobs, self._file_columns()):
            names = sorted(group[0][0].job.components)
            components = {name: load_component(self.model, name, dtype, device) for name in names}
            for batch in group:
                self._run_job(batch, components, outcome)
            components.clear()
            free_memory()
        return outcome

    def _run_job(self, calls: Sequence[Call], components: Mapping[str, Any], outcome: Outcome) -> None:
        job, family = calls[0].job, self.model.family
        units = (*job.before, job.unit)
        light = tuple(u for k, u in enumerate(units) if not any(v.components for v in units[: k + 1]) and not job.read)
        heavy = units[len(light) :]
        rows = min((rows_of(u, family, self.encode_batch) for u in heavy if u.components), default=1)
        if rows < self.encode_batch and any(uncounted(u, family) for u in heavy):
            say(f"{job.unit.identity}: one row per forward pass, since {family.name} counts no tokens beforehand")
        shapes, passes = Shapes(heavy, family, components, self.store), Passes(job, heavy, components, rows)
        with (
            Writer(self.store, job.unit.identity) as writer,
            Progress(job.unit.identity, len(calls), "values") as progress,
        ):
            started = time.perf_counter()
            for batch in decoded(batches(calls, shapes.of, rows), light, self.stamps, self.workers):
                for done, made in passes.run(self._sound(batch, outcome)):
                    self._keep(done, made, writer, outcome)
                progress.advance(len(batch))
                if self.watch:
                    seconds = -started + (started := time.perf_counter())
                    for call, _ in batch:
                        self.watch(call, seconds / len(batch))

    def _sound(self, batch: Sequence[Decoded], outcome: Outcome) -> list[tuple[Call, dict[str, Any]]]:
        """The calls of a batch whose inputs are there, with those; what is wrong with the others is noted."""
        found = []
        for call, values in batch:
            if isinstance(values, str):
                outcome.problems[call.key] = self._problems(call, values, "replace the file or drop the row")
            elif not all(key in self.store for key in call.given.values()):
                outcome.problems[call.key] = []  # the call that should have made it says why
            else:
                given = {name: self.store.get(key)[None].to(self.device) for name, key in call.given.items()}
                found.append((call, {**values, **given}))
        return found

    def _keep(self, calls: Sequence[Call], made: Mapping[str, Any], writer: Writer, outcome: Outcome) -> None:
        """Stores the values of the calls of a pass, but for those of a call of which one is not finite."""
        job = calls[0].job
        finite = {name: _finite(made[name]) for name in job.stored}
        for k, call in enumerate(calls):
            bad = [name for name in job.stored if not finite[name][k]]
            if bad:
                parts = ", ".join(sorted(job.components)) or job.unit.name
                remedy = f"check the precision of {parts} (--dtype float32) and its weights (`dsplit prepare --verify`)"
                outcome.problems[call.key] = self._problems(call, f"NaN/Inf in {', '.join(bad)}", remedy)
            else:
                writer.put({key: made[name][k] for name, key in call.keys.items()})
                outcome.encoded[job.unit.identity] += 1

    def _problems(self, call: Call, what: str, remedy: str) -> list[Problem]:
        """The fault, told of the first row that needs the value."""
        if call.row is None:
            return [Problem("the empty prompt", what, remedy)]
        source = ", ".join(f"'{v}'" for k, v in call.row.columns.items() if k in call.job.columns)
        return [Problem(call.row.place, f"{what} ({source})", remedy)]

    def _file_columns(self) -> set[str]:
        return {c.name for c in self.model.family.columns if c.kind == "file"}


def _finite(value: torch.Tensor) -> list[bool]:
    """Per row, True if every number is finite; in one pass, since neither bound is finite if some number is not."""
    if not value.is_floating_point() or not value.numel():
        return [True] * len(value)
    low, high = value.flatten(1).aminmax(dim=1) if value.ndim > 1 else (value, value)
    return [math.isfinite(one) and math.isfinite(other) for one, other in zip(low.tolist(), high.tolist(), strict=True)]
