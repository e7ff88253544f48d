"""Reads the records of CSV files (RFC 4180). A malformed record fails alone.

DuckDB (2.0) and Arrow have CSV readers too, but these do not fit. DuckDB gives line numbers only for rejected
records, so a failed row could not keep its place. It also drops the lines after an unclosed quote, some of
them without a message, and cannot read Windows code pages. Arrow does not report misplaced quotes.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Iterator

from batchrunner.core.errors import InputError
from batchrunner.core.files import LONGEST_LINE_BYTES
from batchrunner.input.text_lines import TOO_LONG, TextRecord
from batchrunner.job.spec import InputSpec

# A field may hold a whole document, which exceeds the csv module's default limit.
csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE_BYTES))

_ENCODING_HINT = "set input.encoding; Excel writes cp1252 or utf-16"
_UNDECODED = re.compile("[\udc80-\udcff]")
"""Surrogates that replace bytes which are invalid in the encoding (`errors="surrogateescape"`)."""
_EXCEL_DELIMITER = re.compile(r'"?sep=(?P<delimiter>[^"])"?', re.IGNORECASE)
"""First line of a CSV file that names the delimiter for Excel, such as `sep=;`."""


def delimiter_on(line: str) -> str | None:
    """Return the delimiter that a first line such as `sep=;` names for Excel; None for any other line."""
    match = _EXCEL_DELIMITER.fullmatch(line.rstrip("\r\n"))
    return match and match["delimiter"]


def csv_table(
    source: io.BufferedReader, path: str, spec: InputSpec, usual_delimiter: str
) -> tuple[list[str], Iterator[TextRecord]]:
    """Return the column names of a CSV file, and its records.

    `usual_delimiter` is used if neither `input.delimiter` nor the file names one. Raises InputError for a bad
    header. The call and the iterator also raise InputError if a quoted value is never closed, or if no record
    with non-ASCII characters can be decoded.
    """
    # Line ends are kept as they are, because a quoted value may contain any of them.
    text = io.TextIOWrapper(source, spec.encoding, "surrogateescape", newline="\n")
    records = _decoded_records(_CsvLines(text), path, spec, usual_delimiter)
    no_header: _Cells = (1, [], "is missing")
    line, header, problem = next(records, no_header)
    repeated_names = [name for name in header if name and header.count(name) > 1]
    if repeated_names:
        problem = f"has {repeated_names[0]!r} twice"
    if problem:
        raise InputError(
            f"{path}: line {line}: the header {problem}",
            hint="the first line of a CSV file must name its columns",
        )
    return header, _named_records(records, header)


_Cells = tuple[int, list[str], str | None]
"""Number of a record's first line, its values, and the reason why it cannot be read (None if it can)."""


def _named_records(records: Iterator[_Cells], names: list[str]) -> Iterator[TextRecord]:
    """Yield records with values by column; `names` are the names in the header."""
    for line, cells, problem in records:
        size = sum(map(len, cells))
        if problem:
            yield TextRecord(line, {}, problem, size)
        elif len(cells) != len(names):
            count_problem = f"has {len(cells)} value(s), but the header has {len(names)}"
            yield TextRecord(line, {}, count_problem, size)
        else:
            yield TextRecord(line, dict(zip(names, cells, strict=True)), None, size)


def _decoded_records(lines: _CsvLines, path: str, spec: InputSpec, usual_delimiter: str) -> Iterator[_Cells]:
    """Yield the records. A record with bytes that are invalid in the encoding gets a reason for its failure.

    Raises InputError if no record with non-ASCII characters can be decoded, because the encoding is wrong
    then.
    """
    not_decoded = f"is not {spec.encoding.upper()}: {_ENCODING_HINT}"
    first_undecoded_line, encoding_fits = 0, False
    try:
        excel_delimiter = lines.read_delimiter()
        delimiter = spec.delimiter or excel_delimiter or usual_delimiter
        for line, cells, problem in _records(lines, path, delimiter):
            text = "".join(cells)
            # ASCII is the same in nearly every encoding, so it does not confirm the encoding.
            if text.isascii():
                yield line, cells, problem
            elif _UNDECODED.search(text):
                first_undecoded_line = first_undecoded_line or line
                yield line, cells, not_decoded
            else:
                encoding_fits = True
                yield line, cells, problem
    except UnicodeError:
        # UTF-16 decoding may fail although `surrogateescape` is set.
        first_undecoded_line, encoding_fits = lines.begin_record(), False
    if first_undecoded_line and not encoding_fits:
        raise InputError(f"{path}: line {first_undecoded_line} {not_decoded}")


