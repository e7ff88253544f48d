"""Runs a batch file in OpenAI's format as a job, and writes results and errors once all lines are done."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.errors import BatchrunError, JobError, OutputError
from batchrunner.job.call import job_of_batch
from batchrunner.output.batch_results import publish, results_path
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import holds_run
from batchrunner.report.report import Report
from batchrunner.runner.foreground import run_in_foreground


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Result of running an OpenAI batch file."""

    report: Report
    results: Path
    errors: Path | None
    """File for lines that failed; None if they are written to `results` too."""
    is_published: bool
    """Whether all lines are done, and the results are written."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            **self.report.as_dict(),
            "results": str(self.results) if self.is_published else None,
            "errors": str(self.errors) if self.is_published and self.errors else None,
        }

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        lines = self.report.lines()[:-1]  # the report's last line names the part files
        if not self.is_published:
            # Exit code 0 without results: other workers still send rows of the shared run.
            is_stopped = self.report.exit_code != 0
            writer = (
                "the attempt that finishes the last line" if is_stopped else "the last worker that finishes"
            )
            return [*lines, f"results: not written yet; {writer} will write {self.results}"]
        failed = f", failed lines: {self.errors}" if self.errors else ""
        return [*lines, f"results: {self.results}{failed}"]


@contextlib.contextmanager
def _named_by_option() -> Iterator[None]:
    """Say `--output` instead of `output.path` in error messages, because the command has no job file."""
    try:
        yield
    except BatchrunError as failure:
        failure.args = (str(failure).replace("output.path", "--output"),)
        failure.message = failure.message.replace("output.path", "--output")
        failure.hint = failure.hint.replace("output.path", "--output")
        raise


@_named_by_option()
def run_batch(
    requests: str, output: str, errors: str | None, job: Mapping[str, Any], *, fresh: bool, **options: Any
) -> BatchRun:
    """Run or resume a batch, and write its results once all lines are done. Raises BatchrunError.

    `requests` is the batch file, `output` and `errors` are the result files. `job` has the options of
    `job_of_batch`, and `options` those of `run_in_foreground`.
    """
    if requests == "-":
        raise JobError(
            "requests: a batch cannot be read from standard input, because a resumed batch reads it again",
            hint="save the requests in a file",
        )
    results = results_path(output, "--output")
    failed = results_path(errors, "--errors") if errors else None
    run = results.with_name(f"{results.name}.run")
    _check_files(requests, [results, *([failed] if failed else [])], run, fresh=fresh)
    report = run_in_foreground(job_of_batch(requests, str(run), **job), (), fresh=fresh, **options)
    try:
        is_done = not report.rows_left and publish(RunDir(run), results, failed) is not None
    except BatchrunError as failure:
        failure.report = report
        raise
    return BatchRun(report, results, failed, is_done)


def _check_files(requests: str, written: Sequence[Path], run: Path, *, fresh: bool) -> None:
    """Raise OutputError if two of the files are the same, or if a foreign file would be overwritten.

    `written` are the files for results and errors. They may be overwritten with `fresh`, or if the run of
    this batch exists.
    """
    other_files = {Path(requests).expanduser().resolve()}
    for path in written:
        if path.resolve() in other_files:
            raise OutputError(
                f"{path}: requests, results and errors need three different files",
                hint="give different files",
            )
        other_files.add(path.resolve())
    if fresh or holds_run(run):
        return
    for path in written:
        if path.exists():
            raise OutputError(
                f"{path}: exists, and was not written by the run in {run}",
                hint="use another name, or --fresh to replace the file",
            )
