"""Where this host keeps what it derives from caches: never within them, since other hosts may share those."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from pathlib import Path

PLACE = "DSPLIT_INDEX"  # the environment variable that names another folder
FORMAT = 1  # part of the file's name, so that another version never meets it
UNUSED_SECONDS = 60 * 86400.0


def index_path(folder: Path) -> Path:
    """The file of the index of `folder`: in the user's cache folder or in $DSPLIT_INDEX, by host and absolute path.

    Raises RuntimeError where the user has no home.
    """
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    return Path(os.environ.get(PLACE) or _user_folder()) / host_name() / f"{name}-{FORMAT}.sqlite"


def host_name() -> str:
    """The host's name, made fit for a file name without dots."""
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())


def remove_unused(folder: Path) -> None:
    """Removes indexes that nobody opened for 60 days; their caches may be gone."""
    for path in folder.glob("*.sqlite"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink()


def _user_folder() -> Path:
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dsplit" / "index"
