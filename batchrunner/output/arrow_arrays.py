"""Conversion of Python values to Arrow arrays, and back."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

UNREADABLE = (ValueError, OverflowError, pa.ArrowException)
"""Errors of Arrow for a value that Python cannot represent: a time zone that no local database has, a date
out of range, invalid UTF-8 (UnicodeDecodeError is a ValueError)."""
_UTC = "+00:00"
"""UTC as an offset, which needs no database of time zones."""
_VECTORS = {pa.list_(pa.float16()): 2, pa.list_(pa.float32()): 4}
"""Types of vectors, each with the size of a number in bytes."""


def arrow_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Convert values to an array like `pa.array`.

    Values of a vector type are given as the bytes of their numbers. Lone surrogates become question marks,
    because UTF-8 has none, and so Parquet cannot hold them.
    """
    if kind in _VECTORS:
        return _vectors(values, kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], kind)


def shown_values(column: pa.Array) -> list[Any]:
    """Return a column as Python values, with substitutes for values that Python cannot represent.

    A time of an unknown zone is given in UTC, a date out of range as text, and invalid UTF-8 with a
    replacement character for each bad byte.
    """
    try:
        return list(column.to_pylist())
    except UNREADABLE:
        return [_shown(item) for item in column]


def _shown(scalar: Any) -> Any:
    kind = scalar.type
    try:
        return scalar.as_py()
    except UNREADABLE:
        if pt.is_dictionary(kind):
            return _shown(scalar.value)
        return _shown_nested(scalar) if pt.is_nested(kind) else _shown_plain(scalar)


def _shown_nested(scalar: Any) -> Any:
    kind = scalar.type
    if pt.is_struct(kind):
        return {field.name: _shown(scalar[at]) for at, field in enumerate(kind)}
    if pt.is_map(kind):
        return [(_shown(pair["key"]), _shown(pair["value"])) for pair in scalar.values]
    return [_shown(item) for item in scalar.values]


def _shown_plain(scalar: Any) -> Any:
    kind = scalar.type
    if pt.is_timestamp(kind) and kind.tz is not None:
        if kind.tz != _UTC:
            return _shown(scalar.cast(pa.timestamp(kind.unit, _UTC)))
        return _shown(scalar.cast(pa.timestamp(kind.unit))) + _UTC
    if pt.is_duration(kind):
        return f"{scalar.value} {kind.unit}"
    if pt.is_temporal(kind):
        return scalar.cast(pa.string()).as_py().replace(" ", "T")
    return scalar.as_buffer().to_pybytes().decode(errors="replace")


def _vectors(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    vectors = [value or b"" for value in values]
    number_bytes = _VECTORS[kind]
    lengths = (len(vector) // number_bytes for vector in vectors)
    offsets = [*accumulate(lengths, initial=0)]
    content = pa.py_buffer(b"".join(vectors))
    numbers = pa.Array.from_buffers(kind.value_type, offsets[-1], [None, content])
    nulls = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), numbers, kind, mask=nulls)


def _encodable(value: Any) -> Any:
    """Return a value with question marks for lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {name: _encodable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value
