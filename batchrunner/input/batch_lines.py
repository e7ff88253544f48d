"""Batch files in OpenAI's format: each line is a whole request, with an ID for its answer.

`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import InputError
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.input.parquet_copy import PROBLEM
from batchrunner.input.request_bodies import BODY, URL
from batchrunner.input.text_files import Record, in_chunks

CUSTOM_ID = "custom_id"
"""Column of the IDs."""
BatchHow: TypeAlias = Literal["strict", "lenient"]
"""What becomes of a line that is no request: its file is refused, or it fails alone."""
SHOWN_CHARACTERS = 60
"""Most characters of a wrong value in a message."""
MEMORY = "128MB"
"""Memory limit of duckdb, which compares the IDs."""
_REPEATED = """
SELECT line FROM ids JOIN (SELECT id, min(line) AS first FROM ids GROUP BY id HAVING count(*) > 1) USING (id)
WHERE line > first
"""


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: str | None = None


_read_line = msgspec.json.Decoder(_Line)
_read_body = msgspec.json.Decoder(_Body)


class _NotARequestError(Exception):
    """A line is no request that can be sent; the text says why."""


class BatchFile:
    """Makes rows of the lines of a batch file: `custom_id`, `url`, and `body` as JSON text."""

    def __init__(self, path: str, how: BatchHow) -> None:
        """Take the path of the file, for messages."""
        self._path = path
        self._how = how
        self._first_url: str | None = None
        self._model: tuple[str, int] | None = None  # with the line that asks for it
        self._lines = BitMap64()  # that are rows
        self._bad: list[tuple[int, str]] = []
        self._bad_count = 0
        self._repeated = BitMap64()  # lines whose custom_id an earlier line has
        self._finished = 0

    def batches(self, lines: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, and look for IDs that stand on several lines.

        Raises InputError for a file whose requests ask for several models, and where a line is no request,
        has the custom_id of another one, or asks for what the model of the others cannot do, unless bad lines
        are to fail.
        """
        import duckdb  # noqa: PLC0415 - 25 MB

        names = [CUSTOM_ID, URL, BODY]
        with (
            tempfile.TemporaryDirectory(prefix="batchrunner-ids-") as spilled,
            duckdb.connect(config={"memory_limit": MEMORY, "threads": 1, "temp_directory": spilled}) as ids,
        ):
            ids.execute("CREATE TABLE ids (id VARCHAR, line BIGINT)")
            yield pa.RecordBatch.from_arrays([pa.nulls(0, pa.string())] * 4, names=[*names, PROBLEM])
            for chunk in in_chunks(self._records(lines)):
                numbers = [line for line, *_ in chunk]
                self._lines.update(numbers)
                columns = [
                    pa.array(column, pa.string())
                    for column in zip(*(values for _, values, _, _ in chunk), strict=True)
                ]
                known = pa.table([columns[0], pa.array(numbers)], names=["id", "line"])
                ids.execute("INSERT INTO ids SELECT * FROM known WHERE id IS NOT NULL")
                del known
                problems = pa.array(
                    [problem and self._told(line, problem) for line, _, problem, _ in chunk], pa.string()
                )
                yield pa.RecordBatch.from_arrays([*columns, problems], names=[*names, PROBLEM])
            for batch in ids.sql(_REPEATED).to_arrow_reader():
                self._repeated.update(batch.column(0).to_pylist())
        for line in self._repeated[:1]:
            self._bad.append((line, _IS_REPEATED))
        if self._how == "strict" and self._bad:
            others = self._bad_count + len(self._repeated) - 1
            raise InputError(
                self._told(*min(self._bad)) + (f" (and {others} more bad lines)" if others else ""),
                hint="correct the file, or --skip-bad-lines lets such lines fail alone",
            )

    def finish(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch, of which the next one is next, with what is known once all lines were read."""
        lines = self._lines[self._finished : self._finished + batch.num_rows]
        self._finished += batch.num_rows
        if lines.isdisjoint(self._repeated):
            return batch
        *columns, problems = batch.columns
        told = [
            problem or (self._told(line, _IS_REPEATED) if line in self._repeated else None)
            for line, problem in zip(lines, problems.to_pylist(), strict=True)
        ]
        return pa.RecordBatch.from_arrays([*columns, pa.array(told, pa.string())], schema=batch.schema)

    def _records(self, lines: Iterable[bytes]) -> Iterator[Record]:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            custom_id, url, body, problem = None, None, None, None
            try:
                found = _decoded(text)
                custom_id = _checked_id(found.custom_id)
                url = self._checked_url(found)
                body = self._checked_body(bytes(found.body), number)
            except _NotARequestError as failure:
                problem = str(failure)
                if not self._bad:
                    self._bad.append((number, problem))
                self._bad_count += 1
            yield number, (custom_id, url, body), problem, len(line)

    def _told(self, line: int, problem: str) -> str:
        return f"{self._path}: line {line}: {problem}"

    def _checked_url(self, line: _Line) -> str:
        if line.method != "POST":
            raise _NotARequestError(f"method should be POST (got {_json(line.method)})")
        if line.url not in BATCH_PATHS:
            raise _NotARequestError(f"url should be {' or '.join(BATCH_PATHS)} (got {_json(line.url)})")
        url = str(line.url)
        self._first_url = self._first_url or url
        embeds = self._first_url == EMBEDDINGS_PATH
        if (url == EMBEDDINGS_PATH) != embeds:
            others = f"and earlier lines are{' ' if embeds else ' not '}for {EMBEDDINGS_PATH}"
            raise _NotARequestError(f"url: it is for {url}, {others}: one model cannot do both")
        return url

    def _checked_body(self, body: bytes, number: int) -> str:
        try:
            model = _read_body.decode(body).model
        except msgspec.DecodeError:
            wanted = "body.model should be a text" if body[:1] == b"{" else "body should be an object"
            raise _NotARequestError(f"{wanted} (got {_shown(body) or 'nothing'})") from None
        if model is not None:
            self._model = self._model or (model, number)
            if model != self._model[0]:
                raise InputError(
                    f"{self._path}: line {self._model[1]} asks for the model "
                    f"{_shown(self._model[0].encode())}, line {number} for {_shown(model.encode())}",
                    hint="a batch has one model: divide the file",
                )
        return body.decode()


_IS_REPEATED = "its custom_id stands on an earlier line"


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


def _shown(text: bytes) -> str:
    shown = text.decode(errors="replace")
    end = "…" if len(shown) > SHOWN_CHARACTERS else ""
    one_line = [char if char.isprintable() else repr(char)[1:-1] for char in shown[:SHOWN_CHARACTERS]]
    return "".join(one_line) + end


def _json(value: Any) -> str:
    return "nothing" if value is None else _shown(msgspec.json.encode(value))
