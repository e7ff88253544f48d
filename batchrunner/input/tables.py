"""Data as people have it in Python → Arrow: tables, data frames, data sets, texts and mappings.

No package of these is imported: what speaks Arrow's PyCapsule interface (`__arrow_c_stream__`) is read
through it, and the others are known by their methods.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from batchrunner.core.errors import InputError
from batchrunner.core.exact_json import has_more_levels
from batchrunner.input.files import find_files, first_line
from batchrunner.input.parquet_copy import array_of

TEXT = "text"
"""Name of the column that texts become."""
CHUNK_ROWS, CHUNK_BYTES = 1024, 16 << 20
"""Most rows of an iterator that are converted together, and the bytes of their texts."""
MOST_LEVELS = 49
"""Most levels of a value: Parquet has two for each list, and 100 in all."""
_PNG_MODES = {"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"}
"""Modes of Pillow's images that a PNG file can hold."""
_WANTED = (
    "rows: give texts, mappings, a table or data frame (pyarrow, pandas, polars, duckdb, datasets), "
    "or the path of files"
)


class SupportsArrow(Protocol):
    """A table of another library, by Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table."""


class SupportsBatches(Protocol):
    """A data set of pyarrow, which is read batch by batch."""

    def to_batches(self) -> Iterable[pa.RecordBatch]:
        """Read the data set."""


class SupportsCollect(Protocol):
    """A lazy frame of polars."""

    def collect(self) -> Any:
        """Compute the frame."""


Row: TypeAlias = str | Mapping[str, Any] | None
Data: TypeAlias = (
    str | os.PathLike[str] | SupportsArrow | SupportsBatches | SupportsCollect | pa.Table | Iterable[Row]
)
"""What rows may come as."""


def paths_of(data: object) -> list[str] | None:
    """Return the files, directories or globs that the data names; None where it is no path.

    Raises InputError where a text names nothing.
    """
    if isinstance(data, (list, tuple)) and data and all(isinstance(item, os.PathLike) for item in data):
        return [os.fspath(item) for item in data]
    if isinstance(data, os.PathLike):
        return [os.fspath(data)]
    if not isinstance(data, str):
        return None
    try:
        find_files([data])
    except InputError as failure:
        raise InputError(
            f"rows: {str(failure)[:200]}", hint="a text names files: give texts as a list"
        ) from None
    return [data]


def batches_of(data: object) -> Iterator[pa.RecordBatch]:
    """Yield data as Arrow batches, at least one; those of an iterator may differ in their columns and types.

    Raises InputError, and what an iterator raises.
    """
    stream = as_batches(data)
    yield from _of_rows(iter(as_rows(data))) if stream is None else stream


def as_batches(data: object) -> Iterator[pa.RecordBatch] | None:
    """Return the batches of a table, a data frame or a data set; None where it is none; raises InputError."""
    try:
        return _stream_of(data)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as failure:
        raise InputError(f"rows: cannot be made a table: {first_line(failure)}") from None


def as_rows(data: object) -> Iterable[Any]:
    """Return data that has no columns as an iterable of rows; raises InputError where it is none."""
    values: object = data
    if hasattr(data, "__arrow_c_array__") or hasattr(data, "__arrow_c_stream__"):
        values = _values_of(data)
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise InputError(f"{_WANTED} (got {type(data).__name__})")
    return values


def rows_known(data: Any) -> int:
    """Return the number of rows where it costs nothing (a relation of duckdb runs its query), else 0."""
    for name in ("num_rows", "height"):  # of pyarrow and Hugging Face, of polars
        if isinstance(count := getattr(data, name, None), int):
            return count
    return len(data) if isinstance(data, (list, tuple)) or hasattr(data, "iterrows") else 0


def _stream_of(data: Any) -> Iterator[pa.RecordBatch] | None:
    """Return the batches of a table, a data frame or a data set; None for anything else."""
    if hasattr(data, "__arrow_c_stream__"):
        with contextlib.suppress(pa.ArrowInvalid):  # a column, which has values and no columns
            return _from_reader(pa.RecordBatchReader.from_stream(data))
    elif hasattr(data, "collect"):  # a lazy frame of polars, which older versions compute whole
        frames = data.collect_batches() if hasattr(data, "collect_batches") else [data.collect()]
        return _from_tables(map(pa.table, frames), lambda: pa.table(data.collect()).schema)
    elif hasattr(data, "scanner"):  # a data set of pyarrow
        return _from_reader(data.scanner().to_reader())
    elif hasattr(data, "to_reader"):  # a scanner of pyarrow
        return _from_reader(data.to_reader())
    elif hasattr(data, "with_format"):  # a data set of Hugging Face
        tables = data.with_format("arrow").iter(batch_size=CHUNK_ROWS)
        features = getattr(data, "features", None)
        return _from_tables(
            tables, lambda: features.arrow_schema if features else pa.schema([(TEXT, pa.string())])
        )
    return None


