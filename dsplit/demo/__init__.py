"""The embedded demo: a small model that has learned, 48 drawn pictures, and the settings that teach it their style."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsplit.errors import UsageError

PARTS = ("model", "data", "dsplit.toml")


def write_demo(folder: Path) -> None:
    """Copies the demo into `folder`, which is made if need be; nothing is fetched.

    Raises UsageError where `folder` is a file or holds something already, so that nobody's work is overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or empty folder for the demo")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new or empty folder for the demo")
    source = Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, folder / part, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source / part, folder / part)
