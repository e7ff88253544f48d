"""Arrow arrays of Python values, without `pa.array`, which imports pandas where that is installed."""

from __future__ import annotations

import datetime as dt
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

_NUMBER_CODES = {
    pa.int32(): "i", pa.int64(): "q", pa.float32(): "f", pa.float64(): "d", pa.date32(): "i",
    pa.timestamp("us"): "q",
}  # fmt: skip
"""How Python's `array` calls Arrow's types of numbers; dates and times are whole numbers."""
_VECTORS = {pa.list_(pa.float16()): 2, pa.list_(pa.float32()): 4}
"""Types of vectors, with the bytes of a number."""


def _days(date: dt.date | None) -> int | None:
    return None if date is None else (date - dt.date(1970, 1, 1)).days


def _microseconds(time: dt.datetime | None) -> int | None:
    return None if time is None else (time - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)  # noqa: DTZ001


_FROM_1970 = {pa.date32(): _days, pa.timestamp("us"): _microseconds}
"""How Arrow counts dates and times without a zone."""


def arrow_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of texts, bytes, numbers, booleans, dates, times, or lists and structs of these.

    None becomes null. A struct is a mapping; a key that it lacks is null. A list of 16- or 32-bit numbers is
    a vector: the bytes of its numbers.

    `pa.array` does the same, but imports pandas where that is installed: 47 MB, and 0.2 s while rows wait.
    Lone surrogates, which JSON can carry and Parquet's UTF-8 cannot, become question marks.
    """
    nulls = _validity(values) if None in values else None
    if pa.types.is_list(kind):
        offsets, inner = _vectors(values, kind) if kind in _VECTORS else _lists(values, kind)
        return pa.Array.from_buffers(kind, len(values), [nulls, offsets], children=[inner])
    if pa.types.is_struct(kind):
        return pa.Array.from_buffers(kind, len(values), [nulls], children=_members(values, kind))
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, len(values), [nulls, _bits(values, (None, False))])
    if pa.types.is_string(kind):
        known = values if nulls is None else [value or "" for value in values]
        encoded = [text.encode("utf-8", "replace") for text in known]
        return _of_bytes(encoded, kind, nulls)
    if pa.types.is_binary(kind):
        return _of_bytes([value or b"" for value in values], kind, nulls)
    if kind in _FROM_1970:
        values = list(map(_FROM_1970[kind], values))
    stored = values if nulls is None else [value or 0 for value in values]
    numbers = array(_NUMBER_CODES[kind], stored)
    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(numbers)])


def arrow_scalar(value: Any, kind: pa.DataType) -> pa.Scalar[Any]:
    """Return a value for `pyarrow.compute`; as a plain one, or by `pa.scalar`, it would import pandas."""
    return arrow_array([value], kind)[0]


def _lists(values: Sequence[Any], kind: pa.ListType[Any]) -> tuple[pa.Buffer, pa.Array]:
    """Return where lists begin and end in the array of their items, and that array."""
    lists = [value or () for value in values]
    return _offsets(map(len, lists)), arrow_array(list(chain.from_iterable(lists)), kind.value_type)


def _vectors(values: Sequence[bytes | None], kind: pa.ListType[Any]) -> tuple[pa.Buffer, pa.Array]:
    """Return the same for vectors, whose bytes are as they stand in the array."""
    known, width = [value or b"" for value in values], _VECTORS[kind]
    content = b"".join(known)
    numbers = pa.Array.from_buffers(kind.value_type, len(content) // width, [None, pa.py_buffer(content)])
    return _offsets(len(vector) // width for vector in known), numbers


def _members(values: Sequence[Any], kind: pa.StructType) -> list[pa.Array]:
    return [arrow_array([(value or {}).get(field.name) for value in values], field.type) for field in kind]


def _of_bytes(values: Sequence[bytes], kind: pa.DataType, nulls: pa.Buffer | None) -> pa.Array:
    buffers = [nulls, _offsets(map(len, values)), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def _offsets(lengths: Iterable[int]) -> pa.Buffer:
    return pa.py_buffer(array("i", accumulate(lengths, initial=0)))


def _validity(values: Sequence[Any]) -> pa.Buffer:
    """Return Arrow's validity bitmap, which is 0 for a null."""
    return _bits(values, (None,))


def _bits(values: Sequence[Any], zeros: tuple[Any, ...]) -> pa.Buffer:
    """Return a bitmap: bit i, from the lowest bit of the first byte, is 0 for a value of `zeros`."""
    if values.count(None) == len(values):  # such as the errors of rows without one
        return pa.py_buffer(bytes((len(values) + 7) // 8))
    bits = int("".join("0" if value in zeros else "1" for value in reversed(values)) or "0", 2)
    return pa.py_buffer(bits.to_bytes((len(values) + 7) // 8, "little"))
