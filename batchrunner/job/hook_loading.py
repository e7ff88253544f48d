"""Loads a job's Python functions in a worker process, and converts their results."""

import ast
import contextlib
import dataclasses
import datetime as dt
import functools
import hashlib
import inspect
import operator
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
    """Columns that a Python function of a job declares by the annotations of its arguments and result."""

    columns: Columns = ()
    """Columns that the function returns, with their types; empty if they are not declared."""
    may_be_none: bool = False
    reads: tuple[str, ...] | None = None
    """Columns of the row that is the function's first argument; None if they are not declared."""


class HookFunction(NamedTuple):
    """A Python function of a job, as it is sent to a worker process."""

    where: str
    """Job field that names the function, such as `prompt.python`."""
    name: str
    """Name of the function in messages: `module:function`."""
    target: str | bytes
    """The reference `module:function`, or cloudpickle's bytes for a function that a program passes.

    The bytes are a tuple of the function, its Annotations and the digest of its code.
    """


def load_functions(
    functions: Sequence[HookFunction],
) -> tuple[list[HookFacts], list[Callable[..., Any]]]:
    """Import the Python functions of a job.

    Returns the properties of the functions and, in the same order, a callable for each function, which calls
    it and converts its result. Raises HookLoadError if a function cannot be imported or called.
    """
    loaded = [_load(function) for function in functions]
    return [facts for facts, _ in loaded], [caller for _, caller in loaded]


def _load(function: HookFunction) -> tuple[HookFacts, Callable[..., Any]]:
    """Import a function; return its properties, and a callable that calls it and converts its result."""
    name = f"{function.where}: {function.name}"
    try:
        if isinstance(function.target, bytes):
            target, annotations, digest = pickle.loads(function.target)  # noqa: S301 - from this program
        else:
            target, annotations = pkgutil.resolve_name(function.target), None
            # The function of MEDIA belongs to this package, so its code needs no digest.
            digest = None if function.where == MEDIA else code_digest(target)
    except BaseException as failure:  # noqa: BLE001 - a module may raise anything, SystemExit too
        raise HookLoadError(failure_text(f"{name}: cannot be imported", failure)) from None
    try:
        takes_row = _takes_row(target, function.where)
        annotations = annotations or annotations_for(target, function.where)
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
    """Return a digest of the code that a function depends on, without comments and layout.

    Returns None if the source is unknown. The digest covers the code of the function's whole module, because
    a helper or a constant in it may change. In a script or a notebook (`__main__`), only the function itself
    counts, because the rest is often unrelated.
    """
    inner = getattr(function, "func", function)  # A functools.partial has its function in `func`.
    inner = inspect.unwrap(inner) if hasattr(inner, "__qualname__") else type(inner)
    module = inspect.getmodule(inner)
    is_in_file = module is not None and module.__name__ != "__main__" and hasattr(module, "__file__")
    try:
        code = textwrap.dedent(inspect.getsource(module if module is not None and is_in_file else inner))
    except (OSError, TypeError):
        return None
    # Parsing and unparsing removes comments and formatting. For some lambdas this fails: `getsource` returns
    # the whole line with the lambda, which is not always a complete statement. Such a line is digested as it
    # is.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        code = ast.unparse(ast.parse(code))
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()[:16]


def _call(function: Callable[..., Any], convert: Callable[[Any], Any], name: str, *args: Any) -> Any:
    """Call a function and convert its result; raise UnusableValueError if the result cannot be converted."""
    value = function(*args)
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as failure:
        raise UnusableValueError(f"{name}: {failure}") from None


async def _solve(
    function: Callable[..., Any], annotations: Annotations, name: str, *args: Any
) -> list[dict[str, Any]]:
    """Run the function of a multi-turn rollout; return the values of each row that it returns.

    The function may return one row, a list of rows, or None for no row. Raises UnusableValueError if the
    result cannot be converted.
    """
    value = await function(*args)
    # A NamedTuple (it has `_fields`) is a single row, although it is a tuple.
    is_list_of_rows = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    rows = value if is_list_of_rows else [value]
    try:
        return [row_value(row, annotations) for row in rows if row is not None]
    except (ValueError, TypeError, OverflowError, RecursionError) as failure:
        raise UnusableValueError(f"{name}: {failure}") from None