def _from_tables(tables: Iterable[pa.Table], schema: Callable[[], pa.Schema]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of tables; where there are none, `schema` tells the columns."""
    batches = chain.from_iterable(table.to_batches() for table in tables)
    first = next(batches, None)
    yield _no_rows(schema()) if first is None else first
    yield from batches


def _from_reader(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    yield _no_rows(reader.schema)
    try:
        yield from reader
    except (OSError, pa.ArrowException) as failure:  # of a query or a file behind the reader
        raise InputError(f"rows: cannot be read: {first_line(failure)}") from None


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _values_of(data: Any) -> Iterable[Any]:
    """Return the values of a column that speaks Arrow's interface."""
    try:
        is_stream = hasattr(data, "__arrow_c_stream__")
        column = pa.chunked_array(data) if is_stream else pa.chunked_array([pa.array(data)])
    except (TypeError, ValueError, pa.ArrowException) as failure:
        raise InputError(f"rows: cannot be made a table: {first_line(failure)}") from None
    return chain.from_iterable(chunk.to_pylist() for chunk in column.chunks)


def _of_rows(rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
    first = 0
    while chunk := _chunk(rows, first):
        yield from batches_of_rows(chunk, first, array_of)
        first += len(chunk)
    if not first:
        yield _no_rows(pa.schema([(TEXT, pa.string())]))


def _chunk(rows: Iterator[Row], first: int) -> list[Mapping[str, Any]]:
    """Take the next rows as mappings: CHUNK_ROWS, or as many as have CHUNK_BYTES."""
    chunk: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        chunk.append(as_mapping(row, first + len(chunk)))
        size += bytes_of(chunk[-1])
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            break
    return chunk


def bytes_of(row: Mapping[str, Any]) -> int:
    """Return the bytes of a row's texts and of its bytes, also of those in lists and mappings in it."""
    return sum(map(_size_of, row.values()))


def _size_of(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return bytes_of(value)
    if isinstance(value, (list, tuple)):
        first = value[0] if value else None  # lists of numbers are many, and count little
        return sum(map(_size_of, value)) if isinstance(first, (str, bytes, Mapping)) else 0
    return 0


def as_mapping(row: object, number: int) -> Mapping[str, Any]:
    """Return a row as a mapping: a text is the column `text`; raises InputError, naming its number."""
    if isinstance(row, str):
        return {TEXT: row}
    if row is None:
        return {}
    if not isinstance(row, Mapping):
        raise InputError(f"{_WANTED} (got a row of type {type(row).__name__}: row {number})")
    return (
        {name: _plain(value) for name, value in row.items()} if any(map(_has_object, row.values())) else row
    )


def _is_object(value: object) -> bool:
    """Tell whether a value is an image of Pillow or a path."""
    return isinstance(value, os.PathLike) or hasattr(value, "tobitmap")


def _has_object(value: object) -> bool:
    """Tell whether a value is an image of Pillow or a path, or a list of them; lists of numbers are long."""
    if not isinstance(value, (list, tuple)):
        return _is_object(value)
    return bool(value) and not isinstance(value[0], (int, float)) and any(map(_is_object, value))


def _plain(value: Any) -> Any:
    """Return images of Pillow as the bytes of PNG files, and paths as texts; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_plain_item(item) for item in value] if _has_object(value) else value
    return _plain_item(value)


def _plain_item(value: Any) -> Any:
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


def batches_of_rows(
    rows: Sequence[Mapping[str, Any]], first: int, to_array: Callable[[list[Any]], pa.Array] = pa.array
) -> list[pa.RecordBatch]:
    """Return mappings as batches; `first` is the number of the first one; raises InputError.

    `to_array` makes a column of values.
    """
    names = list(dict.fromkeys(chain.from_iterable(rows)))  # a row may have more than the first one
    if not names:
        raise InputError(
            f"rows: {len(rows)} rows without a column, from row {first} on", hint="give each one at least"
        )
    for number, row in enumerate(rows, first):
        for name, value in row.items():
            if has_more_levels(value, MOST_LEVELS):  # pyarrow would crash
                raise InputError(
                    f"rows: cannot be made a table: column {name!r}, row {number}: "
                    f"has more than {MOST_LEVELS} levels, or contains itself",
                    hint="give it as JSON text",
                )
    columns = []
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"rows: a column has the name {name!r}", hint="give a text")
        try:
            columns.append(to_array([row.get(name) for row in rows]))
        except Exception as failure:  # noqa: BLE001 - values of any kind: a number over 64 bits, for example
            raise InputError(
                f"rows: cannot be made a table: column {name!r}, "
                f"rows {first} to {first + len(rows) - 1}: {first_line(failure)}"
            ) from None
    return [pa.RecordBatch.from_arrays(columns, names=names)]
