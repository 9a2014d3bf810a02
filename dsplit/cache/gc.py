"""`dsplit cache --gc`: finds the values that no manifest refers to, and removes them beside running processes.

Why a run never misses a value because of it:
- A run writes or opens its manifest, holds it (see `holds`), and only then looks which values are there.
- Here a shard is first hidden (renamed), then manifests and holds are read again if any appeared, and only then the
  shard goes. A run that looked before the hiding has its manifest read here, and gets the shard back; one that looks
  after it misses the value and encodes it.
- Wanted values of a shard are in a new one, synced, before it is hidden: a reader whose shard went looks anew.
- Shards that appear meanwhile are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsplit.cache import shards
from dsplit.cache.files import sync_folder, temporary_name
from dsplit.cache.holds import holder, holds
from dsplit.cache.manifest import ManifestFile, cache_manifests, digest_of, manifests
from dsplit.cache.shards import Damaged
from dsplit.cache.store import Store
from dsplit.console import warn
from dsplit.errors import CacheError


def run_gc(folder: Path, *, remove: bool) -> dict[str, Any]:
    """What no manifest and no running process refers to: `values` {unit: [{key, bytes}]}, `bytes`, and `damaged`, the
    shards that cannot be read; `removed`: whether it was (with `remove`), but for what lay in the shards that had to be
    `left`; `in_use`: who holds a manifest. Raises CacheError if there is no cache, or a manifest cannot be read.
    """
    cache_manifests(folder)  # without any, nothing would be wanted
    store = Store(folder)
    seen = _users(folder)
    unwanted = store.index.unwanted(lambda: wanted(folder))
    damaged = store.damaged
    values: dict[str, list[dict[str, Any]]] = {}
    for path, keys in unwanted.items():
        values.setdefault(path.parent.name, []).extend({"key": key, "bytes": size} for key, size in keys.items())
    left = _remove(folder, {**unwanted, **{path: {} for path in damaged}}, seen) if remove else []
    store.refresh()
    return {
        "cache": str(folder),
        "values": values,
        "bytes": sum(value["bytes"] for found in values.values() for value in found),
        "damaged": [str(path) for path in damaged],
        "removed": remove,
        "left": [str(path) for path in left],
        "in_use": [holder(path) for path in holds(folder)],
    }


def wanted(folder: Path) -> Iterator[str]:
    """The keys that the manifests of the cache and those that running processes hold refer to."""
    for path in (*manifests(folder), *holds(folder)):
        try:
            manifest = ManifestFile(path)
        except CacheError:
            if not path.exists():  # its process ended
                continue
            raise
        yield from manifest.keys()


def _users(folder: Path) -> set[str]:
    """The digests of all manifests that count; of equal digest are equal rows."""
    found = {path: digest_of(path) for path in (*manifests(folder), *holds(folder))}
    return {digest for path, digest in found.items() if digest or path.exists()}


def _remove(folder: Path, found: Mapping[Path, Collection[str]], seen: set[str]) -> list[Path]:
    """Removes the values of each shard; gives back the shards that had to be left."""
    left = list(found)
    for path, keys in found.items():
        try:
            hidden = _hide(path, keys)
            if hidden is not None:
                if not _users(folder) <= seen:
                    os.replace(hidden, path)
                    warn("a run began meanwhile with rows of its own; do it again for the rest")
                    break
                hidden.unlink()
                sync_folder(path.parent)
        except Damaged as error:
            warn(f"{error}; {path.name} is left, run `dsplit cache` first")
            continue
        except FileNotFoundError:
            pass  # another process merged or removed it
        except OSError as error:
            raise CacheError(f"{path}: cannot be removed: {error.strerror}") from error
        left.remove(path)
    return left


def _hide(path: Path, keys: Collection[str]) -> Path | None:
    """Takes a shard out of sight, once what is not in `keys` lies in another one; None if it holds nothing else.

    Its new name is one that the next `dsplit cache` clears away if this process dies. Raises Damaged, OSError.
    """
    try:
        kept = {key: entry for key, entry in shards.read_table(path).items() if key not in keys}
    except Damaged:
        kept = {}  # its values do not count
    if kept and path in {entry.shard for entry in shards.join(path.parent, path.parent.name, kept).values()}:
        return None
    hidden = temporary_name(path)
    follow = os.utime not in os.supports_follow_symlinks
    os.utime(path, follow_symlinks=follow)  # a temporary file counts as left over by its age
    os.replace(path, hidden)
    return hidden
