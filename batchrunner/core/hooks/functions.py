"""A job's Python functions: how they are named, what is known of them, and what a call of one came to."""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

HookKind = Literal["prompt", "parse", "check", "media"]
"""What a function is for: a row becomes a prompt, an answer becomes columns, an answer is judged; `media` is
our own, which prepares the files of a row."""
ColumnKind: TypeAlias = str | tuple[str, Any]
"""Type of a column: the name of a plain type, ("list", kind), or ("struct", ((name, kind), …))."""
REFERENCE = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""Pattern of `module:function`."""


class HookFunction(NamedTuple):
    """A function as a job names it."""

    where: str
    """Its place in the job, such as `prompt.python`."""
    kind: HookKind
    name: str
    """Its name in messages, `module:function`."""
    target: str | bytes
    """`module:function`, or a function that a program gave, as cloudpickle writes it."""
    columns: tuple[tuple[str, ColumnKind], ...] = ()
    """Columns of what it returns, where the job names them, or a program gives the function."""
    may_be_none: bool = False
    """Whether it may return None, for a function that a program gives."""
    reads: tuple[str, ...] | None = None
    """Columns of a row that it reads, for a function that a program gives; None where it does not say."""


class HookFacts(NamedTuple):
    """What is known of a function once it is loaded."""

    where: str
    name: str
    digest: str
    """Hash of the function's file and of neighbours that it imports; of its code where it has no file."""
    columns: tuple[tuple[str, ColumnKind], ...] = ()
    """Columns that it makes."""
    takes_row: bool = False
    """Whether it is called with the answer and the row, not with the answer only."""
    reads: tuple[str, ...] | None = None
    """Columns of a row that it reads, where the annotation of its argument says so."""


class HookSetup(NamedTuple):
    """What a process needs to run the functions of a job."""

    functions: tuple[HookFunction, ...]
    directories: tuple[str, ...]
    """Where modules are looked up before the paths of this process, in order."""
    limit_s: float
    """Time of one call, in seconds."""
    memory_bytes: int
    """Memory that the process may take beyond what it has when its modules are imported."""


class HookResult(NamedTuple):
    """What one call came to: a value, or the error of its row."""

    value: Any
    error: str | None = None


def is_reference(value: object) -> bool:
    """Tell whether a value is a text of the form `module:function`."""
    return isinstance(value, str) and re.fullmatch(REFERENCE, value) is not None


def name_of(function: str | Callable[..., Any]) -> str:
    """Return the name of a function, `module:function`; of one that a program gives too."""
    if isinstance(function, str):
        return function
    inner = getattr(function, "func", function)  # of a functools.partial
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}:{named.__qualname__}"


def pickled(function: Callable[..., Any]) -> bytes:
    """Return a function that a program gives as bytes, with what it refers to in the program's main module.

    Raises ValueError where it cannot be sent to another process.
    """
    import cloudpickle  # noqa: PLC0415 - only where a program gives a function

    try:
        content: bytes = cloudpickle.dumps(function)
    except Exception as failure:  # noqa: BLE001 - whatever the function refers to says so in its own way
        raise ValueError(f"cannot be sent to another process: {type(failure).__name__}: {failure}") from None
    return content
