"""Merges the results of a run into one dataset or file, in input order and with bounded memory."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.errors import InputError, NoResultYetError, OutputError, ResumeError, first_line
from batchrunner.core.types import rows_of_column
from batchrunner.job.output import REQUEST_DIGEST, RETURNED
from batchrunner.output.buckets import BUFFER_BYTES, Buckets
from batchrunner.output.columns import kinds_returned, with_returned
from batchrunner.output.counts import with_counts
from batchrunner.output.export import distinct_rows, export_format, export_tables
from batchrunner.output.files import (
    file_to_write,
    one_process_at_a_time,
    scratch_directory,
    sync_directory,
    whole_file,
    writing,
)
from batchrunner.output.parts import open_part, read_journal, without_rows
from batchrunner.output.resume import done_by_all
from batchrunner.output.run_dir import RunDir, look_at_run
from batchrunner.output.run_json import require_run_json

BUCKET_ROWS = 100_000
"""Maximum number of rows in a bucket. Each bucket becomes one file of the merged dataset."""
BUCKET_BYTES = 128 << 20
"""Approximate maximum size in bytes of a bucket in memory."""
WORK_PREFIX = ".batchrun-merge-"
"""Beginning of the name of a merge's directory of temporary files."""
SAMPLED_PARTS = 32
"""Approximate number of part files that are read to estimate the size of a row in memory."""


class Merged(NamedTuple):
    """The dataset or file that a merge wrote."""

    path: Path
    """Path of the file, or of the directory `merged`."""
    rows: int
    """Number of input rows. An input row with several results counts once."""


def merge(run: str | Path | RunDir, file: str | None = None, *, force: bool = False) -> Merged:
    """Write the results of a run so far, in input order, to `merged/*.parquet` of the run or to a file.

    Workers may be running. Only rows that are safely on disk are written. The ending of `file` selects its
    format. The file appears when it is complete, and replaces an existing file only with `force`.

    Rows are partitioned into buckets of consecutive input rows, and each bucket is sorted. So the data are
    read and written twice, with one bucket in memory at a time.

    Raises NoResultYetError if no row is on disk yet, OutputError if the path holds no run, if `file` belongs
    to the run or if nothing can be written, ResumeError if a part file is damaged, and StorageError if the
    disk cannot read one.
    """
    run_dir = look_at_run(run)
    file_format = None if file is None else export_format(file)
    target = run_dir.merged if file is None else file_to_write(file, force=force)
    if file is not None and run_dir.owns(target):
        raise OutputError(f"{file}: belongs to the run {run_dir.name}", hint="give a path outside of it")
    if not run_dir.all_tasks():
        raise OutputError(
            f"{run_dir.name}: nothing to merge: not a run's output path, or no row has finished yet",
            hint="give the job's output.path, without /parts",
        )
    with writing(target, OutputError), work_directory(run_dir, target.parent) as work:
        tables = in_order(run_dir, durable_results(run_dir, work), work)
        if file_format is not None:
            # In `work`, an unfinished file of a killed merge is deleted by the next one.
            merged = work / "merged"
            with whole_file(merged) as temporary:
                rows = export_tables(tables, temporary, file_format)
            merged.replace(target)
            sync_directory(target.parent)
        else:
            rows = _write_dataset(run_dir, tables, work)
    return Merged(target, rows)


def _write_dataset(run_dir: RunDir, tables: Iterator[pa.Table], work: Path) -> int:
    """Replace the merged dataset of a run; return the number of its input rows.

    The files are written to the directory `work`, and moved once all are complete. Raises OSError if one
    cannot be written.
    """
    dataset, rows = work / "merged", 0
    dataset.mkdir()
    for index, table in enumerate(tables):
        pq.write_table(table, dataset / f"merged-{index:06d}.parquet", compression="zstd")
        rows += distinct_rows(table)
    shutil.rmtree(run_dir.merged, ignore_errors=True)
    dataset.rename(run_dir.merged)
    sync_directory(run_dir.path)
    run_dir.store.publish_directory(run_dir.merged)
    return rows


def merge_finished_run(run_dir: RunDir, name: str) -> None:
    """Merge a run that is the input of another job, unless its merged dataset has all rows.

    Messages call the run `name`. Raises InputError if a row is not done, and the errors of `merge`.
    """
    done, total = len(done_by_all(run_dir)), require_run_json(run_dir)["rows_total"]
    if done < total:
        raise InputError(
            f"{name}: this run is not done: {done:,} of {total:,} rows are done",
            hint=f"run its job again, or use the finished rows in {name}/parts",
        )
    if _merged_rows(run_dir) >= total:
        return
    with one_process_at_a_time(run_dir.path / ".merging", unfinished=f"{WORK_PREFIX}*/**/*"):
        if _merged_rows(run_dir) >= total:
            return  # Another process has merged the run while this one waited.
        merged = merge(run_dir)
        if merged.rows < total:
            raise InputError(f"{name}: this run is still running", hint="try again when it has ended")


def _merged_rows(run_dir: RunDir) -> int:
    """Count the input rows in the merged dataset. Raises ResumeError if one of its files is damaged."""
    return sum(distinct_rows(_read(file, ["row"])) for file in run_dir.merged.glob("*.parquet"))


@contextlib.contextmanager
def work_directory(run_dir: RunDir, parent: Path) -> Iterator[Path]:
    """Create a directory for temporary files in `parent`, and delete it after the block.

    The directories that killed merges left in `parent` are deleted first: each may be twice as large as the
    results. Raises OSError if no directory can be created, and ResumeError if the part files that the block
    reads do not belong together.
    """
    work, delete = scratch_directory(WORK_PREFIX, parent)
    try:
        yield work
    except (KeyError, ValueError, pa.ArrowException) as failure:
        # The files do not fit together; for example, one belongs to another run.
        raise ResumeError(f"{run_dir.parts}: cannot be merged: {first_line(failure)}") from None
    finally:
        delete()


