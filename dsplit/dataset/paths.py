"""Finds the file that a cell names, and says what is nearest where there is none."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from pathlib import Path, PurePosixPath

from dsplit.dataset.faults import Refusal

Listings = dict[Path, dict[str, str]]  # folder -> folded name -> name


def spelled(text: str, base: Path) -> str:
    """`text` with / separators; as it is where, not on Windows, it names a file with a backslash in its name."""
    if "\\" not in text or (os.name != "nt" and Path(base, text).is_file()):
        return text
    return text.replace("\\", "/")


def locate(text: str, base: Path, shown_base: str, listings: Listings) -> Path:
    """The path of an existing, regular, non-empty file that `text` (with / separators) names, seen from `base`.

    `..` and absolute paths are accepted: data may lie anywhere, it is only read. `listings` remembers folders between
    calls. Raises Refusal.
    """
    path = Path(base, text)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(text, base, shown_base, listings) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise Refusal("unreadable path", f"'{text}' cannot be read: {_words(error)}", "fix the path") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise Refusal("not a file", f"'{text}' is {kind}", "fix the path or drop the row")
    if status.st_size == 0:
        raise Refusal("empty file", f"'{text}' is an empty file (0 bytes)", "copy it again or drop the row")
    return path


def _missing(text: str, base: Path, shown_base: str, listings: Listings) -> Refusal:
    if "://" in text:
        return Refusal("web address", f"'{text}' is a web address, not a file", "download it first")
    if os.name != "nt" and re.match("[A-Za-z]:/", text):
        return Refusal("file not found", f"'{text}' is a path of a Windows machine", "make it relative to --data")
    near = _nearest(text, base, listings)
    if near is None:
        under = "" if Path(text).is_absolute() else f" under '{shown_base}'"
        return Refusal("file not found", f"'{text}' not found{under}", "fix the path or drop the row")
    letters = unicodedata.normalize("NFC", near) == unicodedata.normalize("NFC", text)
    how = "differs only in its Unicode form (composed or decomposed accents)" if letters else "differs only in case"
    return Refusal("wrong case", f"'{text}' not found: it {how} from {near}", f"write {near}")


def _nearest(text: str, base: Path, listings: Listings) -> str | None:
    """The existing path that `text` equals but for case and Unicode form, or None."""
    folder, found = base, PurePosixPath()
    for part in PurePosixPath(text).parts:
        if part in ("/", "..") or (folder / part).exists():
            name: str | None = part
        else:
            name = _listing(folder, listings).get(_folded(part))
        if name is None:
            return None
        folder, found = folder / name, found / name
    return str(found)


def _listing(folder: Path, listings: Listings) -> dict[str, str]:
    if folder not in listings:
        try:
            listings[folder] = {_folded(name): name for name in os.listdir(folder)}
        except OSError:
            listings[folder] = {}
    return listings[folder]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
