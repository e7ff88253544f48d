"""Loads a job's Python functions in the process that calls them, and makes plain values of what they give."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import hashlib
import inspect
import operator
import pickle
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import typing_extensions

from batchrunner.core.hook_worker import HookFacts, HookLoadError, UnusableValueError, failure_text
from batchrunner.core.types import ColumnKind

HookKind = Literal["prompt", "parse", "check", "media"]
"""What a function is for: a row becomes a prompt, an answer becomes columns, an answer is judged; `media` is
our own, which prepares the files of a row."""
Columns = tuple[tuple[str, ColumnKind], ...]
_OF_ROWS = {"prompt", "media"}
"""Kinds of functions that are called with a row; others with an answer."""


class Annotations(NamedTuple):
    """What the annotations of a function say."""

    columns: Columns = ()
    """Columns of what it returns; empty where it does not say."""
    may_be_none: bool = False
    """Whether it may return None."""
    reads: tuple[str, ...] | None = None
    """Columns of its first argument; None where it does not say."""


class HookFunction(NamedTuple):
    """A function as a job names it."""

    where: str
    """Its place in the job, such as `prompt.python`."""
    kind: HookKind
    name: str
    """Its name in messages, `module:function`."""
    target: str | bytes
    """`module:function`; or a function that a program gave, and its Annotations, as cloudpickle's bytes."""


def load_functions(
    functions: Sequence[HookFunction],
) -> tuple[list[HookFacts], list[Callable[..., Any]]]:
    """Import the functions; raises HookLoadError."""
    loaded = [_load(function) for function in functions]
    return [facts for facts, _ in loaded], [function for _, function in loaded]


def _load(function: HookFunction) -> tuple[HookFacts, Callable[..., Any]]:
    name = f"{function.where}: {function.name}"
    try:
        if isinstance(function.target, bytes):
            found, known = pickle.loads(function.target)  # noqa: S301 - of the program itself
        else:
            found, known = pkgutil.resolve_name(function.target), None
    except BaseException as failure:  # noqa: BLE001 - a module may raise anything, SystemExit too
        raise HookLoadError(failure_text(f"{name}: cannot be imported", failure)) from None
    try:
        takes_row = _takes_row(found, function.kind)
        known = known or known_of(found, function.kind)
    except HookLoadError as failure:
        raise HookLoadError(f"{name} {failure}") from None
    columns = known.columns if function.kind == "parse" else ()
    facts = HookFacts(function.where, function.name, _digest_of(found), columns, takes_row, known.reads)
    plain = {"prompt": _prompt, "check": _judgement, "media": lambda value: value}.get(function.kind)
    convert = plain or functools.partial(row_value, known=known)
    return facts, functools.partial(_call, found, convert, function.name)


def _call(function: Callable[..., Any], convert: Callable[[Any], Any], name: str, *given: Any) -> Any:
    value = function(*given)
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as failure:
        raise UnusableValueError(f"{name}: {failure}") from None


