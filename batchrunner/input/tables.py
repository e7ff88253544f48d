"""Converts a program's data to Arrow: tables, data frames, datasets, texts and mappings.

This module does not import the libraries of these types. It reads objects with Arrow's PyCapsule interface
(`__arrow_c_stream__`) through that interface, and recognizes all others by their methods.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, groupby
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from batchrunner.core.console import counted
from batchrunner.core.errors import InputError, first_line
from batchrunner.input.files import find_files
from batchrunner.input.parquet_copy import array_of, empty_batch, in_chunks

TEXT = "text"
"""Name of the column for rows that are plain texts."""
CHUNK_ROWS = 1024
"""Maximum number of rows that are converted together. A limit of bytes alone would not bound memory, because
`bytes_of` does not count numbers."""
_PNG_MODES = {"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"}
"""Modes of Pillow's images that a PNG file can hold."""
_SCALARS: dict[type, pa.DataType] = {
    str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), bytes: pa.binary(),
    type(None): pa.null(),
}  # fmt: skip
"""Arrow's types of plain values; a look-up is faster than asking Arrow."""
_EXPECTED = (
    "rows: give a list of texts or mappings, a table or data frame (pyarrow, pandas, polars, duckdb, "
    "datasets), or the path of files"
)


class SupportsArrow(Protocol):
    """A table of another library, by Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table."""


class SupportsBatches(Protocol):
    """A dataset of pyarrow, which is read batch by batch."""

    def to_batches(self) -> Iterable[pa.RecordBatch]:
        """Read the dataset."""


Row: TypeAlias = str | Mapping[str, Any] | None
Data: TypeAlias = str | os.PathLike[str] | SupportsArrow | SupportsBatches | pa.Table | Iterable[Row]
"""Data of a program: a table, rows, or the path of files."""


def paths_of(data: object) -> list[str] | None:
    """Return the paths or globs that the data consists of; None if it is no path.

    Raises InputError if a text names no file.
    """
    items: Any = data if isinstance(data, (list, tuple)) else [data]
    if items and all(isinstance(item, os.PathLike) for item in items):
        return [os.fspath(item) for item in items]
    if not isinstance(data, str):
        return None
    try:
        find_files([data])
    except InputError as failure:
        raise InputError(
            f"rows: {str(failure)[:200]}", hint="a text names files: give texts as a list"
        ) from None
    return [data]


def batches_of(data: object, on_each: Callable[[Any], Any]) -> Iterator[pa.RecordBatch]:
    """Yield data as Arrow batches, at least one. Batches of an iterator may differ in columns and types.

    `on_each` is called with each batch, or each row, and returns it. Raises InputError, and what an iterator
    or `on_each` raises.
    """
    batches = as_batches(data)
    batches = _of_rows(map(on_each, as_rows(data))) if batches is None else map(on_each, batches)
    first = next(batches, None)
    if first is None:
        first = pa.RecordBatch.from_pydict({TEXT: pa.nulls(0, pa.string())})
    yield first
    yield from batches


def as_batches(data: Any) -> Iterator[pa.RecordBatch] | None:
    """Return the batches of a table, data frame or dataset; None for other data. Raises InputError."""
    if hasattr(data, "with_format"):  # a dataset of Hugging Face
        tables = data.with_format("arrow").iter(batch_size=CHUNK_ROWS)
        return chain.from_iterable(table.to_batches() for table in tables)
    stream = data.scanner().to_reader() if hasattr(data, "scanner") else data  # a dataset of pyarrow
    if not hasattr(stream, "__arrow_c_stream__"):
        return None
    try:
        return _from_reader(pa.RecordBatchReader.from_stream(stream))
    except pa.ArrowInvalid:  # a single column
        return None
    except ValueError as failure:  # a frame of pandas with two columns of one name
        raise InputError(f"rows: {first_line(failure)}") from None


def as_rows(data: Any) -> Iterator[Any]:
    """Return the rows of data without columns; raises InputError if it has no rows either."""
    if hasattr(data, "__arrow_c_stream__"):
        return chain.from_iterable(chunk.to_pylist() for chunk in pa.chunked_array(data).chunks)
    if hasattr(data, "__arrow_c_array__"):
        return iter(pa.array(data).to_pylist())
    if not isinstance(data, Iterable) or isinstance(data, (bytes, Mapping)):
        raise InputError(f"{_EXPECTED} (got {type(data).__name__})")
    return iter(data)


