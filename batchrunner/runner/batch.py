"""Runs a batch file in the format of OpenAI as a job; gives results and errors when all lines are done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.errors import BatchrunError, JobError, OutputError
from batchrunner.job.call import job_of_batch
from batchrunner.job.spec import Job
from batchrunner.output.merge import publish, results_path
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import holds_run
from batchrunner.report.report import Report
from batchrunner.runner.foreground import run_in_foreground


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The files of a batch, all of them different."""

    requests: str
    results: Path
    errors: Path | None

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.results.with_name(f"{self.results.name}.run")

    def check(self, *, fresh: bool) -> None:
        """Raise OutputError where a file would be lost; with `fresh` the results may be."""
        written = [self.results, *([self.errors] if self.errors else [])]
        places = [path.resolve() for path in (Path(self.requests).expanduser(), *written)]
        if len(set(places)) < len(places):
            raise OutputError(
                f"{self.results}: is two of requests, results and errors", hint="give different files"
            )
        if fresh or holds_run(self.run):
            return
        for path in written:
            if path.exists():
                raise OutputError(
                    f"{path}: exists, and no run in {self.run} made it",
                    hint="take another name, or --fresh to replace it",
                )


@dataclass(frozen=True, slots=True)
class BatchRun:
    """What became of a batch file."""

    report: Report
    files: BatchFiles
    is_published: bool
    """Whether the results are written: all lines are done."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        errors = self.files.errors if self.is_published else None
        return {
            **self.report.as_dict(),
            "results": str(self.files.results) if self.is_published else None,
            "errors": str(errors) if errors else None,
        }

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        lines = self.report.lines()[:-1]  # the last one names the parts
        if not self.is_published:
            who = "the last task to end" if not self.report.exit_code else "the start that ends the last line"
            return [*lines, f"results: not yet: {who} writes {self.files.results}"]
        failed = f", failed lines: {self.files.errors}" if self.files.errors else ""
        return [*lines, f"results: {self.files.results}{failed}"]


def prepare_batch(
    requests: str, output: str, errors: str | None, *, fresh: bool, **options: Any
) -> tuple[BatchFiles, Job]:
    """Return the files and the job of a batch; raises JobError or OutputError.

    `options` are those of `job_of_batch`.
    """
    if requests == "-":
        raise JobError("requests: standard input cannot be read again to resume", hint="save it to a file")
    results = results_path(output, "--output")
    files = BatchFiles(requests, results, results_path(errors, "--errors") if errors else None)
    files.check(fresh=fresh)
    return files, job_of_batch(requests, str(files.run), **options)


def run_batch(files: BatchFiles, job: Job, **options: Any) -> BatchRun:
    """Run or resume a batch, and write its results once all lines are done; raises BatchrunError.

    `options` are those of `run_in_foreground`.
    """
    report = run_in_foreground(job, (), **options)
    try:
        is_done = not report.rows_left and publish(RunDir(files.run), files.results, files.errors)
    except BatchrunError as failure:
        failure.report = report
        raise
    return BatchRun(report, files, is_done)
