"""Reads CSV, JSON Lines, batch files and Arrow files as Arrow batches.

A record that cannot be read becomes a row with the line number and the reason in its column PROBLEM. A file
that cannot be divided into records is refused. `csv_records` and `_json_records` say why DuckDB's readers
cannot be used instead.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from batchrunner.core.errors import InputError
from batchrunner.core.files import FileFormat
from batchrunner.input.batch_lines import checked_requests, request_lines
from batchrunner.input.csv_records import csv_table
from batchrunner.input.parquet_copy import (
    AS_JSON,
    LINE,
    PROBLEM,
    UNFIT,
    empty_batch,
    fitted_values,
    in_chunks,
    json_array,
    text_of,
)
from batchrunner.input.request_bodies import BATCH_COLUMNS
from batchrunner.input.text_lines import TOO_LONG, TextRecord, read_lines
from batchrunner.job.arrow_types import PLAIN_TYPES
from batchrunner.job.prompt import BatchRules
from batchrunner.job.spec import InputSpec
from batchrunner.output.arrow_arrays import arrow_array

BATCH_ROWS = 4096
"""Maximum number of rows in an Arrow batch."""
MOST_LEVELS = 48
"""Maximum number of nested levels of a JSON value, about as many as Parquet can store."""
_NO_NUMBER = re.compile(rb"[:,[]\s*-?(NaN|Infinity)\b")
"""Values that some programs write as numbers, although JSON does not allow them: NaN and infinity."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark, which some editors write at the start of a UTF-8 file. It is not part of the text."""
ARROW_MAGIC = b"ARROW1"
"""First bytes of an Arrow IPC file. An Arrow IPC stream begins otherwise."""
ARROW_HEAD_BYTES = 8
"""Number of bytes before the stream in an Arrow IPC file: ARROW_MAGIC and padding."""


def skip_bom(source: io.BufferedReader) -> None:
    """Skip the byte order mark at the start of a file, if there is one."""
    if source.peek(len(BOM)).startswith(BOM):
        source.read(len(BOM))


