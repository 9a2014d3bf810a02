"""The index of a store: where each value lies. SQLite, on this host alone, made of the shards and deletable at any time."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dsplit.cache import shards
from dsplit.cache.host import PLACE, index_path, remove_unused
from dsplit.cache.shards import Damaged, Entry
from dsplit.console import warn
from dsplit.errors import CacheError

BATCH = 200_000  # values per transaction while an index is made
ASKED = 500  # keys per query
SOUND, UNREADABLE, BROKEN = 0, 1, 2  # states of a shard: its header is damaged; a value in it is
SCHEMA = """
CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, size INTEGER,
    mtime INTEGER, state INTEGER, count INTEGER, bytes INTEGER);
CREATE TABLE IF NOT EXISTS kinds (id INTEGER PRIMARY KEY, dtype TEXT, shape TEXT, UNIQUE (dtype, shape));
CREATE TABLE IF NOT EXISTS entries (key BLOB, shard INTEGER, kind INTEGER, start INTEGER, length INTEGER, crc INTEGER,
    PRIMARY KEY (key, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS manifests (digest TEXT PRIMARY KEY, whole INTEGER, ids BLOB, offsets BLOB, groups BLOB,
    sizes TEXT);
CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY);
CREATE TEMP TABLE wanted (key BLOB PRIMARY KEY) WITHOUT ROWID;
"""
LOST = """SELECT EXISTS (SELECT 1 FROM entries e WHERE shard IN gone AND NOT EXISTS
    (SELECT 1 FROM entries f WHERE f.key = e.key AND f.shard NOT IN gone))"""

Stamp = tuple[int, int]  # size and mtime of a shard
Method = TypeVar("Method", bound=Callable[..., Any])
_left: list[sqlite3.Connection] = []  # connections of a parent process: closing them here would undo its locks


def _lasting(method: Method) -> Method:
    """The method, done again on a new index if the present one turns out to be unusable."""

    @functools.wraps(method)
    def run(self: Index, *args: Any) -> Any:
        try:
            return method(self, *args)
        except sqlite3.DatabaseError as error:
            self._replace(error)
            return method(self, *args)

    return run  # type: ignore[return-value]


class Index:
    """Where the values of the shards in `folder` lie, by key.

    A lookup may be outdated, never wrong for long: `sync` compares the shards' names, sizes and mtimes, and every value
    carries a checksum over its key. May be used after a fork, and be pickled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):  # no home, or none that can be written
            self._path = index_path(folder)
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._connect()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]
        if self._path is None:
            self.sync()

    @_lasting
    def find(self, key: str) -> list[Entry]:
        """Where the value of `key` lies: once per shard that holds it."""
        query = "SELECT shard, kind, start, length, crc FROM entries WHERE key = ?"
        found = []
        for shard, kind, start, length, crc in self._db.execute(query, (bytes.fromhex(key),)).fetchall():
            path = self._shards.get(shard) or self._shard(shard)
            if path is not None:
                dtype, shape = self._kinds.get(kind) or self._kind(kind)
                found.append(Entry(path, dtype, shape, start, start + length, crc))
        return found

    @_lasting
    def present(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that have a value; quicker than to look for one after the other."""
        found: set[str] = set()
        for start in range(0, len(keys), ASKED):
            part = [bytes.fromhex(key) for key in keys[start : start + ASKED]]
            query = f"SELECT key FROM entries WHERE key IN ({','.join('?' * len(part))})"
            found.update(key.hex() for (key,) in self._db.execute(query, part))
        return found

    @_lasting
    def sync(self) -> None:
        """Takes up shards that appeared or changed, and forgets those that went away."""
        seen = self._scan()
        while self._known() != seen:
            with self._writing():
                known = self._known()
                new, size = {}, 0
                for name in sorted(name for name, stamp in seen.items() if known.get(name) != stamp):
                    new[name] = self._read(name)
                    size += len(new[name] or ())
                    if size >= BATCH:
                        break
                else:
                    self._drop(self._gone(known, seen))
                for name in [name for name in new if not (self.folder / name).exists()]:
                    del new[name], seen[name]
                self._drop(new.keys() & known.keys())
                self._insert(new, seen)

    @_lasting
    def add(self, path: Path, table: Mapping[str, Entry]) -> None:
        """Takes up a shard that was just written, or read anew."""
        name = self._name(path)
        with contextlib.suppress(FileNotFoundError), self._writing():  # another process may have merged it away
            stamp = _stamp(path.stat())
            self._drop([name])
            self._insert({name: table}, {name: stamp})

    @_lasting
    def drop(self, paths: Iterable[Path]) -> None:
        """Forgets shards; those that are still there are read again by the next `sync`."""
        with self._writing():
            self._drop(map(self._name, paths))

    @_lasting
    def forget(self, key: str, shard: Path) -> None:
        """Takes a damaged value out, and marks its shard as broken."""
        taken = "DELETE FROM entries WHERE key = ? AND shard = (SELECT id FROM shards WHERE name = ?) RETURNING length"
        broken = f"UPDATE shards SET state = {BROKEN}, count = count - 1, bytes = bytes - ? WHERE name = ?"
        with self._writing():
            for (length,) in self._db.execute(taken, (bytes.fromhex(key), self._name(shard))).fetchall():
                self._db.execute(broken, (length, self._name(shard)))
                self._db.execute("UPDATE manifests SET whole = 0")

    @_lasting
    def unsound(self, *states: int) -> list[Path]:
        """The shards in one of `states`: UNREADABLE, BROKEN."""
        query = f"SELECT name FROM shards WHERE state IN ({','.join('?' * len(states))}) ORDER BY name"
        return [self.folder / name for (name,) in self._db.execute(query, states)]

    @_lasting
    def totals(self) -> dict[str, dict[str, int]]:
        """Per unit: `values`, `bytes`, `shards`; the unreadable ones do not count."""
        query = f"""SELECT substr(name, 1, instr(name, '/') - 1) AS unit, sum(count), sum(bytes), count(*) FROM shards
            WHERE state <> {UNREADABLE} GROUP BY unit ORDER BY unit"""
        return {u: {"values": v, "bytes": b, "shards": n} for u, v, b, n in self._db.execute(query)}

    @_lasting
    def unwanted(self, wanted: Callable[[], Iterable[str]]) -> dict[Path, dict[str, int]]:
        """Per shard, the values whose keys `wanted` does not give: key and bytes."""
        found: dict[Path, dict[str, int]] = {}
        query = """SELECT name, key, length FROM entries JOIN shards ON shard = id
            WHERE key NOT IN wanted ORDER BY name, start"""
        with self._writing("DEFERRED"):  # what is temporary needs no lock
            keys = ((bytes.fromhex(key),) for key in wanted())
            self._db.executemany("INSERT OR IGNORE INTO wanted VALUES (?)", keys)
            for name, key, length in self._db.execute(query):
                found.setdefault(self.folder / name, {})[key.hex()] = length
            self._db.execute("DELETE FROM wanted")
        return found

    @_lasting
    def rows(self, digest: str) -> tuple[Any, ...] | None:
        """What `keep_rows` kept of the manifest with this digest: whole, ids, offsets, groups, sizes."""
        query = "SELECT whole, ids, offsets, groups, sizes FROM manifests WHERE digest = ?"
        return self._db.execute(query, (digest,)).fetchone()

    @_lasting
    def keep_rows(self, digest: str, table: tuple[Any, ...], present: Collection[str]) -> None:
        """Keeps what was read of a manifest; forgets that of manifests whose digests are not in `present`."""
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?, ?, ?)", (digest, *table))
            for (other,) in self._db.execute("SELECT digest FROM manifests").fetchall():
                if other not in present:
                    self._db.execute("DELETE FROM manifests WHERE digest = ?", (other,))

    # --- within a transaction

    def _insert(self, tables: Mapping[str, Mapping[str, Entry] | None], stamps: Mapping[str, Stamp]) -> None:
        rows: list[tuple] = []
        for name, table in tables.items():
            state, entries = (UNREADABLE, {}) if table is None else (SOUND, table)
            total = sum(e.end - e.start for e in entries.values())
            values = (name, *stamps[name], state, len(entries), total)
            number = self._db.execute("INSERT INTO shards VALUES (NULL, ?, ?, ?, ?, ?, ?)", values).lastrowid
            rows += [
                (bytes.fromhex(k), number, self._kind_number(e), e.start, e.end - e.start, e.checksum)
                for k, e in entries.items()
            ]
        self._db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", sorted(rows))

    def _drop(self, names: Iterable[str]) -> None:
        """Forgets shards; if a value is nowhere else, no manifest is known to be whole any more."""
        if names := list(names):
            find = "INSERT INTO gone SELECT id FROM shards WHERE name = ?"
            self._db.executemany(find, ((name,) for name in names))
            if self._db.execute("SELECT EXISTS (SELECT 1 FROM gone)").fetchone()[0]:
                if self._db.execute(LOST).fetchone()[0]:
                    self._db.execute("UPDATE manifests SET whole = 0")
                self._db.execute("DELETE FROM entries WHERE shard IN gone")
                self._db.execute("DELETE FROM shards WHERE id IN gone")
                self._db.execute("DELETE FROM gone")

    def _kind_number(self, entry: Entry) -> int:
        kind = (entry.dtype, entry.shape)
        if kind not in self._kind_numbers:
            texts = (entry.dtype, ",".join(map(str, entry.shape)))
            self._db.execute("INSERT OR IGNORE INTO kinds VALUES (NULL, ?, ?)", texts)
            found = self._db.execute("SELECT id FROM kinds WHERE dtype = ? AND shape = ?", texts).fetchone()
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
        return {name: (size, mtime) for name, size, mtime in self._db.execute("SELECT name, size, mtime FROM shards")}

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
        gone = []
        for name in known.keys() - seen.keys():
            if (self.folder / name).exists():
                seen[name] = known[name]
            else:
                gone.append(name)
        return gone

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _shard(self, number: int) -> Path | None:
        for (name,) in self._db.execute("SELECT name FROM shards WHERE id = ?", (number,)):
            self._shards[number] = self.folder / name
        return self._shards.get(number)

    def _kind(self, number: int) -> tuple[str, tuple[int, ...]]:
        dtype, shape = self._db.execute("SELECT dtype, shape FROM kinds WHERE id = ?", (number,)).fetchone()
        self._kinds[number] = dtype, tuple(int(n) for n in shape.split(",") if n)
        return self._kinds[number]

    # --- the connection

    @property
    def _db(self) -> sqlite3.Connection:
        if self._process != os.getpid() and self._path is not None:
            _left.append(self._connection)
            self._connect()
        return self._connection

    @contextlib.contextmanager
    def _writing(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            self._kind_numbers.clear()
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _connect(self) -> None:
        """Opens the index, in memory if it cannot be kept in a file."""
        self._shards: dict[int, Path] = {}
        self._kinds: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._kind_numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self._process = os.getpid()
        try:
            self._connection = self._opened(self._path)
        except sqlite3.DatabaseError as error:
            if self._path is None:
                raise
            self._give_up(error)
            self._connection = self._opened(self._path)

    def _opened(self, path: Path | None) -> sqlite3.Connection:
        if path is not None and not path.exists():
            remove_unused(path.parent)
        db = sqlite3.connect(path or ":memory:", isolation_level=None, timeout=60, check_same_thread=False)
        try:
            db.execute("PRAGMA synchronous = OFF")  # a power cut may cost the index; it is made again
            db.execute("PRAGMA cache_size = -32000")
            db.executescript(SCHEMA)
        except sqlite3.Error:
            db.close()
            raise
        if path is not None:
            with contextlib.suppress(OSError):
                os.utime(path)  # in use
        return db

    def _replace(self, error: sqlite3.DatabaseError) -> None:
        """Starts anew from the shards, after `error`."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        if self._path is None:
            raise CacheError(f"the index of {self.folder} cannot be kept in memory: {error}") from error
        self._give_up(error)
        self._connect()
        self.sync()

    def _give_up(self, error: sqlite3.DatabaseError) -> None:
        """Deletes a damaged index; one that cannot be written or is locked for good is left alone."""
        damaged = not isinstance(error, sqlite3.OperationalError)
        try:
            if damaged and self._path is not None:
                for suffix in ("", "-journal"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError:
            damaged = False
        if not damaged:
            warn(f"{self._path}: cannot be used ({error}); the index is kept in memory (${PLACE}: another folder)")
            self._path = None


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

