"""Loads a job's functions in the process that runs them, and finds out what is to be known of them."""

import difflib
import hashlib
import importlib
import inspect
import pickle
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from batchrunner.core.hooks.annotations import AnnotationError, Annotations, annotations_of
from batchrunner.core.hooks.functions import HookFacts, HookFunction, HookKind
from batchrunner.core.hooks.returned import (
    CheckConversion,
    Conversion,
    ParseConversion,
    PlainConversion,
    PromptConversion,
)

_OURS = str(Path(__file__).parent)
_INSTALLED = tuple({*sysconfig.get_paths().values(), "<frozen"})
"""Beginnings of the paths of files that are not the user's own."""
_LONGEST_ERROR = 500
_OF_ROWS = {"prompt", "media"}
"""Kinds of functions that are called with a row; others with an answer."""


class HookLoadError(Exception):
    """A function that cannot be called; the message is one line for the user."""


class LoadedFunction(NamedTuple):
    """A function that can be called."""

    facts: HookFacts
    call: Callable[..., Any]
    conversion: Conversion


def load(functions: Sequence[HookFunction], directories: Sequence[str]) -> list[LoadedFunction]:
    """Import the functions, from these directories first; raises HookLoadError."""
    return [_load(function, directories) for function in functions]


def failure_text(where: str, failure: BaseException) -> str:
    """Return an exception of a function as the error of its row: place, file and line, class, message."""
    try:
        said = " ".join(str(failure).split())
    except Exception:  # noqa: BLE001 - an exception of the user's may be unable to say anything
        said = ""
    text = f"{where}: {place_of(failure)}{type(failure).__name__}" + (f": {said}" if said else "")
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 1]}…"


