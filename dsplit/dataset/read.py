"""Reads a data set: every row checked, all faults of all rows in one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dsplit.console import Progress
from dsplit.dataset.columns import Cells, match_columns, parse_renames, read_cells, wanted_columns
from dsplit.dataset.draft import Draft
from dsplit.dataset.faults import Fault, Refusal, count_reasons
from dsplit.dataset.inspector import Inspector
from dsplit.dataset.metadata import read_metadata
from dsplit.dataset.notices import Notices
from dsplit.dataset.paths import Listings, locate, spelled
from dsplit.dataset.rows import Dataset, Row, place, row_id
from dsplit.dataset.sizes import Size, scaled_size, stated_size, target_size
from dsplit.dataset.spool import Rows
from dsplit.dataset.table import Record, Table
from dsplit.errors import DataError, Problem
from dsplit.recipe import DataOptions

if TYPE_CHECKING:
    from dsplit.models.family import Column

TOGETHER = 1000  # rows on their way at once


def read_dataset(options: DataOptions, columns: Sequence[Column], size_factor: int, *, decode: bool = False) -> Dataset:
    """The usable rows, each checked: columns, types, files, pictures, sizes. No model is loaded.

    The metadata is read in parts, and the rows lie on disk, so a data set may have millions. decode: decode every
    picture wholly; else read its header and its end-of-file mark. Warnings are for the caller to show. Raises
    UsageError for options that make no sense, and DataError with the faults of all rows, unless `options.skip_bad`
    leaves those rows out; no usable row is always an error.
    """
    stated_size(options, size_factor)
    columns = wanted_columns(options, columns)
    renames = parse_renames(options.columns, columns)
    table, base, shown_base = read_metadata(options)
    names = match_columns(table, columns, renames) if table.columns else {}
    rows, ids, notices = Rows(options.crops, options.flip), _Ids(), Notices(options)
    inspector, listings, files = Inspector(options, decode), Listings(), [c.name for c in columns if c.kind == "file"]
    problems: list[Problem] = []
    reasons: Counter[str] = Counter()
    for drafts in _parts(table, columns, names):
        _find_files(drafts, files, base, shown_base, listings)
        _check_pictures(drafts, inspector)
        for draft in drafts:
            _choose_size(draft, options, size_factor)
            if draft.faults:
                problems += [fault.problem for fault in draft.faults]
                reasons[draft.faults[0].reason] += 1
            else:
                rows.add(_row(draft, ids))
                notices.add(draft)
    _refuse(table, len(rows), reasons, problems, options.skip_bad)
    return Dataset(rows, tuple(problems), (*table.warnings, *notices.problems()))


def _parts(table: Table, columns: Sequence[Column], names: Mapping[str, str]) -> Iterator[list[Draft]]:
    """The records as drafts, some thousand at a time. Raises DataError where the file cannot be read on."""
    records = iter(table.records)
    with ExitStack() as stack:
        progress = None
        try:
            while part := list(islice(records, TOGETHER)):
                yield [_draft(table, record, columns, names) for record in part]
                if len(part) == TOGETHER:
                    progress = progress or stack.enter_context(Progress("read", None, "rows"))
                    progress.advance(len(part))
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise DataError("cannot read the metadata", [Problem(str(error.filename or table.source), what)]) from error


def _draft(table: Table, record: Record, columns: Sequence[Column], names: Mapping[str, str]) -> Draft:
    source = record.source or table.source
    where = place(source, record.line, record.cells, record.item)
    cells = Cells({}, {}, (), ()) if record.faults else read_cells(record, columns, names, where)
    return Draft(record.line, where, cells, [*record.faults, *cells.faults], source, item=record.item)


def _find_files(drafts: Iterable[Draft], columns: Sequence[str], base: Path, shown: str, listings: Listings) -> None:
    """Adds the files that the cells of `columns` name."""
    for draft in drafts:
        for name in columns:
            if name not in draft.cells.written:
                continue
            if name in draft.cells.packed:
                draft.files[name] = draft.cells.packed[name]
                continue
            text = draft.cells.written[name] = draft.cells.values[name] = spelled(draft.cells.written[name], base)
            try:
                draft.files[name] = locate(text, base, shown, listings)
            except Refusal as refusal:
                draft.faults.append(refusal.at(draft.where, f"{name} "))


def _check_pictures(drafts: Sequence[Draft], inspector: Inspector) -> None:
    """Adds what the files show."""
    found = inspector.pictures(source for draft in drafts for source in draft.files.values())
    for draft in drafts:
        for name, source in draft.files.items():
            result = found[source]
            if isinstance(result, Refusal):
                draft.faults.append(result.at(draft.where, f"{name} '{draft.cells.written[name]}': "))
            else:
                draft.pictures[name] = result


def _choose_size(draft: Draft, options: DataOptions, size_factor: int) -> None:
    """Adds the target size, by the first picture."""
    if not draft.pictures:
        if not draft.faults:
            draft.faults.append(Fault("no picture", draft.where, "no picture to take the size from"))
        return
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


def _refuse(table: Table, good: int, reasons: Counter[str], problems: Sequence[Problem], skip_bad: bool) -> None:
    """Raises DataError if no row is usable, or if some are not and may not be left out; `reasons`: bad rows by kind."""
    bad, counts = reasons.total(), count_reasons(reasons.elements())
    if not good:
        why = f"{bad} of {bad} rows have faults: {counts}" if bad else _emptiness(table)
        raise DataError(f"0 usable rows in '{table.source}' ({why})", problems)
    if bad and not skip_bad:
        summary = f"{bad} of {good + bad} rows in '{table.source}' have faults ({counts})"
        raise DataError(f"{summary}; mend them, or leave them out with --skip-bad", problems)


def _emptiness(table: Table) -> str:
    if Path(table.source).is_dir():
        return "no metadata file and no picture in it"
    return "0 rows below the column names" if table.columns else "the file holds nothing"


class _Ids:
    """Gives rows their ids: the cells as written, and how many rows before had the same."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._again: Counter[str] = Counter()

    def of(self, written: Mapping[str, str]) -> str:
        first = row_id(written, 0)
        number = bytes.fromhex(first)
        if number not in self._seen:
            self._seen.add(number)
            return first
        self._again[first] += 1
        return row_id(written, self._again[first])


def _row(draft: Draft, ids: _Ids) -> Row:
    return Row(
        id=ids.of(draft.cells.written),
        source=draft.source,
        line=draft.line,
        columns=draft.cells.values,
        files=draft.files,
        image_size=draft.picture.size,
        size=draft.size,
        item=draft.item,
        variants=draft.cells.variants,
    )
