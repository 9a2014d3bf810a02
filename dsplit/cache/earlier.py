"""An earlier manifest of the same name, and which of its rows a row of now was; rows are read when asked for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, overload

from dsplit.cache.calls import KeySet
from dsplit.cache.draft import Draft
from dsplit.cache.header import check_header
from dsplit.cache.manifest import AGAIN, Entry, ManifestFile
from dsplit.cache.shards import KEY
from dsplit.errors import CacheError

NONE = 0xFFFFFFFF  # no row


class Earlier(Sequence[Entry]):
    """The rows of the manifest at `path`. header, ids: of it. known: the keys of all values that it refers to.

    Raises CacheError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = ManifestFile(path)
        self.header: Mapping[str, Any] = self._file.header
        check_header(path, self.header)
        self.ids, self.known, self._ends = KeySet(), KeySet(), array("Q", [self._file.start])
        for key in self.header["empty_prompt"].values():
            self.known.add(key)
        for end, row in self._file:
            self._ends.append(end)
            if not KEY.fullmatch(row.id) or not self.ids.add(row.id):
                raise CacheError(f"{path}: '{row.id}' is no row id; {AGAIN}")
            for key in row.all_keys:
                self.known.add(key)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, i: int) -> Entry: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Entry]: ...
    def __getitem__(self, i: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        k = range(len(self))[i]
        return self._file.row(self._ends[k], self._ends[k + 1])


class Match:
    """Which of the rows of `old` each of `rows` was before it was edited.

    That is the one with the same id, else one with the same source files (columns `files`), else one at the same place
    with a part in common. Each old row is taken once.
    """

    def __init__(self, rows: Draft, old: Earlier, files: set[str]) -> None:
        self._rows, self._old = rows, old
        self._before = array("I", [NONE]) * len(rows)
        self._taken = bytearray(len(old))
        for i, id in enumerate(rows.ids):
            number = old.ids.find(id)
            if number is not None:
                self._take(i, number)
        self._match(lambda entry: _only(entry.inputs, files), lambda row, _: any(name in files for name in row.inputs))
        self._match(
            lambda entry: PurePath(entry.place).name,
            lambda row, before: bool(set(row.inputs.items()) & set(before.inputs.items())),
        )

    def __getitem__(self, i: int) -> int | None:
        """The number of the old row."""
        return None if self._before[i] == NONE else self._before[i]

    def _take(self, i: int, number: int) -> None:
        self._before[i], self._taken[number] = number, 1

    def _match(self, key: Callable[[Entry], Hashable], agree: Callable[[Entry, Entry], bool]) -> None:
        """Takes old rows that are left for rows that have none, where their keys are equal and they agree."""
        waiting: dict[Hashable, list[int]] = {}
        for number in (k for k in reversed(range(len(self._old))) if not self._taken[k]):
            waiting.setdefault(key(self._old[number]), []).append(number)
        for i in (k for k, number in enumerate(self._before) if number == NONE) if waiting else ():
            row = self._rows[i]
            if (those := waiting.get(key(row))) and agree(row, self._old[those[-1]]):
                self._take(i, those.pop())


def _only(inputs: Mapping[str, str], names: set[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, key) for name, key in inputs.items() if name in names))
