"""What a function may return, made into plain Python: prompts, columns, judgements.

Values go to another process, which knows nothing of the user's classes. Runs where the function runs.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from batchrunner.core.hooks.column_types import Columns, row_value

_SCALARS = (str, bool, int, float)
_DEEPEST = 32


class Conversion(Protocol):
    """Makes plain Python of what a function returned."""

    def convert(self, value: Any) -> Any:
        """Return the plain value; raises ValueError, whose text ends a sentence, where it cannot be used."""


class PromptConversion:
    """A prompt: its kind and its value; None for a row that is left out."""

    def convert(self, value: Any) -> tuple[str, Any] | None:
        """Take a text, a list of token ids, or a list of messages."""
        if value is None:
            return None
        if isinstance(value, str):
            if not value:
                raise ValueError("returned an empty text")
            return "text", str(value)
        if not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "tolist"):  # numpy
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"returned {_a(value)}: return messages, a text, token ids, or None")  # noqa: TRY004
        if not value:
            raise ValueError("returned an empty list")
        if all(isinstance(item, Mapping) for item in value):
            return "messages", [_plain(item, 0) for item in value]
        return "input_ids", [_token(item) for item in value]


class ParseConversion:
    """The values of columns."""

    def __init__(self, columns: Columns, *, may_be_none: bool) -> None:
        """With `may_be_none` a None stands for a null in each column."""
        self._columns = columns
        self._may_be_none = may_be_none

    def convert(self, value: Any) -> dict[str, Any]:
        """Take a dict, or an object with the columns as attributes."""
        if value is None and self._may_be_none:
            return dict.fromkeys([name for name, _ in self._columns])
        try:
            return row_value(value, self._columns)
        except ValueError as failure:
            raise ValueError(
                f"returned a value that {failure}" if _is_row(failure) else f"{failure}"
            ) from None


class CheckConversion:
    """A judgement: True for a good answer, else a complaint."""

    def convert(self, value: Any) -> bool | str:
        """Take true, false, or a text that says what is wrong."""
        if isinstance(value, str):
            return str(value) or True
        if isinstance(value, bool) or type(value).__name__ in {"bool_", "bool"}:
            return bool(value)
        raise ValueError(f"returned {_a(value)}: return True, False, or a text that says what is wrong")


class PlainConversion:
    """What our own function returns, which is plain Python."""

    def convert(self, value: Any) -> Any:
        """Take the value as it is."""
        return value


def _is_row(failure: ValueError) -> bool:
    return str(failure).startswith(("is ", "has "))


def _token(value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise ValueError(f"returned a list with {_a(value)} in it: give messages (dicts) or token ids (integers)")


def _plain(value: Any, depth: int) -> Any:
    """Return a part of a message as plain Python; raises ValueError for what JSON cannot hold."""
    if depth > _DEEPEST:
        raise ValueError("returned a message that is nested too deeply")
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(inner, depth + 1) for inner in value]
    if hasattr(value, "tolist"):  # numpy
        return _plain(value.tolist(), depth + 1)
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)
    raise ValueError(f"returned a message with {_a(value)} in it, which JSON cannot hold")


def _a(value: object) -> str:
    """Return what a value is, in words."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
