"""Converts data that a Python program passes to Arrow: tables, data frames, datasets, texts and mappings.

The libraries of these types are not imported. Objects with Arrow's PyCapsule interface (`__arrow_c_stream__`)
are read through it, and all others are recognized by their methods.
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
"""Name of the column if rows are plain texts."""
CHUNK_ROWS = 1024
"""Maximum number of rows that are converted together.

This bounds memory together with a limit of bytes: `bytes_of` does not count numbers.
"""
_PNG_MODES = {"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"}
"""Image modes of Pillow that a PNG file can hold."""
_SCALARS: dict[type, pa.DataType] = {
    str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(), bytes: pa.binary(),
    type(None): pa.null(),
}  # fmt: skip
"""Arrow types of plain Python values. This lookup is faster than `pyarrow.infer_type`."""
_EXPECTED = (
    "rows: give a list of texts or mappings, a table, data frame or query (pyarrow, pandas, polars, duckdb, "
    "datasets), or the path of files"
)


class SupportsArrow(Protocol):
    """Table of another library that has Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export the table."""


class SupportsBatches(Protocol):
    """Dataset of pyarrow, which can be read batch by batch."""

    def to_batches(self) -> Iterable[pa.RecordBatch]:
        """Return the dataset's rows, batch by batch."""


Row: TypeAlias = str | Mapping[str, Any] | None
Data: TypeAlias = str | os.PathLike[str] | SupportsArrow | SupportsBatches | pa.Table | Iterable[Row]
"""Data that a program passes: a table, rows, or paths of files."""


def paths_of(data: object) -> list[str] | None:
    """Return the paths and globs that a program passes as its data; None if the data are not paths.

    Raises InputError for a single text that matches no file.
    """
    items: Any = data if isinstance(data, (list, tuple)) else [data]
    if items and all(isinstance(item, os.PathLike) for item in items):
        return [os.fspath(item) for item in items]
    if not isinstance(data, str):
        return None
    try:
        # This raises InputError if the text matches no file; it may be a prompt by mistake.
        find_files([data])
    except InputError as failure:
        raise InputError(
            f"rows: {str(failure)[:200]}",
            hint="a single text is read as a path: give prompts as a list of texts",
        ) from None
    return [data]


def batches_of(data: object, on_each: Callable[[Any], Any]) -> Iterator[pa.RecordBatch]:
    """Yield the data of a program as one or more Arrow batches.

    Batches may differ in columns and types. `on_each` is called with each batch, or with each row if the data
    are single rows; what it returns is used instead. Raises InputError, and any error of `on_each` or of an
    iterator.
    """
    batches = as_batches(data)
    batches = _of_rows(map(on_each, as_rows(data))) if batches is None else map(on_each, batches)
    first_batch = next(batches, None)
    if first_batch is None:
        # Without rows, the result is an empty batch with one column.
        first_batch = pa.RecordBatch.from_pydict({TEXT: pa.nulls(0, pa.string())})
    yield first_batch
    yield from batches


def as_batches(data: Any) -> Iterator[pa.RecordBatch] | None:
    """Return the batches of a table, data frame, dataset or query; None for other data. Raises InputError."""
    is_hugging_face_dataset = hasattr(data, "with_format")
    if is_hugging_face_dataset:
        tables = data.with_format("arrow").iter(batch_size=CHUNK_ROWS)
        return chain.from_iterable(table.to_batches() for table in tables)
    is_pyarrow_dataset = hasattr(data, "scanner")
    is_polars_query = hasattr(data, "collect_schema") and hasattr(data, "collect")
    stream = data
    if is_pyarrow_dataset:
        stream = data.scanner().to_reader()
    elif is_polars_query:
        stream = _results_of_query(data)
    if not hasattr(stream, "__arrow_c_stream__"):
        return None
    try:
        return _from_reader(pa.RecordBatchReader.from_stream(stream))
    except pa.ArrowInvalid:
        # A single column, such as a Series, has no columns of its own.
        return None
    except ValueError as failure:
        # A data frame of pandas may have two columns of one name, for example.
        raise InputError(f"rows: {first_line(failure)}") from None


def _results_of_query(query: Any) -> Any:
    """Run a LazyFrame of Polars, and return its result with Arrow's interface. Raises InputError.

    Polars 2 runs the query while the result is read. Earlier versions return one data frame.
    """
    try:
        # `collect_schema` raises an error for a wrong query, for example for an unknown column.
        query.collect_schema()
        if hasattr(query, "collect_batches"):
            results = query.collect_batches(chunk_size=CHUNK_ROWS, lazy=True)
            if hasattr(results, "__arrow_c_stream__"):
                return results
        return query.collect()
    except Exception as failure:  # noqa: BLE001 - the query may also call functions of the program
        raise InputError(f"rows: the query cannot be run: {first_line(failure)}") from None