def durable_results(run_dir: RunDir, work: Path) -> list[Path]:
    """Return Parquet files with all results on disk: the part files of a run, and copies of its journals.

    The copies are written to the directory `work`. A row may be in two of the files. Workers may be running.
    Raises OSError if a copy cannot be written, and NoResultYetError if there are no results.
    """
    copies = []
    # A journal may become a part file at any time, so it is copied before the part files are listed. Its rows
    # may then be found twice, but are never missed.
    for task in run_dir.all_tasks():
        for journal in task.journals():
            with contextlib.suppress(FileNotFoundError):
                if tables := [*read_journal(journal)]:
                    copy = work / f"{task.task}-{journal.name}.parquet"
                    copies.append(copy)
                    pq.write_table(pa.concat_tables(tables), copy, compression="zstd")
    run_dir.bring_results()
    results = [*run_dir.all_parts(), *copies]
    if not results:
        raise NoResultYetError(
            f"{run_dir.name}: no row is on disk yet",
            hint="if the run is running, wait; if not, run the job again; then merge again",
        )
    return results


def in_order(
    run_dir: RunDir,
    parts: list[Path],
    work: Path,
    *,
    columns: list[str] | None = None,
    bucket_bytes: int | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of part files as tables in input order.

    If several part files hold a row, the first file wins. A table has at most about `bucket_bytes` bytes
    (default: BUCKET_BYTES), and memory peaks at about three times that size. By default, the tables have all
    columns except the digests of requests. Temporary files go to the directory `work`. Raises OutputError if
    they cannot be written, and ArrowException, KeyError or ResumeError for part files that are damaged or do
    not belong together.
    """
    bucket_bytes = bucket_bytes or BUCKET_BYTES
    bucket_rows = _bucket_rows(parts, columns, bucket_bytes)
    bucket_ends = range(bucket_rows, sys.maxsize, bucket_rows)
    buckets = Buckets(work, "row", bucket_ends, min(BUFFER_BYTES, bucket_bytes))
    schema = _common_schema(parts, columns)
    with writing(run_dir.path, OutputError):
        for table in _distinct_tables(parts, columns, schema):
            buckets.put(table)
    sorted_tables = buckets.take()
    kinds = None
    # If a rollout function declares no columns, their types are inferred from the values of all rows.
    if RETURNED in schema.names:
        kinds = kinds_returned(_read(part, [RETURNED]) for part in parts)
    while True:
        # `yield` stays outside of this block. Otherwise an OSError of the caller would become an OutputError.
        with writing(run_dir.path, OutputError):
            table = next(sorted_tables, None)
        if table is None:
            return
        if kinds is not None:
            table = with_returned(table, kinds)
        # The counts in the metadata are those of one part file, and do not fit this table.
        yield with_counts(table, None)


def _distinct_tables(parts: list[Path], columns: list[str] | None, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the table of each part file, without rows that an earlier part file holds."""
    rows_so_far = BitMap64()
    for part in parts:
        table = _with_all_columns(_read(part, columns), schema)
        rows = rows_of_column(table.column("row"))
        repeated = rows & rows_so_far
        if repeated:
            table = without_rows(table, pa.array([*repeated], table.schema.field("row").type))
        rows_so_far |= rows
        yield table


def _bucket_rows(parts: list[Path], columns: list[str] | None, bucket_bytes: int) -> int:
    """Estimate the number of rows that fill a bucket, from a sample of the part files.

    The sizes in the footers of Parquet files would be too small: a repeated text counts only once there.
    """
    rows = size = 1  # Start above 0, because all part files may be empty and the size is a divisor.
    step = 1 + len(parts) // SAMPLED_PARTS
    for part in parts[::step]:
        table = _read(part, columns)
        rows, size = rows + table.num_rows, size + table.nbytes
    return max(1, min(BUCKET_ROWS, bucket_bytes * rows // size))


def _common_schema(parts: list[Path], columns: list[str] | None) -> pa.Schema:
    """Return the common schema of all part files, with the columns in order of first occurrence.

    By default, it has all columns except the digests of requests.
    """
    schemas: list[pa.Schema] = []
    for part in parts:
        with _open(part) as file:
            schemas.append(file.schema_arrow)
    schema = pa.unify_schemas(schemas)  # Different attempts of a run may have written different columns.
    names = columns or {*schema.names} - {REQUEST_DIGEST}
    return pa.schema([field for field in schema if field.name in names], metadata=schema.metadata)


def _with_all_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with exactly the columns of a schema; missing columns become null.

    Raises KeyError for the table of a file that is not a part file.
    """
    if "row" not in table.schema.names:
        raise KeyError("a part lacks the column 'row'")
    table = table.select([name for name in schema.names if name in table.schema.names])
    # Joining the table to an empty one with the whole schema adds the missing columns.
    return pa.concat_tables([pa.Table.from_batches([], schema), table], promote_options="default")


def _read(part: Path, columns: list[str] | None) -> pa.Table:
    with _open(part) as file:
        # For a few columns, one thread is enough. Each further thread would keep memory.
        return file.read(columns, use_threads=columns is None)


@contextlib.contextmanager
def _open(part: Path) -> Iterator[pq.ParquetFile]:
    """Open a part file. Raises ResumeError if it is damaged or missing."""
    try:
        with open_part(part) as file:
            yield file
    except FileNotFoundError:
        raise ResumeError(
            f"{part}: is missing",
            hint="run the job again, which sends the rows of this file again; then merge again",
        ) from None
