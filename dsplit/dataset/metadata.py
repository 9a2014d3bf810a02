"""Finds the metadata of a data set and reads it: CSV, JSON, JSONL, Parquet, tar shards, or a plain folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from dsplit.dataset.captions import PICTURES, read_captions
from dsplit.dataset.csv_file import read_csv
from dsplit.dataset.json_file import read_json, read_jsonl
from dsplit.dataset.parquet_file import read_parquet, read_parquets
from dsplit.dataset.table import Table
from dsplit.dataset.webdataset import read_shards
from dsplit.errors import DataError, Problem, UsageError
from dsplit.recipe import DataOptions

READERS: dict[str, Callable[[Path, str], Table]] = {
    ".csv": read_csv,
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".tar": lambda path, source: read_shards([path], str(Path(source).parent)),
}
TAR = re.compile(r"\.(tar|tgz|tar\.\w+)$", re.IGNORECASE)  # compressed ones too, to be refused in words


def read_metadata(options: DataOptions) -> tuple[Table, Path, str]:
    """The table, the folder where its paths start, and that folder as the user gave it.

    Raises UsageError where the options name nothing usable, DataError where a file or folder is missing or unreadable.
    """
    if options.data is None and options.metadata is None:
        raise UsageError("no data set: give --data FOLDER or --metadata FILE")
    if options.data is not None and not Path(options.data).is_dir():
        if Path(options.data).is_file():
            raise UsageError(f"--data '{options.data}' is a file; give it as --metadata")
        raise DataError(f"the data folder '{options.data}' does not exist")
    source = options.metadata or _find(options.data or ".")
    shown = options.data if options.data is not None else str(Path(source or ".").parent)
    try:
        if source is None:
            return _read_folder(Path(shown), shown), Path(shown).absolute(), shown
        return _reader(source, options.data)(Path(source), source), Path(shown).absolute(), shown
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise DataError("cannot read the metadata", [Problem(str(error.filename or source), what)]) from error


def _read_folder(folder: Path, source: str) -> Table:
    """A folder without metadata: tar shards or Parquet files if there are any, else pictures with their captions."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    shards = [name for name in names if TAR.search(name)]
    tables = [name for name in names if name.lower().endswith(".parquet")]
    kinds = {"tar shards": shards, "Parquet files": tables, "pictures": _picture(folder) if shards or tables else []}
    there = {kind: found for kind, found in kinds.items() if found}
    if len(there) > 1:
        found = " and ".join(f"{kind} ({names[0]})" for kind, names in there.items())
        raise UsageError(f"'{source}' holds {found}: keep them in folders of their own, or name one with --metadata")
    if shards:
        return read_shards([folder / name for name in shards], source)
    if tables:
        return read_parquets([folder / name for name in tables], source)
    return read_captions(folder, source)


def _picture(folder: Path) -> list[str]:
    """One picture in `folder` or below it, if there is any."""
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if found := [name for name in names if os.path.splitext(name)[1].lower() in PICTURES and name[0] != "."]:
            return found[:1]
    return []


def _find(folder: str) -> str | None:
    """The metadata file in `folder`, or None for a plain folder."""
    found = sorted(p for p in Path(folder).glob("metadata.*") if p.is_file())
    known = [p for p in found if p.suffix.lower() in READERS]
    if len(known) > 1:
        names = ", ".join(p.name for p in known)
        raise UsageError(f"'{folder}' holds {names}: choose one with --metadata {known[0]}")
    if known:
        return str(known[0])
    others = [p for p in found if p.suffix.lower() not in {*PICTURES, ".txt"}]
    return str(others[0]) if others else None  # _reader refuses it by name


def _reader(source: str, folder: str | None) -> Callable[[Path, str], Table]:
    path = Path(source)
    if path.is_dir():
        raise UsageError(f"--metadata '{source}' is a folder; give it as --data")
    if not path.exists():
        inside = Path(folder, source) if folder is not None else path
        hint = f"; did you mean {inside}?" if inside.exists() else ""
        raise DataError(f"the metadata file '{source}' does not exist{hint}")
    if TAR.search(path.name):
        return READERS[".tar"]
    if path.suffix.lower() not in READERS:
        known = ", ".join(name[1:] for name in READERS)
        raise DataError(f"{source}: unknown metadata type {path.suffix or '(no extension)'} ({known})")
    return READERS[path.suffix.lower()]
