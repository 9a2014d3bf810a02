"""The SQLite file of an index: opened per process, made anew when unusable, kept in memory as a last resort."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dsplit.cache.host import PLACE, remove_unused
from dsplit.console import warn
from dsplit.errors import CacheError

WAIT_SECONDS = 60  # for another process that writes
SCHEMA = """
CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, size INTEGER,
    mtime INTEGER, state INTEGER, count INTEGER, bytes INTEGER);
CREATE TABLE IF NOT EXISTS seen (shard INTEGER PRIMARY KEY, size INTEGER, mtime INTEGER, ctime INTEGER, inode INTEGER);
CREATE TABLE IF NOT EXISTS kinds (id INTEGER PRIMARY KEY, dtype TEXT, shape TEXT, UNIQUE (dtype, shape));
CREATE TABLE IF NOT EXISTS entries (key BLOB, shard INTEGER, kind INTEGER, start INTEGER, length INTEGER, crc INTEGER,
    PRIMARY KEY (key, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS manifests (digest TEXT PRIMARY KEY, whole INTEGER, ids BLOB, spans BLOB, groups BLOB,
    sizes TEXT);
CREATE TEMP TABLE gone (id INTEGER PRIMARY KEY);
CREATE TEMP TABLE wanted (key BLOB PRIMARY KEY) WITHOUT ROWID;
"""

Method = TypeVar("Method", bound=Callable[..., Any])
_left: list[sqlite3.Connection] = []  # connections of a parent process: closing them here would undo its locks


def lasting(method: Method) -> Method:
    """The method of a Database, done again on a new file if the present one turns out to be unusable."""

    @functools.wraps(method)
    def run(self: Database, *args: Any) -> Any:
        try:
            return method(self, *args)
        except sqlite3.DatabaseError as error:
            self.replace(error)
            return method(self, *args)

    return run  # type: ignore[return-value]


class Database:
    """A connection to the SQLite file at `path` (None: in memory), which may be lost at any time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connect()

    def opened(self) -> None:
        """Called when a file was opened."""

    def rebuild(self) -> None:
        """Called when a new file took the place of one that could not be used."""

    @property
    def db(self) -> sqlite3.Connection:
        """The connection of this process."""
        if self._process != os.getpid() and self.path is not None:
            _left.append(self._connection)
            self._connect()
        return self._connection

    @contextlib.contextmanager
    def writing(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """A transaction: all or nothing."""
        self.db.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            self.opened()
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    def replace(self, error: sqlite3.DatabaseError) -> None:
        """Starts anew after `error`; raises CacheError if there is no other way to keep the index."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        if self.path is None:
            raise CacheError(f"the index of the cache cannot be kept in memory: {error}") from error
        self._give_up(error)
        self._connect()
        self.rebuild()

    def _connect(self) -> None:
        self._process = os.getpid()
        try:
            self._connection = _open(self.path)
        except sqlite3.DatabaseError as error:
            if self.path is None:
                raise
            self._give_up(error)
            self._connection = _open(self.path)
        self.opened()

    def _give_up(self, error: sqlite3.DatabaseError) -> None:
        """Deletes a damaged file; one that cannot be written, or is locked for good, is left alone."""
        damaged = not isinstance(error, sqlite3.OperationalError)
        try:
            if damaged and self.path is not None:
                for suffix in ("", "-journal"):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        except OSError:
            damaged = False
        if not damaged:
            warn(f"{self.path}: cannot be used ({error}); the index is kept in memory (${PLACE}: another folder)")
            self.path = None


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None and not path.exists():
        remove_unused(path.parent)
    db = sqlite3.connect(path or ":memory:", isolation_level=None, timeout=WAIT_SECONDS, check_same_thread=False)
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
