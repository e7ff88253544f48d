"""`batchrun merge`: the merged dataset, the report of the whole run, and which rows are not in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from batchrunner.output.merge import merge
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_holder import is_held
from batchrunner.report.html.page import leave_page
from batchrunner.report.report import EXIT_DONE, EXIT_STOPPED, Report
from batchrunner.report.totals import report_of_all


@dataclass(frozen=True, slots=True)
class MergedRun:
    """What a merge made of a run."""

    path: Path
    """Directory of the merged files."""
    report: Report
    """Report of the whole run."""
    rows: int
    """Rows in the merged files."""
    is_at_work: bool
    """Whether a task of the run is at work."""

    @property
    def exit_code(self) -> int:
        """The exit code: 0 if the merged dataset has all rows, since what reads it may want all of them."""
        return EXIT_STOPPED if self.rows < self.report.rows_total else EXIT_DONE

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        lines = self.report.lines()
        missing = self.report.rows_total - self.rows
        if missing > 0:
            in_journals = max(0, missing - self.report.rows_left)
            journals = (
                f" ({in_journals} of them are done, in journals of tasks at work)" if in_journals else ""
            )
            then = "wait for the run's end" if self.is_at_work else "run the same command again"
            lines.append(
                f"merged: {self.rows} of {self.report.rows_total} rows, {missing} are missing"
                f"{journals}: {then}, then merge again"
            )
        return lines


def merge_run(run: str | Path) -> MergedRun:
    """Merge a run and write its report; raises OutputError, ResumeError or StorageError, as `merge` does."""
    path = merge(run)
    rows = sum(pq.read_metadata(file).num_rows for file in path.glob("*.parquet"))
    report, run_dir = report_of_all(run), RunDir(run)
    leave_page(run_dir)
    at_work = any(is_held(task.task_directory) is not False for task in run_dir.all_tasks())
    return MergedRun(path, report, rows, at_work)
