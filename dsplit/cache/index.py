"""The index of a store: where each value lies. Kept on this host alone, made of the shards, deletable at any time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dsplit.cache import shards
from dsplit.cache.database import Database, lasting
from dsplit.cache.host import index_path
from dsplit.cache.shards import Damaged, Entry
from dsplit.errors import CacheError

BATCH = 200_000  # values per transaction while an index is made
ASKED = 500  # keys per query
SOUND, UNREADABLE, BROKEN = 0, 1, 2  # states of a shard: its header is damaged; a value in it is
LOST = """SELECT EXISTS (SELECT 1 FROM entries e WHERE shard IN gone AND NOT EXISTS
    (SELECT 1 FROM entries f WHERE f.key = e.key AND f.shard NOT IN gone))"""

Stamp = tuple[int, int]  # size and mtime of a shard


class Index(Database):
    """Where the values of the shards in `folder` lie, by key.

    A lookup may be outdated, never wrong for long: `sync` compares the shards' names, sizes and mtimes, and every value
    carries a checksum over its key. May be used after a fork, and be pickled. `private`: in memory, for this object
    alone, empty at first.
    """

    def __init__(self, folder: Path, *, private: bool = False) -> None:
        self.folder = folder
        path = None
        with contextlib.suppress(OSError, RuntimeError):  # no home, or none that can be written
            if not private:
                path = index_path(folder)
                path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)

    def opened(self) -> None:
        """Forgets what was remembered of another file."""
        self._shards: dict[int, Path] = {}
        self._kinds: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._kind_numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def rebuild(self) -> None:
        """Fills a new file."""
        self.sync()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]
        if self.path is None:
            self.sync()

    @lasting
    def find(self, key: str) -> list[Entry]:
        """Where the value of `key` lies: once per shard that holds it."""
        query = "SELECT shard, kind, start, length, crc FROM entries WHERE key = ?"
        found = []
        for shard, kind, start, length, crc in self.db.execute(query, (bytes.fromhex(key),)).fetchall():
            path = self._shards.get(shard) or self._shard(shard)
            if path is not None:
                dtype, shape = self._kinds.get(kind) or self._kind(kind)
                found.append(Entry(path, dtype, shape, start, start + length, crc))
        return found

    def present(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that have a value; quicker than to look for one after the other."""
        return set(self.facts(keys))

    @lasting
    def facts(self, keys: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The bytes and the checksum of those of `keys` that have a value."""
        return {key.hex(): (length, crc) for key, length, crc in self._entries("key, length, crc", keys)}

    @lasting
    def sync(self) -> None:
        """Takes up shards that appeared or changed, and forgets those that went away."""
        seen = self._scan()
        while self._known() != seen:
            with self.writing():
                known = self._known()
                new, size = {}, 0
                for name in sorted(name for name, stamp in seen.items() if known.get(name) != stamp):
                    if size < BATCH:
                        new[name] = self._read(name)
                        size += len(new[name] or ())
                for name in [name for name in new if not (self.folder / name).exists()]:
                    del new[name], seen[name]
                self._drop(new.keys() & known.keys())
                self._insert(new, seen)
                if size < BATCH:  # last, so that a value that a merge moved is never nowhere
                    self._drop(self._gone(known, seen))

    @lasting
    def add(self, path: Path, table: Mapping[str, Entry]) -> None:
        """Takes up a shard that was just written, or read anew."""
        name = self._name(path)
        with contextlib.suppress(FileNotFoundError), self.writing():  # another process may have merged it away
            stamp = _stamp(path.stat())
            self._drop([name])
            self._insert({name: table}, {name: stamp})

    @lasting
    def drop(self, paths: Iterable[Path]) -> None:
        """Forgets shards; those that are still there are read again by the next `sync`."""
        with self.writing():
            self._drop(map(self._name, paths))

    @lasting
    def forget(self, key: str, shard: Path) -> None:
        """Takes a damaged value out, and marks its shard as broken."""
        taken = "DELETE FROM entries WHERE key = ? AND shard = (SELECT id FROM shards WHERE name = ?) RETURNING length"
        broken = f"UPDATE shards SET state = {BROKEN}, count = count - 1, bytes = bytes - ? WHERE name = ?"
        with self.writing():
            for (length,) in self.db.execute(taken, (bytes.fromhex(key), self._name(shard))).fetchall():
                self.db.execute(broken, (length, self._name(shard)))
                self.db.execute("UPDATE manifests SET whole = 0")

    @lasting
    def holding(self, keys: Iterable[str]) -> set[Path]:
        """The shards that hold some of `keys`, which may have to be gone through again."""
        numbers = {number for (number,) in self._entries("DISTINCT shard", keys)}
        return {path for number in numbers if (path := self._shards.get(number) or self._shard(number))}

    @lasting
    def seen(self) -> dict[Path, tuple[int | None, ...]]:
        """Every shard, with its size, mtime, ctime and inode when it was read whole and found good (None if never)."""
        query = "SELECT name, seen.size, seen.mtime, ctime, inode FROM shards LEFT JOIN seen ON shard = id"
        return {self.folder / name: tuple(stamp) for name, *stamp in self.db.execute(query)}

    @lasting
    def note_seen(self, path: Path, stamp: tuple[int, ...]) -> None:
        """Remembers what `seen` tells, until the shard is dropped."""
        query = "INSERT OR REPLACE INTO seen SELECT id, ?, ?, ?, ? FROM shards WHERE name = ?"
        self.db.execute(query, (*stamp, self._name(path)))

    @lasting
    def unsound(self, *states: int) -> list[Path]:
        """The shards in one of `states`: UNREADABLE, BROKEN."""
        query = f"SELECT name FROM shards WHERE state IN ({','.join('?' * len(states))}) ORDER BY name"
        return [self.folder / name for (name,) in self.db.execute(query, states)]

    @lasting
    def totals(self) -> dict[str, dict[str, int]]:
        """Per unit: `values`, `bytes`, `shards`; the unreadable ones do not count."""
        query = f"""SELECT substr(name, 1, instr(name, '/') - 1) AS unit, sum(count), sum(bytes), count(*) FROM shards
            WHERE state <> {UNREADABLE} GROUP BY unit ORDER BY unit"""
        return {u: {"values": v, "bytes": b, "shards": n} for u, v, b, n in self.db.execute(query)}

    @lasting
    def unwanted(self, wanted: Callable[[], Iterable[str]]) -> dict[Path, dict[str, int]]:
        """Per shard, the values whose keys `wanted` does not give: key and bytes."""
        found: dict[Path, dict[str, int]] = {}
        query = """SELECT name, key, length FROM entries JOIN shards ON shard = id
            WHERE key NOT IN wanted ORDER BY name, start"""
        with self.writing("DEFERRED"):  # what is temporary needs no lock
            keys = ((bytes.fromhex(key),) for key in wanted())
            self.db.executemany("INSERT OR IGNORE INTO wanted VALUES (?)", keys)
            for name, key, length in self.db.execute(query):
                found.setdefault(self.folder / name, {})[key.hex()] = length
            self.db.execute("DELETE FROM wanted")
        return found

    @lasting
    def state(self) -> tuple[float, ...]:
        """Figures that change whenever a value appears or goes away."""
        return self.db.execute("SELECT count(*), total(id), total(count) FROM shards").fetchone()

    @lasting
    def rows(self, digest: str) -> tuple[Any, ...] | None:
        """What `keep_rows` kept of the manifest with this digest, if its values are all there still."""
        query = "SELECT ids, spans, groups, sizes FROM manifests WHERE digest = ? AND whole"
        return self.db.execute(query, (digest,)).fetchone()

    @lasting
    def keep_rows(self, digest: str, table: tuple[Any, ...], state: tuple[float, ...], others: Collection[str]) -> None:
        """Keeps what was read of a manifest that is whole, if `state` is still the same.

        Forgets that of manifests whose digests are not in `others`.
        """
        with self.writing():
            for (old,) in self.db.execute("SELECT digest FROM manifests").fetchall():
                if old not in others:
                    self.db.execute("DELETE FROM manifests WHERE digest = ?", (old,))
            if self.state() == state:
                self.db.execute("INSERT OR REPLACE INTO manifests VALUES (?, 1, ?, ?, ?, ?)", (digest, *table))

    # --- within a transaction

    def _insert(self, tables: Mapping[str, Mapping[str, Entry] | None], stamps: Mapping[str, Stamp]) -> None:
        rows: list[tuple] = []
        for name, table in tables.items():
            state, entries = (UNREADABLE, {}) if table is None else (SOUND, table)
            total = sum(e.end - e.start for e in entries.values())
            values = (name, *stamps[name], state, len(entries), total)
            number = self.db.execute("INSERT INTO shards VALUES (NULL, ?, ?, ?, ?, ?, ?)", values).lastrowid
            rows += [
                (bytes.fromhex(k), number, self._kind_number(e), e.start, e.end - e.start, e.checksum)
                for k, e in entries.items()
            ]
        self.db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", sorted(rows))

    def _drop(self, names: Iterable[str]) -> None:
        """Forgets shards; if a value is nowhere else, no manifest is known to be whole any more."""
        if names := list(names):
            find = "INSERT INTO gone SELECT id FROM shards WHERE name = ?"
            self.db.executemany(find, ((name,) for name in names))
            if self.db.execute("SELECT EXISTS (SELECT 1 FROM gone)").fetchone()[0]:
                if self.db.execute(LOST).fetchone()[0]:
                    self.db.execute("UPDATE manifests SET whole = 0")
                self.db.execute("DELETE FROM entries WHERE shard IN gone")
                self.db.execute("DELETE FROM seen WHERE shard IN gone")
                self.db.execute("DELETE FROM shards WHERE id IN gone")
                self.db.execute("DELETE FROM gone")

    def _kind_number(self, entry: Entry) -> int:
        kind = (entry.dtype, entry.shape)
        if kind not in self._kind_numbers:
            texts = (entry.dtype, ",".join(map(str, entry.shape)))
            self.db.execute("INSERT OR IGNORE INTO kinds VALUES (NULL, ?, ?)", texts)
            found = self.db.execute("SELECT id FROM kinds WHERE dtype = ? AND shape = ?", texts).fetchone()
            self._kind_numbers[kind] = found[0]
        return self._kind_numbers[kind]

    # --- what is where

    def _scan(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for unit in _entries_of(self.folder):
            if unit.is_dir():
                for file in _entries_of(Path(unit.path)):
                    if file.name.endswith(".safetensors") and not file.name.startswith("."):
                        with contextlib.suppress(FileNotFoundError):
                            found[f"{unit.name}/{file.name}"] = _stamp(file.stat())
        return found

    def _known(self) -> dict[str, Stamp]:
        return {name: (size, mtime) for name, size, mtime in self.db.execute("SELECT name, size, mtime FROM shards")}

    def _read(self, name: str) -> dict[str, Entry] | None:
        """The table of a shard; None if it is damaged or went away."""
        path = self.folder / name
        try:
            return shards.read_table(path)
        except Damaged:
            return None
        except OSError as error:
            if path.exists():
                raise CacheError(f"{path}: cannot be read: {error.strerror}") from error
            return None

    def _gone(self, known: Mapping[str, Stamp], seen: dict[str, Stamp]) -> list[str]:
        """The known shards that went away; one that another process wrote after the look is taken for seen."""
        for name in known.keys() - seen.keys():
            if (self.folder / name).exists():
                seen[name] = known[name]
        return list(known.keys() - seen.keys())

    def _entries(self, columns: str, keys: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        """These columns of the entries of `keys`."""
        coming = map(bytes.fromhex, keys)
        while part := list(islice(coming, ASKED)):
            marks = ",".join("?" * len(part))
            yield from self.db.execute(f"SELECT {columns} FROM entries WHERE key IN ({marks})", part)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _shard(self, number: int) -> Path | None:
        for (name,) in self.db.execute("SELECT name FROM shards WHERE id = ?", (number,)):
            self._shards[number] = self.folder / name
        return self._shards.get(number)

    def _kind(self, number: int) -> tuple[str, tuple[int, ...]]:
        dtype, shape = self.db.execute("SELECT dtype, shape FROM kinds WHERE id = ?", (number,)).fetchone()
        self._kinds[number] = dtype, tuple(int(n) for n in shape.split(",") if n)
        return self._kinds[number]


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(f"{folder}: cannot be read: {error.strerror}") from error


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns
