"""Merges the results of a run into one dataset, file or batch file, in input order and bounded memory."""

import base64
import contextlib
import functools
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from hashlib import blake2b
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt
from pyroaring import BitMap64

from batchrunner.core.errors import NoResultYetError, OutputError, ResumeError, StorageError
from batchrunner.core.files import COMPRESSIONS, ENDINGS, FileFormat, known_format
from batchrunner.core.types import rows_of_column
from batchrunner.job.output import REQUEST_DIGEST, RESPONSE, RETURNED
from batchrunner.output.arrow_arrays import arrow_array, shown_values
from batchrunner.output.buckets import BUFFER_BYTES, Buckets, release_unused
from batchrunner.output.columns import kinds_returned, with_returned
from batchrunner.output.counts import with_counts
from batchrunner.output.files import (
    file_to_write,
    json_line,
    make_directory,
    sync_directory,
    whole_file,
    writing,
)
from batchrunner.output.parts import open_part, read_journal
from batchrunner.output.run_dir import RunDir, look_at_run
from batchrunner.output.run_json import read_run_json, require_run_json

BUCKET_ROWS = 100_000
"""Most rows in a bucket, which becomes a merged file."""
BUCKET_BYTES = 128 << 20
"""Approximate bytes of a bucket in memory."""
SAMPLED_PARTS = 32
"""Parts that are read to estimate the size of a row."""
CHUNK_ROWS = 1024
"""Rows that are Python values at once."""
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
RESULT_COLUMNS = ["row", "custom_id", "attempts", "error", *TOKENS, RESPONSE]
"""Columns of the parts that are read for the results of a batch file."""
RESULT_BUCKET_BYTES = 16 << 20
"""Approximate bytes of such results that are put in order at once: the engine's and the rows' memory is still
there."""
ID_BYTES = 16
_STATUS = re.compile(r"(\d{3}): (.*)", re.DOTALL)
"""An error that a server answered with: its status and its sentence."""


class Merged(NamedTuple):
    """What a merge wrote."""

    path: Path
    """Directory of the dataset, or the file."""
    rows: int
    """Rows of the input in it, each with all its samples."""


def merge(run: str | Path | RunDir, file: str | None = None, *, force: bool = False) -> Merged:
    """Write the durable rows of a run in input order to `merged/*.parquet` of the run, or to a file.

    The run may be at work. Rows are partitioned into buckets of consecutive ordinals, then each bucket is
    sorted: two passes over the data with one bucket in memory. The ending of `file` tells its format; it is
    whole when it appears, and replaces an existing file with `force` only. Raises NoResultYetError where no
    row is durable, OutputError where the path holds no run or nothing can be written, ResumeError where a
    part is damaged.
    """
    run_dir = look_at_run(run)
    form = _format(file) if file is not None else None
    target = run_dir.merged if file is None else file_to_write(file, force=force)
    if not run_dir.all_tasks():
        raise OutputError(
            f"{run_dir.name}: nothing to merge: not a run's output path, or no row has finished yet",
            hint="give the job's output.path, without /parts",
        )
    with writing(target, OutputError), _work_directory(run_dir, target.parent) as work:
        tables = in_order(run_dir, durable_results(run_dir, work), work)
        if form is not None:
            with whole_file(target, secrets.token_hex(4)) as temporary:
                return Merged(target, write_tables(tables, temporary, form))
        made, rows = work / "merged", 0
        made.mkdir()
        for index, table in enumerate(tables):
            pq.write_table(table, made / f"merged-{index:06d}.parquet", compression="zstd")
            rows += _distinct_rows(table)
        shutil.rmtree(run_dir.merged, ignore_errors=True)
        made.rename(run_dir.merged)
        sync_directory(run_dir.path)
        run_dir.store.publish_directory(run_dir.merged)
    return Merged(target, rows)


