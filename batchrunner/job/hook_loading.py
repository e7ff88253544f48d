"""Loads a job's Python functions in the process that calls them, and makes their results plain values."""

import ast
import contextlib
import dataclasses
import datetime as dt
import functools
import hashlib
import inspect
import pickle
import pkgutil
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typing_extensions

from batchrunner.core.errors import first_line
from batchrunner.core.hook_protocol import HookFacts, HookLoadError, UnusableValueError, failure_text
from batchrunner.core.types import CHECK, MEDIA, PARSE, PROMPT, ROLLOUT, ColumnKind, PromptKind

Columns = tuple[tuple[str, ColumnKind], ...]
_read_mapping = msgspec.json.Decoder(dict)


class Annotations(NamedTuple):
    """The annotations of a function."""

    columns: Columns = ()
    """Columns that it returns; empty if they are not declared."""
    may_be_none: bool = False
    """Whether it may return None."""
    reads: tuple[str, ...] | None = None
    """Columns of its first argument; None if they are not declared."""


class HookFunction(NamedTuple):
    """A function as a job names it."""

    where: str
    """Job field that names it, such as `prompt.python`."""
    name: str
    """Its name in messages, `module:function`."""
    target: str | bytes
    """`module:function`; or the function of a program, its Annotations and the digest of its code, pickled by
    cloudpickle."""


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
            target, annotations, digest = pickle.loads(function.target)  # noqa: S301 - of the program itself
        else:
            target, annotations = pkgutil.resolve_name(function.target), None
            digest = None if function.where == MEDIA else code_digest(target)
    except BaseException as failure:  # noqa: BLE001 - a module may raise anything, SystemExit too
        raise HookLoadError(failure_text(f"{name}: cannot be imported", failure)) from None
    try:
        takes_row = _takes_row(target, function.where)
        annotations = annotations or known_of(target, function.where)
    except HookLoadError as failure:
        raise HookLoadError(f"{name} {failure}") from None
    columns = annotations.columns if function.where in {PARSE, ROLLOUT} else ()
    facts = HookFacts(
        where=function.where,
        name=function.name,
        columns=columns,
        takes_row=takes_row,
        reads=annotations.reads,
        code_digest=digest,
    )
    convert: dict[str, Callable[[Any], Any]] = {
        PROMPT: _prompt,
        PARSE: functools.partial(row_value, annotations=annotations),
        CHECK: _judgement,
        MEDIA: lambda value: value,
    }
    if function.where == ROLLOUT:
        return facts, functools.partial(_solve, target, annotations, function.name)
    return facts, functools.partial(_call, target, convert[function.where], function.name)


def code_digest(function: Any) -> str | None:
    """Return a digest of the module that a function comes from, without comments and layout.

    So a change of a helper or a constant beside the function counts. A script or a notebook also has code
    that makes no results. So for a function of `__main__` only the function's own code counts. Return None if
    there is no source.
    """
    inner = getattr(function, "func", function)  # of a functools.partial
    inner = inspect.unwrap(inner) if hasattr(inner, "__qualname__") else type(inner)
    module = inspect.getmodule(inner)
    is_in_file = module is not None and module.__name__ != "__main__" and hasattr(module, "__file__")
    try:
        code = textwrap.dedent(inspect.getsource(module if module is not None and is_in_file else inner))
    except (OSError, TypeError):
        return None
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # the line of a lambda is no statement
        code = ast.unparse(ast.parse(code))
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()[:16]


def _call(function: Callable[..., Any], convert: Callable[[Any], Any], name: str, *args: Any) -> Any:
    value = function(*args)
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as failure:
        raise UnusableValueError(f"{name}: {failure}") from None


async def _solve(
    function: Callable[..., Any], annotations: Annotations, name: str, *args: Any
) -> list[dict[str, Any]]:
    """Run a rollout; return the values of each row that it returned."""
    value = await function(*args)
    rows = value if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") else [value]
    try:
        return [row_value(row, annotations) for row in rows if row is not None]
    except (ValueError, TypeError, OverflowError, RecursionError) as failure:
        raise UnusableValueError(f"{name}: {failure}") from None


