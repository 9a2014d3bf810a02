"""`dsplit cache`: finds what is missing, encodes it, and says what the cache then holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dsplit.cache import ranks
from dsplit.cache.calls import Calls
from dsplit.cache.draft import write_manifest
from dsplit.cache.estimate import value_bytes, warn_of_full_disk
from dsplit.cache.files import claimed, remove_leftovers
from dsplit.cache.holds import Hold, remove_old_holds
from dsplit.cache.keys import content_digest
from dsplit.cache.manifest import Entry, Manifest, manifest_path, refuse_foreign
from dsplit.cache.planner import Plan
from dsplit.cache.preview import preview
from dsplit.cache.stage1 import Stage1
from dsplit.cache.stock import take_stock
from dsplit.cache.store import Store
from dsplit.cache.work import find_work, warn_of_cut_captions
from dsplit.console import counted, say, warn
from dsplit.errors import CacheError, DataError, Problem
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions

T = TypeVar("T")
STEP = 1000  # keys looked up with one another


def run_cache(
    model: ModelOptions, data: DataOptions, cache: CacheOptions, *, first: int | None = None
) -> dict[str, Any]:
    """Makes the cache of a data set: `rows`, `encoded` and `reused` per unit, `bytes`, `seconds`, `cache`, `digest`.

    The counts are of distinct values: pictures at their size; texts, the empty one among them. first: take no more rows
    than this. Raises CacheError if the folder cannot take a cache, DataError for rows that cannot be read or encoded
    (all others are stored), ModelError or UsageError for a model that is not there. With `dry_run`, `probe` or `why`
    nothing is encoded, and the result is that of `preview`.
    """
    started = time.monotonic()
    folder = Path(cache.out or "cache")
    path = manifest_path(folder, cache.name)
    refuse_foreign(folder)
    if cache.dry_run or cache.probe or cache.why:
        return preview(model, data, cache, folder, path)
    with claimed(folder):
        work = find_work(model, data, folder, fetch=True, first=first, encode_batch=cache.encode_batch)
    plan = work.plan

    with ranks.together() as gather:
        store = Store(folder)
        if ranks.rank() == 0:
            remove_leftovers(folder)
            remove_old_holds(folder)
            work.digests.save()
        take_stock(store, plan.calls.values(), gather)
        if ranks.rank() == 0:
            write_manifest(path, work.manifest)
        gather(None)  # from here on `--gc` spares what the manifest names; what it took before is missing
        hold = Hold(path)
        store.refresh()
        missing = plan.missing(store.present)
        size = sum(value_bytes(missing, work.model.names(), work.dtype).values())
        say(_work_line(plan, missing, size, folder))
        warn_of_cut_captions(work, store)
        warn_of_full_disk(folder, size)
        stage = Stage1(
            plan,
            work.model,
            store,
            work.dtype,
            work.device,
            work.digests.stamps,
            cache.workers,
            model.threads,
            encode_batch=cache.encode_batch,
        )
        encoded, problems = _encode(stage, missing, gather)
        store.refresh()
        if problems:
            problems = plan.spread(problems)
            if ranks.rank() == 0:  # for `--status` to tell
                write_manifest(path, Manifest(work.manifest.header, plan.with_faults(problems)))
            plan = _without_faulty(plan, problems, skip=data.skip_bad)
            if ranks.rank() == 0:
                write_manifest(path, Manifest(work.manifest.header, plan.entries))
        result = _result(plan, store, encoded, folder)
        gather(None)  # nobody reads the small shards any more
        if ranks.rank() == 0:
            for unit in encoded:
                store.merge(unit)
    hold.let_go()
    result["seconds"] = round(time.monotonic() - started, 3)
    return result


def _encode(stage: Stage1, missing: Calls, gather: ranks.Gather) -> tuple[dict[str, int], dict[str, list[Problem]]]:
    """Encodes this process's share of `missing`; counts per unit and faults per call, of all processes."""
    encoded: Counter[str] = Counter(dict.fromkeys(stage.plan.calls.counts(), 0))
    problems: dict[str, list[Problem]] = {}
    share = missing.share(ranks.rank(), ranks.world()) if ranks.world() > 1 else missing
    if share:
        outcome = stage.run(share)
        encoded.update(outcome.encoded)
        problems = outcome.problems
    told = {key: [astuple(problem) for problem in found] for key, found in problems.items()}
    gathered = gather([dict(encoded), told])
    return (
        {unit: sum(counts[unit] for counts, _ in gathered) for unit in encoded},
        {key: [Problem(*p) for p in found] for _, faulty in gathered for key, found in faulty.items()},
    )


def _without_faulty(plan: Plan, problems: Mapping[str, list[Problem]], *, skip: bool) -> Plan:
    """The plan without the rows that could not be encoded. Raises DataError with all of them, unless `skip`."""
    faults = [p for found in problems.values() for p in found]
    good, total = plan.without(problems), len(plan.entries)
    if not skip or not good.entries or len(good.empty) < len(plan.empty):
        bad = total - len(good.entries)
        raise DataError(f"{bad} of {total} rows could not be encoded; the others are in the cache:", faults)
    for problem in faults:
        warn(f"left out: {problem}")
    return good


def _result(plan: Plan, store: Store, encoded: Mapping[str, int], folder: Path) -> dict[str, Any]:
    """The result of the run, but for its time. Raises CacheError if a value is not there after all."""
    found = bytes_ = 0
    for keys in _parts(plan.calls.values()):
        lengths = [length for length, _ in store.facts(keys).values()]
        found, bytes_ = found + len(lengths), bytes_ + sum(lengths)
    if absent := plan.calls.value_count - found:
        raise CacheError(f"{counted(absent, 'value')} missing from {folder} after the run; run `dsplit cache` again")
    calls = plan.calls.counts()
    return {
        "rows": len(plan.entries),
        "encoded": dict(encoded),
        "reused": {unit: calls[unit] - count for unit, count in encoded.items()},
        "bytes": bytes_,
        "seconds": 0.0,
        "cache": str(folder),
        "digest": content_digest(_contents(plan, store)),
    }


def _contents(plan: Plan, store: Store) -> Iterator[tuple[str, str, str, int]]:
    """(row id, value name, key, checksum) of all values of all rows, sorted."""
    for numbers in _parts(plan.entries.by_id()):
        rows: list[Entry] = [plan.entries[i] for i in numbers]
        facts = store.facts([key for row in rows for key in row.all_keys])
        for row in rows:
            yield from sorted((row.id, name, key, facts[key][1]) for name, keys in row.keys.items() for key in keys)


def _parts(all_: Iterable[T]) -> Iterator[list[T]]:
    things = iter(all_)
    while part := list(islice(things, STEP)):
        yield part


def _work_line(plan: Plan, missing: Calls, size: int, folder: Path) -> str:
    if not missing:
        return f"nothing to encode: {counted(plan.calls.value_count, 'value')} in {folder}"
    todo = missing.counts()
    units = ", ".join(f"{unit} {todo[unit]} of {n} distinct" for unit, n in plan.calls.counts().items())
    return f"to encode: {units}; about {size / 1e6:.2f} MB into {folder}"
