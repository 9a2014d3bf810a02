"""Reads a plain folder: pictures with `name.txt` captions beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from dsplit.dataset.faults import Fault
from dsplit.dataset.table import UTF8_REMEDY, Record, Table, not_utf8, physical_lines
from dsplit.errors import Problem

# Those that cannot be read are listed too, so that they are refused in words and not passed over in silence.
READABLE = (".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
PICTURES = frozenset((*READABLE, ".heic", ".heif", ".jxl", ".svg"))


def read_captions(folder: Path, source: str) -> Table:
    """One record per picture in `folder` and its subfolders, with the columns `image` and `prompt`.

    The caption is the text of `name.txt` without its last line break; hidden files and folders are left alone. A
    picture without a caption and a caption that is not UTF-8 are faults, a caption without a picture is a warning.
    """
    warnings: list[Problem] = []
    records = _records(folder, source, warnings)
    first = list(islice(records, 1))
    return Table(source, ("image", "prompt") if first else (), chain(first, records), source, warnings)


def _records(folder: Path, source: str, warnings: list[Problem]) -> Iterator[Record]:
    orphans: list[str] = []
    links: list[str] = []
    for path, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links += [str(Path(path, name).relative_to(folder)) for name in folders if Path(path, name).is_symlink()]
        names = sorted(name for name in names if not name.startswith("."))
        captions = {_stem(name): Path(path, name) for name in names if name.lower().endswith(".txt")}
        pictures = [name for name in names if os.path.splitext(name)[1].lower() in PICTURES]
        for name in pictures:
            image = Path(path, name).relative_to(folder).as_posix()
            yield _record(image, captions.get(_stem(name)), folder, source)
        orphans += [str(captions[stem].relative_to(folder)) for stem in captions.keys() - {*map(_stem, pictures)}]
    told = {"captions without a picture": orphans, "linked folders, which are not followed": links}
    warnings += [Problem(source, f"{what}: {', '.join(sorted(names))}") for what, names in told.items() if names]


def _fail(error: OSError) -> None:
    raise error


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _record(image: str, caption: Path | None, folder: Path, source: str) -> Record:
    if caption is None:
        name = f"{os.path.splitext(image)[0].rpartition('/')[2]}.txt"
        remedy = f"write {name} beside it; it may be empty"
        return Record(0, {}, (Fault("no caption", str(Path(source, image)), f"no caption {name}", remedy),))
    shown = str(Path(source, caption.relative_to(folder)))
    bad: dict[int, str] = {}
    text = "".join(physical_lines(caption, shown, bad))
    if bad:
        line, byte = next(iter(bad.items()))
        return Record(0, {}, (Fault("not UTF-8", f"{shown}:{line}", f"{byte} is not UTF-8", UTF8_REMEDY),))
    if not_utf8(image):
        what = "the name of the picture is not UTF-8"
        return Record(0, {}, (Fault("not UTF-8", str(Path(source)), f"{what}: {image!a}", "rename it"),))
    return Record(0, {"image": image, "prompt": without_line_end(text)})


def without_line_end(text: str) -> str:
    """A caption without the last line break of its file."""
    for end in ("\r\n", "\n", "\r"):
        if text.endswith(end):
            return text[: -len(end)]
    return text
