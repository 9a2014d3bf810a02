"""What stage 1 has to do for a data set: rows, keys and calls, found without torch and without loading weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsplit.cache.hardware import device_and_dtype
from dsplit.cache.header import header_of
from dsplit.cache.keys import Digests, component_files, digest_of, file_keys
from dsplit.cache.manifest import Manifest
from dsplit.cache.plan import Call, text_bytes
from dsplit.cache.planner import Plan, Planner
from dsplit.cache.store import Store
from dsplit.console import counted, is_main_process, say, warn
from dsplit.dataset import Row, read_dataset
from dsplit.dataset.packed import Source
from dsplit.dataset.views import refuse_variants
from dsplit.models.captions import PROMPTS, SUFFIX_TOKENS, Captions, perhaps_long, warn_of_cut
from dsplit.models.locate import Model, find_family, locate
from dsplit.models.registry import registry
from dsplit.recipe import DataOptions, ModelOptions, listed
from dsplit.shapes import ragged_axis

BUCKETS_SHOWN = 6


@dataclass(frozen=True)
class Work:
    """The rows of a data set and the plan for them; `manifest` is what the cache will say of them.

    buckets: rows per target size, `{"64x64": 3, ...}`, the most frequent first.
    """

    model: Model
    planner: Planner
    rows: Sequence[Row]
    buckets: Mapping[str, int]
    plan: Plan
    manifest: Manifest
    digests: Digests
    device: str
    dtype: str


def find_work(
    model: ModelOptions,
    data: DataOptions,
    folder: Path,
    *,
    fetch: bool,
    first: int | None = None,
    encode_batch: int = 1,
) -> Work:
    """Reads the data set and the files of the model, and makes the keys. Writes nothing but weights it had to fetch.

    folder: the cache, for its memory of digests. fetch: get what the model lacks from the hub. first: take no more rows
    than this. encode_batch: rows per forward pass. Raises DataError for rows that cannot be read, ModelError or
    UsageError for a model that is not there.
    """
    family, task = find_family(model), registry().task(model.task)
    refuse_variants(family.name, family.variants, data)
    planner = Planner(family, task, listed(model.trainable), model.posterior or "mean", encode_batch)
    located = locate(model, fetch=tuple(planner.components) if fetch else None, hub=model.hub)
    located.require(planner.components, planner.components)
    dataset = read_dataset(data, located.family.columns_for(planner.task), located.family.size_factor)
    for problem in dataset.warnings:
        warn(str(problem))
    for problem in dataset.skipped:
        warn(f"left out: {problem}")
    rows = dataset.rows[:first] if first else dataset.rows
    device, dtype = device_and_dtype(model)
    buckets, sources = _survey(rows, planner)
    say(_rows_line(buckets, device, dtype))
    digests = Digests(folder)
    parts = component_files(located, planner.components, digests)
    components = {name: digest_of(files) for name, files in parts.items()}
    plan = planner.plan(rows, file_keys(sources, digests), components, dtype)
    header = header_of(located, planner, parts, plan.empty, (model, data), device, dtype)
    return Work(located, planner, rows, buckets, plan, Manifest(header, plan.entries), digests, device, dtype)


def warn_of_cut_captions(work: Work, store: Store) -> None:
    """Warns of captions that the model cuts, those included whose values are in `store`, or are made by stage 2.

    A stored value shorter than the limit was not cut, which saves counting its tokens.
    """
    if not is_main_process():
        return
    if any(column in unit.inputs for unit in work.planner.split.stage2 for column in PROMPTS):
        captions = perhaps_long(work.model, work.rows, work.planner.split_of)
    else:
        captions = _perhaps_long(work, store)
    if captions:
        warn_of_cut(work.model, captions)


def _perhaps_long(work: Work, store: Store) -> Captions:
    """As `perhaps_long`, from the calls of the plan, without those whose values show that they were not cut."""
    captions: Captions = {}
    places: dict[str, list[str]] = {}  # of the rows that need the value with this key
    limit = work.model.family.token_limit
    for call in work.plan.calls.longer(limit - SUFFIX_TOKENS):
        column = next((name for name in PROMPTS if name in call.job.columns), "")
        text = call.row.columns.get(column, "") if call.row else ""
        if text_bytes(text) >= limit - SUFFIX_TOKENS and not any(n < limit for n in _lengths(call, store)):
            here = places.setdefault(next(iter(call.keys.values())), [])
            captions.setdefault(column, {})[text] = here
    for i, keys in work.plan.using(places):
        for key in keys:
            places[key].append(work.plan.entries[i].place)
    return captions


def _lengths(call: Call, store: Store) -> list[int]:
    """The numbers of tokens of the call's values in `store`."""
    axes = {name: ragged_axis(call.job.unit.shapes.get(name, "")) for name in call.job.stored}
    stored = {call.keys[name]: axis for name, axis in axes.items() if axis is not None and call.keys[name] in store}
    return [store.entry(key).shape[axis] for key, axis in stored.items()]


def _survey(rows: Iterable[Row], planner: Planner) -> tuple[dict[str, int], dict[Source, str]]:
    """Rows per target size, `{"64x64": 3, ...}`, the most frequent first; the files that stage 1 reads, each with the
    first row that names it."""
    sizes = Counter[tuple[int, int]]()
    files: dict[Source, str] = {}
    for row in rows:
        sizes[row.size] += 1
        for name, file in row.files.items():
            if name in planner.columns and file not in files:
                files[file] = row.place
    return {f"{w}x{h}": n for (w, h), n in sizes.most_common()}, files


def _rows_line(buckets: Mapping[str, int], device: str, dtype: str) -> str:
    shown = ", ".join(f"{size}: {n}" for size, n in list(buckets.items())[:BUCKETS_SHOWN])
    if len(buckets) > BUCKETS_SHOWN:
        shown += f", {len(buckets) - BUCKETS_SHOWN} more"
    rows, sizes = counted(sum(buckets.values()), "row"), counted(len(buckets), "bucket")
    return f"plan: {rows} in {sizes} ({shown}), on {device} in {dtype}"