def as_rows(data: Any) -> Iterator[Any]:
    """Return an iterator over data that are not a table, row by row.

    The data are no single text either: `paths_of` has read that as a path. Raises InputError if the data are
    not a collection of rows.
    """
    if hasattr(data, "__arrow_c_stream__"):
        # The rows are the values of a single column.
        return chain.from_iterable(chunk.to_pylist() for chunk in pa.chunked_array(data).chunks)
    if hasattr(data, "__arrow_c_array__"):
        return iter(pa.array(data).to_pylist())
    # Iterating over bytes or a single mapping would yield numbers or keys, not rows.
    if not isinstance(data, Iterable) or isinstance(data, (bytes, Mapping)):
        raise InputError(f"{_EXPECTED} (got {type(data).__name__})")
    return iter(data)


def rows_known(data: Any) -> int:
    """Return the number of rows in a program's data; 0 if counting would take work.

    `len` is called only for lists and tuples. For a relation of DuckDB, it would run the query.
    """
    return len(data) if isinstance(data, (list, tuple)) else getattr(data, "num_rows", 0)


def _from_reader(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield an empty batch with the schema, then the batches of the reader."""
    yield empty_batch(reader.schema)
    try:
        yield from reader
    except (OSError, pa.ArrowException) as failure:
        # The error comes from the query or the file behind the reader.
        raise InputError(f"rows: cannot be read: {first_line(failure)}") from None


def _of_rows(rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
    first_row = 0
    for chunk in in_chunks(map(as_mapping, rows, count()), CHUNK_ROWS, bytes_of):
        yield from batches_of_rows(chunk, first_row, array_of)
        first_row += len(chunk)


def bytes_of(value: Any) -> int:
    """Return the total length of the texts and bytes in a value; numbers are not counted."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if _is_list(value) else 0


def as_mapping(row: object, number: int) -> Mapping[str, Any]:
    """Return a row as a mapping. A text becomes the column `text`, and None a row of nulls.

    Raises InputError, which names the row's `number`, for a row of another type.
    """
    if isinstance(row, str):
        return {TEXT: row}
    if row is None:
        return {}
    if not isinstance(row, Mapping):
        raise InputError(f"{_EXPECTED} (got a row of type {type(row).__name__}: row {number})")
    return {name: _plain(value) for name, value in row.items()}


def _is_list(value: object) -> bool:
    """Tell whether a value is a list whose items may need a conversion.

    A list that begins with a number is taken as a list of numbers, which needs no conversion and may be long.
    """
    return isinstance(value, (list, tuple)) and bool(value) and not isinstance(value[0], (int, float))


def _plain(value: Any) -> Any:
    """Convert an image of Pillow to a PNG file and a path to a text; return any other value unchanged."""
    if isinstance(value, str):
        return value
    if _is_list(value):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Only images of Pillow have this method. Testing for it avoids importing Pillow.
    is_pillow_image = hasattr(value, "tobitmap")
    if not is_pillow_image:
        return value
    stream = io.BytesIO()
    try:
        image = value if value.mode in _PNG_MODES else value.convert("RGB")
        image.save(stream, "PNG", compress_level=1)
    except Exception:  # noqa: BLE001 - the file of an image may be broken; then its row fails later
        return b"unreadable"
    return stream.getvalue()


def rows_of_like_types(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in order, in lists whose rows have the same columns with the same types.

    Arrow can convert such a list without changing values. With mixed types in a column, it would turn 1
    beside 2.5 into 1.0 and a text beside bytes into bytes, and would give each object the keys of all others.
    """
    for _, group in groupby(rows, _types_of):
        yield [*group]


def _types_of(row: Mapping[str, Any]) -> list[tuple[Any, pa.DataType | None]]:
    """Return the name and Arrow type of each value in a row.

    The type is None if Arrow cannot hold the value.
    """
    types = []
    for name, value in row.items():
        kind = _SCALARS.get(type(value))
        if kind is None:
            # A value of an unknown class may raise any exception.
            with contextlib.suppress(Exception):
                kind = pa.infer_type([value])
        types.append((name, kind))
    return types


def batches_of_rows(
    rows: Sequence[Mapping[str, Any]], first: int, to_array: Callable[[list[Any]], pa.Array] = pa.array
) -> list[pa.RecordBatch]:
    """Convert rows to Arrow batches; raise InputError if Arrow cannot hold a value.

    `first` is the number of the first row. `to_array` converts the values of a column.
    """
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        # Later rows may have keys that the first row lacks.
        if not isinstance(name, str):
            raise InputError(
                f"rows: the name of a column is {name!r}, which is not text", hint="name the column by a text"
            )
        try:
            columns[name] = to_array([row.get(name) for row in rows])
        except Exception as failure:  # noqa: BLE001 - values of any kind, for example a number over 64 bits
            last = first + len(rows) - 1
            raise InputError(
                f"rows: column {name!r} of rows {first} to {last} cannot be converted to Arrow: "
                f"{first_line(failure)}"
            ) from None
    if not columns:
        raise InputError(
            f"rows: {counted(len(rows), 'row')} without any column, starting at row {first}",
            hint="give each row at least one column",
        )
    return [pa.RecordBatch.from_pydict(columns)]
