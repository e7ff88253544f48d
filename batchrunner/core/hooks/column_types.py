"""Types of columns from Python's annotations, and values of them. Runs where the function runs.

Plain types are those of `_PLAIN`, and `json`: any value, as a JSON text.
"""

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import json
import operator
import pathlib
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from batchrunner.core.hooks.functions import ColumnKind

Columns = tuple[tuple[str, ColumnKind], ...]
_PLAIN: dict[Any, str] = {
    str: "string", bool: "bool", int: "int64", float: "float64", bytes: "binary", dt.date: "date",
    dt.datetime: "timestamp", decimal.Decimal: "string", uuid.UUID: "string", pathlib.Path: "string",
    Any: "json", object: "json", dict: "json", Mapping: "json", list: "json", tuple: "json", set: "json",
    types.NoneType: "json",
}  # fmt: skip
_LISTS = (list, tuple, set, frozenset, Sequence, Iterable, collections.abc.Set, collections.abc.Collection)


class NoColumnError(ValueError):
    """An annotation that no column can hold."""


def columns_of(annotation: Any) -> Columns | None:
    """Return the columns of a TypedDict, dataclass, NamedTuple or pydantic model; None for another type.

    Raises NoColumnError for a field that no column can hold.
    """
    fields = _fields_of(_without_none(annotation))
    if fields is None:
        return None
    found = []
    for name, kind in fields.items():
        try:
            found.append((name, _kind_of(kind)))
        except NoColumnError as failure:
            raise NoColumnError(f"{name}: {failure}") from None
    return tuple(found)


def allows_none(annotation: Any) -> bool:
    """Tell whether an annotation is a union with None."""
    return types.NoneType in _members(annotation)


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in {typing.Union, types.UnionType}
    return typing.get_args(annotation) if is_union else (annotation,)


def _without_none(annotation: Any) -> Any:
    members = [member for member in _members(annotation) if member is not types.NoneType]
    return members[0] if len(members) == 1 else annotation


def _fields_of(kind: Any) -> dict[str, Any] | None:
    """Return the fields of a class that has them, with their types."""
    if not isinstance(kind, type):
        return None
    if hasattr(kind, "model_fields") and hasattr(kind, "model_validate"):  # pydantic, which may not be here
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    is_typed_dict = issubclass(kind, dict) and hasattr(kind, "__required_keys__")  # typing_extensions' too
    if is_typed_dict or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return typing.get_type_hints(kind)
    return None