def _records(lines: _CsvLines, path: str, delimiter: str) -> Iterator[_Cells]:
    """Yield all records, each with the reason if it cannot be read.

    For a misplaced quote, only the first line of the record fails. The lines below it are read again as
    records, because an unclosed quote would otherwise swallow them all.
    """
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = lines.begin_record()
        try:
            cells = _next_cells(reader)
        except _TooLongError:
            if not lines.skip_long_record(delimiter):
                raise _endless_value(path, line) from None
            yield line, [], TOO_LONG
        except csv.Error as failure:
            lines.requeue_below_first()
            yield line, [], f"has misplaced quotes: {failure}"
        else:
            if cells is None:
                return
            if cells:
                # An empty line has no cells, and is no record.
                yield line, cells, None


def _next_cells(reader: Iterator[list[str]]) -> list[str] | None:
    """Return the values of the next record, None after the last; raise _TooLongError or csv.Error."""
    try:
        return next(reader, None)
    except csv.Error as failure:
        if "larger than field limit" in str(failure):
            raise _TooLongError from None
        raise


def _endless_value(path: str, line: int) -> InputError:
    """Return the error for a quoted value that begins on line `line` and is never closed."""
    return InputError(
        f"{path}: line {line}: a value of more than {LONGEST_LINE_BYTES >> 20} MiB has no closing quote",
        hint="correct the quotes of this record, or write the file as Parquet",
    )


def _closes_value(line: str, delimiter: str) -> bool:
    """Tell whether a line that begins inside a quoted value closes the value and ends the record."""
    try:
        # With a quote in front, the line must be a valid record of its own.
        next(csv.reader([f'"{line}'], delimiter=delimiter, strict=True))
    except csv.Error:
        return False
    return True


class _TooLongError(Exception):
    """A line or a value exceeds LONGEST_LINE_BYTES."""


class _CsvLines:
    """Iterator over the lines of a CSV file.

    The lines of the current record are kept, so that they can be read again.
    """

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._record: list[str] = []
        self._requeued: deque[str] = deque()
        """Lines to read again before the next line of the file."""
        self._number = 0
        """Number of the line that was read last."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line. A line that is too long is skipped, and raises _TooLongError."""
        line = self._requeued.popleft() if self._requeued else self._text.readline(LONGEST_LINE_BYTES)
        if not line:
            raise StopIteration
        self._number += 1
        self._record.append(line)
        # `readline` stops at this length, so such a line without an end is incomplete.
        if len(line) == LONGEST_LINE_BYTES and not line.endswith("\n"):
            self._skip_rest_of_line()
            raise _TooLongError
        return line

    def begin_record(self) -> int:
        """Begin a new record, and return the number of its first line."""
        self._record.clear()
        return self._number + 1

    def requeue_below_first(self) -> None:
        """Requeue all lines of the current record except the first."""
        lines_below = self._record[1:]
        self._requeued.extendleft(reversed(lines_below))
        self._number -= len(lines_below)

    def read_delimiter(self) -> str | None:
        """Return the delimiter of a first line such as `sep=;`, and skip this line; else return None."""
        line = self._text.readline(LONGEST_LINE_BYTES)
        delimiter = delimiter_on(line)
        if delimiter is not None:
            self._number += 1
        elif line:
            # Any other first line is the header, so it is read again.
            self._requeued.append(line)
        return delimiter

    def skip_long_record(self, delimiter: str) -> bool:
        """Skip the rest of a record that is too long to be read; tell whether its quotes are closed.

        If they are not, the lines below cannot be divided into records.
        """
        if self._has_paired_quotes():
            # The line that was too long ends the record.
            return True
        while True:
            # From here on, each line begins inside a quoted value.
            self._record.clear()
            line: str | None
            try:
                line = next(self)
            except StopIteration:
                return False
            except _TooLongError:
                # The line is too long to be checked as CSV.
                line = None
            # Quotes inside a value come in pairs. An odd number means that the value has ended.
            ends_value = not self._has_paired_quotes()
            if ends_value:
                return line is not None and _closes_value(line, delimiter)

    def _has_paired_quotes(self) -> bool:
        """Tell whether the number of quotes in the current record is even."""
        return sum(line.count('"') for line in self._record) % 2 == 0

    def _skip_rest_of_line(self) -> None:
        """Skip the rest of a line that is too long, but keep its quotes for counting."""
        while chunk := self._text.readline(LONGEST_LINE_BYTES):
            self._record.append('"' * chunk.count('"'))
            if chunk.endswith("\n"):
                return
