"""The embedded demo: a small model that has learned, 48 drawn pictures, and the settings that teach it their style."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsplit.errors import DsplitError, UsageError

PARTS = ("model", "data", "dsplit.toml")


def write_demo(folder: Path) -> None:
    """Copies the demo into `folder`, which is made if need be; nothing is fetched.

    Raises UsageError where `folder` is a file or holds something already, so that nobody's work is overwritten, and
    DsplitError where the system refuses to write.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or empty folder for the demo")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new or empty folder for the demo")
    source = Path(__file__).parent
    files = [path for part in PARTS for path in (source / part, *(source / part).rglob("*"))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            if path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    except OSError as error:
        reason = error.strerror or error
        raise DsplitError(
            f"{folder}: cannot write the demo there: {reason}; mend that, empty the folder, and try again"
        ) from error
