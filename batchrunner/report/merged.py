"""`batchrun merge` and `export`: what they wrote, the report of the whole run, and which rows are missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from batchrunner.core.exit_codes import EXIT_DONE, EXIT_STOPPED
from batchrunner.job.output import SAMPLE
from batchrunner.output.export import export
from batchrunner.output.merge import distinct_rows, merge
from batchrunner.output.opened import look_at_run
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_holder import is_held
from batchrunner.report.html.page import leave_page
from batchrunner.report.report import Report
from batchrunner.report.totals import report_of_all

_DONE = {"merge": "merged", "export": "exported"}


@dataclass(frozen=True, slots=True)
class MergedRun:
    """What a merge made of a run."""

    path: str
    """Directory of the merged files, or its URI; or the exported file."""
    report: Report
    """Report of the whole run."""
    rows: int
    """Rows in these files."""
    is_at_work: bool
    """Whether a task of the run is at work."""
    command: Literal["merge", "export"] = "merge"
    """The command that made it."""

    @property
    def exit_code(self) -> int:
        """The exit code: 0 if the merged dataset has all rows, since what reads it may want all of them."""
        return EXIT_STOPPED if self.rows < self.report.rows_total else EXIT_DONE

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "path": self.path,
            "rows": self.rows,
            "rows_missing": max(0, self.report.rows_total - self.rows),
            "is_at_work": self.is_at_work,
            "exit_code": self.exit_code,
            "report": self.report.as_dict(),
        }

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
                f"{_DONE[self.command]}: {self.rows} of {self.report.rows_total} rows, {missing} are missing"
                f"{journals}: {then}, then {self.command} again"
            )
        return lines


def merge_run(run: str | Path) -> MergedRun:
    """Merge a run and write its report; raises OutputError, ResumeError or StorageError, as `merge` does."""
    run_dir = look_at_run(run)
    path = merge(run_dir)
    rows = sum(map(_input_rows, path.glob("*.parquet")))
    report = report_of_all(run_dir)
    leave_page(run_dir)
    place = f"{run_dir.store.uri}/{path.name}" if run_dir.store.uri else str(path)
    return MergedRun(place, report, rows, _is_at_work(run_dir))


def _input_rows(file: Path) -> int:
    """Return how many rows of the input a merged file has: each is in one file, with all its samples."""
    if SAMPLE not in pq.read_schema(file).names:
        return int(pq.read_metadata(file).num_rows)
    with pq.ParquetFile(file) as merged:
        return distinct_rows(merged.read(columns=["row"]))


def export_run(run: str | Path, file: str, *, form: str | None, force: bool) -> MergedRun:
    """Export a run to a file; raises what `export` does."""
    run_dir = look_at_run(run)
    rows = export(run_dir, file, form=form, force=force)
    report = report_of_all(run_dir)
    rows = report.rows_total if rows is None else rows
    return MergedRun(str(Path(file)), report, rows, _is_at_work(run_dir), "export")


def _is_at_work(run_dir: RunDir) -> bool:
    return any(is_held(task.task_directory) is not False for task in run_dir.all_tasks())
