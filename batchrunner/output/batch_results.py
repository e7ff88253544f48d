"""The results of a batch file in OpenAI's format: one line for each request, in the order of the requests."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterator
from hashlib import blake2b
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from batchrunner.core.errors import NoPartYetError, OutputError, ResumeError, StorageError
from batchrunner.core.files import COMPRESSIONS, known_format
from batchrunner.job.output import RESPONSE
from batchrunner.output.buckets import release_unused
from batchrunner.output.files import file_to_write, whole_file, writing
from batchrunner.output.merge import finished_parts, in_order
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import require_run_json

COLUMNS = ["row", "custom_id", "attempts", "error", RESPONSE]
"""Columns of the parts that are read."""
LINES = 1024
"""Lines that are Python values at once."""
BUCKET_BYTES = 16 << 20
"""Approximate bytes of the answers that are put in order at once: less than `merge` takes, since the engine's
and the rows' memory is still there."""
ID_BYTES = 16
_STATUS = re.compile(r"(\d{3}): (.*)", re.DOTALL)
"""An error that a server answered with: its status and its sentence."""


class _RowsMissingError(Exception):
    """The parts do not have all rows yet."""


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class _Error(msgspec.Struct):
    code: str
    message: str


class _ResultLine(msgspec.Struct):
    """A line of the results."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


def results_path(given: str, option: str) -> Path:
    """Return the path of a file that results can be written to; raises OutputError, naming the `option`."""
    if given == "-":
        raise OutputError(f"{option} -: standard output cannot be published whole", hint="give a file")
    form = known_format(given)
    if form is not None and form.kind != "JSON Lines":
        raise OutputError(
            f"{option} {given}: results are JSON Lines, not {form.kind}", hint="take the ending .jsonl"
        )
    return file_to_write(given, f"{option} {given}")


def publish(run_dir: RunDir, results: Path, errors: Path | None) -> bool:
    """Write the results of a run, each file whole when it appears; return False while rows are missing.

    Lines that failed go to `errors`, or to the `results` where that is None. Existing files are replaced.
    Raises StorageError, or ResumeError where a part is damaged.
    """
    release_unused()  # of the run before
    facts = require_run_json(run_dir)
    ids = _Ids(facts["fingerprint"]["files"][0]["digest"])
    work = run_dir.path / f".publish-{secrets.token_hex(4)}"
    try:
        with writing(run_dir.path):
            work.mkdir()
        with _sink(results) as good, _sink(errors) if errors else contextlib.nullcontext(good) as bad:
            rows = 0
            for row in _rows(run_dir, work):
                rows += 1
                line = _line(row, ids)
                (good if line.error is None else bad).write(msgspec.json.encode(line) + b"\n")
            _require_all(rows, facts["rows_total"])
    except (_RowsMissingError, NoPartYetError):  # a task that is at work writes its parts at its end
        return False
    except OutputError as failure:  # the work directory: what is to be done is the same as for the results
        raise StorageError(failure.message, hint=failure.hint) from None
    except (KeyError, pa.ArrowException) as failure:  # for example parts of another run
        reason = str(failure).splitlines()[0]
        raise ResumeError(f"{run_dir.parts}: cannot be published: {reason}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _require_all(rows: int, total: int) -> None:
    if rows < total:
        raise _RowsMissingError


class _Sink:
    """A file of results; what fails in writing it names it."""

    def __init__(self, path: Path, stream: Any) -> None:
        self._path = path
        self._stream = stream

    def write(self, line: bytes) -> None:
        """Write a line; raises StorageError."""
        with writing(self._path):
            self._stream.write(line)


@contextlib.contextmanager
def _sink(path: Path) -> Iterator[_Sink]:
    """Open a file to write, compressed if its ending says so; it appears when it is whole."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    with writing(path), whole_file(path, secrets.token_hex(4)) as temporary, temporary.open("wb") as file:
        if compression is None:
            yield _Sink(path, file)
        else:
            with pa.CompressedOutputStream(pa.PythonFile(file, "w"), compression) as stream:
                yield _Sink(path, stream)


def _rows(run_dir: RunDir, work: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts in input order, each once."""
    last = -1
    for table in in_order(run_dir, finished_parts(run_dir), work, COLUMNS, bucket_bytes=BUCKET_BYTES):
        for batch in table.to_batches(max_chunksize=LINES):
            for row in batch.to_pylist():
                if row["row"] != last:  # two parts may hold a row
                    last = row["row"]
                    yield row


class _Ids:
    """Makes the IDs of lines, which are the same whenever they are made for the same file."""

    def __init__(self, digest: str) -> None:
        self._digest = digest

    def of(self, row: int) -> str:
        """Return the ID of a line, in hexadecimal digits."""
        return blake2b(f"{self._digest} {row}".encode(), digest_size=ID_BYTES).hexdigest()


def _line(row: dict[str, Any], ids: _Ids) -> _ResultLine:
    number = ids.of(row["row"])
    name, request, error = f"batch_req_{number}", f"req_{number}", row["error"]
    if error is None:
        body = msgspec.Raw(row[RESPONSE].encode())
        return _ResultLine(name, row["custom_id"], _Response(HTTPStatus.OK, request, body), None)
    answered = _STATUS.fullmatch(error)
    status, said = (int(answered[1]), answered[2]) if answered else (None, error)
    refused = row["attempts"] == 0 or (status is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR)
    code = "invalid_request" if refused else "request_failed"
    response = None
    if status is not None:
        response = _Response(status, request, _error_body(row[RESPONSE], status, said, code))
    return _ResultLine(name, row["custom_id"], response, _Error(code, error))


def _error_body(own: str | None, status: int, said: str, code: str) -> Any:
    """Return the body of an error as OpenAI writes it, with all that the server's own body says.

    SGLang's own body is what stands below `error` there.
    """
    found = None if own is None else msgspec.json.decode(own)
    error = {"message": said, "type": code, "code": status}
    if not isinstance(found, dict):
        return {"error": error}
    if isinstance(found.get("error"), dict):
        return found
    if isinstance(found.get("message"), str):
        return {"error": found}
    return {**found, "error": error}
