"""Encodes what is missing: one component group in memory at a time, decoding ahead of it, writing behind it."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsplit.cache.ahead import decoded
from dsplit.cache.encode import encode
from dsplit.cache.keys import Stamp
from dsplit.cache.plan import Call, Plan, groups
from dsplit.cache.store import Store, Writer
from dsplit.console import Progress
from dsplit.dataset.packed import Source
from dsplit.errors import Problem
from dsplit.models.load import load_component, pick_device, set_threads
from dsplit.models.model import Model

if TYPE_CHECKING:
    import torch


@dataclass
class Outcome:
    """encoded: calls made, per unit. problems: rows that could not be encoded, by call key."""

    encoded: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[Problem]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage1:
    """What the encoding of a plan needs: the model, where values go, and how it runs.

    watch: told of each call and the seconds it took, decoding and storing included.
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

    def run(self, calls: Sequence[Call]) -> Outcome:
        """Makes and stores the values of `calls`. A row that cannot be encoded is a problem of its own.

        Raises ModelError for weights that cannot be loaded, CacheError if the disk gives out; what was sealed stays.
        """
        import torch

        self.model.check({name for call in calls for name in call.job.components})
        set_threads(self.threads)
        dtype, device = getattr(torch, self.dtype), pick_device(self.device)
        outcome = Outcome()
        for group in groups(calls, self._file_columns()):
            names = sorted(group[0][0].job.components)
            components = {name: load_component(self.model, name, dtype, device) for name in names}
            for batch in group:
                self._run_job(batch, components, outcome)
            components.clear()
            _free_memory()
        return outcome

    def _run_job(self, calls: Sequence[Call], components: Mapping[str, Any], outcome: Outcome) -> None:
        job = calls[0].job
        units = (*job.before, job.unit)
        light = tuple(u for k, u in enumerate(units) if not any(v.components for v in units[: k + 1]) and not job.read)
        heavy = units[len(light) :]
        with (
            Writer(self.store, job.unit.identity) as writer,
            Progress(job.unit.identity, len(calls), "values") as progress,
        ):
            started = time.perf_counter()
            for call, values in decoded(calls, light, self.stamps, self.workers):
                if isinstance(values, str):
                    outcome.problems[call.key] = self._problems(call, values, "replace the file or drop the row")
                else:
                    given = {name: self.store.get(key)[None].to(self.device) for name, key in call.given.items()}
                    made = encode(heavy, {**values, **given}, components)
                    self._keep(call, made, writer, outcome)
                progress.advance()
                if self.watch:
                    self.watch(call, -started + (started := time.perf_counter()))

    def _keep(self, call: Call, made: Mapping[str, Any], writer: Writer, outcome: Outcome) -> None:
        """Stores the values of a call, unless one of them is not finite."""
        bad = [name for name in call.job.stored if not _finite(made[name])]
        if bad:
            parts = ", ".join(sorted(call.job.components)) or call.job.unit.name
            remedy = f"check the precision of {parts} (--dtype float32) and its weights (`dsplit prepare --verify`)"
            outcome.problems[call.key] = self._problems(call, f"NaN/Inf in {', '.join(bad)}", remedy)
            return
        writer.put({key: made[name][0] for name, key in call.keys.items()})
        outcome.encoded[call.job.unit.identity] += 1

    def _problems(self, call: Call, what: str, remedy: str) -> list[Problem]:
        """The fault, for each row that needs the value."""
        if call.row is None:
            return [Problem("the empty prompt", what, remedy)]
        source = ", ".join(f"'{v}'" for k, v in call.row.columns.items() if k in call.job.columns)
        return [Problem(e.place, f"{what} ({source})", remedy) for e in self.plan.using(call)]

    def _file_columns(self) -> set[str]:
        return {c.name for c in self.model.family.columns if c.kind == "file"}


def _finite(value: torch.Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
