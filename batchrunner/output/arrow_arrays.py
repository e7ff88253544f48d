"""Conversion of Python values to Arrow arrays, and back."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

UNREADABLE = (ValueError, OverflowError, pa.ArrowException)
"""Errors that Arrow raises for a value that Python cannot represent.

Examples are an unknown time zone, a date out of range, and invalid UTF-8 (UnicodeDecodeError is a
ValueError).
"""
_UTC = "+00:00"
"""The time zone UTC as an offset, which needs no time zone database."""
_VECTORS = {pa.list_(pa.float16()): 2, pa.list_(pa.float32()): 4}
"""Arrow types of embedding vectors, with the size in bytes of one number."""


def arrow_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Convert values to an array like `pa.array`, with two differences.

    For a vector type, each value is the bytes of the vector's numbers. In texts, lone surrogates become
    question marks, because UTF-8, and therefore Parquet, cannot encode them.
    """
    if kind in _VECTORS:
        return _vectors(values, kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], kind)


def shown_values(column: pa.Array) -> list[Any]:
    """Return a column as Python values, with substitutes for values that Python cannot represent.

    A time with an unknown time zone is converted to UTC. A date out of range becomes text. In invalid UTF-8,
    each bad byte becomes a replacement character.
    """
    try:
        return list(column.to_pylist())
    except UNREADABLE:
        return [_shown(item) for item in column]


def _shown(scalar: Any) -> Any:
    """Return an Arrow scalar as a Python value, or its substitute (see `shown_values`)."""
    kind = scalar.type
    try:
        return scalar.as_py()
    except UNREADABLE:
        if pt.is_dictionary(kind):  # The value is from a dictionary-encoded column; it is not a dict.
            return _shown(scalar.value)
        return _shown_nested(scalar) if pt.is_nested(kind) else _shown_plain(scalar)


def _shown_nested(scalar: Any) -> Any:
    """Convert a struct to a dict, a map to pairs and a list to a list, with `_shown` for each item."""
    kind = scalar.type
    if pt.is_struct(kind):
        fields = {}
        for position, field in enumerate(kind):  # Two fields may have the same name, so look up by position.
            fields[field.name] = _shown(scalar[position])
        return fields
    if pt.is_map(kind):
        return [(_shown(pair["key"]), _shown(pair["value"])) for pair in scalar.values]
    return [_shown(item) for item in scalar.values]


def _shown_plain(scalar: Any) -> Any:
    """Return the substitute for a scalar, such as a time or a text, that Python cannot represent."""
    kind = scalar.type
    if pt.is_timestamp(kind) and kind.tz is not None:
        if kind.tz != _UTC:
            return _shown(scalar.cast(pa.timestamp(kind.unit, _UTC)))
        # Python could not represent the time even in UTC, so its date is out of range.
        return _shown(scalar.cast(pa.timestamp(kind.unit))) + _UTC
    if pt.is_duration(kind):  # The duration is too long for Python's timedelta.
        return f"{scalar.value} {kind.unit}"
    if pt.is_temporal(kind):  # Arrow writes a space where ISO 8601 has a T.
        return scalar.cast(pa.string()).as_py().replace(" ", "T")
    # The only remaining case is a text with invalid UTF-8.
    return scalar.as_buffer().to_pybytes().decode(errors="replace")


def _vectors(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """Build an array of vectors directly from their bytes, without a Python object per number."""
    is_null = [value is None for value in values]
    vectors = [value or b"" for value in values]  # A null takes no bytes.
    number_bytes = _VECTORS[kind]
    lengths = [len(vector) // number_bytes for vector in vectors]
    offsets = list(accumulate(lengths, initial=0))
    # The first buffer would mark null numbers. Only whole vectors can be null, and `mask` marks those.
    buffers = [None, pa.py_buffer(b"".join(vectors))]
    numbers = pa.Array.from_buffers(kind.value_type, offsets[-1], buffers)
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), numbers, kind, mask=pa.array(is_null, pa.bool_())
    )


def _encodable(value: Any) -> Any:
    """Return a value with question marks for lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {name: _encodable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value
