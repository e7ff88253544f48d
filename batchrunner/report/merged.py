"""The result of `batchrun merge`: the merged files, the report of the whole run, and the missing rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EXIT_DONE, EXIT_STOPPED
from batchrunner.output.merge import merge
from batchrunner.output.run_dir import look_at_run
from batchrunner.report.report import Report, report_of_all


@dataclass(frozen=True, slots=True)
class MergedRun:
    """A merged run."""

    path: str
    """Directory of the merged files, its URI, or the path of the file."""
    report: Report
    """Report of the whole run."""
    rows: int
    """Number of merged rows."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 only if all rows are merged, as the next step may need them all."""
        return EXIT_STOPPED if self.rows < self.report.rows_total else EXIT_DONE

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "path": self.path,
            "rows": self.rows,
            "rows_missing": max(0, self.report.rows_total - self.rows),
            "exit_code": self.exit_code,
            "report": self.report.as_dict(),
        }

    def lines(self) -> list[str]:
        """Return the result as lines for people."""
        lines = self.report.lines()[:-1]  # the last line names the parts, not the merged files
        missing = self.report.rows_total - self.rows
        if missing > 0:
            lines.append(
                f"merged: {self.rows:,} of {self.report.rows_total:,} rows, {missing:,} are missing: wait "
                "for workers that still run, or run the same command again, then merge again"
            )
        return lines


def merge_run(run: str | Path, file: str | None = None, *, force: bool = False) -> MergedRun:
    """Merge a run, and write its report; raises the errors of `merge`."""
    run_dir = look_at_run(run)
    path, rows = merge(run_dir, file, force=force)
    report = report_of_all(run_dir)
    place = f"{run_dir.store.uri}/{path.name}" if file is None and run_dir.store.uri else str(path)
    return MergedRun(place, report, rows)