@contextlib.contextmanager
def _work_directory(run_dir: RunDir, place: Path) -> Iterator[Path]:
    """Give a directory in `place` for files that are gone afterwards.

    Raises OSError, or ResumeError where parts do not fit together.
    """
    work = place / f".merge-{secrets.token_hex(4)}"
    try:
        work.mkdir()
        yield work
    except (KeyError, ValueError, pa.ArrowException) as failure:  # for example parts of another run
        raise ResumeError(f"{run_dir.parts}: cannot be merged: {str(failure).splitlines()[0]}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _format(file: str) -> FileFormat:
    found = known_format(file)
    if found is None:
        endings, compressions = ", ".join(ENDINGS), ", ".join(COMPRESSIONS)
        raise OutputError(
            f"{file}: its ending names no format",
            hint=f"give one of {endings}; all but .parquet may end with {compressions}",
        )
    return found


def durable_results(run_dir: RunDir, work: Path) -> list[Path]:
    """Return the parts of a run, and copies of the journals as parts in the directory `work`.

    Some rows may be in two of these files. Tasks at work are not disturbed. Raises OSError where a copy
    cannot be written, NoResultYetError where no row is durable.
    """
    copies = []
    # A journal may become a part at any moment: its rows are in what is listed later.
    for task in run_dir.all_tasks():
        for journal in task.journals():
            with contextlib.suppress(FileNotFoundError):
                if tables := [*read_journal(journal)]:
                    copies.append(work / f"{task.task}-{journal.name}.parquet")
                    pq.write_table(pa.concat_tables(tables), copies[-1], compression="zstd")
    run_dir.bring_results()
    results = [*run_dir.all_parts(), *copies]
    if not results:
        raise NoResultYetError(
            f"{run_dir.name}: no row is on disk yet",
            hint="wait for the run if it is at work, else run the same command again; then merge again",
        )
    return results


def in_order(
    run_dir: RunDir,
    parts: list[Path],
    work: Path,
    columns: list[str] | None = None,
    *,
    bucket_bytes: int | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of parts of a run as tables in input order, each of bounded size.

    Where two parts have a row, the first one's results are taken. A table has about `bucket_bytes` at most,
    by default BUCKET_BYTES; memory is about three times as much. `work` takes files meanwhile; `columns` are
    those to read, by default all. Raises OutputError where these files cannot be written, ArrowException,
    KeyError or ResumeError.
    """
    bucket_bytes = bucket_bytes or BUCKET_BYTES
    rows = _bucket_rows(parts, columns, bucket_bytes)
    ends = range(rows, sys.maxsize, rows)
    buckets = Buckets(work, "row", ends, min(BUFFER_BYTES, bucket_bytes))
    schema = _common_schema(parts, columns)
    with writing(run_dir.path, OutputError):
        earlier = BitMap64()
        for part in parts:
            table = _without_rows(_with_all_columns(_read(part, columns), schema), earlier)
            earlier |= rows_of_column(table.column("row"))
            buckets.put(table)
    tables = buckets.take()
    returned = (_read(part, [RETURNED]) for part in parts)
    kinds = kinds_returned(returned) if RETURNED in schema.names else None
    while True:
        with writing(run_dir.path, OutputError):
            table = next(tables, None)
        if table is None:
            return
        yield with_counts(table if kinds is None else with_returned(table, kinds), None)


def merged_rows(run_dir: RunDir) -> int:
    """Return how many rows of the input are merged: a run may have been merged before its end.

    Raises ResumeError where a merged file is damaged.
    """
    return sum(_distinct_rows(_read(file, ["row"])) for file in run_dir.merged.glob("*.parquet"))


def _distinct_rows(table: pa.Table) -> int:
    """Return how many rows of the input a table of results has."""
    return int(pc.count_distinct(table.column("row")).as_py())


def _common_schema(parts: list[Path], columns: list[str] | None) -> pa.Schema:
    """Return these columns of all parts, by default all but the digests, those of the first part first."""
    schemas: list[pa.Schema] = []
    for part in parts:
        with _opened(part) as file:
            schemas.append(file.schema_arrow)
    schema = pa.unify_schemas(schemas)  # starts of a run may differ in them
    fields = [field for field in schema if field.name in (columns or {*schema.names} - {REQUEST_DIGEST})]
    return pa.schema(fields, metadata=schema.metadata)


def _with_all_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns of a schema, null where it had none; raises KeyError for no part."""
    if "row" not in table.schema.names:
        raise KeyError("a part lacks the column 'row'")
    table = table.select([name for name in schema.names if name in table.schema.names])
    return pa.concat_tables([pa.Table.from_batches([], schema), table], promote_options="default")


def _without_rows(table: pa.Table, rows: BitMap64) -> pa.Table:
    """Return the results of all but some rows of the input."""
    repeated = rows_of_column(table.column("row")) & rows
    if not repeated:
        return table
    values = pa.array([*repeated], table.schema.field("row").type)
    return table.filter(pc.invert(pc.is_in(table.column("row"), value_set=values)))


def _bucket_rows(parts: list[Path], columns: list[str] | None, bucket_bytes: int) -> int:
    """Return the rows per bucket, estimated from some parts; footers count a repeated text only once."""
    rows = size = 1
    for part in parts[:: 1 + len(parts) // SAMPLED_PARTS]:
        table = _read(part, columns)
        rows, size = rows + table.num_rows, size + table.nbytes
    return max(1, min(BUCKET_ROWS, bucket_bytes * rows // size))


def _read(part: Path, columns: list[str] | None) -> pa.Table:
    with _opened(part) as file:
        return file.read(columns, use_threads=columns is None)  # each thread keeps memory


@contextlib.contextmanager
def _opened(part: Path) -> Iterator[pq.ParquetFile]:
    """Open a part; raises ResumeError where it is damaged or gone."""
    try:
        with open_part(part) as file:
            yield file
    except FileNotFoundError:
        raise ResumeError(
            f"{part}: is gone", hint="run the same command again, which does its rows again; then merge again"
        ) from None


def write_tables(tables: Iterator[pa.Table], path: Path, form: FileFormat) -> int:
    """Write tables of one schema to a file; return how many rows of the input they have. Raises OSError."""
    rows = 0
    write: Callable[[pa.Table], object] | None = None
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(_opened_to_write(path, form.compression))
        for table in tables:
            write = write or stack.enter_context(_writer(form, stream, table.schema))
            write(table)
            rows += _distinct_rows(table)
    return rows


@contextlib.contextmanager
def _opened_to_write(path: Path, compression: str | None) -> Iterator[Any]:
    with path.open("wb") as file:
        if compression is None:
            yield file
        else:
            with pa.CompressedOutputStream(pa.PythonFile(file, "w"), compression) as stream:
                yield stream


@contextlib.contextmanager
def _writer(form: FileFormat, stream: Any, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    """Give what writes a table in a format."""
    if form.kind == "Parquet":
        with pq.ParquetWriter(stream, schema, compression="zstd") as parquet:
            yield parquet.write_table
    elif form.kind == "Arrow":
        new = pa.ipc.new_stream if form.ending == ".arrows" else pa.ipc.new_file
        with new(stream, schema) as arrow:
            yield functools.partial(arrow.write_table, max_chunksize=8 * CHUNK_ROWS)
    elif form.kind == "JSON Lines":
        yield functools.partial(_write_lines, stream)
    else:
        from pyarrow import csv  # noqa: PLC0415 - only for this format

        kinds = pa.schema(
            [(each.name, each.type if _is_plain(each.type) else pa.string()) for each in schema]
        )
        options = csv.WriteOptions(delimiter="\t" if form.ending == ".tsv" else ",")
        with csv.CSVWriter(stream, kinds, write_options=options) as writer:
            yield functools.partial(_write_records, writer, kinds)


def _write_lines(stream: Any, table: pa.Table) -> None:
    """Write an object for each row, bytes as Base64."""
    for batch in table.to_batches(CHUNK_ROWS):
        columns = map(shown_values, batch.columns)
        rows = (dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True))
        stream.write(b"".join(json_line(row, _unusual, orjson.OPT_NON_STR_KEYS) for row in rows))


def _write_records(writer: Any, kinds: pa.Schema, table: pa.Table) -> None:
    """Write a CSV record for each row. Lists and structs are JSON, a null is an empty field."""
    for batch in table.to_batches(CHUNK_ROWS):
        columns = [
            column.cast(field.type)
            if _is_plain(column.type)
            else arrow_array([*map(_text, shown_values(column))], pa.string())
            for column, field in zip(batch.columns, kinds, strict=True)
        ]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=kinds))


def _is_plain(kind: pa.DataType) -> bool:
    """Tell whether pyarrow writes values of a type to CSV as a person expects them."""
    checks = (pt.is_integer, pt.is_floating, pt.is_boolean, pt.is_string, pt.is_date)
    return any(check(kind) for check in checks)


def _text(value: Any) -> str | None:
    """Return a value as a text: a text as it is, null as null, a list or struct as JSON."""
    if value is None or isinstance(value, str):
        return value
    written = _json(value).decode()
    return written if isinstance(value, (list, dict)) else written.strip('"')


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=_unusual, option=orjson.OPT_NON_STR_KEYS)


def _unusual(value: object) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


EXPIRED = "This request could not be executed before the completion window expired."
CANCELLED = "This request was not executed: the batch was cancelled."
_CODES = {EXPIRED: "batch_expired", CANCELLED: "batch_cancelled"}
"""OpenAI's codes for lines that were not answered when their batch ended early, by error."""


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


class Published(NamedTuple):
    """Totals of the lines that were written for a batch file."""

    usage: dict[str, Any]
    """Tokens of all lines, in OpenAI's form."""
    completed: int
    failed: int


def publish(
    run_dir: RunDir,
    results: Path,
    errors: Path | None,
    *,
    unanswered: Iterable[tuple[str | None, str]] | None = None,
) -> Published | None:
    """Write the results of a batch file as OpenAI does: a line for each request, in their order.

    Failed lines go to `errors`, or to `results` where that is None. Each file appears whole and replaces an
    existing one. Return None while results are missing. A batch that ended early gives `unanswered`: for each
    request of the file, in order, its custom_id and the error to write where it has no result. Raises
    StorageError, or ResumeError where a part is damaged.
    """
    release_unused()  # of the run before
    facts = require_run_json(run_dir) if unanswered is None else read_run_json(run_dir)
    # A batch that was cancelled before its run began has no run.json, and no results either.
    digest = facts["fingerprint"]["files"][0]["digest"] if facts else run_dir.name
    errors = errors or results
    total, failed, tokens = 0, 0, Counter[str]()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(writing(run_dir.path))
            make_directory(run_dir.path)
            work = stack.enter_context(_work_directory(run_dir, run_dir.path))
            files = {path: stack.enter_context(_result_file(path)) for path in {results, errors}}
            rows = _result_rows(run_dir, work) if facts else iter(())
            if unanswered is not None:
                rows = _with_unanswered(rows, unanswered)
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
            if facts and total < facts["rows_total"]:
                raise NoResultYetError  # noqa: TRY301 - so that the files do not appear
    except NoResultYetError:
        return None
    except OutputError as failure:  # the work directory: what is to be done is the same as for the results
        raise StorageError(failure.message, hint=failure.hint) from None
    prompt, cached, output = (tokens[name] for name in TOKENS)
    usage = {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": output, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }  # fmt: skip
    return Published(usage, completed=total - failed, failed=failed)


def _result_rows(run_dir: RunDir, work: Path) -> Iterator[dict[str, Any]]:
    """Yield the durable results of a batch file in input order; none where no row is durable."""
    try:
        parts = durable_results(run_dir, work)
    except NoResultYetError:
        return
    tables = in_order(run_dir, parts, work, RESULT_COLUMNS, bucket_bytes=RESULT_BUCKET_BYTES)
    for table in tables:
        for batch in table.to_batches(CHUNK_ROWS):
            yield from batch.to_pylist()


def _with_unanswered(
    results: Iterator[dict[str, Any]], unanswered: Iterable[tuple[str | None, str]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each request of a batch file: its result, or its error in `unanswered`."""
    result = next(results, None)
    for number, (custom_id, error) in enumerate(unanswered):
        if result is not None and result["row"] == number:
            yield result
            result = next(results, None)
        else:
            blank = dict.fromkeys(RESULT_COLUMNS)
            yield {**blank, "row": number, "custom_id": custom_id, "attempts": 0, "error": error}


@contextlib.contextmanager
def _result_file(path: Path) -> Iterator[Any]:
    """Open a file to write, compressed if its ending says so; it appears when it is whole."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    with (
        writing(path),
        whole_file(path, secrets.token_hex(4)) as temporary,
        _opened_to_write(temporary, compression) as stream,
    ):
        yield stream


def _result_line(row: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return the line of a row, whose ID is the same whenever it is made for the file of this digest."""
    number = blake2b(f"{digest} {row['row']}".encode(), digest_size=ID_BYTES).hexdigest()
    error, own, status, told = row["error"], row[RESPONSE], HTTPStatus.OK.value, None
    body: Any = None if own is None else orjson.Fragment(own)
    if error is not None:
        answered = _STATUS.fullmatch(error)
        status, said = (int(answered[1]), answered[2]) if answered else (0, error)
        refused = row["attempts"] == 0 or 0 < status < HTTPStatus.INTERNAL_SERVER_ERROR
        code = _CODES.get(error) or ("invalid_request" if refused else "request_failed")
        told = {"code": code, "message": error}
        body = _error_body(orjson.loads(own or "null"), {"message": said, "type": code, "code": status})
    response = {"status_code": status, "request_id": f"req_{number}", "body": body}
    return {
        "id": f"batch_req_{number}",
        "custom_id": row["custom_id"],
        "response": response if status else None,
        "error": told,
    }


def _error_body(own: Any, error: dict[str, Any]) -> Any:
    """Return the body of an error as OpenAI writes it; what SGLang writes stands below `error` there."""
    if not isinstance(own, dict):
        return {"error": error}
    if isinstance(own.get("error"), dict):
        return own
    return {"error": own} if isinstance(own.get("message"), str) else {**own, "error": error}
