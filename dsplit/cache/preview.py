"""`dsplit cache --dry-run`, `--why` and `--probe`: the plan and its cost, before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import cache as remembered
from pathlib import Path
from typing import Any

from dsplit.cache.calls import Calls
from dsplit.cache.draft import manifest_bytes
from dsplit.cache.earlier import Earlier
from dsplit.cache.estimate import component_bytes, file_bytes, free_bytes, value_bytes, warn_of_full_disk
from dsplit.cache.plan import groups
from dsplit.cache.reasons import reasons
from dsplit.cache.store import Store
from dsplit.cache.work import Work, find_work, warn_of_cut_captions
from dsplit.console import warn
from dsplit.errors import CacheError
from dsplit.models.load import load_component
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions


def preview(
    model: ModelOptions, data: DataOptions, options: CacheOptions, folder: Path, manifest: Path
) -> dict[str, Any]:
    """What `dsplit cache` would do, as plain values; loads no weights unless `--probe` asks for it, writes nothing.

    `rows`, `buckets`; `values`: per unit `wanted`, `there`, `to_encode` and `bytes`; `bytes` of all values to encode,
    `disk`: of the files that will be written, `free` room, `fits`; `memory`: bytes of weights per component, and of
    those in memory together at most (`peak`); `why` and `seconds` where they are asked for. Raises as `run_cache` does.
    """
    work = find_work(model, data, folder, fetch=False, encode_batch=options.encode_batch)
    store = Store(folder)
    for path in store.damaged:
        warn(f"{path}: damaged; its values count as missing")
    missing = work.plan.missing(store.present)
    if missing:  # else no tokenizer is at hand, and the run that made the values has told
        warn_of_cut_captions(work, store)
    sizes = value_bytes(missing, work.model.names(), work.dtype, _counter(work, missing))
    bytes_, free = sizes.total(), free_bytes(folder)
    disk = file_bytes(missing, bytes_) + manifest_bytes(work.manifest) + work.digests.unsaved_bytes
    warn_of_full_disk(folder, disk)
    result = {
        "rows": len(work.rows),
        "buckets": dict(work.buckets),
        "values": _counts(work, missing, sizes),
        "bytes": bytes_,
        "disk": disk,
        "free": free,
        "fits": disk <= free,
        "memory": _memory(work, missing),
        "device": work.device,
        "dtype": work.dtype,
        "cache": str(folder),
    }
    if options.why:
        result["why"] = [asdict(reason) for reason in reasons(work, missing, _earlier(manifest))]
    if options.probe:
        from dsplit.cache.probe import probe

        result["seconds"] = probe(work, missing, model.threads)
    return result


def _counts(work: Work, missing: Calls, sizes: Counter[str]) -> dict[str, dict[str, int]]:
    wanted, todo = work.plan.calls.counts(), missing.counts()
    return {
        unit: {"wanted": n, "there": n - todo[unit], "to_encode": todo[unit], "bytes": sizes[unit]}
        for unit, n in wanted.items()
    }


def _memory(work: Work, missing: Calls) -> dict[str, int]:
    """The weights that the missing values need, in the order in which they are loaded; all at once: `peak`."""
    files = {c.name for c in work.model.family.columns if c.kind == "file"}
    together = [sorted(group[0][0].job.components) for group in groups(missing.by_job(), files)]
    names = [name for group in together for name in group if work.model.family.component(name).weights]
    memory = {name: component_bytes(work.model, name, work.dtype) for name in names}
    return {**memory, "peak": max((sum(memory.get(n, 0) for n in group) for group in together), default=0)}


def _counter(work: Work, missing: Calls) -> Callable[[str], int] | None:
    """How many tokens of a caption count, by the family's tokenizer; None if no caption is missing."""
    family = work.model.family
    count, limit = family.token_count, family.token_limit
    light = {c.name for c in family.components if not c.weights}
    needed = {name for job in missing.jobs for name in job.components if name in light}
    if count is None or not needed:
        return None
    import torch

    parts = {name: load_component(work.model, name, torch.float32, "cpu") for name in needed}

    @remembered
    def tokens(text: str) -> int:
        found = count(text, parts)
        return min(found, limit) if limit else found

    return tokens


def _earlier(path: Path) -> Earlier | None:
    """The manifest that will be replaced, if there is one that can be read."""
    if not path.is_file():
        return None
    try:
        return Earlier(path)
    except CacheError as error:
        warn(f"{error}; so --why has nothing to compare with")
        return None
