"""Holds: the manifests that running processes use, so that `dsplit cache --gc` spares their values.

A hold is a second name of a manifest (a hard link, or a copy where there are none), `holds/NAME.HOST.PID.N.jsonl`. It
keeps the rows that a run began with, whatever takes the manifest's name afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsplit.cache.files import alive
from dsplit.cache.host import host_name

RENEW_SECONDS = 60.0
LOST_SECONDS = 86400.0  # a hold of another host that was not renewed for so long belongs to nobody
_numbers = itertools.count()


class Hold:
    """A hold on the manifest at `path`, until it is let go or this process ends.

    path: of the hold; of the manifest itself in a cache that cannot be written, where nobody can hold anything.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.let_go: Callable[[], Any] = lambda: None
        self._renewed = time.monotonic()
        place = path.parent.parent / "holds"
        mine = place / f"{path.stem}.{host_name()}.{os.getpid()}.{next(_numbers)}.jsonl"
        with contextlib.suppress(OSError):
            place.mkdir(exist_ok=True)
            try:
                os.link(path, mine)
            except OSError:
                shutil.copyfile(path, mine)
            os.utime(mine)
            self.path = mine
            self.let_go = weakref.finalize(self, _remove, mine, os.getpid())

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}  # the process that made the hold lets it go

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path, self._renewed = state["path"], time.monotonic()

    def renew(self) -> None:
        """Says, at most once a minute, that somebody still reads; for hosts that cannot see this process."""
        if time.monotonic() - self._renewed > RENEW_SECONDS:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.path)


def holds(folder: Path) -> list[Path]:
    """The holds in the cache `folder` that count: those of living processes, and of other hosts if renewed lately."""
    return [path for path in sorted((folder / "holds").glob("*.jsonl")) if _counts(path)]


def remove_old_holds(folder: Path) -> None:
    """Removes the holds that do not count."""
    for path in (folder / "holds").glob("*.jsonl"):
        if not _counts(path):
            with contextlib.suppress(OSError):
                path.unlink()


def holder(path: Path) -> str:
    """Who made a hold: `process 17 on HOST`."""
    _, host, process, _ = path.stem.rsplit(".", 3)
    return f"process {process} on {host}"


def _counts(path: Path) -> bool:
    *_, host, process, _ = ("", "", *path.stem.rsplit(".", 3))
    try:
        if host == host_name() and process.isdigit():
            return alive(int(process))
        return time.time() - path.stat().st_mtime < LOST_SECONDS
    except OSError:
        return False


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a process that was forked from it
        with contextlib.suppress(OSError):
            path.unlink()
