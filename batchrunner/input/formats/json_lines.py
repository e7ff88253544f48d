"""Records of JSON Lines files: an object on each line, whose keys are the columns.

A line that is no object is a row that fails. A key that a line lacks is null there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError
from batchrunner.core.exact_json import has_more_levels, read_exactly
from batchrunner.input.formats.shapes import MIXED, Shape, arrow_type, merge_into, merged
from batchrunner.input.formats.text import Lines
from batchrunner.input.formats.values import TYPES, BlockRows, Column, column_of, text_of
from batchrunner.output.arrow_arrays import arrow_array

MOST_COLUMNS = 10_000
"""Most keys over all lines of a file."""


DEEPEST = 250
"""Most levels of a value: orjson reads 1,024 and writes 254, one of them around the row."""
_LONG_NUMBER = re.compile(rb"(?<![0-9.])(?:[1-9][0-9.]{18}|0[.][0-9]{18})")
"""Beginning of each number of which orjson makes a float that may not be equal to it: 18 digits or more."""


class JsonLinesRecords:
    """The records of a JSON Lines file. The type of a column is that of all its values."""

    def __init__(self, path: str, types: Mapping[str, str]) -> None:
        """`types` are names of types by column, those of `input.types`."""
        self._path = path
        self._types = types
        self.shapes: dict[str, Shape] = {}
        """What is known of each column."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of all lines, in the order in which they come first."""
        return pa.schema([(name, self._type_of(name)) for name in self.shapes])

    def skim(self, lines: Lines) -> Iterator[None]:
        """Parse all lines to find the columns; raises InputError for a file without an object."""
        found, first = False, ""
        for line in lines:
            if not line.strip():
                continue
            values, problem = _object_in(line, exactly=False)
            if _has_float(values) and _LONG_NUMBER.search(line):
                values = read_exactly(line)
            found = found or values is not None
            first = first or f" (line {lines.number - 1}: {problem})"
            if problem and not found and line.lstrip()[:1] in (b"[", b"{"):
                self._refuse_document(line)
            merge_into(self.shapes, values or {})
            if len(self.shapes) > MOST_COLUMNS:
                raise InputError(
                    f"{self._path}: line {lines.number - 1}: has more than {MOST_COLUMNS} different keys"
                )
            yield
        if not found:
            raise InputError(f"{self._path}: no line is a JSON object{first}")

    def parse(self, lines: Lines, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the lines as rows with these columns, and PROBLEM."""
        rows = BlockRows(self._path)
        exactly = any(name in self._types or self.shapes[name] == MIXED for name in columns)
        for line in lines:
            if line.strip():
                rows.add(lines.number - 1, *_object_in(line, exactly=exactly))
        return rows.batch({name: self._column(name, rows.values) for name in columns})

    def _column(self, name: str, rows: Sequence[dict[str, Any] | None]) -> Column:
        values = [None if row is None else row.get(name) for row in rows]
        kind = self._type_of(name)
        if name in self._types or pt.is_string(kind):
            return column_of([text_of(value) for value in values], kind)
        return arrow_array(values, kind), {}

    def _type_of(self, name: str) -> pa.DataType:
        return TYPES[self._types[name]] if name in self._types else arrow_type(self.shapes[name])

    def _refuse_document(self, line: bytes) -> None:
        """Raise InputError for a file that is one JSON document over several lines, or one array."""
        whole = line.strip()
        if whole in (b"[", b"{") or (whole.startswith(b"[") and self._path.lower().endswith(".json")):
            raise InputError(
                f"{self._path}: is one JSON document",
                hint="write JSON Lines, an object on each line (for an array: jq -c '.[]')",
            )


def have_one_schema(files: Sequence[JsonLinesRecords]) -> None:
    """Give files of one input the columns of all, since a key may be missing in a whole file."""
    shapes: dict[str, Shape] = {}
    for file in files:
        for name, shape in file.shapes.items():
            shapes[name] = merged(shapes[name], shape) if name in shapes else shape
    for file in files:
        file.shapes = shapes


def _has_float(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_float(part) for part in value.values())
    return isinstance(value, float) or (isinstance(value, list) and any(map(_has_float, value)))


def _object_in(line: bytes, *, exactly: bool) -> tuple[dict[str, Any] | None, str | None]:
    """Return the object on a line, or what is wrong with it; `exactly` keeps numbers as they are written."""
    try:
        value = orjson.loads(line.strip())
    except orjson.JSONDecodeError as failure:
        return None, f"not valid JSON: {failure.msg} (character {failure.pos + 1})"
    if line.count(b"[") + line.count(b"{") > DEEPEST and has_more_levels(value, DEEPEST + 1):
        return None, f"nested deeper than {DEEPEST}"
    if not isinstance(value, dict):
        return None, "not a JSON object"
    return (read_exactly(line) if exactly else value), None
