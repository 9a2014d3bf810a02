"""Files that are whole or absent: written under a temporary name, synced, renamed; and what dead runs left behind."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsplit.errors import CacheError

STALE_SECONDS = 3600.0  # a temporary file lives for seconds; an older one belongs to nobody
PROBE = "dsplit"  # the file of which `claim_folder` writes the temporary file alone
PLACES = {  # of a cache folder -> the files that are written there
    "": rf"digests\.json|{PROBE}",
    "manifests/": r"[\w-][\w. -]*\.jsonl",
    "shards/*/": r"[0-9a-f]{32}\.safetensors",
}


def write_file(path: Path, chunks: Iterable[bytes | bytearray]) -> None:
    """Puts `chunks` at `path`, whole or not at all; what was there is replaced.

    Raises CacheError with the file and the system's reason (disk full, file too large, no permission).
    """
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CacheError(
            f"{path}: cannot write it: {error.strerror or error}; mend that and run it again, what was written is kept"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def temporary_name(path: Path) -> Path:
    """Where a file lies while it is being written or removed; what dead runs left there is recognised by it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def sync_folder(folder: Path) -> None:
    """Makes renames and deletions in `folder` survive a power cut, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def claim_folder(folder: Path) -> None:
    """Makes `folder` if need be, and finds out whether files can be written there; raises CacheError if not."""
    if folder.exists() and not folder.is_dir():
        raise CacheError(f"{folder}: is a file, not a folder; give another folder with --out")
    probe = folder / f".{PROBE}.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise CacheError(f"{folder}: cannot write there: {reason}; give another folder with --out") from error


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claims `folder`; an error meanwhile takes it away again, if it was made for this and nothing lies in it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    claim_folder(folder)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise


def remove_leftovers(folder: Path) -> int:
    """The number of temporary files of dead runs in the cache `folder` that were removed; those of others stay."""
    removed = 0
    found = [(path, names) for place, names in PLACES.items() for path in folder.glob(f"{place}.*.tmp")]
    for path, names in found:
        match = re.fullmatch(rf"\.({names})\.(?P<host>.+)\.(?P<process>[0-9]{{1,9}})\.tmp", path.name)
        if match is None:
            continue
        host, process = match["host"], match["process"]
        with contextlib.suppress(OSError):
            mine = host == socket.gethostname()
            if time.time() - path.stat().st_mtime > STALE_SECONDS or (mine and not _writes(int(process))):
                path.unlink()
                removed += 1
    return removed


def _writes(process: int) -> bool:
    return alive(process) and process != os.getpid()  # this process writes only later


def alive(process: int) -> bool:
    """True if the process of this host may still be running."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
