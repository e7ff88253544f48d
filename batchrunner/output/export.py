"""Exports tables to one file, whose ending names the format: Parquet, Arrow, JSON Lines or CSV."""

import base64
import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from batchrunner.core.errors import OutputError
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, known_format
from batchrunner.output.arrow_arrays import arrow_array, shown_values
from batchrunner.output.files import json_line

CHUNK_ROWS = 1024
"""Number of rows that are converted to Python values at a time."""


def export_format(file: str) -> FileFormat:
    """Return the format that a file's ending names; raise OutputError for an unknown ending."""
    file_format = known_format(file)
    if file_format is None:
        endings, compressions = ", ".join(ENDINGS), ", ".join(COMPRESSIONS)
        raise OutputError(
            f"{file}: unknown file format",
            hint=f"use one of {endings}; all but .parquet may be followed by {compressions}",
        )
    return file_format


def export_tables(tables: Iterator[pa.Table], path: Path, file_format: FileFormat) -> int:
    """Write tables of one schema to a file; return the number of distinct input rows.

    Raises OSError if the file cannot be written.
    """
    rows = 0
    write: Callable[[pa.Table], object] | None = None
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open_to_write(path, file_format.compression))
        for table in tables:
            if write is None:  # The first table shows the schema that the writer needs.
                write = stack.enter_context(_table_writer(file_format, stream, table.schema))
            write(table)
            rows += distinct_rows(table)
    return rows


def distinct_rows(table: pa.Table) -> int:
    """Count the input rows in a table of results. A multi-turn rollout may return several rows for one."""
    return int(pc.count_distinct(table.column("row")).as_py())


@contextlib.contextmanager
def open_to_write(path: Path, compression: str | None) -> Iterator[Any]:
    """Open a file for writing; yield a binary stream that compresses what is written to it."""
    with path.open("wb") as file:
        if compression is None:
            yield file
        else:
            with pa.CompressedOutputStream(pa.PythonFile(file, "w"), compression) as stream:
                yield stream


@contextlib.contextmanager
def _table_writer(
    file_format: FileFormat, stream: Any, schema: pa.Schema
) -> Iterator[Callable[[pa.Table], object]]:
    """Yield a function that appends a table to the stream in the given format."""
    if file_format.kind == "Parquet":
        with pq.ParquetWriter(stream, schema, compression="zstd") as parquet:
            yield parquet.write_table
    elif file_format.kind == "Arrow":
        new_writer = pa.ipc.new_stream if file_format.ending == ".arrows" else pa.ipc.new_file
        with new_writer(stream, schema) as arrow:
            # Readers load a whole record batch at once, so batches are kept small.
            yield functools.partial(arrow.write_table, max_chunksize=8 * CHUNK_ROWS)
    elif file_format.kind == "JSON Lines":
        yield functools.partial(_write_json_lines, stream)
    else:
        from pyarrow import csv  # noqa: PLC0415 - only for this format

        csv_schema = pa.schema(
            [(field.name, field.type if _fits_csv(field.type) else pa.string()) for field in schema]
        )
        options = csv.WriteOptions(delimiter="\t" if file_format.ending == ".tsv" else ",")
        with csv.CSVWriter(stream, csv_schema, write_options=options) as writer:
            yield functools.partial(_write_csv, writer, csv_schema)


def _write_json_lines(stream: Any, table: pa.Table) -> None:
    """Write a JSON object for each row of a table. Bytes become Base64."""
    for batch in table.to_batches(CHUNK_ROWS):
        columns = map(shown_values, batch.columns)
        names = batch.schema.names
        rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        stream.write(b"".join(json_line(row, _json_default, orjson.OPT_NON_STR_KEYS) for row in rows))


def _write_csv(writer: Any, csv_schema: pa.Schema, table: pa.Table) -> None:
    """Write a CSV record for each row of a table. Lists and structs become JSON; nulls become empty."""
    for batch in table.to_batches(CHUNK_ROWS):
        columns = []
        for column, field in zip(batch.columns, csv_schema, strict=True):
            if _fits_csv(column.type):
                columns.append(column.cast(field.type))
            else:
                texts = [_csv_text(value) for value in shown_values(column)]
                columns.append(arrow_array(texts, pa.string()))
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=csv_schema))


def _fits_csv(kind: pa.DataType) -> bool:
    """Tell whether pyarrow's CSV writer can write this type; all others are converted to text first."""
    checks = (pt.is_integer, pt.is_floating, pt.is_boolean, pt.is_string, pt.is_date)
    return any(check(kind) for check in checks)


def _csv_text(value: Any) -> str | None:
    """Return the text of a CSV field: lists and dicts as JSON, other values as JSON without its quotes."""
    if value is None or isinstance(value, str):
        return value
    text = orjson.dumps(value, default=_json_default, option=orjson.OPT_NON_STR_KEYS).decode()
    return text if isinstance(value, (list, dict)) else text.strip('"')


def _json_default(value: object) -> Any:
    """Convert a value that JSON lacks: a duration to seconds, bytes to Base64, anything else to text."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
