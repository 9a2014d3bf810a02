"""`dsplit cache --verify`: reads every byte of a cache, and says which values of which rows are damaged or missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsplit.cache import shards
from dsplit.cache.index import Index
from dsplit.cache.manifest import ManifestFile, cache_manifests
from dsplit.cache.shards import Damaged, Entry
from dsplit.cache.status import Gap, gaps
from dsplit.console import Progress
from dsplit.errors import CacheError

READERS = 4  # threads: while one computes a checksum, others read


@dataclass(frozen=True)
class Checked:
    """What was read of a shard: its good values, its damaged ones. unreadable: its header cannot be believed."""

    path: Path
    good: Mapping[str, Entry] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    unreadable: bool = False
    gone: bool = False


def run_verify(folder: Path) -> dict[str, Any]:
    """What is wrong, and how much was read: `ok`, `shards`, `values`, `bytes`, and the lists `damaged` [{key, shard,
    rows: [{set, row, value}]}], `unreadable` (shards), `missing` [{set, row, value, why}], `manifests` (their faults).

    Raises CacheError if there is no cache.
    """
    names = cache_manifests(folder)
    index = Index(folder / "shards", private=True)  # of what is read here, and nothing else
    damaged: list[tuple[str, Path]] = []
    unreadable: list[Path] = []
    for checked in _each_shard(folder / "shards"):
        damaged += [(key, checked.path) for key in checked.damaged]
        unreadable += [checked.path] if checked.unreadable else []
        index.add(checked.path, checked.good)
    if suspect := {*unreadable, *(path for _, path in damaged)}:
        Index(folder / "shards").drop(suspect)  # so that the next run looks at them itself
    rows, missing, faults = _rows(names, index, {key for key, _ in damaged}, bool(unreadable))
    totals = index.totals().values()
    return {
        "cache": str(folder),
        "ok": not (damaged or unreadable or missing or faults),
        "shards": sum(total["shards"] for total in totals),
        "values": sum(total["values"] for total in totals),
        "bytes": sum(total["bytes"] for total in totals),
        "damaged": [{"key": key, "shard": str(path), "rows": rows.get(key, [])} for key, path in damaged],
        "unreadable": [str(path) for path in unreadable],
        "missing": missing,
        "manifests": faults,
    }


def _each_shard(folder: Path) -> Iterator[Checked]:
    """All shards, those too that a merge makes meanwhile."""
    done: set[Path] = set()
    with ThreadPoolExecutor(READERS) as pool:
        while new := sorted(set(folder.glob("*/*.safetensors")) - done):
            done.update(new)
            with Progress("checking", len(new), "shards") as progress:
                for checked in pool.map(_check, new):
                    progress.advance()
                    if not checked.gone:
                        yield checked


def _check(path: Path) -> Checked:
    try:
        table = shards.read_table(path)
        good = {key: entry for key, entry in table.items() if shards.good(key, entry)}
        if len(good) < len(table) and not path.exists():
            return Checked(path, gone=True)
        return Checked(path, good, tuple(sorted(table.keys() - good.keys())))
    except Damaged:
        return Checked(path, unreadable=True)
    except FileNotFoundError:
        return Checked(path, gone=True)
    except OSError as error:
        raise CacheError(f"{path}: cannot be read: {error.strerror}") from error


def _rows(
    names: list[Path], index: Index, damaged: set[str], unreadable: bool
) -> tuple[dict[str, list[dict[str, str]]], list[dict[str, str]], list[str]]:
    """The rows of each damaged value, those that miss other values, and the faults of the manifests."""
    rows: dict[str, list[dict[str, str]]] = {}
    missing, faults = [], []
    for path in names:
        try:
            for gap in gaps(ManifestFile(path), index.present, damaged):
                if gap.key in damaged:
                    rows.setdefault(gap.key, []).append(_place(path, gap))
                else:
                    missing.append({**_place(path, gap), "why": gap.why(unreadable)})
        except CacheError as error:
            faults.append(str(error))
    return rows, missing, faults


def _place(path: Path, gap: Gap) -> dict[str, str]:
    return {"set": path.stem, "row": gap.row.place, "value": gap.value}
