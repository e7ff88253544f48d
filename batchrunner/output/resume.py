"""Which rows of a run are done, read from its parts and journals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from batchrunner.core.processes import thread_pool
from batchrunner.core.types import rows_of_column
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.counts import RowCounts, counts_in
from batchrunner.output.parts import open_part, read_journal
from batchrunner.output.run_dir import RunDir

READERS = 4
"""Parts that are read at the same time. On a network file system reads mostly wait. From memory one reader is
as fast, and eight are slower because they compete for Python's interpreter lock."""
_COUNTED = ["row", "error"]


@dataclass(slots=True)
class DoneRows:
    """Finished rows, by ordinal, and their counts."""

    rows: BitMap64 = field(default_factory=BitMap64)
    counts: RowCounts = field(default_factory=RowCounts)

    @property
    def ok(self) -> int:
        """Number of rows with an answer; a row in two parts counts once."""
        return len(self.rows) - self.counts.failed

    def add(self, results: pa.Table, *, without_failed: bool) -> None:
        """Add the rows of a part or of a journal's table, which has the columns `row` and `error`."""
        counts = counts_in(results.schema)
        self.counts += counts.ok if without_failed else counts.ok + counts.failed
        if without_failed:
            results = results.filter(pc.is_null(results.column("error")))
        self.rows |= rows_of_column(results.column("row"))

    def include(self, more: DoneRows) -> None:
        """Add the rows and counts of further parts."""
        self.rows |= more.rows
        self.counts += more.counts


def read_done(run_dir: RunDir, *, without_failed: bool = False) -> DoneRows:
    """Return the rows in this task's parts and journals; `without_failed` leaves failed rows out.

    Raises ResumeError where a part is damaged.
    """
    done = DoneRows()
    # journals first: one of them may become a part before the parts are listed
    journals = [*_read_journals(run_dir)]
    parts = run_dir.own_parts()
    with thread_pool(READERS) as pool:
        for rows_of_part in pool.map(partial(_read_part, without_failed=without_failed), parts):
            done.include(rows_of_part)
    for table in journals:
        new = [at for at, row in enumerate(table.column("row").to_pylist()) if row not in done.rows]
        if new:  # the others are in a part too
            done.add(table.take(arrow_array(new, pa.int64())), without_failed=without_failed)
    return done


def done_by_all(run_dir: RunDir) -> DoneRows:
    """Return the rows that all tasks of a run together have done; raises ResumeError."""
    run_dir.bring_results()
    done = DoneRows()
    for task in run_dir.all_tasks():
        done.include(read_done(task))
    return done


def _read_part(path: Path, *, without_failed: bool) -> DoneRows:
    done = DoneRows()
    # A part that was discarded or moved away since the listing has no done rows.
    with contextlib.suppress(FileNotFoundError), open_part(path) as part:
        done.add(part.read(_COUNTED, use_threads=False), without_failed=without_failed)
    return done


def _read_journals(run_dir: RunDir) -> Iterator[pa.Table]:
    """Yield copies of the counted columns of the journals, so that their other columns can be freed."""
    for path in run_dir.journals():
        with contextlib.suppress(FileNotFoundError):
            for table in read_journal(path):
                yield table.select(_COUNTED).sort_by("row")
