"""Column types of answers and Python functions: from a JSON Schema (also pydantic's) to Arrow types.

A ColumnKind is the name of a plain type (PLAIN_TYPES), ("list", kind), or ("struct", ((name, kind), …)). The
kind "json" is a JSON text, for values without an Arrow type: values of several types, objects without named
properties, and values of a recursive schema. The kind "null" is for a property that so far is null, an empty
list or an empty object everywhere.
"""

import datetime as dt
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa

from batchrunner.core.types import ColumnKind

PLAIN_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(), "bool": pa.bool_(), "int32": pa.int32(), "int64": pa.int64(),
    "float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64(), "binary": pa.binary(),
    "date": pa.date32(), "timestamp": pa.timestamp("us"), "json": pa.string(),
    "null": pa.string(),
}  # fmt: skip
"""Arrow types by the names of plain kinds."""
_NAMES = {str(kind): name for name, kind in reversed(PLAIN_TYPES.items())}
"""Names of plain kinds, by Arrow's names.

The kinds `string`, `json` and `null` have the same Arrow type, whose name here must be `string`. Because the
order is reversed, `string` comes last and replaces the others.
"""
_KINDS_OF_SCALARS = {"string": "string", "boolean": "bool", "integer": "int64", "number": "float64"}
"""Kinds by the scalar types of JSON Schema."""
_KINDS_OF_FORMATS = {"date": "date", "date-time": "timestamp", "binary": "binary"}
"""Kinds by the `format` that pydantic writes into the JSON Schema of a string."""
MOST_PROPERTIES = 100
"""Maximum number of properties of a struct that is inferred from values, without a schema.

An object with more properties is probably a lookup table, so it becomes JSON text.
"""
MOST_LEVELS = 8
"""Maximum nesting of structs that are inferred from values, without a schema.

Deeper objects become JSON text.
"""
_KINDS_OF_VALUES: dict[type, str] = {bool: "bool", str: "string", int: "int64", float: "float64"}
"""Kinds by the Python types of scalars."""


def arrow_type(kind: ColumnKind) -> pa.DataType:
    """Return the Arrow type of a column."""
    if isinstance(kind, str):
        return PLAIN_TYPES[kind]
    name, inner = kind
    if name == "list":
        return pa.list_(arrow_type(inner))
    return pa.struct([(field, arrow_type(below)) for field, below in inner])


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column holds texts."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return plain in {pa.string(), pa.large_string(), pa.string_view()}


def type_name(kind: pa.DataType) -> str:
    """Return the type as Arrow prints it, but with the names of plain types that a job file uses."""
    text = " ".join(str(kind).split())  # Arrow prints a struct on several lines.
    # A type name may have a unit, as in timestamp[us]. A name before a colon is a field of a struct.
    return re.sub(r"\b[a-z]+\d*\b(\[\w+\])?(?!:)", lambda word: _NAMES.get(word[0], word[0]), text)


def kind_of_schema(schema: Any, *, formats: bool = False) -> ColumnKind:
    """Return the kind of a column for values of a JSON Schema.

    With `formats`, strings that pydantic declares as dates, times or bytes get columns of these types;
    otherwise they stay strings.
    """
    return _SchemaReader(schema, formats).kind_of(schema)


