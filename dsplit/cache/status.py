"""`dsplit cache --status`: what a cache holds, and what its data sets still miss and why. Reads no value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dsplit.cache.gc import wanted
from dsplit.cache.holds import holder, holds
from dsplit.cache.manifest import Entry, ManifestFile, cache_manifests
from dsplit.cache.store import Store
from dsplit.errors import CacheError

TOGETHER = 500  # rows looked up with one another


@dataclass(frozen=True)
class Gap:
    """A value that a row lacks."""

    row: Entry
    value: str
    key: str

    def why(self, unreadable: bool) -> str:
        """The reason, as far as the cache knows it. unreadable: whether a shard is damaged as a whole."""
        if self.row.fault:
            return self.row.fault
        return "its shard is damaged, or it was never encoded" if unreadable else "not encoded yet"


def gaps(
    manifest: ManifestFile, present: Callable[[Sequence[str]], set[str]], also: Collection[str] = ()
) -> Iterator[Gap]:
    """The values of a manifest's rows that are not present, and those whose key is in `also`."""
    rows = iter(manifest)
    while batch := [row for _, row in islice(rows, TOGETHER)]:
        there = present([key for row in batch for key in row.all_keys])
        for row in batch:
            for value, keys in row.keys.items():
                for key in dict.fromkeys(keys):
                    if key not in there or key in also:
                        yield Gap(row, value, key)


def run_status(folder: Path) -> dict[str, Any]:
    """`units`: {unit: {values, bytes, shards}}; `sets`: {name: {rows, whole, family, task, dtype, time, missing}} with
    missing [{row, value, why}]; `unreadable` shards; `unwanted` {values, bytes}; `in_use`: who holds a manifest.

    A set that cannot be read has only `fault`. Raises CacheError if there is no cache.
    """
    names = cache_manifests(folder)
    store = Store(folder)
    unreadable = store.damaged
    sets = {path.stem: _set(path, store, bool(unreadable)) for path in names}
    unwanted = None
    if not any("fault" in found for found in sets.values()):
        left = store.index.unwanted(lambda: wanted(folder)).values()
        unwanted = {"values": sum(map(len, left)), "bytes": sum(sum(keys.values()) for keys in left)}
    return {
        "cache": str(folder),
        "units": store.index.totals(),
        "sets": sets,
        "unreadable": [str(path) for path in unreadable],
        "unwanted": unwanted,
        "in_use": [holder(path) for path in holds(folder)],
    }


def _set(path: Path, store: Store, unreadable: bool) -> dict[str, Any]:
    try:
        manifest = ManifestFile(path)
        missing = [
            {"row": gap.row.place, "value": gap.value, "why": gap.why(unreadable)}
            for gap in gaps(manifest, store.present)
        ]
        rows = sum(1 for _ in manifest)
    except CacheError as error:
        return {"fault": str(error)}
    facts = {name: manifest.header.get(name) for name in ("family", "task", "dtype", "time")}
    return {"rows": rows, "whole": rows - len({gap["row"] for gap in missing}), **facts, "missing": missing}