def batches_of_file(
    source: io.BufferedReader,
    path: str,
    file_format: FileFormat,
    spec: InputSpec,
    *,
    batch_rules: BatchRules | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an open file that is not Parquet; `source` has its decompressed content.

    `spec` has the options of CSV and JSON Lines. `batch_rules` means that each line is a request in OpenAI's
    format. Raises InputError, OSError or ArrowException.
    """
    if file_format.kind == "Arrow":
        return _arrow_batches(source)
    skip_bom(source)
    if batch_rules:
        name = Path(path).name
        requests = request_lines(read_lines(source), name, batch_rules.endpoint)
        return _object_batches(
            checked_requests(requests, name, batch_rules),
            name,
            types=dict.fromkeys(BATCH_COLUMNS, "string"),
            object_name="request",
            hint=f"batchrun init {path} writes a job for a data file, and batchrun JOB.yaml runs a job",
        )
    if file_format.kind == "JSON Lines":
        return _object_batches(
            _json_records(read_lines(source)),
            path,
            types=spec.types,
            object_name="JSON object",
            hint="write JSON Lines, an object on each line (for an array: jq -c '.[]')",
        )
    return _csv_batches(source, path, spec, usual_delimiter="\t" if file_format.ending == ".tsv" else ",")


def _csv_batches(
    source: io.BufferedReader, path: str, spec: InputSpec, usual_delimiter: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV file.

    The first batch is empty, so that the columns are known even without rows.
    """
    header, records = csv_table(source, path, spec, usual_delimiter)
    types = {name: PLAIN_TYPES[spec.types.get(name, "string")] for name in header}
    yield _batch_of(path, [], types)
    for chunk in in_chunks(records, BATCH_ROWS, lambda record: record.size):
        yield _batch_of(path, chunk, types)


def _json_records(lines: Iterable[bytes | None]) -> Iterator[TextRecord]:
    """Yield a record for each line that is not empty. A None in `lines` is a line that was too long.

    Neither DuckDB (2.0) nor Arrow can replace this function. DuckDB turns a malformed line into a null
    without a reason, and turns a column of lists with one odd value into text. Both round integers of more
    than 64 bits.
    """
    for number, line in enumerate(lines, 1):
        if line is None:
            yield TextRecord(number, {}, TOO_LONG, 0)
        elif text := line.strip():
            try:
                value = _json_object(text)
            except (ValueError, RecursionError) as failure:
                yield TextRecord(number, {}, str(failure), len(line))
            else:
                yield TextRecord(number, value, None, len(line))


def _json_object(text: bytes) -> dict[str, Any]:
    """Return the object in a JSON text; raise ValueError or RecursionError if there is none."""
    try:
        # msgspec keeps integers of any size.
        value = msgspec.json.decode(text)
    except ValueError as failure:
        problem = str(failure)
        if no_number := _NO_NUMBER.search(text):
            problem = f"{no_number[1].decode()} is not a valid JSON number (use null)"
        raise ValueError(f"not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - the data is wrong, not the call
    # Counting brackets is fast, and rules out too many levels for nearly all lines.
    may_be_too_deep = text.count(b"[") + text.count(b"{") > MOST_LEVELS
    if may_be_too_deep and _has_more_levels(value, MOST_LEVELS):
        raise ValueError(f"the JSON has more than {MOST_LEVELS} nested levels")
    return value


def _has_more_levels(value: object, most_levels: int) -> bool:
    """Tell whether a JSON value has more than `most_levels` nested levels of lists and objects."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return most_levels == 0 or any(_has_more_levels(inner, most_levels - 1) for inner in value)


def _object_batches(
    records: Iterable[TextRecord], path: str, *, types: Mapping[str, str], object_name: str, hint: str
) -> Iterator[pa.RecordBatch]:
    """Yield the objects on the lines of a file as batches. A key that a line lacks is null in its row.

    `types` has the types that the job sets. If no line has an object, raises InputError with `hint`;
    `object_name` says what a line should have.
    """
    # A file without a single good record likely has another format, and is refused.
    has_good_record = False
    first_bad_record: TextRecord | None = None
    for chunk in in_chunks(records, BATCH_ROWS, lambda record: record.size):
        for record in chunk:
            if record.problem is None:
                has_good_record = True
            else:
                first_bad_record = first_bad_record or record
        names = dict.fromkeys(key for record in chunk for key in record.values)
        chunk_types = {name: PLAIN_TYPES[types[name]] if name in types else None for name in names}
        yield _batch_of(path, chunk, chunk_types)
    if not has_good_record:
        problem = "is empty"
        if first_bad_record is not None:
            line, reason = first_bad_record.line, first_bad_record.problem
            problem = f"no line is a {object_name} (line {line}: {reason})"
        raise InputError(f"{path}: {problem}", hint=hint)


def _batch_of(
    path: str, records: Sequence[TextRecord], types: Mapping[str, pa.DataType | None]
) -> pa.RecordBatch:
    """Return records as a batch, with the additional columns PROBLEM and LINE.

    `types` has the type of each column. A column with the type None gets the common type of its values.
    Without a common type, it becomes an AS_JSON column.
    """
    problems = [record.problem for record in records]
    columns: dict[str, pa.Array] = {}
    for name, kind in types.items():
        values = [record.values.get(name) for record in records]
        if kind is None:
            try:
                columns[name] = pa.array(values)
            except UNFIT:
                columns[f"{AS_JSON}{name}"] = json_array(values)
        else:
            columns[name], misfits = _typed(values, kind)
            for index, misfit in misfits.items():
                # The first problem of a record is kept.
                problems[index] = problems[index] or f"column {name!r}: {misfit}"
    messages = [
        f"{path}: line {record.line}: {problem}" if problem else None
        for record, problem in zip(records, problems, strict=True)
    ]
    columns[PROBLEM] = arrow_array(messages, pa.string())
    columns[LINE] = arrow_array([record.line for record in records], pa.int64())
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _typed(values: Sequence[Any], kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Convert values to a column of type `kind`, with a complaint about each value that does not fit.

    An empty text becomes null, except in a column of texts.
    """
    texts = [text_of(value) for value in values]
    if pa.types.is_string(kind):
        return arrow_array(texts, kind), {}
    stripped_texts = [None if text is None else text.strip() or None for text in texts]
    return fitted_values(arrow_array(stripped_texts, pa.string()), kind)


def _arrow_batches(source: io.BufferedReader) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow IPC file or stream.

    The first batch is empty, so that the schema is known.
    """
    # An Arrow file begins with these bytes, and continues like a stream. Its footer is not needed.
    if source.peek(ARROW_HEAD_BYTES).startswith(ARROW_MAGIC):
        source.read(ARROW_HEAD_BYTES)
    with pa.ipc.open_stream(source) as stream:
        yield empty_batch(stream.schema)
        for batch in stream:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)