def _digest_of(function: Any) -> str:
    """Return a hash of a function's file, or of its source where a program gave it; empty where unknown."""
    inner = inspect.unwrap(getattr(function, "func", function))
    try:
        module = inspect.getmodule(inner)
        source = inspect.getsource(inner if module is None or module.__name__ == "__main__" else module)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _takes_row(function: Any, kind: HookKind) -> bool:
    """Check that a function can be called, and tell whether it wants the row as its second argument."""
    if not callable(function):
        raise HookLoadError("is no function")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HookLoadError("is asynchronous or a generator: give a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C, without a signature
        return False
    places = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    needed = sum(each.default is each.empty and each.kind in places for each in signature.parameters.values())
    takes_row = kind not in _OF_ROWS and needed == len(("answer", "row"))
    try:
        signature.bind(*(("answer", "row") if takes_row else ("row or answer",)))
    except TypeError:
        wanted = "one argument, the row" if kind == "prompt" else "one argument, the answer, or also the row"
        raise HookLoadError(f"takes {signature}: it is called with {wanted}") from None
    return takes_row


def known_of(function: Any, kind: HookKind) -> Annotations:
    """Return what the annotations of a function say; raises HookLoadError where `parse` has no columns."""
    if kind not in {"prompt", "parse"}:
        return Annotations()
    try:
        known = annotations_of(function)
    except ValueError as failure:
        if kind == "parse":
            raise HookLoadError(str(failure)) from None
        return Annotations()
    if kind == "parse" and not known.columns:
        raise HookLoadError(
            "does not say its columns: let it return a TypedDict, a dataclass or a pydantic model by its "
            "annotation"
        )
    return known


def annotations_of(function: Any) -> Annotations:
    """Read the annotations of a function; raises ValueError, whose text follows the function's name."""
    inner = getattr(function, "func", function)  # of a functools.partial
    try:
        if isinstance(inner, type):
            hints: dict[str, Any] = {"return": inner}
        else:
            inner = inner if inspect.isroutine(inner) else type(inner).__call__
            hints = typing.get_type_hints(inner, include_extras=True)
    except Exception as failure:  # noqa: BLE001 - names in annotations may lead anywhere
        raise ValueError(f"has an annotation that cannot be read: {failure}") from None
    returned = hints.pop("return", None)
    first = next(iter(hints.values()), None)
    reads = tuple(typing.get_type_hints(first)) if typing_extensions.is_typeddict(first) else None
    members = typing.get_args(returned) if typing.get_origin(returned) in _UNIONS else (returned,)
    classes = [member for member in members if member is not types.NoneType]
    columns = columns_of(classes[0]) if len(classes) == 1 else ()
    return Annotations(columns, types.NoneType in members, reads)


_UNIONS = (typing.Union, types.UnionType)


def columns_of(kind: Any) -> Columns:
    """Return the columns of a TypedDict, dataclass, NamedTuple or pydantic model; () for another type.

    Raises ValueError for a field that no column can hold.
    """
    if not isinstance(kind, type):
        return ()
    if hasattr(kind, "model_fields"):  # pydantic
        fields = {name: field.annotation for name, field in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind) or typing_extensions.is_typeddict(kind) or hasattr(kind, "_fields"):
        fields = typing.get_type_hints(kind, include_extras=True)
    else:
        return ()
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter  # noqa: PLC0415

    from batchrunner.job.arrow_types import kind_of_schema  # noqa: PLC0415 - it loads pyarrow

    columns = []
    for name, annotation in fields.items():
        try:
            schema = TypeAdapter(annotation).json_schema(mode="serialization")
        except (PydanticSchemaGenerationError, PydanticUserError) as failure:
            said = str(failure).splitlines()[0]
            raise ValueError(f"returns a column {name}: {said}") from None
        columns.append((name, kind_of_schema(schema, formats=True)))
    return tuple(columns)


def row_value(value: Any, known: Annotations) -> dict[str, Any]:
    """Return what a function returned as a value for each column; a missing one is None.

    Raises ValueError, whose text follows the function's name, for one that does not fit, or a key that is no
    column.
    """
    from batchrunner.job.arrow_types import fit  # noqa: PLC0415 - it loads pyarrow

    if value is None and known.may_be_none:
        value = {}
    given = plain(value._asdict() if hasattr(value, "_asdict") else value)
    if not isinstance(given, dict):
        raise ValueError(f"returned {_a(value)}: return a dict")  # noqa: TRY004
    names = [name for name, _ in known.columns]
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ValueError(f"returned {unknown[0]!r}, which is no column (columns: {', '.join(names)})")
    found = {}
    for name, kind in known.columns:
        try:
            found[name] = fit(given.get(name), kind)
        except (ValueError, TypeError) as failure:
            raise ValueError(f"{name}: {failure}") from None
    return found


def plain(value: Any) -> Any:
    """Return a value as dicts, lists and scalars; raises TypeError for what has no such form."""
    return msgspec.to_builtins(value, builtin_types=(bytes, dt.datetime, dt.date), enc_hook=_plain_object)


def _plain_object(value: Any) -> Any:
    for name in ("model_dump", "tolist"):  # pydantic; numpy
        if hasattr(value, name):
            return plain(getattr(value, name)())
    if isinstance(value, (Mapping, Path)):
        return plain(dict(value)) if isinstance(value, Mapping) else str(value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{_a(value)} is neither a scalar nor a list or dict of such")


def _prompt(value: Any) -> tuple[str, Any] | None:
    """Return a prompt's kind and its value; None for a row that is left out."""
    if value is None:
        return None
    given = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(given, str) and given:
        return "text", str(given)
    if isinstance(given, (list, tuple)) and given:
        if all(isinstance(item, Mapping) for item in given):
            return "messages", [msgspec.to_builtins(item, enc_hook=_plain_object) for item in given]
        if not any(isinstance(item, (Mapping, str, bool)) for item in given):
            return "input_ids", [int(operator.index(item)) for item in given]
    raise ValueError(f"returned {_a(value)}: return messages, a text, token ids, or None")


def _judgement(value: Any) -> bool | str:
    """Return true for a good answer, false, or a text that says what is wrong."""
    if isinstance(value, str):
        return str(value) or True
    if isinstance(value, bool) or type(value).__name__ in {"bool_", "bool"}:
        return bool(value)
    raise ValueError(f"returned {_a(value)}: return True, False, or a text that says what is wrong")


def _a(value: object) -> str:
    """Return what a value is, in words."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
