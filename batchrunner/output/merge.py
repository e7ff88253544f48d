"""Parts → one dataset in input order, in bounded memory."""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.errors import HeldError, OutputError, ResumeError
from batchrunner.output.buckets import Buckets
from batchrunner.output.parts import open_part, tidy
from batchrunner.output.run_dir import RunDir, sync_directory, writing
from batchrunner.output.task_lock import hold_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUCKET_ROWS = 100_000
"""Of a bucket, and of a merged file, at most."""
BUCKET_BYTES = 128 << 20
"""Of a bucket in memory, about."""
SAMPLED = 32
"""Parts that are looked at for the size of a row."""


def merge(run: str | Path) -> Path:
    """Write `merged/*.parquet`, the rows of all parts in input order; return the directory.

    Rows are first dealt out to buckets of consecutive ordinals, then each bucket is sorted: two passes over
    the data, one bucket in memory. Raises OutputError where there is nothing to merge or it cannot be
    written, ResumeError where a part is damaged.
    """
    run_dir = RunDir(run)
    run_dir.refuse_links()
    for task in run_dir.all_tasks():
        if task.journals():
            with contextlib.suppress(HeldError), hold_task(task) as claim, writing(task.parts):
                tidy(task, claim)
    parts = run_dir.all_parts()
    if not parts:
        raise OutputError(f"{run}: no parts to merge: not a run's output path, or nothing has finished yet")
    work = run_dir.merged.with_name("merged.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        for index, table in enumerate(_in_order(parts, work)):
            pq.write_table(table, work / f"merged-{index:06d}.parquet", compression="zstd")
        shutil.rmtree(run_dir.merged, ignore_errors=True)
        work.rename(run_dir.merged)
        sync_directory(run_dir.path)
    except OSError as failure:
        raise OutputError(f"{run_dir.merged}: cannot be written: {failure.strerror or failure}") from None
    except (KeyError, pa.ArrowException) as failure:  # parts of another run among them, say
        raise ResumeError(f"{run_dir.parts}: cannot be merged: {str(failure).splitlines()[0]}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return run_dir.merged


def _in_order(parts: list[Path], work: Path) -> Iterator[pa.Table]:
    rows = _bucket_rows(parts)
    buckets = Buckets(work, "row", range(rows, sys.maxsize, rows))
    for part in parts:
        buckets.put(_read(part))
    return buckets.take()


def _bucket_rows(parts: list[Path]) -> int:
    """Judge by a sample of the parts; footers count a text that many rows have only once."""
    rows = size = 1
    for part in parts[:: 1 + len(parts) // SAMPLED]:
        table = _read(part)
        rows, size = rows + table.num_rows, size + table.nbytes
    return max(1, min(BUCKET_ROWS, BUCKET_BYTES * rows // size))


def _read(part: Path) -> pa.Table:
    with open_part(part) as file:
        return file.read()
