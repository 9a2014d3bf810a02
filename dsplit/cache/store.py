"""The store: values by key, over the shards of a cache folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.cache import shards
from dsplit.cache.shards import Damaged, Entry, Value
from dsplit.errors import CacheError

if TYPE_CHECKING:
    import torch

HAND_OVER = 32  # rows per commit; one commit is written while the next one fills, so kill -9 loses at most 64 rows
COMMIT_SECONDS = 10.0
SMALL_TARGET, LARGE_TARGET = 64 << 20, 512 << 20  # bytes of a merged shard, below and above MANY_VALUES
MANY_VALUES = 100_000


class Store:
    """Reads values by key. The index is made of the shards' own tables, so nothing can fall behind them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shards"
        self.damaged: list[Path] = []  # shards whose header cannot be believed
        self._entries: dict[str, list[Entry]] = {}
        self._shards: set[Path] = set()
        self._broken: set[Path] = set()  # shards with a damaged value
        self.refresh()

    def refresh(self) -> None:
        """Takes up shards that appeared, and forgets those that went away."""
        present = set(self.folder.glob("*/*.safetensors"))
        self._forget(self._shards - present)
        self.damaged = [path for path in self.damaged if path in present]
        for path in sorted(present - self._shards - set(self.damaged)):
            try:
                self.add(shards.read_table(path))
            except Damaged:
                self.damaged.append(path)
            except OSError as error:
                if path.exists():
                    raise CacheError(f"{path}: cannot be read: {error.strerror}") from error

    def _forget(self, gone: set[Path]) -> None:
        if gone:
            left = {k: [e for e in entries if e.shard not in gone] for k, entries in self._entries.items()}
            self._entries = {k: entries for k, entries in left.items() if entries}
            self._shards -= gone

    def add(self, entries: dict[str, Entry]) -> None:
        """Takes the entries of a shard into the index."""
        for key, entry in entries.items():
            self._entries.setdefault(key, []).append(entry)
            self._shards.add(entry.shard)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def entry(self, key: str) -> Entry:
        """Where the value of `key` lies; KeyError if it is not there."""
        return self._entries[key][0]

    def read(self, key: str) -> Value:
        """The bytes of `key`, its checksum compared; from another shard if one is damaged or was merged away.

        Raises CacheError that names the damaged shard, KeyError if there is no such value.
        """
        for attempt in (1, 2):
            damage: Damaged | None = None
            for entry in self._entries.get(key, []):
                try:
                    return shards.read_value(key, entry)
                except Damaged as error:
                    damage = error
                except OSError:
                    continue
            if damage:
                raise CacheError(f"{damage}; run `dsplit cache` again: it repairs just that")
            if attempt == 1:
                self.refresh()  # a merge may have moved it
        raise KeyError(key)

    def get(self, key: str) -> torch.Tensor:
        """The value of `key` as a tensor without the batch axis; raises as `read` does."""
        import torch

        value = self.read(key)
        dtype = getattr(torch, value.dtype)
        if not value.data:
            return torch.empty(value.shape, dtype=dtype)
        return torch.frombuffer(value.data, dtype=dtype).reshape(value.shape)

    def damaged_values(self, keys: Iterable[str]) -> list[tuple[str, Path]]:
        """Reads the values of `keys`: those that are damaged, each with its shard."""
        found = []
        for key in sorted((k for k in keys if k in self._entries), key=self._position):
            for entry in self._entries[key]:
                try:
                    shards.read_value(key, entry)
                    break
                except (Damaged, OSError):
                    found.append((key, entry.shard))
        return found

    def forget_values(self, damaged: Iterable[tuple[str, Path]]) -> None:
        """Takes damaged values out of the index, so that they are made anew; the next merge repairs their shards."""
        for key, shard in damaged:
            left = [e for e in self._entries.pop(key, []) if e.shard != shard]
            self._broken.add(shard)
            if left:
                self._entries[key] = left

    def _position(self, key: str) -> tuple[Path, int]:
        entry = self._entries[key][0]
        return entry.shard, entry.start

    def merge(self, unit: str) -> None:
        """Joins the small shards of `unit`, and removes the broken ones, whose values were made anew."""
        folder = self.folder / unit
        if folder.is_dir():
            count = sum(e[0].shard.parent == folder for e in self._entries.values())
            target = SMALL_TARGET if count < MANY_VALUES else LARGE_TARGET
            shards.merge(folder, unit, target, self._broken | set(self.damaged))
            self._forget(self._broken)  # one of the new shards may have the name of a broken one
            self._broken, self.damaged = set(), []
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

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return Value(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
