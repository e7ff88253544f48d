"""Columns of texts and of JSON values as Arrow arrays; a value that does not fit fails its row only."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from batchrunner.core.exact_json import write_exactly
from batchrunner.input.formats.base import PROBLEM
from batchrunner.output.arrow_arrays import arrow_array

TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
}
"""Arrow types, by their names in `input.types`."""
SHOWN_CHARACTERS = 40
"""Most characters of a bad value in a message."""


Column = tuple[pa.Array, dict[int, str]]
"""A column, and what is wrong with some of its values, by their index."""


class BlockRows:
    """The records of a block, and what is wrong with some of them."""

    def __init__(self, path: str) -> None:
        """`path` is the file's, for the messages."""
        self._path = path
        self._lines: list[int] = []
        self._problems: list[str | None] = []
        self.values: list[Any] = []
        """Values of each record; None of one that is wrong."""

    def add(self, line: int, values: Any, problem: str | None = None) -> None:
        """Add a record that begins on this line."""
        self._lines.append(line)
        self.values.append(values if problem is None else None)
        self._problems.append(problem and f"{self._path}: line {line}: {problem}")

    def batch(self, columns: Mapping[str, Column]) -> pa.RecordBatch:
        """Return the columns and PROBLEM."""
        for name, (_, misfits) in columns.items():
            for at, why in misfits.items():
                self._problems[at] = (
                    self._problems[at] or f"{self._path}: line {self._lines[at]}: column {name!r}: {why}"
                )
        arrays = [found for found, _ in columns.values()]
        return pa.record_batch([*arrays, arrow_array(self._problems, pa.string())], names=[*columns, PROBLEM])


def column_of(texts: Sequence[str | None], kind: pa.DataType) -> Column:
    """Return texts as a column of a type.

    A wrong value becomes null. An empty text is null, except in a column of texts.
    """
    if pt.is_string(kind):
        return _texts(texts)
    stripped = [(text.strip() or None) if text is not None else None for text in texts]
    clean, problems = _texts(stripped)
    try:
        return _cast(clean, kind), problems
    except pa.ArrowException:
        good = [None if _misfits(text, kind) else text for text in stripped]
    for at, text in enumerate(stripped):
        if text is not None and good[at] is None and at not in problems:
            problems[at] = f"{_shown(text)} is not {kind}"
    return pc.cast(arrow_array(good, pa.string()), kind), problems


def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return texts as values; raises ArrowException, also for a number that is too large for a float."""
    found = pc.cast(texts, kind)
    if pt.is_floating(kind):
        overflows = pc.and_(pc.is_inf(found), pc.match_substring_regex(texts, "[0-9]"))
        if pc.any(overflows).as_py():
            raise pa.ArrowInvalid("too large")
    return found


def text_of(value: Any) -> str | None:
    """Return a value of `read_exactly` as a text: a text as it is, null as None, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return write_exactly(value)


def _texts(texts: Sequence[str | None]) -> Column:
    """Return texts as a column; one with bytes that are not UTF-8 becomes null, and is a problem."""
    try:
        "".join(text for text in texts if text is not None).encode()
    except UnicodeEncodeError:
        problems = {at: why for at, text in enumerate(texts) if (why := bad_bytes(text))}
        good = [None if at in problems else text for at, text in enumerate(texts)]
        return arrow_array(good, pa.string()), problems
    return arrow_array(texts, pa.string()), {}


def bad_bytes(text: str | None) -> str | None:
    """Return why a text is no UTF-8; None where it is."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as failure:
        byte = ord(failure.object[failure.start])
        if 0xDC80 <= byte <= 0xDCFF:  # noqa: PLR2004 - how Python keeps a byte that is not UTF-8
            return f"byte 0x{byte - 0xDC00:02x} is not UTF-8: write the file as UTF-8"
        return f"character {failure.start} is an unpaired surrogate"
    return None


def _misfits(text: str | None, kind: pa.DataType) -> bool:
    try:
        _cast(arrow_array([text], pa.string()), kind)
    except (pa.ArrowException, UnicodeEncodeError):
        return True
    return False


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
