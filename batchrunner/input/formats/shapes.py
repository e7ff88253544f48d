"""Types of JSON values: found value by value, and merged into one type for each column.

A shape is what is known of a column: one of the words below, a ListShape, or a dict of the shapes of an
object's keys. Values without a common type (a number and a text, two kinds of nesting) make the whole column
MIXED, which is a column of texts. So does a number that the column's type cannot hold: a whole number of more
than 64 bits, one beside fractions that no float is equal to, and, outside of objects and lists, a fraction of
more than 17 digits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa

from batchrunner.core.exact_json import WrittenNumber

NULL, BOOL, INT, FLOAT, TEXT, MIXED = "null", "bool", "int", "float", "text", "mixed"
WIDE_INT = "wide int"
"""A whole number of 64 bits to which no float is equal."""
FLOAT_DIGITS = 17
"""Most digits that programs write of a float of 64 bits; more are of a number that may be none."""
MOST_KEYS = 1000
"""Most keys of a nested object that become fields; one with more is a dictionary, and its column MIXED."""
MOST_DEPTH = 32
"""Deepest nesting that becomes a type."""
_WORDS = {bool: BOOL, float: FLOAT, str: TEXT, type(None): NULL}
_TYPES = {BOOL: pa.bool_(), INT: pa.int64(), WIDE_INT: pa.int64(), FLOAT: pa.float64()}

_COMMON = {(INT, FLOAT): FLOAT, (FLOAT, INT): FLOAT, (INT, WIDE_INT): WIDE_INT, (WIDE_INT, INT): WIDE_INT}
"""Shapes that hold the numbers of two others."""


@dataclass(frozen=True, slots=True)
class ListShape:
    """A list, whose elements have one shape."""

    element: Any


Shape: TypeAlias = str | ListShape | dict[str, Any]


def shape_of(value: Any, depth: int = 0) -> Shape:
    """Return the shape of a JSON value."""
    if depth > MOST_DEPTH:
        return MIXED
    match value:
        case WrittenNumber():
            return FLOAT if depth or _is_float(value) else MIXED
        case bool() | float() | str() | None:
            return _WORDS[type(value)]
        case int():
            return _shape_of_int(value)
        case list():
            element: Shape = NULL
            for item in value:
                element = merged(element, shape_of(item, depth + 1))
            return MIXED if element == MIXED else ListShape(element)
    fields = {key: shape_of(item, depth + 1) for key, item in value.items()}
    return MIXED if len(fields) > MOST_KEYS or MIXED in fields.values() else fields


def _shape_of_int(value: int) -> Shape:
    if not -(1 << 63) <= value < 1 << 63:
        return MIXED
    return INT if int(float(value)) == value else WIDE_INT


def merged(one: Shape, other: Shape) -> Shape:
    """Return the shape that has all values of both."""
    if other in (one, NULL):
        return one
    match one, other:
        case "null", _:
            return other
        case str(), str():
            return _COMMON.get((one, other), MIXED)
        case ListShape(), ListShape():
            element = merged(one.element, other.element)
            return MIXED if element == MIXED else ListShape(element)
        case dict(), dict():
            fields = {key: merged(one.get(key, NULL), other.get(key, NULL)) for key in {**one, **other}}
            return MIXED if len(fields) > MOST_KEYS or MIXED in fields.values() else fields
    return MIXED


def merge_into(shapes: dict[str, Shape], values: Mapping[str, Any]) -> None:
    """Merge the shapes of an object's values into those of the columns."""
    for name, value in values.items():
        known = shapes.get(name, NULL)
        if known == MIXED or (known == TEXT and type(value) is str):
            shapes.setdefault(name, known)
        else:
            shapes[name] = merged(known, shape_of(value))


def _is_float(number: WrittenNumber) -> bool:
    """Tell whether a float holds a number: as it is written, or as its nearest neighbour."""
    digits = re.sub(r"[eE].*|[^0-9]", "", number.written).strip("0")
    if len(digits) <= FLOAT_DIGITS:
        return True
    return Decimal(number.written) in (Decimal(number), Decimal(repr(float(number))))


def arrow_type(shape: Shape) -> pa.DataType:
    """Return the Arrow type of a column: texts where nothing but null is known, and for MIXED."""
    found = _nested_type(shape)
    return pa.string() if found is None else found


def _nested_type(shape: Shape) -> pa.DataType | None:
    """Return the type of a shape; None for an object of which no key is known, which no column can hold."""
    if isinstance(shape, ListShape):
        element = _nested_type(shape.element)
        return None if element is None else pa.list_(element)
    if isinstance(shape, dict):
        fields = {key: _nested_type(below) for key, below in shape.items()}
        known = {key: kind for key, kind in fields.items() if kind is not None}
        return pa.struct(list(known.items())) if len(known) == len(fields) and known else None
    return _TYPES.get(shape, pa.string())
