"""`batchrun merge`: what it wrote, the report of the whole run, and which rows are missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EXIT_DONE, EXIT_STOPPED, JobError, PushError
from batchrunner.job.output import HubFolder, hub_folder
from batchrunner.output.liveness import holders_of
from batchrunner.output.merge import merge
from batchrunner.output.run_dir import RunDir, look_at_run
from batchrunner.output.run_json import read_run_json
from batchrunner.report.report import Report, report_of_all


@dataclass(frozen=True, slots=True)
class MergedRun:
    """What a merge made of a run."""

    path: str
    """Directory of the merged files, or its URI; or the file."""
    report: Report
    """Report of the whole run."""
    rows: int
    """Rows in these files."""
    is_at_work: bool
    """Whether a task of the run is at work."""
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
                f"merged: {self.rows} of {self.report.rows_total} rows, {missing} are missing"
                f"{journals}: {then}, then merge again"
            )
            if self.push is not None:
                lines.append(f"not pushed to {self.push}: rows are missing")
        return [*lines, *([self.told] if self.told else [])]


def merge_run(
    run: str | Path, file: str | None = None, *, push: str | None = None, force: bool = False
) -> MergedRun:
    """Merge a run, write its report, and push it once it has all rows.

    What goes to a `file` is not pushed. `push` is the address on the Hub, by default that of the job. Raises
    what `merge` does, JobError for a wrong address, or PushError with the report of the run.
    """
    run_dir = look_at_run(run)
    if file is not None and push is not None:
        raise JobError("--push: the dataset RUN/merged is pushed", hint="leave FILE out")
    target = _push_target(run_dir, push) if file is None else None
    path, rows = merge(run_dir, file, force=force)
    report = report_of_all(run_dir)
    place = f"{run_dir.store.uri}/{path.name}" if file is None and run_dir.store.uri else str(path)
    is_at_work = any(holders_of([(task, None) for task in run_dir.all_tasks()]))
    merged = MergedRun(place, report, rows, is_at_work, push=str(target) if target else None)
    if target is None or merged.exit_code != EXIT_DONE:
        return merged
    try:
        commit = _pushing().push_merged(path, target)
    except PushError as error:
        error.report = report
        raise
    return replace(merged, pushed=commit, told=f"pushed to {target}: {commit}")


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
