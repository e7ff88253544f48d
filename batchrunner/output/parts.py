"""Parts: Parquet files that are whole when they appear and readable at any moment."""

from __future__ import annotations

import contextlib
import logging
from itertools import count
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrunner.core.errors import ResumeError
from batchrunner.output.journal import read_journal
from batchrunner.output.run_dir import (
    TEMPORARY,
    make_directory,
    name_part,
    number_of,
    sync_directory,
    whole_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from batchrunner.output.run_dir import RunDir
    from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_part(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a part to read it; raises ResumeError where it is damaged, FileNotFoundError where it is gone."""
    try:
        with pq.ParquetFile(path) as part:
            yield part
    except FileNotFoundError:
        raise
    except (OSError, KeyError, pa.ArrowException):  # KeyError: somebody else's columns
        raise ResumeError(f"{path}: is damaged: move it away, and its rows will be done again") from None


def write_part(run_dir: RunDir, first: int, tables: Sequence[pa.Table], claim: TaskLock) -> int:
    """Write rows, in input order, as the part of the first number that is free; return the number.

    A part that has it already stays: one that an old listing did not show, or ours, of a try that failed
    afterwards. Rows that it holds are not written again. Raises OSError or ClaimLostError, and then leaves
    no trace.
    """
    table = pa.concat_tables(tables).sort_by("row")
    for number in count(first):
        path = run_dir.part(number)
        try:
            with whole_file(path, claim.token, name_part) as temporary:
                pq.write_table(table, temporary, compression="zstd", row_group_size=1 << 17)
                claim.verify()
            break
        except FileExistsError:
            table = _without(table, path)
            if not table.num_rows:
                sync_directory(path.parent)  # that may be where it failed
                break
            log.warning("%s: is there, and not of this start: it is kept, and the next number used", path)
    return number


def _without(table: pa.Table, path: Path) -> pa.Table:
    """Return the rows that a part does not hold; one that cannot be read, or has just gone, holds none."""
    try:
        with pq.ParquetFile(path) as part:
            there = part.read(["row"]).column("row").cast(pa.int64()).combine_chunks()
    except (FileNotFoundError, KeyError, pa.ArrowException):
        return table
    return table.filter(pc.invert(pc.is_in(table.column("row"), value_set=there)))


def tidy(run_dir: RunDir, claim: TaskLock) -> None:
    """Clear up after a start that did not come to its end: torn parts go, and journals become parts.

    `claim` is held on the task. Raises OSError.
    """
    for torn in run_dir.parts.glob(f".part-{run_dir.task}-*{TEMPORARY}"):
        torn.unlink(missing_ok=True)
    for path in run_dir.journals():
        if tables := list(read_journal(path)):
            make_directory(run_dir.parts)
            write_part(run_dir, number_of(path), tables, claim)
        path.unlink(missing_ok=True)
