"""`dsplit cache --probe`: the time that a plan will take, from encoding three of its rows."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

from dsplit.cache.calls import Calls
from dsplit.cache.plan import Call, Job
from dsplit.cache.stage1 import Stage1
from dsplit.cache.store import Store
from dsplit.cache.work import Work

ROWS = 3


def probe(work: Work, missing: Calls, threads: int | None) -> dict[str, float]:
    """Seconds: `loading` the components, per unit for all its `missing` calls, and `total`, of one process.

    Encodes three rows for each unit, spread over the missing ones, by the code that will encode all, into a folder that
    is then removed. A unit's first call warms up, and is left out where there are others; what depends on the size is
    taken to need time in proportion to the area.
    """
    times: list[tuple[Call, float]] = []
    tried = _sample(work, missing)
    with tempfile.TemporaryDirectory(prefix="dsplit-probe-") as folder:
        store, stamps = Store(Path(folder)), work.digests.stamps
        started = time.perf_counter()
        watch = lambda call, seconds: times.append((call, seconds))  # noqa: E731
        Stage1(work.plan, work.model, store, work.dtype, work.device, stamps, 0, threads, watch).run(tried)
        loading = time.perf_counter() - started - sum(seconds for _, seconds in times)
    areas = Counter[str]()
    for calls in missing.by_job().values():
        job = calls[0].job
        areas[job.unit.identity] += sum(_weight(job, size) * n for (size, _), n in calls.shapes().items())
    result = {"loading": loading if tried else 0.0}
    for unit, area in areas.items():
        own = [(call, seconds) for call, seconds in times if call.job.unit.identity == unit]
        own = own[1:] or own
        if own:
            result[unit] = sum(seconds for _, seconds in own) / sum(_weight_of(call) for call, _ in own) * area
    result["total"] = sum(result.values())
    return {name: round(seconds, 3) for name, seconds in result.items()}


def _sample(work: Work, missing: Calls) -> list[Call]:
    """Three calls of each job, and those whose values they read."""
    tried = [
        calls[k]
        for calls in missing.by_job().values()
        for k in sorted({k * (len(calls) - 1) // (ROWS - 1) for k in range(ROWS)})
    ]
    found = {call.key: call for call in tried}
    while wanted := {key for call in found.values() for key in call.given.values()} - {
        key for call in found.values() for key in call.keys.values()
    }:
        found |= {call.key: call for call in work.plan.makers(wanted)}
    return list(found.values())


def _weight_of(call: Call) -> int:
    return _weight(call.job, call.row.size if call.row else (0, 0))


def _weight(job: Job, size: tuple[int, int]) -> int:
    """What the time of a call is in proportion to: the area of the picture, or 1."""
    return size[0] * size[1] if "size" in job.sources and size[0] else 1
