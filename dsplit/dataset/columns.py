"""Gives the columns found their canonical names, and the cells their types."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dsplit.dataset.captions import PICTURES
from dsplit.dataset.faults import Fault, Refusal
from dsplit.dataset.packed import Packed, Source
from dsplit.dataset.parquet_cell import ParquetCell
from dsplit.dataset.table import UTF8_REMEDY, Record, Table, not_utf8
from dsplit.errors import DataError, Problem, UsageError
from dsplit.recipe import DataOptions

if TYPE_CHECKING:
    from dsplit.models.family import Column

USUAL_NAMES = {
    "image": ("file_name", "filename", "image_path", "path", "file", "img"),
    "prompt": ("text", "caption", "captions", "description"),
}


def wanted_columns(options: DataOptions, columns: Sequence[Column]) -> tuple[Column, ...]:
    """`columns` with the default that --rand-device gives to the column of that name."""
    given = options.rand_device
    if given is None:
        return tuple(columns)
    return tuple(replace(c, required=False, default=given) if c.name == "rand_device" else c for c in columns)


def is_caption(column: Column) -> bool:
    """True for `prompt` and required free texts: the column must exist, an empty cell means "" and is warned of."""
    return column.kind == "text" and not column.choices and (column.required or column.name == "prompt")


def parse_renames(text: str | None, columns: Sequence[Column]) -> dict[str, str]:
    """`image=file_name,prompt=text` -> canonical name: name found. Raises UsageError."""
    renames: dict[str, str] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, sign, found = (s.strip() for s in part.partition("="))
        if not sign or not name or not found:
            raise UsageError(f"--columns '{part.strip()}': write NAME=FOUND, for instance prompt=text")
        if name not in {c.name for c in columns}:
            known = ", ".join(c.name for c in columns)
            raise UsageError(f"--columns {part.strip()}: '{name}' is no column of this job (it has {known})")
        if name in renames:
            raise UsageError(f"--columns states '{name}' twice")
        renames[name] = found
    return renames


def match_columns(table: Table, columns: Sequence[Column], renames: Mapping[str, str]) -> dict[str, str]:
    """Canonical name -> name found, for the columns that the table has.

    Raises DataError naming the columns found, those needed and how to rename, where one is missing or stands twice.
    """
    names = {c.name: renames.get(c.name, c.name) for c in columns}
    twice = [name for name in dict.fromkeys(names.values()) if table.columns.count(name) > 1]
    missing = [
        c for c in columns if names[c.name] not in table.columns and (c.required or is_caption(c) or c.name in renames)
    ]
    if missing and table.more:
        return match_columns(replace(table, columns=table.more(), more=None), columns, renames)
    if not twice and not missing:
        return {name: found for name, found in names.items() if table.more or found in table.columns}
    faults = [f"no column {', '.join(repr(names[c.name]) for c in missing)}"] if missing else []
    faults += [f"the column '{name}' stands {table.columns.count(name)} times" for name in twice]
    needed = ", ".join(c.name for c in columns if c.required or is_caption(c))
    what = f"{'; '.join(faults)}; columns found: {', '.join(table.columns)}; columns needed: {needed}"
    doubled = [c for c in columns if names[c.name] in twice]
    remedy = _remedy(table, [*missing, *doubled], names)
    if doubled:
        remedy = f"give each column its own name, then {remedy}"
    raise DataError("the columns do not fit", [Problem(table.header, what, remedy)])


def _remedy(table: Table, columns: Sequence[Column], names: Mapping[str, str]) -> str:
    """How to rename, with the usual names that are there as suggestions, and what else the table looks like."""
    free = [name for name in table.columns if name not in names.values()]
    pairs = []
    for column in columns:
        usual = [name for name in USUAL_NAMES.get(column.name, ()) if name in free]
        pairs.append(f"{column.name}={(usual or ['NAME_FOUND'])[0]}")
    remedy = f"rename with --columns {','.join(pairs)}"
    if any("." + name.rpartition(".")[2].lower() in PICTURES for name in table.columns):
        remedy += "; the first line looks like a row: is the line of column names missing?"
    elif len(table.columns) == 1 and re.search("[;\t]", table.columns[0]):
        remedy += "; the columns must be separated by commas"
    return remedy


@dataclass(frozen=True)
class Cells:
    """The cells of one record. values: typed. written: as written, absent and empty ones left out. empty: texts that
    should not be empty. faults: what cannot be used. packed: the pictures that lie within another file.
    variants: all captions, where there are several."""

    values: dict[str, Any]
    written: dict[str, str]
    empty: tuple[str, ...]
    faults: tuple[Fault, ...]
    packed: Mapping[str, Source] = field(default_factory=dict)
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_cells(record: Record, columns: Sequence[Column], names: Mapping[str, str], where: str) -> Cells:
    """The cells of `record` by canonical name, converted to the kinds of `columns`; texts stay exactly as written."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    packed: dict[str, Source] = {}
    variants: dict[str, tuple[str, ...]] = {}
    empty, faults = [], []
    for column in columns:
        try:
            cell = record.cells.get(names[column.name]) if column.name in names else None
            if column.kind == "file" and isinstance(cell, Packed | ParquetCell):
                packed[column.name], cell = cell, cell.text
            if column.name == "prompt" and (texts := _captions(cell)):
                values["prompt"] = texts[0]
                written["prompt"] = cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)
                if len(texts) > 1:
                    variants["prompt"] = texts
                if not all(text.strip() for text in texts):
                    empty.append("prompt")
                continue
            text = _text(cell, column)
            if text:
                values[column.name] = _converted(text, column)
                written[column.name] = text
            elif is_caption(column):
                values[column.name] = ""
            elif column.required:
                raise Refusal("empty cell", "is absent", "every row needs one")
            else:
                values[column.name] = column.default
            if is_caption(column) and not (text or "").strip():
                empty.append(column.name)
        except Refusal as refusal:
            faults.append(refusal.at(where, f"{column.name} "))
    for column in columns:
        if column.needed_with in written and values.get(column.name, "refused") is None:
            option = " or give --rand-device" if column.name == "rand_device" else ""
            what = f"{column.name} is absent, but {column.needed_with} is stated"
            faults.append(Fault("empty cell", where, what, f"state it{option}"))
    return Cells(values, written, tuple(empty), tuple(faults), packed, variants)