def _takes_row(function: Any, where: str) -> bool:
    """Check that a function can be called; tell whether it takes the row as its second argument."""
    if not callable(function):
        raise HookLoadError("is not a function")
    if where == ROLLOUT:
        if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            raise HookLoadError("is not asynchronous: write async def")
        if not _binds(inspect.signature(function), "row", "generate"):
            raise HookLoadError("is called with two arguments, the row and generate")
        return True
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HookLoadError("is asynchronous or a generator: give a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C, without a signature
        return False
    takes_row = not _binds(signature, "row or answer")
    if takes_row and (where in {PROMPT, MEDIA} or not _binds(signature, "answer", "row")):
        expected = "the row" if where in {PROMPT, MEDIA} else "the answer, or also the row"
        raise HookLoadError(f"takes {signature}: it is called with one argument, {expected}")
    return takes_row


def _binds(signature: inspect.Signature, *args: str) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def known_of(function: Any, where: str) -> Annotations:
    """Return the annotations of a function.

    Raises HookLoadError if `parse` declares no columns, or a type that no column can have.
    """
    if where not in {PROMPT, PARSE, ROLLOUT}:
        return Annotations()
    try:
        annotations = annotations_of(function)
    except ValueError as failure:
        if where != PROMPT:
            raise HookLoadError(str(failure)) from None
        return Annotations()
    if where == PARSE and not annotations.columns:
        raise HookLoadError(
            "does not declare its columns: let the annotation of its result be a TypedDict, a dataclass or a "
            "pydantic model"
        )
    return annotations


def annotations_of(function: Any) -> Annotations:
    """Read the annotations of a function; raises ValueError, whose text follows the function's name."""
    inner = getattr(function, "func", function)  # of a functools.partial
    try:
        if isinstance(inner, type):
            hints: dict[str, Any] = {"return": inner}
        else:
            inner = inner if inspect.isroutine(inner) else type(inner).__call__
            hints = _type_hints(inner)
    except Exception as failure:  # noqa: BLE001 - names in annotations may lead anywhere
        raise ValueError(f"has an annotation that cannot be read: {failure}") from None
    returned = hints.pop("return", None)
    first = next(iter(hints.values()), None)
    reads = tuple(typing.get_type_hints(first)) if typing_extensions.is_typeddict(first) else None
    members = typing.get_args(returned) if typing.get_origin(returned) in _UNIONS else (returned,)
    classes = [member for member in members if member is not types.NoneType]
    if len(classes) == 1 and typing.get_origin(classes[0]) is list:  # rows of a rollout
        classes = [*typing.get_args(classes[0])]
    columns = columns_of(classes[0]) if len(classes) == 1 else ()
    return Annotations(columns, types.NoneType in members, reads)


def _type_hints(function: Any) -> dict[str, Any]:
    """Return the types of arguments and result, or only that of the result.

    The types of arguments cannot be read if they are imported for type checkers only.
    """
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        function = inspect.unwrap(function)
        result = {name: kind for name, kind in function.__annotations__.items() if name == "return"}
        of_result = types.SimpleNamespace(__annotations__=result)
        return typing.get_type_hints(of_result, function.__globals__, include_extras=True)


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
            raise ValueError(f"returns a column {name}: {first_line(failure)}") from None
        columns.append((name, kind_of_schema(schema, formats=True)))
    return tuple(columns)


def row_value(value: Any, annotations: Annotations) -> dict[str, Any]:
    """Return the value of each column in the result of a function; a missing one is None.

    Without declared columns, which only a rollout may lack, the result is a dict of JSON values. Raises
    ValueError, whose text follows the function's name, or TypeError, for a value that does not fit and for a
    key that is no column.
    """
    if value is None and annotations.may_be_none:
        value = {}
    fields = plain(value._asdict() if hasattr(value, "_asdict") else value)
    if not isinstance(fields, dict):
        raise ValueError(f"returned {_a(value)}: return a dict")  # noqa: TRY004
    if not annotations.columns:
        return _read_mapping.decode(msgspec.json.encode(fields))
    from batchrunner.job.arrow_types import fit  # noqa: PLC0415 - it loads pyarrow

    names = [name for name, _ in annotations.columns]
    unknown = [key for key in fields if key not in names]
    if unknown:
        raise ValueError(f"returned {unknown[0]!r}, not a declared column (columns: {', '.join(names)})")
    row = {}
    for name, kind in annotations.columns:
        try:
            row[name] = fit(fields.get(name), kind)
        except (ValueError, TypeError) as failure:
            raise ValueError(f"{name}: {failure}") from None
    return row


def plain(value: Any) -> Any:
    """Return a value as dicts, lists and scalars; raises TypeError for a value without such a form."""
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
    raise TypeError(f"{_a(value)} is neither a scalar nor a list or dict of scalars")


def _prompt(value: Any) -> tuple[PromptKind, Any] | None:
    """Return the kind and the value of a prompt; None for a row that is left out."""
    return None if value is None else kind_of_prompt(msgspec.to_builtins(value, enc_hook=_plain_object))


def kind_of_prompt(value: Any) -> tuple[PromptKind, Any]:
    """Return the kind and the value of a prompt; raises ValueError for a value that is no prompt."""
    if isinstance(value, str) and value:
        return "text", value
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(item, dict) for item in value):
            return "messages", [*value]
        if all(type(item) is int for item in value):
            return "input_ids", [*value]
    raise ValueError(f"{_a(value)} is not a prompt: give messages, a text or token ids")


def _judgement(value: Any) -> bool | str:
    """Return True for a good answer, False or a text about what is wrong for a bad one."""
    judgement = plain(value)
    if isinstance(judgement, str):
        return judgement or True
    if isinstance(judgement, bool):
        return judgement
    raise ValueError(f"returned {_a(value)}: return True, False, or a text that says what is wrong")


def _a(value: object) -> str:
    """Return the type of a value with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"
