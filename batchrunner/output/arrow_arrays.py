"""Arrow arrays of Python values."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

_VECTORS = {pa.list_(pa.float16()): 2, pa.list_(pa.float32()): 4}
"""Types of vectors, with the bytes of a number."""


def arrow_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as `pa.array` does.

    A list of 16- or 32-bit numbers is a vector: the bytes of its numbers. Lone surrogates, which UTF-8 and so
    Parquet cannot carry, become question marks.
    """
    if kind in _VECTORS:
        return _vectors(values, kind)
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], kind)


def _vectors(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    known, width = [value or b"" for value in values], _VECTORS[kind]
    ends = [*accumulate((len(vector) // width for vector in known), initial=0)]
    numbers = pa.Array.from_buffers(kind.value_type, ends[-1], [None, pa.py_buffer(b"".join(known))])
    nulls = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), numbers, kind, mask=nulls)


def _encodable(value: Any) -> Any:
    """Return a value without lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {name: _encodable(inner) for name, inner in value.items()}
    return [*map(_encodable, value)] if isinstance(value, (list, tuple)) else value