def _captions(cell: Any) -> tuple[str, ...]:
    """The captions of a cell that is a JSON list of texts, or the text of such a list; empty for any other cell."""
    if isinstance(cell, str):
        if not (cell.lstrip().startswith("[") and cell.rstrip().endswith("]")):
            return ()
        try:
            texts = json.loads(cell)
        except (ValueError, RecursionError):
            return ()
        if not texts or not all(isinstance(text, str) for text in texts):
            return ()  # a caption that begins with a bracket
    elif isinstance(cell, list):
        texts = cell
        if not texts:
            raise Refusal("empty list", "is an empty list", "write one caption at least; it may be empty")
        for text in texts:
            if not isinstance(text, str):
                raise Refusal(
                    "wrong type", f"has {_short(repr(text))} in its list, not a text", "put it between quotes"
                )
    else:
        return ()
    for text in texts:
        if not_utf8(text):
            raise Refusal("not UTF-8", f"{_short(text)!a} is not UTF-8 text", UTF8_REMEDY)
    return tuple(texts)


def _text(cell: Any, column: Column) -> str | None:
    """The cell as text; None if it is absent. Only free text keeps white space around it."""
    if cell is None:
        return None
    number = isinstance(cell, int | float) and not isinstance(cell, bool)
    if not isinstance(cell, str) and not (number and column.kind in ("int", "float")):
        kind = "a number" if number else "a list" if isinstance(cell, list) else "an object"
        kind = "a picture" if isinstance(cell, Packed | ParquetCell) else kind
        kind = "true or false" if isinstance(cell, bool) else kind
        expected = _expected(column, one=isinstance(cell, list | dict))
        raise Refusal("wrong type", f"is {kind} ({_short(repr(cell))}), not {expected}")
    text = cell if isinstance(cell, str) else repr(cell)
    if not_utf8(text):
        raise Refusal("not UTF-8", f"{_short(text)!a} is not UTF-8 text", UTF8_REMEDY)
    if column.kind == "file":
        return text if text.strip() else ""
    return text if column.kind == "text" and not column.choices else text.strip()


def _converted(text: str, column: Column) -> Any:
    value: Any = text
    if column.kind == "int":
        whole = re.fullmatch(r"([+-]?\d{1,19})(\.0*)?", text, re.ASCII)  # spreadsheets write 7 as 7.0
        value = int(whole[1]) if whole else None
        if value is None or not -(2**63) <= value < 2**63:
            raise Refusal("wrong type", f"'{_short(text)}' is no whole number of 64 bits")
    elif column.kind == "float":
        number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
        value = float(text) if number else math.inf
        if not math.isfinite(value):
            raise Refusal("wrong type", f"'{_short(text)}' is no finite number")
    elif column.choices and text not in column.choices:
        raise Refusal("not allowed", f"'{_short(text)}' is not one of {', '.join(column.choices)}")
    if column.minimum is not None and column.kind in ("int", "float") and value < column.minimum:
        raise Refusal("not allowed", f"{text} is below the smallest allowed, {column.minimum:g}")
    return value


def _expected(column: Column, *, one: bool) -> str:
    """What the cell should be, and how to write it; `one`: it holds several."""
    if column.kind in ("int", "float"):
        return "a whole number" if column.kind == "int" else "a number"
    what, single = ("a path", "one path") if column.kind == "file" else ("text", "one text")
    return f"{what} ({f'write {single} per row, between quotes' if one else 'put it between quotes'})"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