def _takes_row(function: Any, where: str) -> bool:
    """Tell whether a function takes the row as a second argument, after the answer.

    `where` is the job field that names the function. For `prompt.rollout`, whose arguments are the row and
    `generate`, the result is True. Raises HookLoadError if the function does not accept the arguments of its
    field.
    """
    if not callable(function):
        raise HookLoadError("is not a function")
    if where == ROLLOUT:
        if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            raise HookLoadError("is not asynchronous: write async def")
        signature = inspect.signature(function)
        if not _accepts(signature, "row", "generate"):
            raise HookLoadError(f"takes {signature}: it must take two arguments, the row and generate")
        return True
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HookLoadError("is asynchronous or a generator: give a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some functions that are written in C have no signature.
        return False
    if _accepts(signature, "row or answer"):
        return False
    if where in {PROMPT, MEDIA}:
        raise HookLoadError(f"takes {signature}: it must take one argument, the row")
    if not _accepts(signature, "answer", "row"):
        raise HookLoadError(f"takes {signature}: it must take the answer, or the answer and the row")
    return True


def _accepts(signature: inspect.Signature, *args: str) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def annotations_for(function: Any, where: str) -> Annotations:
    """Return the annotations of a function that matter for the job field `where`.

    Raises HookLoadError if `parse` declares no columns, or if `parse` or a rollout function declares a type
    that no column can have.
    """
    if where not in {PROMPT, PARSE, ROLLOUT}:
        return Annotations()
    try:
        annotations = annotations_of(function)
    except ValueError as failure:
        if where != PROMPT:
            raise HookLoadError(str(failure)) from None
        # `prompt.python` need not have annotations, so those that cannot be read are ignored.
        return Annotations()
    if where == PARSE and not annotations.columns:
        raise HookLoadError(
            "does not declare the columns that it returns: annotate the result with a TypedDict, a "
            "dataclass, a NamedTuple or a pydantic model"
        )
    return annotations


def annotations_of(function: Any) -> Annotations:
    """Read the annotations of a function.

    Raises ValueError if one cannot be read. The error's text continues a message that begins with the
    function's name.
    """
    inner = getattr(function, "func", function)  # A functools.partial has its function in `func`.
    try:
        if isinstance(inner, type):  # Calling a class returns an instance of it.
            hints: dict[str, Any] = {"return": inner}
        else:
            # A callable object has its annotations at the method `__call__`.
            inner = inner if inspect.isroutine(inner) else type(inner).__call__
            hints = _type_hints(inner)
    except Exception as failure:  # noqa: BLE001 - evaluating an annotation may raise any error
        raise ValueError(f"has an annotation that cannot be read: {failure}") from None
    result_type = hints.pop("return", None)
    row_type = next(iter(hints.values()), None)  # The first argument of a function may be the row.
    reads = tuple(typing.get_type_hints(row_type)) if typing_extensions.is_typeddict(row_type) else None
    # With a result type such as `X | None`, the function may return None.
    is_union = typing.get_origin(result_type) in _UNIONS
    members = typing.get_args(result_type) if is_union else (result_type,)
    classes = [member for member in members if member is not types.NoneType]
    if len(classes) == 1 and typing.get_origin(classes[0]) is list:  # A rollout may return a list of rows.
        classes = [*typing.get_args(classes[0])]
    columns = columns_of(classes[0]) if len(classes) == 1 else ()
    return Annotations(columns=columns, may_be_none=types.NoneType in members, reads=reads)


def _type_hints(function: Any) -> dict[str, Any]:
    """Return the types of a function's arguments and result, or only of the result.

    The types of arguments cannot be read if their names are imported only for type checkers.
    """
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        function = inspect.unwrap(function)
        annotations = {name: kind for name, kind in function.__annotations__.items() if name == "return"}
        # get_type_hints accepts any object with annotations, so this one has only the annotation of the
        # result.
        result_only = types.SimpleNamespace(__annotations__=annotations)
        return typing.get_type_hints(result_only, function.__globals__, include_extras=True)


_UNIONS = (typing.Union, types.UnionType)
"""Origins of the types `Union[A, B]` and `A | B`."""


def columns_of(kind: Any) -> Columns:
    """Return the columns of a TypedDict, dataclass, NamedTuple or pydantic model; () for any other type.

    Raises ValueError for a field whose type no column can have.
    """
    if not isinstance(kind, type):
        return ()
    if hasattr(kind, "model_fields"):  # `kind` is a pydantic model.
        fields = {name: field.annotation for name, field in kind.model_fields.items()}
    # A NamedTuple has `_fields`.
    elif dataclasses.is_dataclass(kind) or typing_extensions.is_typeddict(kind) or hasattr(kind, "_fields"):
        fields = typing.get_type_hints(kind, include_extras=True)
    else:
        return ()
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter  # noqa: PLC0415

    from batchrunner.job.arrow_types import kind_of_schema  # noqa: PLC0415 - it loads pyarrow

    columns = []
    for name, annotation in fields.items():
        try:
            readable = _readable_by_pydantic(annotation, ())
            schema = TypeAdapter(readable).json_schema(mode="serialization")
        except (PydanticSchemaGenerationError, PydanticUserError, NameError) as failure:
            raise ValueError(f"returns a column {name}: {first_line(failure)}") from None
        columns.append((name, kind_of_schema(schema, formats=True)))
    return tuple(columns)


def _readable_by_pydantic(annotation: Any, enclosing: tuple[Any, ...]) -> Any:
    """Replace each dataclass and TypedDict in an annotation by a TypedDict of typing_extensions.

    Before Python 3.12, pydantic refuses the TypedDict of the module `typing`, also inside a dataclass.
    `enclosing` are the classes whose fields lead to this annotation. Among them, a class that contains itself
    becomes a dict. Raises NameError if an annotation names an unknown class.
    """
    is_typed_dict = typing_extensions.is_typeddict(annotation)
    # A dataclass of pydantic itself (it has `__pydantic_fields__`) needs no replacement.
    is_dataclass = dataclasses.is_dataclass(annotation) and not hasattr(annotation, "__pydantic_fields__")
    if is_typed_dict or is_dataclass:
        if annotation in enclosing:
            return dict[str, Any]
        hints = typing.get_type_hints(annotation, include_extras=True)
        names = [field.name for field in dataclasses.fields(annotation)] if is_dataclass else hints
        fields = {name: _readable_by_pydantic(hints[name], (*enclosing, annotation)) for name in names}
        return typing_extensions.TypedDict(annotation.__name__, fields)  # type: ignore[operator]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if not arguments:
        return annotation
    readable = tuple(_readable_by_pydantic(argument, enclosing) for argument in arguments)
    if origin in {typing.Required, typing.NotRequired}:
        return readable[0]  # The column is the same whether or not the key may be missing.
    if origin in _UNIONS:
        return functools.reduce(operator.or_, readable)
    # A type with one argument is `list[X]`, a type with several is `dict[X, Y]`, which takes a tuple.
    return origin[readable[0] if len(readable) == 1 else readable]


def row_value(value: Any, annotations: Annotations) -> dict[str, Any]:
    """Return the value of each declared column in the result of a function; None for a missing value.

    A rollout function may declare no columns. Then all its values are returned, as JSON values. Raises
    ValueError or TypeError if a value does not fit its column, or if a key is not declared. The error's text
    continues a message that begins with the function's name.
    """
    if value is None and annotations.may_be_none:
        value = {}
    # A NamedTuple (it has `_asdict`) would otherwise become a list.
    fields = plain(value._asdict() if hasattr(value, "_asdict") else value)
    if not isinstance(fields, dict):
        raise ValueError(f"returned {_a(value)}: return a dict")  # noqa: TRY004
    if not annotations.columns:
        # Encoding to JSON and decoding again leaves only JSON types.
        return _read_mapping.decode(msgspec.json.encode(fields))
    from batchrunner.job.arrow_types import fit  # noqa: PLC0415 - it loads pyarrow

    names = [name for name, _ in annotations.columns]
    unknown = [key for key in fields if key not in names]
    if unknown:
        raise ValueError(f"returned {unknown[0]!r}, not a declared column (columns: {', '.join(names)})")
    row = {}
    for name, kind in annotations.columns:
        try:
            row[name] = fit(fields.get(name), kind, drops_keys=False)
        except (ValueError, TypeError) as failure:
            raise ValueError(f"{name}: {failure}") from None
    return row


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists and scalars; raise TypeError if that is impossible."""
    return msgspec.to_builtins(value, builtin_types=(bytes, dt.datetime, dt.date), enc_hook=_plain_object)


def _plain_object(value: Any) -> Any:
    """Convert an object of a type that msgspec does not support; raise TypeError if that is impossible."""
    # `model_dump` is for pydantic models, `tolist` for values of NumPy.
    for method in ("model_dump", "tolist"):
        if hasattr(value, method):
            return plain(getattr(value, method)())
    if isinstance(value, Mapping):
        return plain(dict(value))
    if isinstance(value, Path):
        return str(value)
    for scalar in (str, int, float):  # msgspec does not convert subclasses of these types.
        if isinstance(value, scalar):
            return scalar(value)
    raise TypeError(f"{_a(value)} is neither a scalar nor a list or dict of scalars")


def _prompt(value: Any) -> tuple[PromptKind, Any] | None:
    """Return the kind and the value of the prompt that a function returned; None to leave the row out."""
    return None if value is None else kind_of_prompt(msgspec.to_builtins(value, enc_hook=_plain_object))


def kind_of_prompt(value: Any) -> tuple[PromptKind, Any]:
    """Return the kind and the value of a prompt; raise ValueError for a value that is not a prompt."""
    if isinstance(value, str) and value:
        return "text", value
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(item, dict) for item in value):
            return "messages", [*value]
        if all(type(item) is int for item in value):
            return "input_ids", [*value]
    raise ValueError(f"{_a(value)} is not a prompt: give messages, a text or token ids")


def _judgement(value: Any) -> bool | str:
    """Convert the result of `accept.python`: True for a good answer, False or a complaint for a bad one."""
    judgement = plain(value)
    if isinstance(judgement, str):
        return judgement or True  # An empty text is no complaint, so the answer is good.
    if isinstance(judgement, bool):
        return judgement
    raise ValueError(f"returned {_a(value)}: return True, False, or a text that says what is wrong")


def _a(value: object) -> str:
    """Return the name of a value's type with its article, such as "an int"."""
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"
