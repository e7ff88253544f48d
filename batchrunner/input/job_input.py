"""The input of a job: its rows, the requests made of them, and the division of the rows into leases.

A lease is a range of rows. The workers of a joined run take lease after lease.
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

MANY_LEASES, FEWEST_LEASES = 1000, 64
"""Target number of leases of a large run, and minimum number of leases of a small run. A lease of a large
run should be small compared with a worker's rows in flight. In a small run, few workers should be without a
lease. `MOST_LEASE_ROWS` takes precedence."""
LEASES_OF_A_WORKER = 8
"""Minimum number of leases for each task of a Slurm array, so that fast tasks can do more than slow ones."""
MOST_LEASES = 16_384
"""Maximum number of leases of a run in input order, because every worker lists their files. It takes
precedence over `MOST_LEASE_ROWS`, from 134 million rows on."""
LEAST_LEASE_ROWS, MOST_LEASE_ROWS = 128, 8192
"""Minimum and maximum number of rows in a lease. A small run has smaller leases, because of `FEWEST_LEASES`.
Taking a lease with fewer rows costs more time than reading its rows. If leases have more rows, workers end at
very different times."""


@dataclass(frozen=True, slots=True)
class JobInput:
    """A job whose input and templates have been checked."""

    job: Job
    dataset: Dataset
    renderer: Renderer
    functions: HookPool | None
    """The job's Python functions; None if it has none."""

    @property
    def dedupes(self) -> bool:
        """Whether equal rows at temperature 0 share an answer.

        They do not if a Python function judges an answer together with its row.
        """
        return self.job.dedupe and not judges_by_row(self.functions)

    def batches(
        self, rows: BitMap64, check_stop: Callable[[], None] = lambda: None
    ) -> Iterator[list[Request | Outcome]]:
        """Read and render rows in input order, a bounded batch at a time; raises InputError.

        `check_stop` is called before each row; an exception that it raises ends the reading.
        """
        for batch in self.dataset.read(rows, self.renderer.columns):
            yield self.renderer.render(batch, check_stop, [None] * len(batch.rows))

    def selected(self, check_stop: Callable[[], None] = lambda: None) -> BitMap64:
        """Return the first `input.limit` rows for which `input.filter` is true.

        If the filter fails on a null, it counts as false. If it fails otherwise, or if a row cannot be read,
        the row is selected too, and ends as a failed row. Only the columns of the filter are read, and
        reading ends at the limit. `check_stop` is called before each row; an exception that it raises ends
        the search. Raises InputError if the filter is true for no row, or fails on more rows than it is true
        for.
        """
        predicate, limit = self.renderer.predicate, self.job.input.limit
        total = self.dataset.total_rows
        if predicate is None:
            return BitMap64(range(min(limit or total, total)))
        selected, failed, error = BitMap64(), 0, ""
        names = predicate.columns
        batches = self.dataset.read(BitMap64(range(total)), names)
        pairs = (zip(batch.rows, rows_of(batch, names), strict=True) for batch in batches)
        for row, values in chain.from_iterable(pairs):
            check_stop()
            try:
                # a row that cannot be read is selected, so that it ends as a failed row
                if not (isinstance(values, str) or predicate(values)):
                    continue
            except RowRefusedError as failure:
                failed += 1
                error = error or f"row {row}: {str(failure).removeprefix('filter: ')}"
            selected.add(row)
            if len(selected) == limit:
                break
        is_true = len(selected) - failed
        if is_true and is_true >= failed:
            return selected
        problem = f"true for none of the {total} rows: {self.job.input.filter}"
        if failed:
            problem = f"fails on {counted(failed, 'row')}, and is true for {is_true}: {error}"
        of_text = self.dataset.has_text_files and (not failed or "TypeError" in error)
        hint = "values of CSV are text: give the columns other types in input.types" if of_text else None
        raise InputError(f"input.filter: {problem}", hint=hint)


def lease_rows(rows: int) -> int:
    """Return the approximate number of rows in a lease of a run of `rows` rows.

    In a Slurm array, it depends on the number of tasks (`SLURM_ARRAY_TASK_COUNT`).
    """
    array_tasks = os.environ.get("SLURM_ARRAY_TASK_COUNT", "")
    workers = int(array_tasks) if array_tasks.isdecimal() else 1
    leases = max(MANY_LEASES, LEASES_OF_A_WORKER * workers)
    least = min(LEAST_LEASE_ROWS, -(-rows // FEWEST_LEASES))
    return max(1, min(max(rows // leases, least), MOST_LEASE_ROWS))


def cut_into_leases(rows: BitMap64, end: int) -> list[int]:
    """Divide an input of `end` rows into leases, each with about the same number of these rows.

    Return the ordinals at which leases begin, and `end`.
    """
    size = max(lease_rows(len(rows)), -(-len(rows) // MOST_LEASES))
    return [0, *(rows[at] for at in range(size, len(rows), size)), end]
