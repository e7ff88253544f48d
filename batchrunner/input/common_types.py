"""Finds a common type for a column whose type differs between input files.

Most common types come from Arrow's permissive promotion; this module adds the cases that Arrow lacks. If two
types differ only in layout, such as `string` and `large_string`, the first one is kept. A file that is added
to the end of the input then does not change the type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

_TEXTS = {pa.string(), pa.large_string(), pa.string_view()}
_BYTES = {pa.binary(), pa.large_binary(), pa.binary_view()}
_UTC = {"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "Zulu", "+00:00", "-00:00", "+0000", "+00"}
"""Names of the time zone UTC."""
_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19,
           pa.uint8(): 3, pa.uint16(): 5, pa.uint32(): 10, pa.uint64(): 20}  # fmt: skip
"""Maximum number of decimal digits of each integer type."""
_MOST_DIGITS_128 = 38
"""Maximum number of digits of a 128-bit decimal."""
_MOST_DIGITS_256 = 76
"""Maximum number of digits of a 256-bit decimal, the largest in Arrow."""


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that holds the values of both types; None if there is no such type."""
    if one == other or pt.is_null(other):
        return one
    if pt.is_null(one):
        return other
    if pt.is_dictionary(one) or pt.is_dictionary(other):
        return _common_dictionary(one, other)
    # Arrow's promotion does not handle these kinds of types well.
    for is_of_kind, common_of_kind in _KINDS:
        if is_of_kind(one) and is_of_kind(other):
            return common_of_kind(one, other)
    return _promoted(one, other)


def _promoted(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type to which Arrow promotes both types; None if there is no such type."""
    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    try:
        promoted = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (TypeError, pa.ArrowException):
        return None
    # For a decimal and a float32, Arrow would choose float32, which loses digits.
    has_decimal = pt.is_decimal(one) or pt.is_decimal(other)
    return pa.float64() if has_decimal and pt.is_floating(promoted) else promoted


def _common_dictionary(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the common type of two types of which at least one is dictionary-encoded.

    It is a dictionary type only if the first type is one.
    """
    value_types = [kind.value_type if pt.is_dictionary(kind) else kind for kind in (one, other)]
    value_type = common_type(*value_types)
    if value_type is None or not pt.is_dictionary(one):
        return value_type
    # The values have an order only if they have one in both types.
    is_ordered = one.ordered and pt.is_dictionary(other) and other.ordered
    return pa.dictionary(pa.int32(), value_type, ordered=is_ordered)


def _first(one: pa.DataType, other: pa.DataType) -> pa.DataType:  # noqa: ARG001 - as the other functions
    return one


def _common_map(one: pa.MapType, other: pa.MapType) -> pa.DataType | None:
    key, item = common_type(one.key_type, other.key_type), common_type(one.item_type, other.item_type)
    if key is None or item is None:
        return None
    return pa.map_(key, item, keys_sorted=one.keys_sorted and other.keys_sorted)


def _is_list(kind: pa.DataType) -> bool:
    tests = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view)
    return any(test(kind) for test in tests)


def _common_list(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the common type of two list types: a list of the common type of their items.

    It has a fixed size only if both lists have the same fixed size.
    """
    item_type = common_type(one.value_type, other.value_type)
    if item_type is None:
        return None
    item = one.value_field.with_type(item_type).with_nullable(True)
    if pt.is_fixed_size_list(one) and pt.is_fixed_size_list(other) and one.list_size == other.list_size:
        return pa.list_(item, one.list_size)
    is_large = pt.is_large_list(one) or pt.is_large_list_view(one)
    return pa.large_list(item) if is_large else pa.list_(item)


def _common_struct(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a struct type with the fields of both struct types; a missing field is null.

    Returns None if a struct has two fields of one name, or if a field has no common type.
    """
    fields: dict[str, pa.Field[Any]] = {}
    for struct in (one, other):
        names = [field.name for field in struct]
        if len({*names}) < len(names):
            return None
        for field in struct:
            earlier = fields.get(field.name)
            kind = field.type if earlier is None else common_type(earlier.type, field.type)
            if kind is None:
                return None
            fields[field.name] = field.with_type(kind).with_nullable(True)
    return pa.struct(list(fields.values()))


def _common_timestamp(one: pa.TimestampType, other: pa.TimestampType) -> pa.DataType | None:
    """Return a timestamp type with the finer unit of both; None if only one type has a time zone.

    If the time zones differ, the result has UTC.
    """
    if (one.tz is None) != (other.tz is None):
        return None
    zone = one.tz
    # If both names mean UTC, the first one is kept, such as "Etc/UTC".
    both_mean_utc = {one.tz, other.tz} <= _UTC
    if one.tz != other.tz and not both_mean_utc:
        zone = "UTC"
    finer_type = _promoted(pa.timestamp(one.unit), pa.timestamp(other.unit))
    assert isinstance(finer_type, pa.TimestampType)
    return pa.timestamp(finer_type.unit, zone)


def _common_exact(one: Any, other: Any) -> pa.DataType | None:
    """Return the common type of two types that are integers or decimals.

    For an integer and a decimal, Arrow's own promotion may give a decimal with too few digits.
    """
    if pt.is_integer(one) == pt.is_integer(other):
        return _promoted(one, other)
    # The result keeps the decimal's places after the point, and has room for all digits before the point.
    integer, decimal = (one, other) if pt.is_integer(one) else (other, one)
    digits_before_point = max(decimal.precision - decimal.scale, _DIGITS[integer])
    digits = digits_before_point + decimal.scale
    if digits <= _MOST_DIGITS_128:
        return pa.decimal128(digits, decimal.scale)
    return pa.decimal256(digits, decimal.scale) if digits <= _MOST_DIGITS_256 else None


_KINDS: Sequence[tuple[Callable[[pa.DataType], bool], Callable[[Any, Any], pa.DataType | None]]] = (
    (_TEXTS.__contains__, _first),
    (_BYTES.__contains__, _first),
    (_is_list, _common_list),
    (pt.is_struct, _common_struct),
    (pt.is_map, _common_map),
    (pt.is_timestamp, _common_timestamp),
    (lambda kind: pt.is_integer(kind) or pt.is_decimal(kind), _common_exact),
)
"""For each kind of types, a test and a function that returns the common type of two such types."""