def _kind_of(annotation: Any) -> ColumnKind:
    """Return the type of a column for an annotation; raises NoColumnError."""
    origin, given = typing.get_origin(annotation), typing.get_args(annotation)
    members = _members(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated
        found = _kind_of(annotation.__origin__)
    elif len(members) > 1:
        found = _common([_kind_of(member) for member in members if member is not types.NoneType])
    elif origin in {typing.Required, typing.NotRequired, typing.Final}:
        found = _kind_of(given[0])
    elif origin is typing.Literal:
        found = _common([_kind_of(type(value)) for value in given if value is not None])
    elif origin in {dict, Mapping}:
        found = "json"
    elif origin in _LISTS:
        found = _list_of(origin, given)
    else:
        found = _kind_of_class(annotation)
    return found


def _kind_of_class(annotation: Any) -> ColumnKind:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _common([_kind_of(type(member.value)) for member in annotation])
    fields = columns_of(annotation)
    if fields is not None:
        return ("struct", fields) if fields else "json"
    for kind in (annotation, *getattr(annotation, "__mro__", ())[:-1]):
        if kind in _PLAIN:
            return _PLAIN[kind]
    raise NoColumnError(f"no column can hold {_brief(annotation)}")


def _list_of(origin: Any, given: tuple[Any, ...]) -> ColumnKind:
    if origin is tuple and not (len(given) == len(("item", "...")) and given[1] is Ellipsis):
        inner = _common([_kind_of(member) for member in given])
    else:
        inner = _kind_of(given[0])
    return "json" if inner == "json" else ("list", inner)


def _common(kinds: Sequence[ColumnKind]) -> ColumnKind:
    """Return the type that holds values of all these."""
    if kinds and all(kind == kinds[0] for kind in kinds):
        return kinds[0]
    return "float64" if kinds and set(kinds) <= {"int64", "float64"} else "json"


def value_of(value: Any, kind: ColumnKind) -> Any:
    """Return a value as plain Python of a column's type, or None; raises ValueError where it does not fit."""
    if value is None:
        return None
    if isinstance(value, enum.Enum):
        return value_of(value.value, kind)
    if isinstance(kind, tuple):
        name, inner = kind
        return _list_value(value, inner) if name == "list" else row_value(value, inner)
    try:
        return _CONVERTERS[kind](value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is {_brief(value)}, which is not of the type {kind}") from None


def row_value(value: Any, columns: Columns) -> dict[str, Any]:
    """Return a mapping, a dataclass, a NamedTuple or a model as a value for each column.

    A missing one is None. Raises ValueError for a value that does not fit, or a key that is no column.
    """
    given = _as_mapping(value)
    names = [name for name, _ in columns]
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ValueError(f"has {_brief(unknown[0])}, which is no column (columns: {', '.join(names)})")
    found = {}
    for name, kind in columns:
        try:
            found[name] = value_of(given.get(name), kind)
        except ValueError as failure:
            raise ValueError(f"{name}: {failure}") from None
    return found


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if hasattr(type(value), "model_fields") and hasattr(value, "model_dump"):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        found: Mapping[str, Any] = value._asdict()
        return found
    raise ValueError(f"is {_brief(value)}: a dict is wanted")


def _list_value(value: Any, inner: ColumnKind) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"is {_brief(value)}: a list is wanted")  # noqa: TRY004 - as all values that do not fit
    return [value_of(item, inner) for item in value]


def _text(value: Any) -> str:
    if isinstance(value, (str, decimal.Decimal, uuid.UUID, pathlib.PurePath)):
        return str(value)
    raise TypeError


def _truth(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in {"bool_", "bool"}:
        return bool(value)
    raise TypeError


def _integer(bound: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
        if not -bound <= whole < bound:
            raise OverflowError
        return int(whole)

    return convert


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError
    return float(value)


def _bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError


def _date(value: Any) -> dt.date:
    if isinstance(value, dt.datetime):
        return value.date()
    return value if isinstance(value, dt.date) else dt.date.fromisoformat(value)


def _time(value: Any) -> dt.datetime:
    """Return a time without a zone: one with a zone becomes UTC."""
    if not isinstance(value, dt.datetime):
        if isinstance(value, dt.date):
            value = dt.datetime(value.year, value.month, value.day)  # noqa: DTZ001
        else:
            value = dt.datetime.fromisoformat(value)
    found: dt.datetime = value
    return found if found.tzinfo is None else found.astimezone(dt.UTC).replace(tzinfo=None)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_value)


def _json_value(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return list(value)
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    try:
        return dict(_as_mapping(value))
    except ValueError:
        if _has_no_text(value):
            raise
        return str(value)


def _has_no_text(value: Any) -> bool:
    """Tell whether the text of a value says nothing of it: bytes, a generator, a class without a text."""
    plain = object.__str__, object.__repr__
    is_bare = (getattr(type(value), "__str__", None), getattr(type(value), "__repr__", None)) == plain
    is_running = hasattr(value, "__next__") or hasattr(value, "__await__")
    return is_bare or is_running or callable(value) or isinstance(value, (bytes, bytearray, memoryview))


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "string": _text, "bool": _truth, "int32": _integer(1 << 31), "int64": _integer(1 << 63), "json": _json,
    "float32": _number, "float64": _number, "binary": _bytes, "date": _date, "timestamp": _time,
}  # fmt: skip


def _brief(value: object) -> str:
    try:
        text = value.__name__ if isinstance(value, type) else " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - a class of the user's
        text = type(value).__name__
    limit = 80
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
