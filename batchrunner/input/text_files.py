"""Files of other formats than Parquet → Arrow batches: CSV, JSON Lines, batch files and Arrow.

A record that cannot be read is a row whose column PROBLEM says why, with its line. A file that cannot be
divided into records is refused.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from batchrunner.core.errors import InputError
from batchrunner.core.files import LONGEST_LINE_BYTES, FileFormat
from batchrunner.input.parquet_copy import LINE, MOST_SHOWN, ODD, PROBLEM, in_chunks, main_and_odd, text_of
from batchrunner.input.request_bodies import BATCH_COLUMNS, TOO_LONG, request_lines, reviewed
from batchrunner.job.arrow_types import PLAIN_TYPES, type_name
from batchrunner.job.spec import InputSpec
from batchrunner.output.arrow_arrays import arrow_array

BATCH_ROWS = 4096
"""Most rows of a batch."""
MOST_LEVELS = 48
"""Most levels of a JSON value: Parquet holds about as many."""
_NO_NUMBER = re.compile(rb"[:,[]\s*-?(NaN|Infinity)\b")
"""What some programs write into JSON for numbers that it does not have."""
_OTHER_ENCODINGS = "write input.encoding; cp1252 and utf-16 are those of Excel"
_UNDECODED = re.compile("[\udc80-\udcff]")
"""What stands for a byte that the encoding does not have."""
_EXCEL_DELIMITER = re.compile(r'"?sep=(?P<delimiter>[^"])"?', re.IGNORECASE)
"""First line by which Excel is told the delimiter of a CSV file."""
BOM = b"\xef\xbb\xbf"
"""Mark at the beginning of a UTF-8 file, which some editors write; it is no part of the text."""
ARROW_MAGIC, ARROW_HEAD_BYTES = b"ARROW1", 8
csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE_BYTES))  # a field may hold a whole document

Record: TypeAlias = tuple[int, Mapping[str, Any], str | None, int]
"""The line of a record, its values, what is wrong with it, and its bytes."""
_Cells: TypeAlias = tuple[int, list[str], str | None, int]
"""The same of a CSV file, whose values have no names yet."""


def batches_of_file(
    source: io.BufferedReader, path: str, form: FileFormat, spec: InputSpec, *, is_batch: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file that is open, without its compression.

    `spec` says how texts are read; a batch file has requests in OpenAI's format. Raises InputError, OSError
    or ArrowException.
    """
    if form.kind == "Arrow":
        return _arrow_batches(source)
    if source.peek(len(BOM)).startswith(BOM):
        source.read(len(BOM))
    if is_batch:
        hint = f"batchrun init {path} writes a job for a file of data, batchrun JOB.yaml runs a job"
        path = Path(path).name
        requests = reviewed(request_lines(_lines(source), path), path)
        return _object_batches(requests, path, dict.fromkeys(BATCH_COLUMNS, "string"), "request", hint)
    if form.kind == "JSON Lines":
        hint = "write JSON Lines, an object on each line (for an array: jq -c '.[]')"
        return _object_batches(_json_records(_lines(source)), path, spec.types, "JSON object", hint)
    text = io.TextIOWrapper(source, spec.encoding, "surrogateescape", newline="\n")
    usual = "\t" if form.ending == ".tsv" else ","
    return _csv_batches(_csv_records(_CsvLines(text), path, spec, usual), path, spec)