def place_of(failure: BaseException) -> str:
    """Return the file and line of the user's own code that raised an exception, with a colon and a space."""
    if isinstance(failure, SyntaxError) and (failure.filename or "").endswith(".py"):
        return f"{_short(str(failure.filename))}:{failure.lineno}: "
    found = ""
    for frame, line in traceback.walk_tb(failure.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and (not found or not file.startswith(_INSTALLED)):
            found = f"{_short(file)}:{line}: "
    return found


def _short(file: str) -> str:
    """Return a path from the directory in which the module was looked up."""
    for directory in sorted(filter(None, sys.path), key=len, reverse=True):
        if file.startswith(f"{directory}/"):
            return file[len(directory) + 1 :]
    return file


def _load(function: HookFunction, directories: Sequence[str]) -> LoadedFunction:
    before = set(sys.modules)
    try:
        if isinstance(function.target, bytes):
            found, files = _unpickled(function.target), []
        else:
            found, module = _imported(function.target, directories)
            files = _own_files(module, before, directories)
    except HookLoadError as failure:
        raise HookLoadError(f"{function.where}: {function.name}: {failure}") from None
    except BaseException as failure:  # noqa: BLE001 - a module may raise anything, SystemExit too
        why = failure_text(f"{function.where}: {function.name}: cannot be imported", failure)
        raise HookLoadError(why) from None
    try:
        takes_row = _takes_row(found, function.kind)
        annotated = _annotations(found, function)
        conversion = _conversion(annotated, function.kind)
    except HookLoadError as failure:
        raise HookLoadError(f"{function.where}: {function.name} {failure}") from None
    digest = _digest_of_files(files) if files else _digest_of_code(found)
    columns = annotated.columns if function.kind == "parse" else ()
    facts = HookFacts(function.where, function.name, digest, columns, takes_row, annotated.reads)
    return LoadedFunction(facts, found, conversion)


def _unpickled(content: bytes) -> Callable[..., Any]:
    found: Callable[..., Any] = pickle.loads(content)  # noqa: S301 - of the program itself
    return found


def _imported(target: str, directories: Sequence[str]) -> tuple[Callable[..., Any], ModuleType]:
    name, _, path = target.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as failure:
        if failure.name is None or not f"{name}.".startswith(f"{failure.name}."):
            raise  # the module is there, and imports one that is not
        places = ", ".join(directories)
        raise HookLoadError(
            f"there is no module {failure.name!r} (looked in {places} and among the installed packages)"
            f"{_nearest_module(name, directories)}"
        ) from None
    found: Any = module
    for step in path.split("."):
        if not hasattr(found, step):
            near = difflib.get_close_matches(step, vars(found) if hasattr(found, "__dict__") else (), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise HookLoadError(f"there is no {step!r} in {getattr(module, '__file__', name)}{hint}")
        found = getattr(found, step)
    return found, module


def _nearest_module(name: str, directories: Sequence[str]) -> str:
    files = [file.stem for place in directories for file in sorted(Path(place).glob("*.py"))]
    near = difflib.get_close_matches(name.removesuffix(".py"), files, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _own_files(module: ModuleType, before: set[str], directories: Sequence[str]) -> list[str]:
    """Return the module's file, and those of modules of the user's that it imports."""
    new = [found for name, found in list(sys.modules.items()) if name not in before]
    files = {str(getattr(found, "__file__", None) or "") for found in new}
    own = {file for file in files if file.startswith(tuple(f"{place}/" for place in directories))}
    own = {file for file in own if not file.startswith(_INSTALLED)}
    return sorted({*own, *filter(None, [getattr(module, "__file__", None)])})


def _digest_of_files(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest()[:16]


def _digest_of_code(function: Callable[..., Any]) -> str:
    """Return a hash of what a function does; empty where it is no function of Python's."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return hashlib.sha256(_code_bytes(code)).hexdigest()[:16] if isinstance(code, CodeType) else ""


def _code_bytes(code: CodeType) -> bytes:
    plain = [value for value in code.co_consts if isinstance(value, (str, bytes, int, float, type(None)))]
    inner = b"".join(_code_bytes(value) for value in code.co_consts if isinstance(value, CodeType))
    return code.co_code + repr((plain, code.co_names)).encode("utf-8", "backslashreplace") + inner


def _takes_row(function: Any, kind: str) -> bool:
    """Check that a function can be called, and tell whether it wants the row as its second argument."""
    if not callable(function):
        raise HookLoadError("is no function")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise HookLoadError("is asynchronous: give a plain function")
    if inspect.isgeneratorfunction(function):
        raise HookLoadError("is a generator: let it return its value")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C, without a signature
        return False
    needed = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}
    ]
    takes_row = kind not in _OF_ROWS and len(needed) == len(("answer", "row"))
    given = ("answer", "row") if takes_row else ("row" if kind in _OF_ROWS else "answer",)
    try:
        signature.bind(*given)
    except TypeError:
        wanted = "one argument, the row" if kind == "prompt" else "one argument, the answer, or also the row"
        raise HookLoadError(f"takes {signature}: it is called with {wanted}") from None
    return takes_row


def _annotations(function: Any, spec: HookFunction) -> Annotations:
    """Return what is known of what a function takes and returns; raises HookLoadError.

    A program has read the annotations of a function that it gives: their names are not known here.
    """
    if spec.kind in {"check", "media"} or isinstance(spec.target, bytes):
        return Annotations(spec.columns, spec.may_be_none, spec.reads)
    try:
        found = annotations_of(function)
    except AnnotationError as failure:
        if spec.kind == "prompt" or spec.columns:  # nothing of it is needed
            return Annotations(spec.columns)
        raise HookLoadError(str(failure)) from None
    return found._replace(columns=spec.columns or found.columns)


def _conversion(annotated: Annotations, kind: HookKind) -> Conversion:
    if kind == "prompt":
        return PromptConversion()
    if kind == "check":
        return CheckConversion()
    if kind == "media":
        return PlainConversion()
    if not annotated.columns:
        raise HookLoadError(
            "does not say its columns: let it return a TypedDict, a dataclass or a pydantic model by its "
            "annotation, or name them in parse.columns"
        )
    return ParseConversion(annotated.columns, may_be_none=annotated.may_be_none)
