"""Writes the results of a batch file in OpenAI's format: one line per request, in the same order."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchrunner.core.errors import NoResultYetError, OutputError, StorageError, status_in
from batchrunner.core.files import COMPRESSIONS, known_format
from batchrunner.job.output import RESPONSE
from batchrunner.output.buckets import release_unused
from batchrunner.output.export import CHUNK_ROWS, open_to_write
from batchrunner.output.files import file_to_write, json_line, make_directory, whole_file, writing
from batchrunner.output.merge import durable_results, in_order, work_directory
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import read_run_json, require_run_json

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
LINE_COLUMNS = ["row", "custom_id", "attempts", "error", *TOKENS, RESPONSE]
"""Columns of the part files (Parquet files of results) from which the result lines are made."""
RESULT_BUCKET_BYTES = 16 << 20
"""Approximate maximum size in bytes of the results that are sorted in memory at a time.

It is smaller than BUCKET_BYTES of `merge`, because the engine and other batches need memory at the same time.
"""
ID_BYTES = 16
EXPIRED = "This request could not be executed before the completion window expired."
CANCELLED = "This request was not executed: the batch was cancelled."
_CODES = {EXPIRED: "batch_expired", CANCELLED: "batch_cancelled"}
"""OpenAI's error codes of requests that were not executed because the batch ended early."""


def results_path(name: str, option: str) -> Path:
    """Return the path of a results file. Raises OutputError, whose message begins with `option`."""
    if name == "-":
        raise OutputError(f"{option} -: results cannot be written to standard output", hint="give a file")
    file_format = known_format(name)
    if file_format is not None and file_format.kind != "JSON Lines":
        raise OutputError(
            f"{option} {name}: results are JSON Lines, not {file_format.kind}", hint="use the ending .jsonl"
        )
    return file_to_write(name, f"{option} {name}")


class Published(NamedTuple):
    """Totals of the lines that were written for a batch file."""

    usage: dict[str, Any]
    """Total tokens of all lines, with the field names of OpenAI's `usage`."""
    completed: int
    failed: int


def publish(
    run_dir: RunDir,
    results: Path,
    errors: Path | None,
    *,
    unanswered: Iterable[tuple[str | None, str]] | None = None,
) -> Published | None:
    """Write a result line for each request; return None, without files, if requests lack a result.

    Failed requests go to `errors` if it is given, all others to `results`. Each file appears when it is
    complete, and replaces an older file of its name. For a batch that ended early, `unanswered` has the
    custom_id and an error of each request, in the order of the batch file. A request without a result then
    gets that error. Raises StorageError if a file cannot be written, and ResumeError if a part file is
    damaged.
    """
    release_unused()  # Arrow's pool still keeps memory of the run that has just ended.
    run_json = require_run_json(run_dir) if unanswered is None else read_run_json(run_dir)
    # A batch that was cancelled before its run began has no run.json, and so no digest of the input. The
    # directory's name replaces it.
    digest = run_json["fingerprint"]["files"][0]["digest"] if run_json else run_dir.name
    errors = errors or results
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(writing(run_dir.path))
            make_directory(run_dir.path)
            work = stack.enter_context(work_directory(run_dir, run_dir.path))
            # `errors` may be the same file as `results`, hence a set.
            files = {path: stack.enter_context(_result_file(path)) for path in {results, errors}}
            rows = _result_rows(run_dir, work) if run_json else iter(())
            if unanswered is not None:
                rows = _with_unanswered(rows, unanswered)
            published = _write_lines(rows, digest, files, results=results, errors=errors)
            if run_json and published.completed + published.failed < run_json["rows_total"]:
                # This exception leaves the `with` block, which deletes the incomplete files.
                raise NoResultYetError  # noqa: TRY301
    except NoResultYetError:
        return None
    except OutputError as failure:
        # An OutputError means that temporary files could not be written. The disk is at fault, not the paths
        # of the batch.
        raise StorageError(failure.message, hint=failure.hint) from None
    return published


