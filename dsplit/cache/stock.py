"""Taking stock: the values that a run reuses are read once; a shard that was seen whole is not read again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from dsplit.cache import ranks, shards
from dsplit.cache.keys import FRESH_SECONDS, NOTEWORTHY_BYTES, Stamp, stamp_of
from dsplit.cache.shards import Damaged
from dsplit.cache.store import Store
from dsplit.console import Progress, warn

READERS = 4  # threads: while one computes a checksum, others read
HEADER = ""  # stands for the key where it is the shard's header that is damaged


def take_stock(store: Store, keys: Iterable[str], gather: ranks.Gather) -> None:
    """Takes damaged values among `keys` for missing ones, in all processes of the launch.

    Reads the shards that hold some of them, if they changed since they were last seen whole.
    """
    for path in store.damaged:
        warn(f"{path}: damaged; its values will be encoded again")
    told = [(key, str(path)) for path, damaged in look(store, unseen(store, keys)).items() for key in damaged]
    for found in gather(told):  # all have looked before the first one writes
        for key, path in found:
            if key == HEADER:
                store.index.drop([Path(path)])  # and read anew by the next look at the shards
                warn(f"{path}: damaged; its values will be encoded again")
            else:
                store.index.forget(key, Path(path))
                warn(f"{path}: the value {key} is damaged; it will be encoded again")


def unseen(store: Store, keys: Iterable[str]) -> list[Path]:
    """Of this process's share of the shards, those that hold some of `keys` and changed since they were last seen."""
    seen = store.index.seen()
    mine = sorted(seen)[ranks.rank() :: ranks.world()]
    if os.name == "posix":  # elsewhere nothing tells of a time that was set back
        mine = [path for path in mine if seen[path] != _stamp(path)]
    holding = store.index.holding(keys) if mine else set()
    return [path for path in mine if path in holding]


def look(store: Store, paths: Iterable[Path]) -> dict[Path, list[str]]:
    """Reads shards whole: per shard the keys of its damaged values, and remembers those that have none."""
    paths = list(paths)
    size = sum((_stamp(path) or (0,))[0] for path in paths)
    found = {}
    with (
        ThreadPoolExecutor(READERS) as pool,
        Progress("checking", len(paths), "shards") if size > NOTEWORTHY_BYTES else nullcontext() as progress,
    ):
        for path, (damaged, stamp) in zip(paths, pool.map(_read, paths), strict=True):
            found[path] = damaged
            if stamp is not None and not damaged:
                store.index.note_seen(path, stamp)
            if progress:
                progress.advance()
    return found


def _read(path: Path) -> tuple[list[str], Stamp | None]:
    """The damaged values of a shard, and its stamp if it is one to remember: it did not change just now."""
    started = time.time_ns()
    stamp = _stamp(path)
    try:
        damaged = [key for key, entry in shards.read_table(path).items() if not shards.good(key, entry)]
    except Damaged:
        damaged = [HEADER]
    except OSError:
        damaged = []
    if stamp is None or not path.exists():
        return [], None  # merged away; the next look at the shards finds its values elsewhere
    settled = max(stamp[1], stamp[2]) < started - FRESH_SECONDS * 1e9 and _stamp(path) == stamp
    return damaged, stamp if settled else None


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None
