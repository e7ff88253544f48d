"""JSON Schemas → Arrow types, and JSON values → values of these types.

What Arrow cannot hold as a type of its own stays JSON text: values of several types, objects without named
properties, schemas that contain themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from batchrunner.core.exact_json import write_exactly
from batchrunner.core.json_pointer import part_at

MOST_DEPTH = 32
"""Levels of a schema that become types; what lies deeper stays JSON text."""
MOST_PARTS = 5000
"""Parts of a schema that become types, each time that it is referred to."""
_INT64 = 1 << 63
_SCALARS: dict[str, pa.DataType] = {
    "string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(),
}  # fmt: skip


class ShapeError(ValueError):
    """A value does not fit its Arrow type, in words."""


class JsonShape(Protocol):
    """The Arrow type of a schema."""

    @property
    def type(self) -> pa.DataType:
        """The type."""

    def fit(self, value: Any) -> Any:
        """Return a JSON value as the type holds it; raises ShapeError."""


class TextShape:
    """JSON text, for values of any type."""

    type = pa.string()

    def fit(self, value: Any) -> Any:
        """Return the JSON text of a value; a null is null."""
        try:
            return None if value is None else write_exactly(value)
        except RecursionError:
            raise ShapeError("it is nested too deeply") from None


class ScalarShape:
    """A text, a number or a boolean."""

    def __init__(self, kind: str) -> None:
        self.type = _SCALARS[kind]
        self._kind = kind

    def fit(self, value: Any) -> Any:
        """Return the value; a number such as 1.0 is a whole one."""
        if value is None:
            return None
        if self._kind == "integer":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
                raise ShapeError(f"{value!r} is no whole number")
            if not -_INT64 <= value < _INT64:
                raise ShapeError(f"{value!r} has more than 64 bits")
            return int(value)
        if self._kind == "number":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ShapeError(f"{value!r} is no number")
            return _float(value)
        if not isinstance(value, str if self._kind == "string" else bool):
            raise ShapeError(f"{value!r} is no {self._kind}")
        return value


def _float(value: float) -> float:
    try:
        found = float(value)
    except OverflowError:  # of a whole number
        found = math.inf
    if not math.isfinite(found):
        raise ShapeError("a number of more than 1.8e308 is too large")
    return found


class SequenceShape:
    """A list of values of one type."""

    def __init__(self, items: JsonShape) -> None:
        self.type = pa.list_(items.type)
        self._items = items

    def fit(self, value: Any) -> Any:
        """Return the list."""
        if value is None:
            return None
        if not isinstance(value, list):
            raise ShapeError(f"{str(value)[:50]!r} is no list")
        return [self._items.fit(item) for item in value]


class StructShape:
    """An object with named properties; others that it has are left out."""

    def __init__(self, fields: Mapping[str, JsonShape]) -> None:
        self.type = pa.struct([(name, shape.type) for name, shape in fields.items()])
        self._fields = fields

    def fit(self, value: Any) -> Any:
        """Return the object; a property that it lacks is null."""
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ShapeError(f"{str(value)[:50]!r} is no object")
        return {name: shape.fit(value.get(name)) for name, shape in self._fields.items()}


def shape_of(schema: Any) -> JsonShape:
    """Return the shape of a JSON Schema, without one JSON text."""
    return _Shapes(schema).of(schema, 0)


class _Shapes:
    """Makes the shapes of the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: set[str] = set()  # references that lead here
        self._left = MOST_PARTS

    def of(self, schema: Any, depth: int) -> JsonShape:
        """Return the shape of a part."""
        self._left -= 1
        if not isinstance(schema, dict) or depth > MOST_DEPTH or self._left < 0:
            return TextShape()
        if "$ref" in schema:
            return self._referred(schema, depth)
        several = next((schema[name] for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
        if several is not None:
            return self._one_of(schema, several, depth)
        if "enum" in schema or "const" in schema:
            return _of_values(schema["enum"] if "enum" in schema else [schema["const"]])
        return self._by_type(schema, depth)

    def _by_type(self, schema: dict[str, Any], depth: int) -> JsonShape:
        kind = _only_kind(schema.get("type", "object" if "properties" in schema else None))
        items, properties = schema.get("items"), schema.get("properties")
        if kind in _SCALARS:
            return ScalarShape(kind)
        if kind == "array" and isinstance(items, dict) and "prefixItems" not in schema:
            return SequenceShape(self.of(items, depth + 1))
        if kind == "object" and isinstance(properties, dict) and properties:
            return StructShape({name: self.of(part, depth + 1) for name, part in properties.items()})
        return TextShape()

    def _referred(self, schema: dict[str, Any], depth: int) -> JsonShape:
        reference = schema["$ref"]
        if not isinstance(reference, str) or reference in self._open or not reference.startswith("#/"):
            return TextShape()
        try:
            found = part_at(self._root, reference)
        except LookupError:
            return TextShape()
        self._open.add(reference)
        shape = self.of(found, depth + 1)
        self._open.discard(reference)
        return shape

    def _one_of(self, schema: dict[str, Any], choices: Any, depth: int) -> JsonShape:
        """Return the shape that all choices but null have in common; else JSON text."""
        if not isinstance(choices, list) or "properties" in schema:
            return TextShape()
        shapes = [self.of(choice, depth + 1) for choice in choices if choice != {"type": "null"}]
        if not shapes or any(shape.type != shapes[0].type for shape in shapes):
            return TextShape()
        alike = len(shapes) == 1 or isinstance(shapes[0], ScalarShape)
        return shapes[0] if alike else TextShape()


def _only_kind(kinds: Any) -> str | None:
    """Return the only type besides null; None where there are several."""
    given = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    return given[0] if len(given) == 1 and isinstance(given[0], str) else None


def _of_values(values: Any) -> JsonShape:
    """Return the shape of a list of values, such as those of an `enum`."""
    given = [value for value in values if value is not None] if isinstance(values, list) else []
    for kind, types in (("boolean", bool), ("string", str), ("integer", int), ("number", (int, float))):
        if given and all(
            isinstance(value, types) and isinstance(value, bool) == (kind == "boolean") for value in given
        ):
            return ScalarShape(kind)
    return TextShape()