def _write_lines(
    rows: Iterator[dict[str, Any]], digest: str, files: dict[Path, Any], *, results: Path, errors: Path
) -> Published:
    """Write each row's line to one of the open `files`; return the totals.

    The line of a row with an error goes to `files[errors]`, any other line to `files[results]`.
    """
    total, failed, tokens = 0, 0, Counter[str]()
    while chunk := [*islice(rows, CHUNK_ROWS)]:
        lines: dict[Path, list[bytes]] = {path: [] for path in files}
        for row in chunk:
            tokens.update({name: row[name] or 0 for name in TOKENS})
            path = results if row["error"] is None else errors
            lines[path].append(json_line(_result_line(row, digest)))
            failed += row["error"] is not None
        total += len(chunk)
        for path, file in files.items():
            with writing(path):
                file.writelines(lines[path])
    return Published(_usage(tokens), completed=total - failed, failed=failed)


def _result_rows(run_dir: RunDir, work: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of a batch file that are on disk, in input order; nothing if there are none yet."""
    try:
        parts = durable_results(run_dir, work)
    except NoResultYetError:
        return
    tables = in_order(run_dir, parts, work, columns=LINE_COLUMNS, bucket_bytes=RESULT_BUCKET_BYTES)
    for table in tables:
        for batch in table.to_batches(CHUNK_ROWS):
            yield from batch.to_pylist()


def _with_unanswered(
    results: Iterator[dict[str, Any]], errors_if_unanswered: Iterable[tuple[str | None, str]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each request of a batch file: its result, or else its error.

    `errors_if_unanswered` has the custom_id of each request, and the error if it has no result. Both
    arguments are in the order of the batch file.
    """
    result = next(results, None)
    for number, (custom_id, error) in enumerate(errors_if_unanswered):
        if result is not None and result["row"] == number:
            yield result
            result = next(results, None)
        else:
            blank = dict.fromkeys(LINE_COLUMNS)
            yield {**blank, "row": number, "custom_id": custom_id, "attempts": 0, "error": error}


def _usage(tokens: Counter[str]) -> dict[str, Any]:
    """Return token totals with the field names of OpenAI's `usage`."""
    input_tokens, cached_tokens, output_tokens = (tokens[name] for name in TOKENS)
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        # OpenAI's format has this field, but the results do not count reasoning tokens separately.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


@contextlib.contextmanager
def _result_file(path: Path) -> Iterator[Any]:
    """Open a results file, which appears if the block succeeds. Its ending selects the compression."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    with (
        writing(path),
        whole_file(path, secrets.token_hex(4)) as temporary,
        open_to_write(temporary, compression) as stream,
    ):
        yield stream


def _result_line(row: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return the result line of a row. Its ID depends only on the row and on the input file's `digest`."""
    number = blake2b(f"{digest} {row['row']}".encode(), digest_size=ID_BYTES).hexdigest()
    status, body, error = HTTPStatus.OK.value, row[RESPONSE], None
    if row["error"] is not None:
        status, body, error = _failure(row)
    elif body is not None:
        body = orjson.Fragment(body)  # The body is already JSON.
    response = {"status_code": status, "request_id": f"req_{number}", "body": body}
    return {
        "id": f"batch_req_{number}",
        "custom_id": row["custom_id"],
        "response": response if status else None,
        "error": error,
    }


def _failure(row: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    """Return HTTP status, response body and error of a failed row; the status is 0 if no server answered."""
    error = row["error"]
    status, message = status_in(error)
    # A row without an attempt was invalid. With a status below 500, the server refused the row; 0 means that
    # no server answered.
    is_refused = row["attempts"] == 0 or 0 < status < HTTPStatus.INTERNAL_SERVER_ERROR
    code = _CODES.get(error) or ("invalid_request" if is_refused else "request_failed")
    body = _error_body(
        orjson.loads(row[RESPONSE] or "null"), {"message": message, "type": code, "code": status}
    )
    return status, body, {"code": code, "message": error}


def _error_body(body: Any, error: dict[str, Any]) -> Any:
    """Return the response body of a failed request in OpenAI's format, with an object `error`.

    An error in the body itself is kept. Otherwise the argument `error` is added.
    """
    if not isinstance(body, dict):
        return {"error": error}
    if isinstance(body.get("error"), dict):
        return body
    if isinstance(body.get("message"), str):  # SGLang puts the fields of the error at the top level.
        return {"error": body}
    return {**body, "error": error}
