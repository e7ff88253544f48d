"""What the annotations of a function say: the columns that it makes, and those of a row that it reads."""

import inspect
import typing
from typing import Any, NamedTuple

from batchrunner.core.hooks.column_types import Columns, NoColumnError, allows_none, columns_of


class AnnotationError(Exception):
    """Annotations that cannot be used; the message follows the name of the function."""


class Annotations(NamedTuple):
    """What the annotations of a function say."""

    columns: Columns = ()
    """Columns of what it returns; empty where it does not say."""
    may_be_none: bool = False
    """Whether it may return None."""
    reads: tuple[str, ...] | None = None
    """Columns of its first argument; None where it does not say."""


def annotations_of(function: Any) -> Annotations:
    """Read the annotations of a function; raises AnnotationError."""
    try:
        hints = _hints(function)
    except Exception as failure:  # noqa: BLE001 - names in annotations may lead anywhere
        raise AnnotationError(f"has an annotation that cannot be read: {failure}") from None
    returned = hints.pop("return", None)
    try:
        columns = columns_of(returned) or ()
    except NoColumnError as failure:
        raise AnnotationError(f"returns a column {failure}: name the columns in parse.columns") from None
    first = next(iter(hints.values()), None)
    is_typed_dict = (
        isinstance(first, type) and issubclass(first, dict) and hasattr(first, "__required_keys__")
    )
    reads = tuple(typing.get_type_hints(first)) if is_typed_dict else None
    return Annotations(columns, allows_none(returned), reads)


def _hints(function: Any) -> dict[str, Any]:
    inner = getattr(function, "func", function)  # of a functools.partial
    if isinstance(inner, type):
        return {"return": inner}
    inner = inner if inspect.isroutine(inner) else type(inner).__call__
    return typing.get_type_hints(inner, include_extras=True)
