"""Runs a job or a batch file for a command: signals, display, metrics, results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from batchrunner.core.console import is_no_detail
from batchrunner.core.errors import BatchrunError, JobError, OutputError
from batchrunner.core.processes import SignalWatch, need_files_of_loop
from batchrunner.core.types import MetricsAddress
from batchrunner.job.call import job_of_batch
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from batchrunner.output.batch_results import publish, results_path
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import holds_run
from batchrunner.report.report import Report
from batchrunner.runner.control import SIGNALS, Control, RunSignals
from batchrunner.runner.metrics import metrics_server
from batchrunner.runner.progress import Display, Displays, ProgressBar, make_display
from batchrunner.runner.run import execute
from batchrunner.runner.slurm import task_name

log = logging.getLogger(__name__)

TERM_DRAIN_S = 15.0
"""Seconds that requests in flight get after SIGTERM. SIGKILL follows, after 30 s by default with Slurm and
Kubernetes, and the engine has to end too."""


def run_in_foreground(
    job: str | Job,
    overrides: Sequence[str],
    *,
    fresh: bool,
    retry_failed: bool,
    quiet: bool,
    as_json: bool,
    join: bool = False,
    no_python: bool = False,
    metrics: MetricsAddress | None = None,
) -> Report:
    """Run a job; a signal drains the run, a second SIGINT stops it at once. Raises BatchrunError.

    `no_python` refuses a job that runs Python functions. `metrics` is where its metrics are served.
    """
    loaded = load_job(job, overrides=overrides, no_python=no_python)
    control = Control()

    async def supervised() -> Report:
        signals = RunSignals(control, asyncio.get_running_loop(), bounds_s)
        display = make_display(quiet=quiet or as_json)
        with SignalWatch(signals, SIGNALS), contextlib.closing(signals), _log_above(display):
            return await execute(
                loaded,
                fresh=fresh,
                retry_failed=retry_failed,
                join=join,
                display=Displays([display, *pages]),
                control=control,
            )

    bounds_s = {signal.SIGTERM: TERM_DRAIN_S, signal.SIGUSR1: loaded.limits.drain}
    need_files_of_loop()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with metrics_server(metrics) as pages:
        try:
            return runner.run(supervised())
        finally:
            if control.reason is not None:  # a thread that reads from a mount may never end
                runner.get_loop().set_default_executor(ThreadPoolExecutor(1))
            if not control.at_once:
                runner.close()


def log_to_stderr(*, quiet: bool, details: bool = True) -> None:
    """Show only batchrunner's log; an engine in this process uses the root logger.

    `details` is whether a terminal shows all lines; elsewhere they are in the log in any case.
    """
    ours = logging.getLogger("batchrunner")
    ours.setLevel(logging.ERROR if quiet else logging.INFO)
    task = task_name(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{task}: %(message)s" if task else None))
    if not details and sys.stderr.isatty():
        handler.addFilter(is_no_detail)
    ours.addHandler(handler)
    ours.propagate = False


def _log_above(display: Display) -> contextlib.AbstractContextManager[None]:
    """Let log lines appear above the bar and not in it."""
    if not isinstance(display, ProgressBar):
        return contextlib.nullcontext()
    from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415 - only where there is a terminal

    return logging_redirect_tqdm([logging.getLogger("batchrunner")])


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
        for path in written:
            outer = next((above for above in path.resolve().parents if self._is_run(above)), None)
            if outer is not None:
                raise OutputError(
                    f"{path}: lies in the output path of a run, {outer}", hint="give a file outside of it"
                )
        if fresh or holds_run(self.run):
            return
        for path in written:
            if path.exists():
                raise OutputError(
                    f"{path}: exists, and no run in {self.run} made it",
                    hint="take another name, or --fresh to replace it",
                )

    def _is_run(self, directory: Path) -> bool:
        return directory == self.run.resolve() or holds_run(directory)


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
    requests: str,
    output: str,
    errors: str | None,
    *,
    model: str | None,
    urls: Sequence[str],
    base: str | None,
    lenient: bool,
    overrides: Sequence[str],
    fresh: bool,
) -> tuple[BatchFiles, Job]:
    """Return the files and the job of a batch; raises JobError or OutputError."""
    if requests == "-":
        raise JobError("requests: standard input cannot be read again to resume", hint="save it to a file")
    results = results_path(output, "--output")
    files = BatchFiles(requests, results, results_path(errors, "--errors") if errors else None)
    files.check(fresh=fresh)
    run = str(files.run)
    job = job_of_batch(requests, run, model=model, urls=urls, base=base, lenient=lenient, overrides=overrides)
    return files, job


def run_batch(
    files: BatchFiles, job: Job, *, fresh: bool, retry_failed: bool, join: bool, quiet: bool, as_json: bool,
    metrics: MetricsAddress | None = None,
) -> BatchRun:  # fmt: skip
    """Run or resume a batch, and write its results once all lines are done; raises BatchrunError."""
    report = run_in_foreground(
        job, (), fresh=fresh, retry_failed=retry_failed, join=join, quiet=quiet, as_json=as_json,
        metrics=metrics,
    )  # fmt: skip
    try:
        is_done = not report.rows_left and publish(RunDir(files.run), files.results, files.errors)
    except BatchrunError as failure:
        failure.report = report
        raise
    return BatchRun(report, files, is_done)
