"""Input of a job: its rows, the requests made from them, and their division into leases.

A lease is a range of rows that one worker claims, if several workers share a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.core.console import counted
from batchrunner.core.errors import InputError, RowRefusedError
from batchrunner.core.types import Outcome, Request
from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.render import Renderer
from batchrunner.job.answers import judges_by_row
from batchrunner.job.spec import Job

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool

MANY_LEASES = 1000
"""Target number of leases of a large run (a lease is a range of rows that a worker claims).

There are more leases if they would otherwise exceed MOST_LEASE_ROWS.
"""
LEASES_OF_A_WORKER = 8
"""Minimum number of leases (ranges of rows that workers claim) per task of a Slurm array.

With several leases for each task, fast tasks can do more than slow ones.
"""
MOST_LEASES = 16_384
"""Maximum number of leases (ranges of rows that workers claim) of a run in input order.

Every worker lists the files of all leases, so there must not be too many. For more than 134 million rows,
leases therefore exceed MOST_LEASE_ROWS.
"""
FEWEST_LEASES = 64
"""Minimum number of leases (ranges of rows that workers claim) of a small run.

With fewer leases, some workers would have no rows.
"""
LEAST_LEASE_ROWS = 128
"""Minimum number of rows in a lease (a range of rows that a worker claims).

Claiming a smaller lease would take longer than reading its rows. Leases are smaller only if a run would
otherwise have less than FEWEST_LEASES.
"""
MOST_LEASE_ROWS = 8192
"""Maximum number of rows in a lease (a range of rows that a worker claims).

With larger leases, workers would end at very different times.
"""


@dataclass(frozen=True, slots=True)
class JobInput:
    """Input of a job, with files, columns and templates already checked."""

    job: Job
    dataset: Dataset
    renderer: Renderer
    functions: HookPool | None
    """Python functions of the job; None if it has none."""

    @property
    def dedupes(self) -> bool:
        """Whether equal rows at temperature 0 share one answer.

        They do not if `accept.python` judges an answer together with its row.
        """
        return self.job.dedupe and not judges_by_row(self.functions)

    def batches(
        self, rows: BitMap64, check_stop: Callable[[], None] = lambda: None
    ) -> Iterator[list[Request | Outcome]]:
        """Yield the requests of `rows` in input order, in batches of limited size; raise InputError.

        `check_stop` is called before each row, and may raise an exception to stop reading.
        """
        for batch in self.dataset.read(rows, self.renderer.columns):
            yield self.renderer.render(batch, check_stop, [None] * len(batch.rows))

    def selected(self, check_stop: Callable[[], None] = lambda: None) -> BitMap64:
        """Return the numbers of the first `input.limit` rows for which `input.filter` is true.

        A filter that fails on a null counts as false. A row that cannot be read, or on which the filter fails
        for another reason, is also selected and becomes a failed row. Only the columns of the filter are
        read. `check_stop` is called before each row, and may raise an exception to stop. Raises InputError if
        the filter is true for no row, or if it fails on more rows than it is true for.
        """
        predicate, limit = self.renderer.predicate, self.job.input.limit
        total = self.dataset.total_rows
        if predicate is None:
            return BitMap64(range(min(limit or total, total)))
        selected, failures, first_error = BitMap64(), 0, ""
        names = predicate.columns
        batches = self.dataset.read(BitMap64(range(total)), names)
        pairs = (zip(batch.rows, rows_of(batch, names), strict=True) for batch in batches)
        for row, values in chain.from_iterable(pairs):
            check_stop()
            is_selected = True
            # A text in place of values is the reason why the row cannot be read.
            if not isinstance(values, str):
                try:
                    is_selected = predicate(values)
                except RowRefusedError as failure:
                    failures += 1
                    first_error = first_error or f"row {row}: {str(failure).removeprefix('filter: ')}"
            if is_selected:
                selected.add(row)
                if len(selected) == limit:
                    break
        # A filter that fails more often than it is true is likely wrong.
        rows_true = len(selected) - failures
        if rows_true and rows_true >= failures:
            return selected
        problem = f"true for none of the {total} rows: {self.job.input.filter}"
        if failures:
            problem = f"fails on {counted(failures, 'row')}, and is true for {rows_true}: {first_error}"
        may_need_types = self.dataset.has_text_files and (not failures or "TypeError" in first_error)
        hint = "values of CSV are text: give the columns other types in input.types"
        raise InputError(f"input.filter: {problem}", hint=hint if may_need_types else None)


def lease_rows(rows: int) -> int:
    """Return the approximate number of rows in a lease (a range of rows that a worker claims).

    `rows` is the number of rows of the run. In a Slurm array, the number of tasks counts too
    (`SLURM_ARRAY_TASK_COUNT`).
    """
    array_tasks = os.environ.get("SLURM_ARRAY_TASK_COUNT", "")
    workers = int(array_tasks) if array_tasks.isdecimal() else 1
    leases = max(MANY_LEASES, LEASES_OF_A_WORKER * workers)
    # Leases of a small run may have less than LEAST_LEASE_ROWS rows, so that there are FEWEST_LEASES leases.
    # `-(-a // b)` rounds up.
    rows_for_fewest_leases = -(-rows // FEWEST_LEASES)
    least = min(LEAST_LEASE_ROWS, rows_for_fewest_leases)
    size = min(max(rows // leases, least), MOST_LEASE_ROWS)
    return max(1, size)


def cut_into_leases(rows: BitMap64, end: int) -> list[int]:
    """Divide an input of `end` rows into leases, the ranges that workers claim.

    Each lease has about the same number of `rows`. Returns the row number at which each lease begins, and
    `end` as the last element.
    """
    # `-(-a // b)` rounds up, so there are at most MOST_LEASES leases.
    rows_for_most_leases = -(-len(rows) // MOST_LEASES)
    size = max(lease_rows(len(rows)), rows_for_most_leases)
    cuts = [0]
    # The next lease begins at the row with this rank, its index in `rows`.
    next_rank = size
    rows_before = 0
    # Finding the n-th row of a bitmap takes longer the larger n is, so rows are counted block by block.
    block_size = max(1, -(-end // MOST_LEASES))
    for start in range(0, end, block_size):
        stop = min(end, start + block_size)
        rows_to_here = rows_before + rows.range_cardinality(start, stop)
        if next_rank < rows_to_here:
            block = BitMap64()
            block.add_range(start, stop)
            rows_of_block = rows & block
            while next_rank < rows_to_here:
                cuts.append(rows_of_block[next_rank - rows_before])
                next_rank += size
        rows_before = rows_to_here
    return [*cuts, end]
