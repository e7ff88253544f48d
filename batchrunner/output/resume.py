"""Reads which rows of a run are done, from its part files (Parquet files of results) and journals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from batchrunner.core.types import rows_of_column
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.counts import RowCounts, counts_in
from batchrunner.output.parts import open_part, read_journal
from batchrunner.output.run_dir import RunDir

_COUNTED = ["row", "error"]


@dataclass(slots=True)
class DoneRows:
    """The rows that have a result, as sets of row numbers, and their counts."""

    answered: BitMap64 = field(default_factory=BitMap64)
    failed: BitMap64 = field(default_factory=BitMap64)
    """Rows with an error and no answer."""
    counts_of_answered: RowCounts = field(default_factory=RowCounts)
    counts_of_failed: RowCounts = field(default_factory=RowCounts)

    @property
    def rows(self) -> BitMap64:
        """Rows with an answer or an error."""
        return self.answered | self.failed

    @property
    def counts(self) -> RowCounts:
        """Counts of the rows with an answer or an error."""
        return self.counts_of_answered + self.counts_of_failed

    def __len__(self) -> int:
        """Return the number of rows with an answer or an error.

        A row in two part files counts once.
        """
        return len(self.answered) + len(self.failed)

    def without_failed(self) -> DoneRows:
        """Return only the rows with an answer, and their counts."""
        return DoneRows(answered=self.answered, counts_of_answered=self.counts_of_answered)

    def add(self, results: pa.Table) -> None:
        """Add the rows of a table (columns `row` and `error`) from a part file or a journal."""
        counts = counts_in(results.schema)  # they are stored in the schema's metadata
        is_answered = pc.is_null(results.column("error"))
        rows = results.select(["row"])
        self.include(
            DoneRows(
                answered=rows_of_column(rows.filter(is_answered).column("row")),
                failed=rows_of_column(rows.filter(pc.invert(is_answered)).column("row")),
                counts_of_answered=counts.ok,
                counts_of_failed=counts.failed,
            )
        )

    def include(self, more: DoneRows) -> None:
        """Add the rows and counts of `more`. A row with both an answer and an error counts as answered."""
        # Both sets change in place. Copying all rows for each part file would take quadratic time.
        self.answered |= more.answered
        self.failed -= more.answered
        self.failed |= more.failed - self.answered
        self.counts_of_answered += more.counts_of_answered
        self.counts_of_failed += more.counts_of_failed


def read_done(run_dir: RunDir) -> DoneRows:
    """Return the rows in this worker's part files (Parquet files of results) and journals.

    Raises ResumeError if a part file is damaged, and StorageError if the disk cannot read one.
    """
    done = DoneRows()
    # A journal may become a part file at any time. It is read before the part files are listed, so that its
    # rows are not missed.
    journals = [*_read_journals(run_dir)]
    for part in run_dir.own_parts():
        done.include(_read_part(part))
    for table in journals:
        rows_of_parts = done.rows
        rows = table.column("row").to_pylist()
        # If a journal has just become a part file, its rows count only once.
        not_in_parts = [index for index, row in enumerate(rows) if row not in rows_of_parts]
        if not_in_parts:
            done.add(table.take(arrow_array(not_in_parts, pa.int64())))
    return done


def done_by_all(run_dir: RunDir) -> DoneRows:
    """Return the rows that all workers of a run together have done.

    Raises ResumeError if a part file is damaged, StorageError if the disk cannot read one, and OutputError if
    the results cannot be fetched from the run's store.
    """
    run_dir.bring_results()
    done = DoneRows()
    for task in run_dir.all_tasks():
        done.include(read_done(task))
    return done


def _read_part(path: Path) -> DoneRows:
    done = DoneRows()
    # The file may have been deleted or moved since the listing. Then it counts as empty.
    with contextlib.suppress(FileNotFoundError), open_part(path) as part:
        done.add(part.read(_COUNTED, use_threads=False))
    return done


def _read_journals(run_dir: RunDir) -> Iterator[pa.Table]:
    """Yield the columns `row` and `error` of each table in this worker's journals.

    They are copied, so that the memory of the other columns can be freed.
    """
    for path in run_dir.journals():
        with contextlib.suppress(FileNotFoundError):
            for table in read_journal(path):
                yield table.select(_COUNTED).sort_by("row")
