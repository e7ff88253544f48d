"""Writers of tables: CSV, JSON Lines, Parquet and Arrow files, table by table."""

from __future__ import annotations

import base64
from typing import Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from batchrunner.core.file_format import FileFormat
from batchrunner.output.arrow_arrays import arrow_array

CHUNK_ROWS = 1024
"""Rows that are Python values at once."""


class TableFile(Protocol):
    """A file that tables of one schema are written to. All methods may raise OSError or ArrowException."""

    def write(self, table: pa.Table) -> None:
        """Write the rows of a table."""

    def close(self) -> None:
        """Write what is left; the stream stays open."""


def table_file(form: FileFormat, stream: pa.NativeFile, schema: pa.Schema) -> TableFile:
    """Begin a file of a format, in a stream that is compressed already where it should be."""
    if form.kind == "CSV":
        return CsvTableFile(stream, schema, "\t" if form.ending == ".tsv" else ",")
    if form.kind == "JSON Lines":
        return JsonLinesTableFile(stream)
    if form.kind == "Parquet":
        return ParquetTableFile(stream, schema)
    return ArrowTableFile(stream, schema, is_stream=form.ending == ".arrows")


class ParquetTableFile:
    """A Parquet file."""

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(stream, schema, compression="zstd")

    def write(self, table: pa.Table) -> None:
        """Write a table as a row group."""
        self._writer.write_table(table)

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


class ArrowTableFile:
    """An Arrow file or stream."""

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, *, is_stream: bool) -> None:
        self._writer = (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(stream, schema)

    def write(self, table: pa.Table) -> None:
        """Write a table as record batches."""
        self._writer.write_table(table, max_chunksize=8 * CHUNK_ROWS)

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


class JsonLinesTableFile:
    """A JSON Lines file: an object for each row, bytes as Base64."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream

    def write(self, table: pa.Table) -> None:
        """Write a line for each row."""
        names = table.schema.names
        for start in range(0, table.num_rows, CHUNK_ROWS):
            columns = [_values(column) for column in table.slice(start, CHUNK_ROWS).columns]
            rows = zip(*columns, strict=True)
            lines = (_json(dict(zip(names, row, strict=True))) for row in rows)
            self._stream.write(b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """Do nothing: every line is written."""


class CsvTableFile:
    """A CSV file with a header. Lists and structs are JSON, a null is an empty field, texts are quoted."""

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, delimiter: str) -> None:
        from pyarrow import csv  # noqa: PLC0415 - only for this format

        self._schema = pa.schema([(field.name, _csv_type(field.type)) for field in schema])
        self._writer = csv.CSVWriter(
            stream, self._schema, write_options=csv.WriteOptions(delimiter=delimiter)
        )

    def write(self, table: pa.Table) -> None:
        """Write a record for each row."""
        for start in range(0, table.num_rows, CHUNK_ROWS):
            part = table.slice(start, CHUNK_ROWS)
            columns = [
                column.cast(field.type) if _is_plain(column.type) else _as_texts(column)
                for column, field in zip(part.columns, self._schema, strict=True)
            ]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _csv_type(kind: pa.DataType) -> pa.DataType:
    return kind if _is_plain(kind) else pa.string()


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether pyarrow writes values of a type to CSV as a person expects them."""
    return bool(
        pt.is_integer(kind)
        or pt.is_floating(kind)
        or pt.is_boolean(kind)
        or pt.is_string(kind)
        or pt.is_date(kind)
    )


def _as_texts(column: pa.ChunkedArray) -> pa.Array:
    return arrow_array([_text(value) for value in _values(column)], pa.string())


def _text(value: Any) -> str | None:
    """Return a value as a text: a text as it is, null as null, a list or struct as JSON."""
    if value is None or isinstance(value, str):
        return value
    written = _json(value).decode()
    return written if isinstance(value, (list, dict)) else written.strip('"')


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python values; one that Python cannot represent becomes a text."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError, pa.ArrowException):  # bad UTF-8; a date out of range
        return [_value(item) for item in column]


def _value(item: pa.Scalar[Any]) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return (
            item.as_buffer().to_pybytes().decode("utf-8", "replace") if hasattr(item, "as_buffer") else None
        )
    except (ValueError, OverflowError, pa.ArrowException):
        return str(item.cast(pa.int64()).as_py())


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=_unusual, option=orjson.OPT_NON_STR_KEYS)


def _unusual(value: object) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