class _SchemaReader:
    """Derives column kinds from a JSON Schema, and follows its `$ref` references."""

    def __init__(self, root: Any, formats: bool) -> None:
        self._root = root
        self._kinds_of_formats = _KINDS_OF_FORMATS if formats else {}
        self._open_references: set[str] = set()
        """References that are being resolved. A schema that refers to one of them is recursive."""

    def kind_of(self, schema: Any) -> ColumnKind:
        """Return the kind for values of the schema, or of a part of it."""
        if not isinstance(schema, dict):
            return "json"
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        choices = next((schema[name] for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
        if choices is not None:
            return self._of_choices(choices, schema)
        if "enum" in schema:
            return common_kind(_kinds_of_values(schema["enum"]))
        if "const" in schema:
            return common_kind(kinds_of_value(schema["const"]))
        types = schema.get("type", "object" if "properties" in schema else None)
        if not isinstance(types, list):
            types = [types]
        types = [name for name in types if name != "null"]  # Any column may have nulls.
        return self._of_type(types[0], schema) if len(types) == 1 else "json"

    def _of_choices(self, choices: Any, schema: dict[str, Any]) -> ColumnKind:
        """Return the kind that holds the values of all choices of an `anyOf`, `oneOf` or `allOf`."""
        # Properties beside the choices would belong to each choice, which is not supported. The values become
        # JSON.
        if not isinstance(choices, list) or "properties" in schema:
            return "json"
        kinds = [self.kind_of(choice) for choice in choices if choice != {"type": "null"}]
        return common_kind(kinds)

    def _of_type(self, name: Any, schema: dict[str, Any]) -> ColumnKind:
        if name == "object":
            properties = schema.get("properties")
            if not properties:
                return "json"
            return "struct", tuple((field, self.kind_of(below)) for field, below in properties.items())
        if name == "array":
            return self._of_array(schema)
        if name == "string":
            return self._kinds_of_formats.get(schema.get("format", ""), "string")
        return _KINDS_OF_SCALARS.get(name, "json")

    def _of_array(self, schema: dict[str, Any]) -> ColumnKind:
        """Return the kind for a schema of arrays: a list, or JSON if the items have no common type."""
        first_items, items = schema.get("prefixItems"), schema.get("items")
        if not first_items:
            inner = self.kind_of(items)
        elif schema.get("maxItems") == len(first_items):  # No items may follow the first ones, as in a tuple.
            inner = common_kind(map(self.kind_of, first_items))
        else:
            inner = "json"  # Any values may follow the first items, so there is no common type.
        if inner == "json" and not items:
            return "json"  # The schema does not describe the items, so the whole array becomes one JSON text.
        return "list", inner

    def _referred(self, reference: Any) -> ColumnKind:
        """Return the kind for the part of the schema that a `$ref` names.

        It is JSON for a recursive schema, and for a reference that leads out of the schema.
        """
        if reference in self._open_references or not str(reference).startswith("#/"):
            return "json"
        try:
            part = part_at(self._root, reference)
        except LookupError:
            return "json"
        self._open_references.add(reference)
        kind = self.kind_of(part)
        self._open_references.discard(reference)
        return kind


def part_at(root: Any, reference: str) -> Any:
    """Return the part of a JSON Schema that a reference such as `#/$defs/a` names.

    Raises LookupError if there is no such part.
    """
    try:
        return functools.reduce(operator.getitem, reference.split("/")[1:], root)
    except TypeError:  # A step of the reference leads into a list or a text.
        raise LookupError(reference) from None


def kinds_of_value(value: Any, level: int = 0) -> list[ColumnKind]:
    """Return the possible column kinds of a JSON value; `common_kind` combines those of many values.

    A list has a kind for each of its items. A null and an empty object have no kind, because any column can
    hold them. `level` is the number of objects around the value.
    """
    if value is None or value == {}:
        return []
    if isinstance(value, list):
        return [("list", kind) for kind in _kinds_of_values(value, level)]
    if isinstance(value, dict) and len(value) <= MOST_PROPERTIES and level < MOST_LEVELS:
        properties = []
        for name, inner in value.items():
            properties.append((name, common_kind(["null", *kinds_of_value(inner, level + 1)])))
        return [("struct", tuple(properties))]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return ["json"]  # The number does not fit into 64 bits.
    return [_KINDS_OF_VALUES.get(type(value), "json")]


def _kinds_of_values(values: Iterable[Any], level: int = 0) -> Iterator[ColumnKind]:
    return chain.from_iterable(kinds_of_value(value, level) for value in values)


def common_kind(kinds: Iterable[ColumnKind]) -> ColumnKind:
    """Return the kind of a column that can hold values of all `kinds`."""
    # A dict keeps the order, which becomes the order of the properties of a struct.
    distinct = dict.fromkeys(kinds)
    if len(distinct) > 1:
        distinct.pop("null", None)
    if len(distinct) == 1:
        return next(iter(distinct))
    if distinct and all(kind[0] == "list" for kind in distinct):
        return "list", common_kind(kind[1] for kind in distinct)
    if distinct and all(kind[0] == "struct" for kind in distinct):
        return _common_struct(kind[1] for kind in distinct)
    return "float64" if distinct.keys() == {"int64", "float64"} else "json"


def _common_struct(structs: Iterable[Any]) -> ColumnKind:
    """Return the struct with the properties of all `structs`, each a tuple of names and kinds.

    It is JSON if a property has values of several types, or if there are too many properties.
    """
    kinds_of: dict[str, list[ColumnKind]] = {}
    for properties in structs:
        for name, kind in properties:
            kinds_of.setdefault(name, []).append(kind)
    merged = {name: common_kind(kinds) for name, kinds in kinds_of.items()}
    for name, kind in merged.items():
        # A property of mixed types would become JSON text, in which strings have quotes, unlike in the other
        # properties. So the whole object becomes JSON.
        if innermost(kind) == "json" and {*map(innermost, kinds_of[name])} != {"json"}:
            return "json"
    return "json" if len(merged) > MOST_PROPERTIES else ("struct", tuple(merged.items()))


def innermost(kind: ColumnKind) -> ColumnKind:
    """Return the kind of the items of a list, however deeply nested; any other kind unchanged."""
    return innermost(kind[1]) if kind[0] == "list" else kind


def fit(value: Any, kind: ColumnKind, *, drops_keys: bool = True) -> Any:
    """Convert a value for a column of `kind`; raise ValueError, with a message for users, if impossible.

    None stays None. Keys of an object that the column does not have are dropped; without `drops_keys`, they
    raise ValueError. A date or a time may be an ISO text.
    """
    if value is None:
        return None
    if isinstance(kind, str):
        return _CONVERTERS[kind](value)
    name, inner = kind
    if name == "list":
        return [fit(item, inner, drops_keys=drops_keys) for item in _instance(value, "list", list, tuple)]
    fields = _instance(value, "object", dict)
    names = [field for field, _ in inner]
    unknown = [] if drops_keys else [key for key in fields if key not in names]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a declared key (keys: {', '.join(names)})")
    return {field: fit(fields.get(field), below, drops_keys=drops_keys) for field, below in inner}


def _instance(value: Any, name: str, *classes: type) -> Any:
    if not isinstance(value, classes):
        raise ValueError(f"{str(value)[:50]!r} is not of type {name}")  # noqa: TRY004 - as for all that does not fit
    return value


def _json_text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _whole_number(value: Any) -> int:
    """Return an integer; accept a float without a fraction, such as 1.0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise ValueError(f"{value!r} is not a whole number")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value!r} has more than 64 bits")
    return int(value)


def _number(value: Any) -> float:
    """Return a finite number as a float; raise ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:  # The integer is too large for a float.
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("the number is not finite, or is too large for a float (limit 1.8e308)")
    return number


def _time(value: Any) -> dt.datetime:
    """Return a time without a time zone; a time with a zone is converted to UTC."""
    time = value if isinstance(value, dt.datetime) else dt.datetime.fromisoformat(value)
    return time if time.tzinfo is None else time.astimezone(dt.UTC).replace(tzinfo=None)


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "string": lambda value: _instance(value, "string", str),
    "bool": lambda value: _instance(value, "boolean", bool),
    "binary": lambda value: _instance(value, "bytes", bytes),
    "int64": _whole_number,
    "float64": _number,
    "date": lambda value: value if isinstance(value, dt.date) else dt.date.fromisoformat(value),
    "timestamp": _time,
    "json": _json_text,
    "null": _json_text,
}
