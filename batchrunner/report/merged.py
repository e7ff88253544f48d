"""`batchrun merge`: merges the results of a run, and reports on the whole run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EXIT_DONE, EXIT_STOPPED
from batchrunner.output.merge import merge
from batchrunner.output.run_dir import look_at_run
from batchrunner.report.report import Report, report_of_all
from batchrunner.report.upload import check_destination, is_remote, upload


@dataclass(frozen=True, slots=True)
class MergedRun:
    """The result of `batchrun merge`."""

    path: str
    """Path or URI of the directory with the merged files, or the path of the single merged file."""
    report: Report
    """Report of the whole run."""
    rows: int
    """Number of merged rows."""

    @property
    def exit_code(self) -> int:
        """Exit code of `batchrun merge`: 0 only if all rows are merged, because a script may need all."""
        return EXIT_STOPPED if self.rows < self.report.rows_total else EXIT_DONE

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object that `batchrun merge --json` prints."""
        return {
            "path": self.path,
            "rows": self.rows,
            "rows_missing": max(0, self.report.rows_total - self.rows),
            "exit_code": self.exit_code,
            "report": self.report.as_dict(),
        }

    def lines(self) -> list[str]:
        """Return the lines that `batchrun merge` prints."""
        missing = self.report.rows_total - self.rows
        # The last line below says what to do about missing rows: workers may still be running.
        report = replace(self.report, next_step="") if missing > 0 else self.report
        # The last line of the report names the directory of unmerged results.
        lines = report.lines()[:-1]
        if missing > 0:
            lines.append(
                f"merged: {self.rows:,} of {self.report.rows_total:,} rows, {missing:,} are missing: wait "
                "for workers that still run, or run the same command again, then merge again"
            )
        return lines


def merge_run(run: str | Path, file: str | None = None, *, force: bool = False) -> MergedRun:
    """Merge the results of a run, into RUN/merged or into `file`, and write the report of the run.

    If `file` is the URI of a dataset on the Hub or of a directory in an object store, RUN/merged is uploaded.
    Raises the errors of `merge` and `upload`.
    """
    run_dir = look_at_run(run)
    if file is not None and is_remote(file):
        check_destination(file)
        _, rows = merge(run_dir)
        report = report_of_all(run_dir)
        upload(run_dir, report, file, force=force)
        return MergedRun(path=file, report=report, rows=rows)
    path, rows = merge(run_dir, file, force=force)
    report = report_of_all(run_dir)
    # The merged directory of a run in an object store is in the store, too.
    is_in_store = file is None and run_dir.store.uri
    merged_path = f"{run_dir.store.uri}/{path.name}" if is_in_store else str(path)
    return MergedRun(path=merged_path, report=report, rows=rows)
