"""Values of the rows of a batch, as Python has them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.types import RowRef
from batchrunner.input.row_reader import RowBatch

_CODES = {
    pa.int8(): "b", pa.int16(): "h", pa.int32(): "i", pa.int64(): "q",
    pa.uint8(): "B", pa.uint16(): "H", pa.uint32(): "I", pa.uint64(): "Q",
}  # fmt: skip
"""Codes of Python's `array` by Arrow's types."""

Row = dict[str, Any]
"""Values of a row by column."""


@dataclass(frozen=True, slots=True)
class UnreadableValue:
    """Stands for a value that Python cannot represent (bad UTF-8, a date out of range)."""

    reason: str


def rows_of(batch: RowBatch, names: Sequence[str]) -> list[Row]:
    """Return the rows of a batch as Python values of these columns, see `values_of`."""
    columns = [values_of(batch.data.column(name)) for name in names]
    if not columns:
        return [{} for _ in batch.rows]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def values_of(column: pa.Array) -> list[Any]:
    """Return a column as Python values; one that Python cannot represent becomes an UnreadableValue."""
    if (pt.is_list(column.type) or pt.is_large_list(column.type)) and pt.is_integer(column.type.value_type):
        ends = _integers(column.offsets)
        values = column.values.slice(ends[0], ends[-1] - ends[0])
        if not column.null_count and not values.null_count:  # token ids: many times faster than `to_pylist`
            numbers = _integers(values)
            return [numbers[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError, pa.ArrowException):  # UnicodeDecodeError is a ValueError
        return [_value_of(item) for item in column]


def _integers(column: pa.Array) -> list[int]:
    """Return a column of integers without nulls."""
    data, width = column.buffers()[1], column.type.bit_width // 8
    if data is None:
        return []
    stored = memoryview(data)[column.offset * width : (column.offset + len(column)) * width]
    numbers = array(_CODES[column.type])
    numbers.frombytes(stored)
    return numbers.tolist()


def carried_of(ref: RowRef) -> dict[str, Any]:
    """Return the carried columns of a row; a value that Python cannot represent is None."""
    found = {}
    for at, name in enumerate(ref.carried.schema.names):
        (value,) = values_of(ref.carried.column(at).slice(ref.position, 1))
        found[name] = None if isinstance(value, UnreadableValue) else value
    return found


def _value_of(item: pa.Scalar[Any]) -> Any:
    try:
        return item.as_py()
    except (ValueError, OverflowError, pa.ArrowException) as failure:
        return UnreadableValue(f"unreadable value: {failure}")
