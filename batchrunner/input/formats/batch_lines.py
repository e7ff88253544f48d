"""Lines of a batch file in OpenAI's format: each a whole request, with an ID for its answer.

`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.input.formats.base import PROBLEM
from batchrunner.input.formats.text import Lines
from batchrunner.input.formats.unique_ids import UniqueIds
from batchrunner.output.arrow_arrays import arrow_array

CUSTOM_ID, URL, BODY = "custom_id", "url", "body"
"""Columns of a batch file."""
BatchHow: TypeAlias = Literal["strict", "lenient"]
"""What becomes of a line that is no request, `prompt.batch` of a job."""
SHOWN_CHARACTERS = 60
"""Most characters of a wrong value in a message."""


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: str | None = None


class BatchLine(NamedTuple):
    """What a line says, as far as it can be read."""

    custom_id: str | None
    url: str | None = None
    body: str | None = None
    model: str | None = None
    problem: str | None = None
    """Why it is no request that can be sent; None for one that can."""


_read_line = msgspec.json.Decoder(_Line)
_read_body = msgspec.json.Decoder(_Body)


class _NotARequestError(Exception):
    """A line is no request that can be sent; the text says why."""


def line_of(text: bytes) -> BatchLine:
    """Read a line of a batch file."""
    custom_id = None
    try:
        line = _decoded(text)
        custom_id = _checked_id(line.custom_id)
        _check_target(line)
        body, model = _checked_body(bytes(line.body))
    except _NotARequestError as problem:
        return BatchLine(custom_id, problem=str(problem))
    return BatchLine(custom_id, line.url, body, model)


def _decoded(text: bytes) -> _Line:
    try:
        text.decode()
        return _read_line.decode(text)
    except UnicodeDecodeError as failure:
        problem = f"byte {failure.start + 1} is not UTF-8: write the file as UTF-8"
    except msgspec.ValidationError:
        way_out = "; jq -c '.[]' makes lines of an array" if text[:1] == b"[" else ""
        problem = f"not a JSON object (got {_shown(text)}){way_out}"
    except msgspec.DecodeError as failure:
        problem = f"not valid JSON: {failure} (got {_shown(text)})"
    except RecursionError:
        problem = "not valid JSON: it is nested too deeply"
    raise _NotARequestError(problem)


def _checked_id(custom_id: Any) -> str:
    if not isinstance(custom_id, str) or not custom_id:
        raise _NotARequestError(f"custom_id should be a text that names the request (got {_json(custom_id)})")
    return custom_id


def _check_target(line: _Line) -> None:
    if line.method != "POST":
        raise _NotARequestError(f"method should be POST (got {_json(line.method)})")
    paths = " or ".join(BATCH_PATHS)
    if line.url not in BATCH_PATHS:
        raise _NotARequestError(f"url should be {paths} (got {_json(line.url)})")


def _checked_body(body: bytes) -> tuple[str, str | None]:
    try:
        return body.decode(), _read_body.decode(body).model
    except msgspec.DecodeError:
        wanted = "body.model should be a text" if body[:1] == b"{" else "body should be an object"
        raise _NotARequestError(f"{wanted} (got {_shown(body) or 'nothing'})") from None


class BatchLines:
    """The records of a batch file: columns `custom_id`, `url`, and `body` as JSON text."""

    def __init__(self, path: str, how: BatchHow) -> None:
        """Take the path of the file, for messages."""
        self._path = path
        self._how = how
        self._embeds: bool | None = None  # whether the first request asks for vectors
        self._repeated = BitMap64()  # lines whose custom_id an earlier line has

    @property
    def schema(self) -> pa.Schema:
        """The three columns."""
        return pa.schema([(name, pa.string()) for name in (CUSTOM_ID, URL, BODY)])

    def skim(self, lines: Lines) -> Iterator[None]:
        """Check all lines.

        Raises InputError for a file whose requests ask for several models, and where a line is no request,
        has the custom_id of another one, or asks for what the model of the others cannot do, unless bad lines
        are to fail.
        """
        bad = _BadLines()
        model: tuple[str, int] | None = None
        ids = UniqueIds()
        try:
            for text in lines:
                number = lines.number - 1
                if not text.strip():
                    continue
                line = self._of_one_kind(line_of(text.strip()))
                if line.custom_id is not None:
                    ids.add(line.custom_id, number)
                if line.problem is not None:
                    bad.add(number, line.problem)
                elif line.model is not None:
                    model = model or (line.model, number)
                    self._check_model(line.model, number, *model)
                yield
            self._repeated = ids.repeated()
        finally:
            ids.close()
        for number in self._repeated[:1]:
            bad.add(number, "its custom_id stands on an earlier line", count=len(self._repeated))
        if self._how == "strict" and bad.count:
            raise InputError(
                f"{self._path}: {bad.first}{bad.more}",
                hint="correct the file, or --skip-bad-lines lets such lines fail alone",
            )

    def parse(self, lines: Lines, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the lines as rows with these columns, and PROBLEM."""
        found = [self._row(lines.number - 1, text.strip()) for text in lines if text.strip()]
        arrays = [arrow_array([getattr(line, name) for line in found], pa.string()) for name in columns]
        problems = arrow_array([line.problem for line in found], pa.string())
        return pa.record_batch([*arrays, problems], names=[*columns, PROBLEM])

    def _row(self, number: int, text: bytes) -> BatchLine:
        line = self._of_one_kind(line_of(text))
        if line.problem is None and number in self._repeated:
            line = line._replace(problem="its custom_id stands on an earlier line")
        if line.problem is None:
            return line
        return line._replace(problem=f"{self._path}: line {number}: {line.problem}")

    def _of_one_kind(self, line: BatchLine) -> BatchLine:
        """Return a line, with a problem where it needs another kind of model than the first request."""
        if line.problem is not None:
            return line
        embeds = line.url == EMBEDDINGS_PATH
        if self._embeds is None:
            self._embeds = embeds
        if embeds == self._embeds:
            return line
        others = f"and earlier lines are{' ' if self._embeds else ' not '}for {EMBEDDINGS_PATH}"
        return line._replace(problem=f"url: it is for {line.url}, {others}: one model cannot do both")

    def _check_model(self, name: str, number: int, first: str, first_number: int) -> None:
        if name != first:
            raise InputError(
                f"{self._path}: line {first_number} asks for the model {_shown(first.encode())}, "
                f"line {number} for {_shown(name.encode())}",
                hint="a batch has one model: divide the file",
            )


class _BadLines:
    """How many lines are wrong, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self._first: tuple[int, str] | None = None

    def add(self, number: int, problem: str, count: int = 1) -> None:
        """Count lines, the first of which is the one with this number."""
        self.count += count
        if self._first is None or number < self._first[0]:
            self._first = number, problem

    @property
    def first(self) -> str:
        """What is wrong with the first of them."""
        assert self._first is not None
        return f"line {self._first[0]}: {self._first[1]}"

    @property
    def more(self) -> str:
        """How many others there are."""
        others = self.count - 1
        return f" (and {others} more bad lines)" if others else ""


def _shown(text: bytes) -> str:
    shown = text.decode(errors="replace")
    end = "…" if len(shown) > SHOWN_CHARACTERS else ""
    one_line = [char if char.isprintable() else repr(char)[1:-1] for char in shown[:SHOWN_CHARACTERS]]
    return "".join(one_line) + end


def _json(value: Any) -> str:
    return "nothing" if value is None else _shown(msgspec.json.encode(value))
