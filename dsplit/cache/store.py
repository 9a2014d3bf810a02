"""The store: values by key, over the shards of a cache folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.cache import shards
from dsplit.cache.index import BROKEN, UNREADABLE, Index
from dsplit.cache.shards import Damaged, Entry, Value
from dsplit.errors import CacheError

if TYPE_CHECKING:
    import torch

HAND_OVER = 32  # rows per commit; one commit is written while the next one fills, so kill -9 loses at most 64 rows
COMMIT_SECONDS = 10.0
SMALL_TARGET, LARGE_TARGET = 64 << 20, 512 << 20  # bytes of a merged shard, below and above MANY_VALUES
MANY_VALUES = 100_000


class Store:
    """Reads values by key. What lies where is made of the shards' own tables, and kept in an index on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shards"
        self.index = Index(self.folder)
        self.refresh()

    def refresh(self) -> None:
        """Takes up shards that appeared, and forgets those that went away."""
        self.index.sync()

    @property
    def damaged(self) -> list[Path]:
        """The shards whose headers cannot be believed; their values do not count."""
        return self.index.unsound(UNREADABLE)

    def add(self, entries: dict[str, Entry]) -> None:
        """Takes the entries of a shard into the index."""
        for entry in entries.values():
            self.index.add(entry.shard, entries)
            break

    def __contains__(self, key: str) -> bool:
        return bool(self.index.find(key))

    def present(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that have a value; quicker than to ask for each."""
        return self.index.present(keys)

    def facts(self, keys: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The bytes and the checksum of those of `keys` that have a value."""
        return self.index.facts(keys)

    def entry(self, key: str) -> Entry:
        """Where the value of `key` lies; KeyError if it is not there."""
        for entry in self.index.find(key):
            return entry
        raise KeyError(key)

    def read(self, key: str) -> Value:
        """The bytes of `key`, its checksum compared; from another shard if one is damaged or was merged away.

        Raises CacheError that names the damaged shard, KeyError if there is no such value.
        """
        for attempt in (1, 2):
            damage: Damaged | None = None
            for entry in self.index.find(key):
                try:
                    return shards.read_value(key, entry)
                except Damaged as error:
                    damage = error
                except OSError:
                    continue
            if attempt == 1:
                if damage:  # or it is the index that is wrong
                    self.index.drop({entry.shard for entry in self.index.find(key)})
                self.refresh()  # a merge may have moved it
            elif damage:
                raise CacheError(f"{damage}; run `dsplit cache` again: it repairs just that")
        raise KeyError(key)

    def get(self, key: str) -> torch.Tensor:
        """The value of `key` as a tensor without the batch axis; raises as `read` does."""
        import torch

        value = self.read(key)
        dtype = getattr(torch, value.dtype)
        if not value.data:
            return torch.empty(value.shape, dtype=dtype)
        return torch.frombuffer(value.data, dtype=dtype).reshape(value.shape)

    def merge(self, unit: str) -> None:
        """Joins the small shards of `unit`, and removes the broken ones, whose values were made anew."""
        folder = self.folder / unit
        if folder.is_dir():
            count = self.index.totals().get(unit, {}).get("values", 0)
            broken = [path for path in self.index.unsound(UNREADABLE, BROKEN) if path.parent == folder]
            shards.merge(folder, unit, SMALL_TARGET if count < MANY_VALUES else LARGE_TARGET, broken)
            self.refresh()  # first, so that the values are never nowhere
            self.index.drop(broken)  # one of the new shards may have the name of a broken one
            self.refresh()


class Writer:
    """Puts values into a store: collects, and seals a shard each commit, on a thread of its own.

    `with Writer(store, "encode_image") as w: w.put({key: tensor, ...})`; an error of the thread is raised by the next
    call, and everything is sealed when the block ends.
    """

    def __init__(self, store: Store, unit: str) -> None:
        self._store, self._unit = store, unit
        self._pending: dict[str, Value] = {}
        self._rows, self._since = 0, 0.0
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._sealing: Future[dict[str, Entry]] | None = None
        self.bytes = 0

    def put(self, values: dict[str, torch.Tensor]) -> None:
        """Adds the values of one row."""
        if not self._rows:
            self._since = time.monotonic()
        for key, tensor in values.items():
            self._pending[key] = value_of(tensor)
            self.bytes += len(self._pending[key].data)
        self._rows += 1
        if self._rows >= HAND_OVER or time.monotonic() - self._since >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Hands what has gathered to the writing thread; waits for the commit before it."""
        self._settle()
        if self._pending:
            folder = self._store.folder / self._unit
            self._sealing = self._pool.submit(shards.write_shard, folder, self._unit, self._pending)
            self._pending, self._rows = {}, 0

    def _settle(self) -> None:
        if self._sealing is not None:
            sealing, self._sealing = self._sealing, None
            self._store.add(sealing.result())

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            with contextlib.suppress(CacheError) if error[0] else contextlib.nullcontext():
                self.commit()
                self._settle()
        finally:
            self._pool.shutdown()


def value_of(tensor: torch.Tensor) -> Value:
    """The bytes of a tensor, off the device, in C order."""
    import torch

    held = tensor.detach().to("cpu").contiguous()
    data = held.view(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return Value(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
