"""Records of CSV files, as RFC 4180 has them: quoted fields may contain delimiters, quotes and line ends.

A record that is wrong (values too many or too few, a quote in the wrong place) is a row that fails.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from batchrunner.core.errors import InputError
from batchrunner.input.formats.text import LONGEST_RECORD_BYTES, Lines
from batchrunner.input.formats.values import TYPES, BlockRows, bad_bytes, column_of

csv.field_size_limit(max(csv.field_size_limit(), LONGEST_RECORD_BYTES))  # a field may hold a whole document
_MEANINGS = (
    ("unexpected end of data", "a quoted field begins and does not end"),
    ("new-line character seen", "a carriage return stands alone in it: end lines with a line feed"),
)
"""Beginnings of what Python's csv says, and what is meant by it here."""


class CsvRecord(NamedTuple):
    """A record of a CSV file."""

    line: int
    """Number of its first line."""
    cells: list[str]
    """Its values; none of a record that is wrong, or of an empty line."""
    problem: str | None
    """What is wrong with it."""


class CsvRecords:
    """The records of a CSV file with a header. All columns are texts, unless a type is given for them."""

    def __init__(self, path: str, delimiter: str, types: Mapping[str, str]) -> None:
        """`types` are names of types by column, those of `input.types`."""
        self._path = path
        self._delimiter = delimiter
        self._types = types
        self._header: list[str] = []

    @property
    def schema(self) -> pa.Schema:
        """Columns of the header."""
        return pa.schema([(name, TYPES[self._types.get(name, "string")]) for name in self._header])

    def skim(self, lines: Lines) -> Iterator[None]:
        """Read the header, and find where each record ends; raises InputError for a bad header."""
        self._read_header(lines)
        for line in lines:
            if b'"' not in line:
                if line.strip(b"\r\n"):
                    yield
                continue
            lines.take_back([line])
            self._next(lines)
            yield

    def parse(self, lines: Lines, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the records as rows with these columns, and PROBLEM."""
        if lines.number == 1:  # the first block
            self._read_header(lines)
        rows = BlockRows(self._path)
        width = len(self._header)
        while record := self._next(lines):
            problem = record.problem
            if problem is None and not record.cells:
                continue
            if problem is None and len(record.cells) != width:
                problem = f"{len(record.cells)} value(s), but the header has {width}"
            rows.add(record.line, record.cells, problem)
        found = {}
        for name in columns:
            at = self._header.index(name)
            texts = [None if cells is None else cells[at] for cells in rows.values]
            found[name] = column_of(texts, self.schema.field(at).type)
        return rows.batch(found)

    def _read_header(self, lines: Lines) -> None:
        record = self._next(lines)
        while record is not None and not (record.cells or record.problem):
            record = self._next(lines)
        if record is None:
            raise InputError(f"{self._path}: has no header: the first line of a CSV file names its columns")
        problem = record.problem or next((why for name in record.cells if (why := bad_bytes(name))), None)
        if problem:
            raise InputError(f"{self._path}: line {record.line}: the header cannot be read: {problem}")
        self._header = record.cells

    def _next(self, lines: Lines) -> CsvRecord | None:
        """Return the next record, None at the end of the file.

        A wrong record ends with its first line: a quote that is not closed swallows no other record.
        """
        line = lines.number
        taken: list[bytes] = []
        reader = csv.reader(_texts_of(lines, taken), delimiter=self._delimiter, strict=True)
        try:
            return CsvRecord(line, next(reader), None)
        except StopIteration:
            return None
        except csv.Error as failure:
            lines.take_back(taken[1:])
            said = str(failure)
            meant = next((meaning for start, meaning in _MEANINGS if said.startswith(start)), said)
            return CsvRecord(line, [], meant)


def _texts_of(lines: Lines, taken: list[bytes]) -> Iterator[str]:
    """Yield the lines that one record needs as texts, and add them to `taken`."""
    size = 0
    for line in lines:
        taken.append(line)
        size += len(line)
        if size > LONGEST_RECORD_BYTES:
            raise csv.Error(f"a quoted field is longer than {LONGEST_RECORD_BYTES >> 20} MiB")
        yield line.decode("utf-8", "surrogateescape")
