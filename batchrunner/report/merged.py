"""`batchrun merge` and `export`: what they wrote, the report of the whole run, and which rows are missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from batchrunner.core.errors import JobError, PushError
from batchrunner.core.exit_codes import EXIT_DONE, EXIT_STOPPED
from batchrunner.job.hub import HubFolder, hub_folder
from batchrunner.job.output import SAMPLE
from batchrunner.output.export import export
from batchrunner.output.merge import distinct_rows, merge
from batchrunner.output.opened import look_at_run
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import read_run_json
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
    push: str | None = None
    """The data set of the Hub that the run is to be pushed to."""
    pushed: str | None = None
    """URL of its commit with these files; None where there is none, as while rows are missing."""
    told: str | None = None
    """What the push did, for a person."""

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
            "pushed": self.pushed,
            "exit_code": self.exit_code,
            "report": self.report.as_dict(),
        }

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        lines = self.report.lines()[:-1]  # the last one names the parts
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
            if self.push is not None:
                lines.append(f"not pushed to {self.push}: rows are missing")
        return [*lines, *([self.told] if self.told else [])]


def merge_run(run: str | Path, push: str | None = None) -> MergedRun:
    """Merge a run, write its report, and push it once it has all rows.

    `push` is the address on the Hub, by default that of the job. Raises what `merge` does, JobError for a
    wrong address, or PushError with the report of the run.
    """
    run_dir = look_at_run(run)
    target = _push_target(run_dir, push)
    path = merge(run_dir)
    rows = sum(map(_input_rows, path.glob("*.parquet")))
    report = report_of_all(run_dir)
    leave_page(run_dir)
    place = f"{run_dir.store.uri}/{path.name}" if run_dir.store.uri else str(path)
    merged = MergedRun(place, report, rows, _is_at_work(run_dir), push=str(target) if target else None)
    if target is None or merged.exit_code != EXIT_DONE:
        return merged
    try:
        pushed = _pushing().push_merged(path, target)
    except PushError as error:
        error.report = report
        raise
    return replace(merged, pushed=pushed.commit, told=pushed.line())


def _push_target(run_dir: RunDir, given: str | None) -> HubFolder | None:
    """Return where a run is to be pushed to; raises JobError for a wrong address, or without the package."""
    where, address = "--push", given
    if given is None:
        output = (read_run_json(run_dir) or {}).get("job", {}).get("output")
        where, address = "output.push", output.get("push") if isinstance(output, dict) else None
    if address is None:
        return None
    try:
        target = hub_folder(str(address))
    except ValueError as failure:
        raise JobError(f"{where}: {failure}") from None
    _pushing()
    return target


def _pushing() -> Any:
    try:
        from batchrunner.output import hub_push  # noqa: PLC0415 - its package may be missing
    except ImportError as missing:
        raise JobError(
            f"a push to the Hub needs huggingface_hub from 1.0 on ({missing})",
            hint="pip install 'batchrunner[hub]'",
            mark=";",
        ) from None
    return hub_push


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
