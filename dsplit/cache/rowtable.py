"""The rows of a manifest in little room: 32 bytes each, so that a million of them open at once."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

from dsplit.cache.manifest import ManifestFile
from dsplit.cache.store import Store
from dsplit.errors import CacheError

TOGETHER = 500  # rows looked up with one another
ID_BYTES = 16


class Ids(Sequence[str]):
    """Row ids, kept as bytes."""

    def __init__(self, ids: bytes) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids) // ID_BYTES

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...
    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        """The id of row `i`, 32 hex digits."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        k = range(len(self))[i]
        return self._ids[k * ID_BYTES : (k + 1) * ID_BYTES].hex()


@dataclass(frozen=True)
class RowTable:
    """ids: 16 bytes per row. spans: begin and end of each row in the manifest, 8 bytes each. groups: the number of its
    size, 4 bytes. sizes: the distinct sizes (W, H)."""

    ids: bytes
    spans: bytes
    groups: bytes
    sizes: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, ids: bytes, spans: bytes, groups: bytes, sizes: str) -> RowTable:
        """The table that `kept` gave."""
        return cls(ids, spans, groups, [(w, h) for w, h in json.loads(sizes)])

    def kept(self) -> tuple[Any, ...]:
        """As an index keeps it."""
        return self.ids, self.spans, self.groups, json.dumps(self.sizes)

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES

    def span(self, i: int) -> tuple[int, int]:
        """Where row `i` lies in the manifest."""
        spans = memoryview(self.spans).cast("Q")
        return spans[2 * i], spans[2 * i + 1]

    def size(self, i: int) -> tuple[int, int]:
        """The target size (W, H) of row `i`."""
        return self.sizes[memoryview(self.groups).cast("I")[i]]

    def without(self, rows: Sequence[int]) -> RowTable:
        """The table without the rows of these numbers."""
        out = set(rows)
        left = [i for i in range(len(self)) if i not in out]
        ids = b"".join(self.ids[i * ID_BYTES : (i + 1) * ID_BYTES] for i in left)
        spans = array("Q", (n for i in left for n in self.span(i)))
        groups = array("I", map(memoryview(self.groups).cast("I").__getitem__, left))
        return RowTable(ids, spans.tobytes(), groups.tobytes(), self.sizes)


def read_table(manifest: ManifestFile, store: Store) -> tuple[RowTable, list[int]]:
    """The rows of a manifest, and the numbers of those with a value that is not in the store. Raises CacheError."""
    ids, spans, groups = bytearray(), array("Q"), array("I")
    sizes: dict[tuple[int, int], int] = {}
    gaps: list[int] = []
    rows, start = iter(manifest), manifest.start
    while batch := list(islice(rows, TOGETHER)):
        present = store.present([key for _, row in batch for key in row.all_keys])
        for end, row in batch:
            if not present.issuperset(row.all_keys):
                gaps.append(len(groups))
            ids += _id(row.id, manifest)
            spans.extend((start, end))
            groups.append(sizes.setdefault(row.size, len(sizes)))
            start = end
    return RowTable(bytes(ids), spans.tobytes(), groups.tobytes(), list(sizes)), gaps


def _id(text: str, manifest: ManifestFile) -> bytes:
    try:
        number = bytes.fromhex(text)
    except ValueError:
        number = b""
    if len(number) != ID_BYTES:
        raise CacheError(f"{manifest.path}: '{text}' is no row id; run `dsplit cache` again")
    return number
