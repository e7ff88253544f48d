"""Column types of answers and Python functions: from JSON Schema, also pydantic's, to Arrow.

A ColumnKind is the name of a plain type (PLAIN_TYPES), ("list", kind), or ("struct", ((name, kind), …)). The
kind "json", a JSON text, holds values for which Arrow has no type: values of several types, objects without
named properties, recursive schemas.
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
}  # fmt: skip
_NAMES = {str(kind): name for name, kind in reversed(PLAIN_TYPES.items())}
_WORDS = {"string": "string", "boolean": "bool", "integer": "int64", "number": "float64"}
"""Kinds by JSON Schema's names of scalar types."""
_FORMATS = {"date": "date", "date-time": "timestamp", "binary": "binary"}
"""Kinds by pydantic's formats of strings."""
_KINDS_OF_VALUES: dict[type, str] = {bool: "bool", str: "string", int: "int64", float: "float64"}


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
    """Return the name of a type as a job file writes it, also within lists and structs, else Arrow's name."""
    words = " ".join(str(kind).split())
    return re.sub(r"\b[a-z]+\d*\b(\[\w+\])?(?!:)", lambda word: _NAMES.get(word[0], word[0]), words)


def kind_of_schema(schema: Any, *, formats: bool = False) -> ColumnKind:
    """Return the kind of column for the values of a JSON Schema.

    With `formats`, strings that pydantic declares as dates, times or bytes get these types.
    """
    return _SchemaReader(schema, formats).kind_of(schema)


class _SchemaReader:
    def __init__(self, root: Any, formats: bool) -> None:
        self._root = root
        self._formats = _FORMATS if formats else {}
        self._open: set[str] = set()  # references that are being resolved

    def kind_of(self, schema: Any) -> ColumnKind:
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
        types = [word for word in types if word != "null"]
        return self._of_type(types[0], schema) if len(types) == 1 else "json"

    def _of_choices(self, choices: Any, schema: dict[str, Any]) -> ColumnKind:
        """Return the kind that holds the values of all choices; a null needs no kind."""
        if not isinstance(choices, list) or "properties" in schema:
            return "json"
        kinds = [self.kind_of(choice) for choice in choices if choice != {"type": "null"}]
        return common_kind(kinds)

    def _of_type(self, word: Any, schema: dict[str, Any]) -> ColumnKind:
        properties = schema.get("properties")
        if word == "object" and properties:
            return "struct", tuple((name, self.kind_of(part)) for name, part in properties.items())
        if word == "array":
            fixed = schema.get("prefixItems")
            if fixed and schema.get("maxItems") == len(fixed):  # a tuple
                inner = common_kind(map(self.kind_of, fixed))
            else:
                inner = self.kind_of(None if fixed else schema.get("items"))
            return ("list", inner) if schema.get("items") or inner != "json" else "json"
        if word == "string":
            return self._formats.get(schema.get("format", ""), "string")
        return _WORDS.get(word, "json")

    def _referred(self, reference: Any) -> ColumnKind:
        if reference in self._open or not str(reference).startswith("#/"):
            return "json"
        try:
            part = part_at(self._root, reference)
        except LookupError:
            return "json"
        self._open.add(reference)
        kind = self.kind_of(part)
        self._open.discard(reference)
        return kind


def part_at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/a` names; raises LookupError."""
    try:
        return functools.reduce(operator.getitem, reference.split("/")[1:], root)
    except TypeError:  # it leads through a list or a text
        raise LookupError(reference) from None


def kinds_of_value(value: Any) -> list[ColumnKind]:
    """Return the column kinds for a JSON value: of a list, one for each item; of a null, none."""
    if value is None:
        return []
    if isinstance(value, list):
        return [("list", kind) for kind in _kinds_of_values(value)]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # it does not fit into 64 bits
        return ["json"]
    return [_KINDS_OF_VALUES.get(type(value), "json")]


def _kinds_of_values(values: Iterable[Any]) -> Iterator[ColumnKind]:
    return chain.from_iterable(map(kinds_of_value, values))


def common_kind(kinds: Iterable[ColumnKind]) -> ColumnKind:
    """Return the kind that holds the values of all these kinds."""
    distinct = set(kinds)
    if distinct and all(kind[0] == "list" for kind in distinct):
        return "list", common_kind(kind[1] for kind in distinct)
    if len(distinct) == 1:
        return distinct.pop()
    return "float64" if distinct == {"int64", "float64"} else "json"


def fit(value: Any, kind: ColumnKind) -> Any:
    """Return a value in the form that a column of this kind holds; None stays None.

    Raises ValueError with a message for users if the value does not fit.

    Properties of an object for which the column has no field are dropped. Dates and times may be ISO texts.
    """
    if value is None:
        return None
    if isinstance(kind, str):
        return _FITTED[kind](value)
    name, inner = kind
    if name == "list":
        return [fit(item, inner) for item in _instance(value, "list", list, tuple)]
    fields = _instance(value, "object", dict)
    return {field: fit(fields.get(field), below) for field, below in inner}


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
    """Return a whole number, which may be written as 1.0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise ValueError(f"{value!r} is not a whole number")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value!r} has more than 64 bits")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a number of more than 1.8e308 is too large")
    return number


def _time(value: Any) -> dt.datetime:
    """Return a time without a zone; one with a zone becomes UTC."""
    time = value if isinstance(value, dt.datetime) else dt.datetime.fromisoformat(value)
    return time if time.tzinfo is None else time.astimezone(dt.UTC).replace(tzinfo=None)


_FITTED: dict[str, Callable[[Any], Any]] = {
    "string": lambda value: _instance(value, "string", str),
    "bool": lambda value: _instance(value, "boolean", bool),
    "binary": lambda value: _instance(value, "bytes", bytes),
    "int64": _whole_number,
    "float64": _number,
    "date": lambda value: value if isinstance(value, dt.date) else dt.date.fromisoformat(value),
    "timestamp": _time,
    "json": _json_text,
}
