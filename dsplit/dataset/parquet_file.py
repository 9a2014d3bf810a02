"""Reads Parquet metadata in batches: a row's line is its number in the file, from 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from dsplit.dataset.faults import Fault
from dsplit.dataset.parquet_cell import ParquetCell
from dsplit.dataset.table import Record, Table
from dsplit.errors import DataError, Problem

BATCH = 4096  # rows
LARGEST_GROUP = 1 << 30  # bytes of pictures in one row group, which are in memory together
COPY = "copy the file again"


class Unread:
    """Stands for a cell of a type that no column of a job has; it is refused where a job needs it."""

    def __init__(self, type_: object) -> None:
        self.type = type_

    def __repr__(self) -> str:
        return f"Parquet's {self.type}"


def read_parquet(path: Path, source: str) -> Table:
    """The table in `path`: texts, numbers, lists of texts, and pictures (bytes, or a struct of bytes and path).

    A null and a NaN are absent. Raises DataError where pyarrow is missing or the file is no whole Parquet file.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        problem = Problem(source, "Parquet is read by pyarrow, which is not installed", "pip install 'dsplit[parquet]'")
        raise DataError("cannot read the metadata", [problem]) from error
    try:
        with ParquetFile(path) as file:
            schema = file.schema_arrow
            pictures = {field.name: _bytes_column(field) for field in schema if _bytes_column(field)}
            _check_groups(file.metadata, set(pictures.values()), source)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            "cannot read the metadata", [Problem(source, f"{_what_it_is(path)} ({error})", COPY)]
        ) from error
    return Table(source, tuple(schema.names), _records(path.absolute(), source, pictures), source)


def read_parquets(paths: Sequence[Path], source: str) -> Table:
    """The tables of a folder of Parquet files as one, in the order given; source: the folder as the user gave it.

    Raises DataError for files whose columns differ.
    """
    tables = [read_parquet(path, str(Path(source, path.name))) for path in paths]
    for table in tables:
        if set(table.columns) != set(tables[0].columns):
            what = f"has the columns {', '.join(table.columns)}; {tables[0].source} has {', '.join(tables[0].columns)}"
            remedy = "give one of the files with --metadata"
            raise DataError("the files are not one data set", [Problem(table.source, what, remedy)])
    records = chain.from_iterable(table.records for table in tables)
    return Table(source, tables[0].columns, records, tables[0].source)


def _bytes_column(field: Any) -> str:
    """Where the bytes of a column of pictures lie: `image`, or `image.bytes` in a struct; "" for another column."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind)

    if holds_bytes(field.type):
        return field.name
    if types.is_struct(field.type):
        inner = {part.name: part.type for part in field.type}
        if "bytes" in inner and holds_bytes(inner["bytes"]):
            return f"{field.name}.bytes"
    return ""


def _check_groups(metadata: Any, columns: set[str], source: str) -> None:
    """Refuses a file whose pictures would fill the memory, since a row group is read as a whole."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for j in range(group.num_columns):
            column = group.column(j)
            if column.path_in_schema in columns and column.total_uncompressed_size > LARGEST_GROUP:
                what = f"row group {number} holds {column.total_uncompressed_size} bytes of pictures"
                what += f" in {group.num_rows} rows, more than {LARGEST_GROUP}"
                remedy = "write the file with smaller row groups (row_group_size=100)"
                raise DataError("cannot read the metadata", [Problem(source, what, remedy)])


def _what_it_is(path: Path) -> str:
    """Why it is no Parquet file. Raises OSError where nobody can tell."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer, not the file itself"
    return "truncated or damaged" if start.startswith(b"PAR1") else "not a Parquet file"


def _records(path: Path, source: str, pictures: Mapping[str, str]) -> Iterator[Record]:
    """The rows of `path`, a batch at a time; a row group that cannot be read gives a faulty record in its place."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    line = 1
    with ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            first, end, outside = line, line + group.num_rows, _without_bytes(group)
            try:
                for cells in _rows(file, number, pictures):
                    for name, column in pictures.items():
                        if cells[name] is not None and column not in outside:
                            text = cells[name] or f"{name}#{line}"
                            cells[name] = ParquetCell(path, number, line - first, column, line, text)
                    yield Record(line, cells, source=source)
                    line += 1
            except (pyarrow.ArrowException, OSError) as error:
                what = f"the rows {line} to {end - 1} cannot be read ({error})"
                yield Record(line, {}, (Fault("unreadable rows", f"{source}:{line}", what, COPY),), source=source)
            line = end


def _rows(file: Any, group: int, pictures: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The cells of each row of a row group; of a picture its path, empty if it has none: bytes are not read here."""
    types = {field.name: field.type for field in file.schema_arrow}
    paths = {name: f"{name}.path" for name, column in pictures.items() if column == f"{name}.bytes"}
    wanted = [name for name in types if name not in pictures and _is_read(types[name])]
    for batch in file.iter_batches(BATCH, row_groups=[group], columns=[*wanted, *paths.values()]):
        columns: dict[str, list[Any]] = {name: [Unread(kind)] * batch.num_rows for name, kind in types.items()}
        columns |= {name: [""] * batch.num_rows for name in pictures}
        for name in batch.schema.names:
            cells = _values(batch.column(name))
            columns[name] = [c and (c.get("path") or "") for c in cells] if name in paths else cells
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(columns, row, strict=True))


def _without_bytes(group: Any) -> set[str]:
    """The columns of which a row group holds nothing but nulls: of pictures beside the file, only paths are there."""
    columns = [group.column(j) for j in range(group.num_columns)]
    known = {c.path_in_schema: c.statistics for c in columns if c.statistics and c.statistics.has_null_count}
    return {name for name, statistics in known.items() if statistics.null_count == group.num_rows}


def _is_read(kind: Any) -> bool:
    """True for the types of texts, numbers, truth values and lists of texts."""
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_read(kind.value_type) if types.is_dictionary(kind) else _is_text(kind.value_type)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return number or _is_text(kind) or types.is_boolean(kind) or types.is_null(kind)


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _values(column: Any) -> list[Any]:
    """The cells of a column as Python values; NaN is how pandas writes a number that is absent."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_floating(column.type) or pyarrow.types.is_decimal(column.type):
        numbers = column.cast(pyarrow.float64()).to_pylist()
        return [None if number is None or math.isnan(number) else number for number in numbers]
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # a writer that does not check its texts
        return [_decoded(cell) for cell in column]


def _decoded(cell: Any) -> Any:
    """One cell; bytes that are not UTF-8 as lone surrogates, which are refused in words where a job needs them."""
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return (
            cell.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
            if _is_text(cell.type)
            else Unread(cell.type)
        )