def rows_known(data: Any) -> int:
    """Return the number of rows if it is known without work, else 0.

    `len` is not used for other types: for a relation of DuckDB it would run the query.
    """
    return len(data) if isinstance(data, (list, tuple)) else getattr(data, "num_rows", 0)


def _from_reader(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield an empty batch with the schema, then the data."""
    yield empty_batch(reader.schema)
    try:
        yield from reader
    except (OSError, pa.ArrowException) as failure:  # of a query or a file behind the reader
        raise InputError(f"rows: cannot be read: {first_line(failure)}") from None


def _of_rows(rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
    first = 0
    for chunk in in_chunks(map(as_mapping, rows, count()), CHUNK_ROWS, bytes_of):
        yield from batches_of_rows(chunk, first, array_of)
        first += len(chunk)


def bytes_of(value: Any) -> int:
    """Return the size of all texts and bytes in a row or a value; numbers are not counted."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if _is_list(value) else 0


def as_mapping(row: object, number: int) -> Mapping[str, Any]:
    """Return a row as a mapping; a text becomes the column `text`. Raises InputError, which has `number`."""
    if isinstance(row, str):
        return {TEXT: row}
    if row is None:
        return {}
    if not isinstance(row, Mapping):
        raise InputError(f"{_EXPECTED} (got a row of type {type(row).__name__}: row {number})")
    return {name: _plain(value) for name, value in row.items()}


def _is_list(value: object) -> bool:
    """Tell whether a value is a list whose items must be looked at.

    A list that begins with a number is not looked at, because it may be long.
    """
    return isinstance(value, (list, tuple)) and bool(value) and not isinstance(value[0], (int, float))


def _plain(value: Any) -> Any:
    """Return images of Pillow as PNG files, paths as texts, and anything else as it is."""
    if isinstance(value, str):
        return value
    if _is_list(value):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not hasattr(value, "tobitmap"):
        return value
    stream = io.BytesIO()
    try:
        (value if value.mode in _PNG_MODES else value.convert("RGB")).save(stream, "PNG", compress_level=1)
    except Exception:  # noqa: BLE001 - a broken file that Pillow opened: its row fails
        return b"unreadable"
    return stream.getvalue()


def rows_of_like_types(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield rows in order, in lists whose rows have the same columns with the same types.

    In a batch of such rows every value stays as it is. In a column of mixed types, Arrow would turn 1 beside
    2.5 into 1.0 and a text beside bytes into bytes, and would give each object the keys of the other objects.
    """
    for _, group in groupby(rows, _types_of):
        yield [*group]


def _types_of(row: Mapping[str, Any]) -> list[tuple[Any, pa.DataType | None]]:
    """Return the type that Arrow gives to each value of a row by itself; None if Arrow cannot hold it."""
    types = []
    for name, value in row.items():
        kind = _SCALARS.get(type(value))
        if kind is None:
            with contextlib.suppress(Exception):  # objects may be of any class, and fail in any way
                kind = pa.infer_type([value])
        types.append((name, kind))
    return types


def batches_of_rows(
    rows: Sequence[Mapping[str, Any]], first: int, to_array: Callable[[list[Any]], pa.Array] = pa.array
) -> list[pa.RecordBatch]:
    """Return mappings as batches; raises InputError.

    `first` is the number of the first row, and `to_array` converts the values of a column.
    """
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):  # rows may have keys that the first row lacks
        if not isinstance(name, str):
            raise InputError(f"rows: a column has the name {name!r}", hint="give a text")
        try:
            columns[name] = to_array([row.get(name) for row in rows])
        except Exception as failure:  # noqa: BLE001 - values of any kind: a number over 64 bits, for example
            raise InputError(
                f"rows: cannot be made a table: column {name!r}, "
                f"rows {first} to {first + len(rows) - 1}: {first_line(failure)}"
            ) from None
    if not columns:
        raise InputError(
            f"rows: {counted(len(rows), 'row')} without a column, from row {first} on",
            hint="give each one at least",
        )
    return [pa.RecordBatch.from_pydict(columns)]
