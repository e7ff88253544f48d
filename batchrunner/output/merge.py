"""Merges the parts of a run into one dataset in input order, in bounded memory."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.core.errors import NoPartYetError, OutputError, ResumeError, TaskHeldError
from batchrunner.output.buckets import BUFFER_BYTES, Buckets
from batchrunner.output.check_counts import without_checks
from batchrunner.output.columns import may_be_missing, with_vectors
from batchrunner.output.files import cannot_write, sync_directory, writing
from batchrunner.output.holding import hold_task
from batchrunner.output.opened import look_at_run
from batchrunner.output.parts import open_part, recover
from batchrunner.output.resume import done_by_all
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import holds_run

BUCKET_ROWS = 100_000
"""Most rows in a bucket, which becomes a merged file."""
BUCKET_BYTES = 128 << 20
"""Approximate bytes of a bucket in memory."""
SAMPLED_PARTS = 32
"""Parts that are read to estimate the size of a row."""


def merge(run: str | Path | RunDir) -> Path:
    """Write the rows of all parts in input order to `merged/*.parquet`; return that directory.

    Rows are partitioned into buckets of consecutive ordinals, then each bucket is sorted: two passes over
    the data with one bucket in memory. Journals of tasks that no process holds become parts first. Raises
    OutputError where there is nothing to merge or it cannot be written, ResumeError where a part is damaged.
    """
    run_dir = look_at_run(run)
    parts = finished_parts(run_dir)
    work = run_dir.merged.with_name("merged.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        for index, table in enumerate(in_order(run_dir, parts, work)):
            pq.write_table(table, work / f"merged-{index:06d}.parquet", compression="zstd")
        shutil.rmtree(run_dir.merged, ignore_errors=True)
        work.rename(run_dir.merged)
        sync_directory(run_dir.path)
        run_dir.store.publish_directory(run_dir.merged)
    except OSError as failure:
        raise cannot_write(run_dir.merged, failure, OutputError) from None
    except (KeyError, pa.ArrowException) as failure:  # for example parts of another run
        raise ResumeError(f"{run_dir.parts}: cannot be merged: {str(failure).splitlines()[0]}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return run_dir.merged


def finished_parts(run_dir: RunDir) -> list[Path]:
    """Return the parts of a run; journals of tasks that no process holds become parts first.

    Raises OutputError where there are none, or NoPartYetError where the rows are in journals still.
    """
    run_dir.refuse_links()
    for task in run_dir.all_tasks():
        if task.journals():
            with contextlib.suppress(TaskHeldError), hold_task(task) as lock, writing(task.parts):
                recover(task, lock)
    parts = run_dir.all_parts()
    if not parts and holds_run(run_dir.path):
        raise NoPartYetError(
            f"{run_dir.name}: no part is written yet, {len(done_by_all(run_dir).rows)} rows are in journals",
            hint="wait for the run's end if it is at work, else run the same command again; then merge again",
        )
    if not parts:
        raise OutputError(
            f"{run_dir.name}: no parts to merge: not a run's output path, or nothing has finished yet",
            hint="give the job's output.path, without /parts",
            mark=";",
        )
    return parts


def in_order(
    run_dir: RunDir,
    parts: list[Path],
    work: Path,
    columns: list[str] | None = None,
    *,
    bucket_bytes: int | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of parts of a run as tables in input order, each of bounded size.

    A table has about `bucket_bytes` at most, by default BUCKET_BYTES; memory is about three times as much.
    `work` takes files meanwhile; `columns` are those to read, by default all. Raises OutputError where
    these files cannot be written, ArrowException, KeyError or ResumeError.
    """
    bucket_bytes = bucket_bytes or BUCKET_BYTES
    rows = _bucket_rows(parts, columns, bucket_bytes)
    ends = range(rows, sys.maxsize, rows)
    buckets = Buckets(work, "row", ends, min(BUFFER_BYTES, bucket_bytes))
    schema = _common_schema(parts)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    with writing(run_dir.path, OutputError):
        for part in parts:
            buckets.put(_with_all_columns(_read(part, columns), schema))
    tables = buckets.take()
    while True:
        with writing(run_dir.path, OutputError):
            table = next(tables, None)
        if table is None:
            return
        yield without_checks(table)


def distinct_rows(table: pa.Table) -> int:
    """Return how many rows of the input a table of results has."""
    return int(pc.count_distinct(table.column("row")).as_py())


def _common_schema(parts: list[Path]) -> pa.Schema:
    """Return the columns of all parts, those of the first one first: starts of a run may differ in them."""
    schema: pa.Schema | None = None
    for part in parts:
        with _opened(part) as file:
            found = file.schema_arrow
        if schema is None:
            schema = found
        elif found.names != schema.names:
            for field in found:
                if field.name not in schema.names and may_be_missing(field):
                    schema = schema.append(field)
    assert schema is not None
    return with_vectors(schema)


def _with_all_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns of a schema, null where it had none.

    Raises KeyError where it lacks one that every part of the run has.
    """
    if table.schema.names == schema.names:
        return table
    for field in schema:
        if field.name not in table.schema.names and not may_be_missing(field):
            raise KeyError(f"a part lacks the column {field.name!r}")
    columns = [
        table.column(field.name) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    kinds = [field.with_type(column.type) for field, column in zip(schema, columns, strict=True)]
    return pa.table(columns, schema=pa.schema(kinds, metadata=schema.metadata))


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