def _lines(source: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one that is too long."""
    while line := source.readline(LONGEST_LINE_BYTES):
        if len(line) < LONGEST_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = source.readline(LONGEST_LINE_BYTES)
        yield None


def _batch_of(path: str, chunk: Sequence[Record], kinds: Mapping[str, pa.DataType | None]) -> pa.RecordBatch:
    """Return records as a batch with PROBLEM and LINE; a column without a type gets that of its values."""
    problems = [problem for _, _, problem, _ in chunk]
    columns: dict[str, pa.Array] = {}
    for name, kind in kinds.items():
        values = [row.get(name) for _, row, _, _ in chunk]
        if kind is None:
            columns[name], odd = main_and_odd(values)
            if odd is not None:
                columns[f"{ODD}{name}"] = odd
            continue
        columns[name], misfits = _typed(values, kind)
        for at, why in misfits.items():
            problems[at] = problems[at] or f"column {name!r}: {why}"
    lines = [line for line, *_ in chunk]
    told = [
        problem and f"{path}: line {line}: {problem}" for line, problem in zip(lines, problems, strict=True)
    ]
    columns[PROBLEM] = arrow_array(told, pa.string())
    columns[LINE] = arrow_array(lines, pa.int64())
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _typed(values: Sequence[Any], kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return values as a column of a type, with null for those that do not fit, and what is wrong with these.

    An empty text is null, except in a column of texts.
    """
    texts = [text_of(value) for value in values]
    if pa.types.is_string(kind):
        return arrow_array(texts, kind), {}
    texts = [(text and text.strip()) or None for text in texts]
    misfits: dict[int, str] = {}
    try:
        return arrow_array(texts, pa.string()).cast(kind), misfits
    except pa.ArrowException:  # one of them at least does not fit
        for at, text in enumerate(texts):
            try:
                pa.scalar(text, pa.string()).cast(kind)
            except pa.ArrowException:
                misfits[at] = f"{values[at]!r:.{MOST_SHOWN}} is not {type_name(kind)}"
                texts[at] = None
    return arrow_array(texts, pa.string()).cast(kind), misfits


def _csv_batches(records: Iterator[_Cells], path: str, spec: InputSpec) -> Iterator[pa.RecordBatch]:
    line, header, problem, _ = next(records, (1, [], "is missing", 0))
    if twice := [name for name in header if name and header.count(name) > 1]:
        problem = f"has {twice[0]!r} twice"
    if problem:
        raise InputError(
            f"{path}: line {line}: the header {problem}",
            hint="the first line of a CSV file names its columns",
        )
    kinds = {name: PLAIN_TYPES[spec.types.get(name, "string")] for name in header}
    yield _batch_of(path, [], kinds)
    for chunk in in_chunks(_of_width(records, header), BATCH_ROWS, itemgetter(-1)):
        yield _batch_of(path, chunk, kinds)


def _of_width(records: Iterable[_Cells], names: list[str]) -> Iterator[Record]:
    for line, cells, problem, size in records:
        if problem:
            yield line, {}, problem, size
        elif len(cells) != len(names):
            yield line, {}, f"{len(cells)} value(s), but the header has {len(names)}", size
        else:
            yield line, dict(zip(names, cells, strict=True)), None, size


def delimiter_on(line: str) -> str | None:
    """Return the delimiter that the first line of a file names for Excel, as in `sep=;`; None without one."""
    named = _EXCEL_DELIMITER.fullmatch(line.rstrip("\r\n"))
    return named and named["delimiter"]


class _LineTooLongError(Exception):
    """A line of a CSV file is longer than LONGEST_LINE_BYTES."""


class _CsvLines:
    """Lines of a CSV file. Those of a record that cannot be read are read again, without the first."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        """Read the lines of a text."""
        self._text = text
        self._again: list[tuple[str, int]] = []  # texts that are read again, the next one last; and where
        self._first = ""  # line of the record
        self._below = io.StringIO()  # its other lines
        self._uncounted_quotes = 0  # in the rest of a line that is too long
        self.number = 0
        """Number of the line that was read last."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._line_again() if self._again else self._text.readline(LONGEST_LINE_BYTES)
        if not line:
            raise StopIteration
        self.number += 1
        if self._first:
            self._below.write(line)
        else:
            self._first = line
        if len(line) == LONGEST_LINE_BYTES and not line.endswith("\n"):
            self._skip_rest_of_line()
            raise _LineTooLongError
        return line

    def take_delimiter(self) -> str | None:
        """Read the first line where Excel names the delimiter there, and return that."""
        line = self._text.readline(LONGEST_LINE_BYTES)
        delimiter = delimiter_on(line)
        if delimiter is not None:
            self.number += 1
        elif line:
            self._again.append((line, 0))
        return delimiter

    def begin_record(self) -> int:
        """Begin a record with the next line, whose number is returned."""
        self._first = ""
        self._uncounted_quotes = 0
        if self._below.tell():
            self._below = io.StringIO()
        return self.number + 1

    def read_again(self, before: str = "") -> None:
        """Read the lines of this record again, and those `before` them, but not the first of all."""
        lines = f"{before}{self._first}{self._below.getvalue()}"
        lines = lines[lines.find("\n") + 1 :] if "\n" in lines else ""
        if lines:
            self._again.append((lines, 0))
            self.number -= lines.count("\n") + (not lines.endswith("\n"))

    def skip_large_value(self, delimiter: str) -> None:
        """Read on to the end of a record that has a value, or a line, of more than LONGEST_LINE_BYTES.

        Where its quotes show no end, only the first line of the record is skipped. Raises csv.Error where too
        many lines were read to read them again.
        """
        below = self._below.getvalue()
        is_one_line = not below
        can_read_again = is_one_line or below.endswith("\n")
        is_open = self._ends_in_quotes()
        while is_open:
            self.begin_record()
            reader = csv.reader(chain(['"'], self), delimiter=delimiter, strict=True)  # still in quotes
            try:
                next(reader)
                is_open = False
            except _LineTooLongError:
                is_open, can_read_again = not self._ends_in_quotes(), False
            except csv.Error as failure:
                if _is_too_large(failure) and not is_one_line:
                    is_open, can_read_again = not self._ends_in_quotes(), False
                    continue
                if not can_read_again:
                    raise
                self.read_again(f"\n{below}")
                is_open = False

    def _line_again(self) -> str:
        text, start = self._again.pop()
        end = text.find("\n", start) + 1 or len(text)
        if end < len(text):
            self._again.append((text, end))
        return text[start:end]

    def _ends_in_quotes(self) -> bool:
        """Tell whether the lines that were read of this record have an odd number of quotes."""
        quotes = self._uncounted_quotes + f"{self._first}{self._below.getvalue()}".count('"')
        return quotes % 2 == 1

    def _skip_rest_of_line(self) -> None:
        is_end = False
        while not is_end:
            piece = self._text.readline(LONGEST_LINE_BYTES)
            self._uncounted_quotes += piece.count('"')
            is_end = not piece or piece.endswith("\n")


def _is_too_large(failure: Exception) -> bool:
    return isinstance(failure, _LineTooLongError) or "larger than field limit" in str(failure)


def _csv_records(lines: _CsvLines, path: str, spec: InputSpec, usual_delimiter: str) -> Iterator[_Cells]:
    """Yield the records of a CSV file, as RFC 4180 has them.

    Raises InputError where no record with other characters than ASCII has the encoding: then it is another
    one. Also raises it where the end of a large value cannot be found.
    """
    not_decoded = f"is not {spec.encoding.upper()}: {_OTHER_ENCODINGS}"
    undecoded, is_known = 0, False
    try:
        delimiter = lines.take_delimiter()
        for line, cells, problem in _csv_cells(lines, path, spec.delimiter or delimiter or usual_delimiter):
            text = "".join(cells)
            is_wrong = not text.isascii() and _UNDECODED.search(text)
            if is_wrong:
                undecoded = undecoded or line
            elif not text.isascii():
                is_known = True
            yield line, cells, not_decoded if is_wrong else problem, len(text)
    except UnicodeError:
        undecoded, is_known = lines.begin_record(), False
    if undecoded and not is_known:
        raise InputError(f"{path}: line {undecoded} {not_decoded}")


def _csv_cells(lines: _CsvLines, path: str, delimiter: str) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield the line of each record, its values, and what is wrong with it.

    Of a record with a misplaced quote the first line fails, and the lines below it are read as records: a
    quote that is never closed would hide them.
    """
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = lines.begin_record()
        try:
            cells = next(reader, None)
        except (csv.Error, _LineTooLongError) as failure:
            if _is_too_large(failure):
                _skip_large_value(lines, path, line, delimiter)
                yield line, [], TOO_LONG
            else:
                lines.read_again()
                yield line, [], f"has misplaced quotes: {failure}"
            continue
        if cells is None:
            return
        if cells:
            yield line, cells, None


def _skip_large_value(lines: _CsvLines, path: str, line: int, delimiter: str) -> None:
    """Read on to the end of a record that is too long; raises InputError where nobody can tell it."""
    try:
        lines.skip_large_value(delimiter)
    except csv.Error:
        raise InputError(
            f"{path}: line {line}: a quote is not closed within {LONGEST_LINE_BYTES >> 20} MiB",
            hint="correct the quotes of this record, or write the file as Parquet",
        ) from None


def _json_records(lines: Iterable[bytes | None]) -> Iterator[Record]:
    """Yield the object on each line; a line that is too long to be read is None."""
    for number, line in enumerate(lines, 1):
        if line is None:
            yield number, {}, TOO_LONG, 0
        elif text := line.strip():
            value: Any = {}
            problem = None
            try:
                value = msgspec.json.decode(text)  # which keeps whole numbers of any size
            except (ValueError, RecursionError) as failure:
                problem = f"not valid JSON: {failure}"
                if found := _NO_NUMBER.search(text):
                    problem = f"not valid JSON: {found[1].decode()} is no number of JSON (write null)"
            else:
                if not isinstance(value, dict):
                    problem = "not a JSON object"
                elif text.count(b"[") + text.count(b"{") > MOST_LEVELS and _has_more_levels(
                    value, MOST_LEVELS
                ):
                    problem = f"nested deeper than {MOST_LEVELS}"
            yield number, {} if problem else value, problem, len(line)


def _has_more_levels(value: object, most: int) -> bool:
    """Tell whether a list or mapping has more levels than `most`."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (not most or any(_has_more_levels(part, most - 1) for part in value))


def _object_batches(
    records: Iterable[Record], path: str, types: Mapping[str, str], what: str, hint: str
) -> Iterator[pa.RecordBatch]:
    """Yield the objects on the lines of a file. A key that a line lacks is null there.

    Raises InputError, with the hint, where no line is `what` it should be.
    """
    found, first = False, None
    for chunk in in_chunks(records, BATCH_ROWS, itemgetter(-1)):
        first = first or next((record for record in chunk if record[2]), None)
        found = found or any(record[2] is None for record in chunk)
        names = dict.fromkeys(key for _, row, _, _ in chunk for key in row)
        yield _batch_of(
            path, chunk, {name: PLAIN_TYPES[types[name]] if name in types else None for name in names}
        )
    if not found:
        told = f"no line is a {what} (line {first[0]}: {first[2]})" if first else "is empty"
        raise InputError(f"{path}: {told}", hint=hint)


def _arrow_batches(source: io.BufferedReader) -> Iterator[pa.RecordBatch]:
    if source.peek(ARROW_HEAD_BYTES).startswith(ARROW_MAGIC):  # the stream of an IPC file stands behind it
        source.read(ARROW_HEAD_BYTES)
    with pa.ipc.open_stream(source) as stream:
        yield pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in stream.schema], schema=stream.schema)
        for batch in stream:
            for at in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(at, BATCH_ROWS)
