"""Rows read from a cache: what stage 2 trains on. The sources may be gone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.cache.header import check_header
from dsplit.cache.manifest import find_manifest, read_manifest
from dsplit.cache.store import Store
from dsplit.errors import CacheError

if TYPE_CHECKING:
    import torch

EXAMPLES = 5  # rows named in the message of an incomplete cache


class CachedRows:
    """The rows of one manifest and their values, joined by key.

    header: what made the values (family, task, trainable, dtype, model, data options, versions). ids: row ids, in the
    data set's order. `skip_bad` leaves out rows that have values missing, instead of refusing. May be handed to worker
    processes. Raises CacheError if there is no such cache, or it is incomplete.
    """

    def __init__(self, folder: Path, name: str = "default", *, skip_bad: bool = False) -> None:
        path = find_manifest(folder, name)
        manifest = read_manifest(path)
        self.header: Mapping[str, Any] = manifest.header
        check_header(path, self.header)
        self._folder = folder
        self._store = Store(folder)
        self._rows = [row for row in manifest.rows if all(key in self._store for key in row.keys.values())]
        if len(self._rows) < len(manifest.rows) and not (skip_bad and self._rows):
            raise CacheError(self._incomplete(manifest.rows))
        self.left_out = len(manifest.rows) - len(self._rows)
        self.ids: Sequence[str] = [row.id for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, i: int) -> str:
        """Where row `i` stands in the metadata it came from."""
        return self._rows[i].place

    def columns(self, i: int) -> dict[str, Any]:
        """The columns that cross to stage 2, typed; `size` as (W, H)."""
        size = {"size": self._rows[i].size} if "size" in self.header["columns"] else {}
        return {**self._rows[i].columns, **size}

    def group(self, i: int) -> Hashable:
        """The target size (W, H): rows of one group can form a batch."""
        return self._rows[i].size

    def values(self, i: int) -> dict[str, torch.Tensor]:
        """The values of row `i` without the batch axis, checksums compared. Raises CacheError for a damaged one."""
        row = self._rows[i]
        found = {}
        for name, key in row.keys.items():
            try:
                found[name] = self._store.get(key)
            except CacheError as error:
                raise CacheError(f"{row.place}: {name}: {error}") from error
            except KeyError:
                raise CacheError(
                    f"{row.place}: {name} went away from {self._folder}; run `dsplit cache` again"
                ) from None
        return found

    def _incomplete(self, rows: Sequence[Any]) -> str:
        gaps = [(row, [v for v, key in row.keys.items() if key not in self._store]) for row in rows]
        gaps = [(row, names) for row, names in gaps if names]
        shown = [f"  {row.place}: {', '.join(names)} missing" for row, names in gaps[:EXAMPLES]]
        if len(gaps) > EXAMPLES:
            shown.append(f"  and {len(gaps) - EXAMPLES} more")
        damaged = [f"  {path}: damaged, its values do not count" for path in self._store.damaged]
        head = f"cache incomplete: {len(self._rows)} of {len(rows)} rows in {self._folder}; run `dsplit cache` again"
        return "\n".join([head, *shown, *damaged])
