"""Rows read from a cache: what stage 2 trains on. The sources may be gone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.cache.header import check_header
from dsplit.cache.holds import Hold
from dsplit.cache.manifest import Entry, ManifestFile, digest_of, find_manifest, manifests
from dsplit.cache.rowtable import Ids, RowTable, read_table
from dsplit.cache.store import Store
from dsplit.dataset.rows import Choice, View
from dsplit.errors import CacheError

if TYPE_CHECKING:
    import torch

FIRST: Choice = {}  # the first variant of everything
EXAMPLES = 5  # rows named in the message of an incomplete cache


class CachedRows:
    """The rows of one manifest and their values, joined by key; rows are read when they are asked for.

    header: what made the values (family, task, trainable, dtype, model, data options, versions). ids: row ids, in the
    data set's order. `skip_bad` leaves out rows that have values missing, instead of refusing. May be handed to worker
    processes. Raises CacheError if there is no such cache, or it is incomplete.
    """

    def __init__(self, folder: Path, name: str = "default", *, skip_bad: bool = False) -> None:
        self._folder = folder
        self._path = path = find_manifest(folder, name)
        self._hold = Hold(path)  # before looking what is there, so that it stays
        self._manifest = ManifestFile(self._hold.path, path)
        self.header: Mapping[str, Any] = self._manifest.header
        check_header(path, self.header)
        self._store = Store(folder)
        self._table, gaps = self._read_table()
        self._last = -1, Entry("", "", (0, 0))  # the row asked for last, and its number
        self.left_out = len(gaps)
        if gaps and not (skip_bad and len(gaps) < len(self._table)):
            raise CacheError(self._incomplete(gaps))
        if gaps:
            self._table = self._table.without(gaps)
            self._last = -1, self._last[1]  # numbers have changed
        self.ids: Sequence[str] = Ids(self._table.ids)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_manifest"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._manifest = ManifestFile(self._hold.path, self._path)
        if self._manifest.header != self.header:
            raise CacheError(f"{self._path}: was replaced while it was in use; start again")

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, i: int) -> str:
        """Where row `i` stands in the metadata it came from."""
        return self._row(i).place

    def variants(self, i: int) -> Mapping[str, int]:
        """How many variants row `i` has, per axis that has several: `{"prompt": 3, "view": 2}`."""
        return self._row(i).variants if self.header["axes"] else {}

    def columns(self, i: int, choice: Choice = FIRST) -> dict[str, Any]:
        """The columns that cross to stage 2, typed, as they are with the variants chosen.

        `size` is (W, H), `view` a View. An axis that `choice` does not name has its first variant; None, for the
        prompt, is the empty one.
        """
        crossing = set(self.header["columns"])
        row = self._row(i) if crossing - {"size"} else None
        columns = dict(row.columns) if row else {}
        for name in columns:
            if choice.get(name, 0) is None:
                columns[name] = ""
            elif row and name in row.variants and name in self.header["axes"].get(name, ()):
                columns[name] = columns[name][choice.get(name, 0)]
        if "view" in columns:
            columns["view"] = View(*columns["view"])
        return {**columns, **({"size": self._table.size(i)} if "size" in crossing else {})}

    def group(self, i: int) -> Hashable:
        """The target size (W, H): rows of one group can form a batch."""
        return self._table.size(i)

    def values(self, i: int, choice: Choice = FIRST) -> dict[str, torch.Tensor]:
        """The values of row `i` without the batch axis, as they are with the variants chosen; checksums are compared.

        Where the prompt is None, what depends on it is that of the empty prompt. Raises CacheError for a value that is
        damaged, or not in the cache.
        """
        self._hold.renew()
        row = self._row(i)
        found = {}
        for name in row.keys:
            try:
                found[name] = self._store.get(self._key(row, name, choice))
            except CacheError as error:
                raise CacheError(f"{row.place}: {name}: {error}") from error
            except KeyError:
                raise CacheError(
                    f"{row.place}: {name} went away from {self._folder}; run `dsplit cache` again"
                ) from None
        return found

    def _key(self, row: Entry, name: str, choice: Choice) -> str:
        """The key of a value of `row` for the variants chosen. Raises CacheError if the empty prompt has none."""
        axes = self.header["axes"].get(name, ())
        if any(choice.get(axis, 0) is None for axis in axes):
            if name in self.header["empty_prompt"]:
                return self.header["empty_prompt"][name]
            raise CacheError("the cache has none for the empty prompt, since it depends on other columns too")
        return row.key(name, axes, choice)

    def _row(self, i: int) -> Entry:
        if self._last[0] != i:  # a visit asks for several things of a row
            self._last = i, self._manifest.row(*self._table.span(i))
        return self._last[1]

    def _read_table(self) -> tuple[RowTable, list[int]]:
        """The rows and the numbers of those that lack a value; from the index if it knows that all is there."""
        digest = self.header["check"]
        if known := self._store.index.rows(digest):
            return RowTable.of(*known), []
        state = self._store.index.state()
        table, gaps = read_table(self._manifest, self._store)
        if not gaps:
            others = {digest, *map(digest_of, manifests(self._folder))}
            self._store.index.keep_rows(digest, table.kept(), state, others)
        return table, gaps

    def _incomplete(self, gaps: Sequence[int]) -> str:
        total = len(self._table)
        shown = []
        for i in gaps[:EXAMPLES]:
            row = self._row(i)
            names = [name for name, keys in row.keys.items() if not all(key in self._store for key in keys)]
            shown.append(f"  {row.place}: {', '.join(names)} missing" + (f" ({row.fault})" if row.fault else ""))
        if len(gaps) > EXAMPLES:
            shown.append(f"  and {len(gaps) - EXAMPLES} more")
        damaged = [f"  {path}: damaged, its values do not count" for path in self._store.damaged]
        head = f"cache incomplete: {total - len(gaps)} of {total} rows in {self._folder}; run `dsplit cache` again"
        return "\n".join([head, *shown, *damaged])
