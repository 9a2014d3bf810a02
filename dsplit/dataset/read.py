"""Reads a data set: every row checked, all faults of all rows in one report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.console import Progress
from dsplit.dataset.columns import Cells, match_columns, parse_renames, read_cells, wanted_columns
from dsplit.dataset.faults import Fault, Refusal, count_reasons, list_lines
from dsplit.dataset.metadata import read_metadata
from dsplit.dataset.packed import Source
from dsplit.dataset.paths import Listings, locate, spelled
from dsplit.dataset.rows import Dataset, Row, place, row_id
from dsplit.dataset.sizes import Size, scaled_size, stated_size, target_size
from dsplit.dataset.table import Table
from dsplit.errors import DataError, Problem
from dsplit.recipe import DataOptions

if TYPE_CHECKING:
    from dsplit.dataset.pictures import Picture
    from dsplit.models.family import Column

HUGE = 89_478_485  # pixels from which a picture is mentioned: a quarter of a GiB in RGB
MANY = 1000  # pictures from which progress is shown
THREADS = 8  # waiting for a network file system, not computing


@dataclass
class Draft:
    """A row on its way: its cells, then its files and sizes, and the faults found so far."""

    line: int
    where: str
    cells: Cells
    faults: list[Fault]
    source: str
    files: dict[str, Source] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)
    size: Size = (0, 0)
    item: int = 0

    @property
    def picture(self) -> Picture:
        """The picture that gives the row its size: that of the first file column."""
        return next(iter(self.pictures.values()))


def read_dataset(options: DataOptions, columns: Sequence[Column], size_factor: int, *, decode: bool = False) -> Dataset:
    """The usable rows, each checked: columns, types, files, pictures, sizes. No model is loaded.

    decode: decode every picture wholly; else read its header and its end-of-file mark. Warnings are for the caller to
    show. Raises UsageError for options that make no sense, and DataError with the faults of all rows, unless
    `options.skip_bad` leaves those rows out; no usable row is always an error.
    """
    stated_size(options, size_factor)
    columns = wanted_columns(options, columns)
    renames = parse_renames(options.columns, columns)
    table, base, shown_base = read_metadata(options)
    names = match_columns(table, columns, renames) if table.columns else {}
    drafts = _read_records(table, columns, names)
    _find_files(drafts, columns, base, shown_base)
    _check_pictures(drafts, options, decode)
    _choose_sizes(drafts, options, size_factor)
    good, bad = [d for d in drafts if not d.faults], [d for d in drafts if d.faults]
    _refuse(table, good, bad, options.skip_bad)
    return Dataset(
        rows=tuple(_rows(good)),
        skipped=tuple(f.problem for d in bad for f in d.faults),
        warnings=(*table.warnings, *_warnings(good)),
    )


def _read_records(table: Table, columns: Sequence[Column], names: Mapping[str, str]) -> list[Draft]:
    drafts = []
    for record in table.records:
        source = record.source or table.source
        where = place(source, record.line, record.cells, record.item)
        cells = Cells({}, {}, (), ()) if record.faults else read_cells(record, columns, names, where)
        drafts.append(Draft(record.line, where, cells, [*record.faults, *cells.faults], source, item=record.item))
    return drafts


def _find_files(drafts: Iterable[Draft], columns: Sequence[Column], base: Path, shown_base: str) -> None:
    listings: Listings = {}
    kept = [c.name for c in columns if c.kind == "file"]
    for draft in drafts:
        for name in kept:
            if name not in draft.cells.written:
                continue
            if name in draft.cells.packed:
                draft.files[name] = draft.cells.packed[name]
                continue
            text = draft.cells.written[name] = draft.cells.values[name] = spelled(draft.cells.written[name], base)
            try:
                draft.files[name] = locate(text, base, shown_base, listings)
            except Refusal as refusal:
                draft.faults.append(refusal.at(draft.where, f"{name} "))


def _check_pictures(drafts: Sequence[Draft], options: DataOptions, decode: bool) -> None:
    """Looks into every file once, several at a time."""
    from dsplit.dataset.images import pillow
    from dsplit.dataset.pictures import inspect

    def look(path: Source) -> Picture | Refusal:
        try:
            return inspect(path, options.max_image_pixels, whole=decode)
        except Refusal as refusal:
            return refusal

    paths = list(dict.fromkeys(path for draft in drafts for path in draft.files.values()))
    with pillow():
        found = dict(zip(paths, _in_threads(look, paths, (os.cpu_count() or 1) if decode else THREADS), strict=True))
    for draft in drafts:
        for name, path in draft.files.items():
            result = found[path]
            if isinstance(result, Refusal):
                draft.faults.append(result.at(draft.where, f"{name} '{draft.cells.written[name]}': "))
            else:
                draft.pictures[name] = result


def _in_threads(look: Callable[[Source], Any], paths: list[Source], threads: int) -> list[Any]:
    """`look` of every path, in order."""
    results: list[Any] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(min(threads, THREADS)))
        shown = stack.enter_context(Progress("check", len(paths), "pictures")) if len(paths) >= MANY else None
        rest = iter(paths)
        while part := list(islice(rest, 4096)):  # a future per path of ten million would fill the memory
            for result in pool.map(look, part):
                results.append(result)
                if shown:
                    shown.advance()
    return results


def _choose_sizes(drafts: Iterable[Draft], options: DataOptions, size_factor: int) -> None:
    for draft in drafts:
        if not draft.pictures:
            if not draft.faults:
                draft.faults.append(Fault("no picture", draft.where, "no picture to take the size from"))
            continue
        name, picture = next(iter(draft.pictures.items()))
        try:
            draft.size = target_size(picture.size, options, size_factor)
            _check_scaled(picture.size, draft.size, options)
        except Refusal as refusal:
            draft.faults.append(refusal.at(draft.where, f"{name} '{draft.cells.written[name]}' is "))


def _check_scaled(image_size: Size, size: Size, options: DataOptions) -> None:
    """Refuses a picture so long and thin that scaling it before the crop would fill the memory."""
    width, height = scaled_size(image_size, size)
    if width * height > options.max_image_pixels:
        what = f"{image_size[0]}x{image_size[1]}, which would be scaled to {width}x{height} and cropped to "
        remedy = "cut the picture, or raise --max-image-pixels"
        raise Refusal("too long and thin", f"{what}{size[0]}x{size[1]}", remedy)


def _refuse(table: Table, good: Sequence[Draft], bad: Sequence[Draft], skip_bad: bool) -> None:
    """Raises DataError if no row is usable, or if some are not and may not be left out."""
    problems = [f.problem for d in bad for f in d.faults]
    reasons = count_reasons(d.faults[0].reason for d in bad)
    if not good:
        why = f"{len(bad)} of {len(bad)} rows have faults: {reasons}" if bad else _emptiness(table)
        raise DataError(f"0 usable rows in '{table.source}' ({why})", problems)
    if bad and not skip_bad:
        summary = f"{len(bad)} of {len(good) + len(bad)} rows in '{table.source}' have faults ({reasons})"
        raise DataError(f"{summary}; mend them, or leave them out with --skip-bad", problems)


def _emptiness(table: Table) -> str:
    if Path(table.source).is_dir():
        return "no metadata file and no picture in it"
    return "0 rows below the column names" if table.columns else "the file holds nothing"


def _rows(drafts: Iterable[Draft]) -> Iterable[Row]:
    seen: Counter[str] = Counter()
    for draft in drafts:
        first = row_id(draft.cells.written, 0)
        yield Row(
            id=row_id(draft.cells.written, seen[first]) if seen[first] else first,
            source=draft.source,
            line=draft.line,
            columns=draft.cells.values,
            files=draft.files,
            image_size=draft.picture.size,
            size=draft.size,
            item=draft.item,
        )
        seen[first] += 1


def _warnings(drafts: Sequence[Draft]) -> list[Problem]:
    """One warning per kind, naming all rows that it is about."""
    kinds: dict[str, list[Draft]] = {}
    for draft in drafts:
        for name in draft.cells.empty:
            kinds.setdefault(f"empty {name}, used as an empty text", []).append(draft)
        if any(p.animated for p in draft.pictures.values()):
            kinds.setdefault("more than one frame, the first is used", []).append(draft)
        if any(p.size[0] * p.size[1] > HUGE for p in draft.pictures.values()):
            kinds.setdefault(f"more than {HUGE} pixels, decoding needs much memory", []).append(draft)
        if draft.size[0] > draft.picture.size[0] or draft.size[1] > draft.picture.size[1]:
            kinds.setdefault("smaller than the stated size, scaled up", []).append(draft)
    return [Problem(rows[0].where, f"{what}: {_list(rows)}") for what, rows in kinds.items()]


def _list(drafts: Sequence[Draft]) -> str:
    if drafts[0].line and not any(d.item for d in drafts):
        return list_lines([d.line for d in drafts])
    return ", ".join(d.where for d in drafts)
