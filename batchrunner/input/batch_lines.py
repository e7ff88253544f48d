"""Batch files in OpenAI's format: each line is a whole request, with an ID for its answer.

`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec
import pyarrow as pa

from batchrunner.core.errors import InputError
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.input.request_bodies import BODY, URL
from batchrunner.input.text_files import Record, batch_of, in_chunks

CUSTOM_ID = "custom_id"
"""Column of the IDs."""
BatchHow: TypeAlias = Literal["strict", "lenient"]
"""What becomes of a line that is no request: its file is refused, or it fails alone."""
MEMORY = "128MB"
"""Memory limit of duckdb, which compares the IDs."""
_COLUMNS = [CUSTOM_ID, URL, BODY]
_FIRST_REPEATED = """
SELECT min(line), max(line) FROM ids GROUP BY id HAVING count(*) > 1 ORDER BY max(line) LIMIT 1
"""


class _Named(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]


class _Line(_Named):
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str | None = None


_read_name = msgspec.json.Decoder(_Named)
_read_line = msgspec.json.Decoder(_Line)
_read_body = msgspec.json.Decoder(_Body)


def batches_of_requests(lines: Iterable[bytes], path: str, how: BatchHow) -> Iterator[pa.RecordBatch]:
    """Yield the lines of a batch file as rows: `custom_id`, `url`, `body` as JSON text, and PROBLEM.

    Raises InputError for a file whose requests ask for several models, and with "strict" where a line is no
    request, or has the custom_id of another one.
    """
    import duckdb  # noqa: PLC0415 - 25 MB

    kinds = [pa.string()] * len(_COLUMNS)
    with (
        tempfile.TemporaryDirectory(prefix="batchrunner-ids-") as spilled,
        duckdb.connect(config={"memory_limit": MEMORY, "threads": 1, "temp_directory": spilled}) as ids,
    ):
        ids.execute("CREATE TABLE ids (id VARCHAR, line BIGINT)")
        yield batch_of(path, [], _COLUMNS, [[], [], []], kinds)
        for chunk in in_chunks(_records(lines, path)):
            if how == "strict" and (bad := next((record for record in chunk if record[2]), None)):
                raise _refused(path, bad[0], f"{bad[2]}")
            columns = list(zip(*(values for _, values, _, _ in chunk), strict=True))
            known = pa.table(
                [pa.array(columns[0], pa.string()), [line for line, *_ in chunk]], ["id", "line"]
            )
            ids.execute("INSERT INTO ids SELECT * FROM known")
            del known
            yield batch_of(path, chunk, _COLUMNS, columns, kinds)
        repeated = ids.execute(_FIRST_REPEATED).fetchone() if how == "strict" else None
    if repeated:
        raise _refused(path, repeated[1], f"line {repeated[0]} has the same custom_id")


def _refused(path: str, line: int, problem: str) -> InputError:
    return InputError(
        f"{path}: line {line}: {problem}",
        hint="correct the file, or --skip-bad-lines lets such lines fail alone",
    )


def _records(lines: Iterable[bytes], path: str) -> Iterator[Record]:
    """Yield the ID, endpoint and body of each line."""
    embeds: bool | None = None  # whether the requests are for vectors
    first: tuple[str, int] | None = None  # model that is asked for, and the line
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            request, model = _request_in(text, embeds)
        except (ValueError, RecursionError) as failure:  # among them those of msgspec, and of UTF-8
            array = "; jq -c '.[]' makes lines of an array" if text.startswith(b"[") else ""
            yield number, (_id_in(text), None, None), f"not a request: {failure}{array}", len(line)
            continue
        embeds = request.url == EMBEDDINGS_PATH
        first = first or (model and (model, number)) or None
        if first and model and model != first[0]:
            raise InputError(
                f"{path}: line {first[1]} asks for the model {first[0]!r}, line {number} for {model!r}",
                hint="a batch has one model: divide the file",
            )
        yield number, (request.custom_id, request.url, bytes(request.body).decode()), None, len(line)


def _request_in(text: bytes, embeds: bool | None) -> tuple[_Line, str | None]:
    """Return the request on a line, and the model that it names; raises ValueError or RecursionError.

    `embeds` says whether requests must be for vectors; None where any may come.
    """
    text.decode()
    found = _read_line.decode(text)
    if found.url not in BATCH_PATHS:
        raise ValueError(f"url should be {' or '.join(BATCH_PATHS)} (got {found.url!r:.60})")
    if embeds is not None and embeds != (found.url == EMBEDDINGS_PATH):
        raise ValueError("one model makes no embeddings and answers")
    return found, _read_body.decode(found.body).model


def _id_in(text: bytes) -> str | None:
    """Return the custom_id of a line that is no request otherwise."""
    try:
        return _read_name.decode(text).custom_id
    except (ValueError, RecursionError):
        return None
