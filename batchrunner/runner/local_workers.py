"""Several processes on this machine that share the rows of one job (`batchrun JOB --processes N`).

Each process is a worker, as `batchrun JOB --join` starts it. This process starts them, shows the progress of
the whole run, passes signals on, and reports at the end. A process that dies is not replaced: the others take
over its rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from batchrunner.core.errors import (
    EXIT_DONE,
    EXIT_FAILED_ROWS,
    EXIT_STOPPED,
    EXIT_WRONG,
    BatchrunError,
    JobError,
    OutputError,
)
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import load_job
from batchrunner.report.report import Report, report_of_all
from batchrunner.runner.control import SIGNALS, Control
from batchrunner.runner.foreground import under_signals
from batchrunner.runner.plan import StartOptions
from batchrunner.runner.status import show_progress
from batchrunner.runner.work import plan_failed_rows

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks at the processes."""


def run_in_processes(
    job: str,
    overrides: Sequence[str],
    *,
    processes: int,
    fresh: bool,
    retry_failed: bool,
    quiet: bool,
    as_json: bool,
) -> Report:
    """Run a job in several processes on this machine, and return the report of all. Raises BatchrunError."""
    StartOptions(fresh=fresh, retry_failed=retry_failed, join=True)  # Raises JobError with `fresh`.
    if job == "-":
        raise JobError("--processes: each process reads the job", hint="save the job in a file")
    loaded = load_job(job, overrides=overrides)
    if isinstance(loaded.engine, ServerEngine):
        raise JobError(
            f"--processes {processes}: each process would start SGLang on the same GPUs",
            hint="start SGLang once, and give its address with engine.kind=attach",
        )
    control = Control()
    # This process sends no rows. But in another stage, a signal would end it before its workers.
    control.stage = "sending"

    async def work() -> Report:
        if retry_failed:
            await asyncio.to_thread(plan_failed_rows, loaded)
        workers = LocalWorkers(job, overrides, control)
        next_line = time.monotonic()
        with contextlib.closing(workers):
            workers.start(processes)
            while workers.watch():
                if not (quiet or as_json) and time.monotonic() >= next_line:
                    next_line = await asyncio.to_thread(show_progress, loaded.output.path, workers.running)
                await asyncio.sleep(POLL_S)
        return workers.report(loaded.output.path)

    return under_signals(work(), control, loaded.limits)


class LocalWorkers:
    """Starts and watches the worker processes of a run."""

    def __init__(self, job: str, overrides: Sequence[str], control: Control) -> None:
        options = [word for override in overrides for word in ("--set", override)]
        self._command = [sys.executable, "-m", "batchrunner", job, "--join", "--json", "--quiet", *options]
        self._control = control
        self._processes: dict[subprocess.Popen[bytes], tuple[IO[bytes], IO[bytes]]] = {}
        """The running processes, each with the files of its standard output and error."""
        self._signals_sent = 0
        """Number of signals that were passed on: 1 for a gentle stop, 2 for a stop at once."""
        self._worst: BatchrunError | None = None
        """Error of a failed process. If several failed, the first error with the highest exit code."""
        self._last: BatchrunError | None = None
        """Error of the process that ended last; None if that process did its rows."""

    @property
    def running(self) -> int:
        """Number of processes that have not ended."""
        return len(self._processes)

    def start(self, processes: int) -> None:
        """Start the processes."""
        for _ in range(processes):
            # `watch` closes these files. A pipe instead could fill up and block the process.
            output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            # In sessions of their own, the processes get a Ctrl-C only once: from this process.
            process = subprocess.Popen(self._command, stdout=output, stderr=errors, start_new_session=True)
            self._processes[process] = output, errors

    def watch(self) -> bool:
        """Handle the ends of processes, and pass signals on; return whether a process is still running."""
        for process in [*self._processes]:
            if process.poll() is not None:
                with contextlib.ExitStack() as stack:  # closes both files
                    output, errors = map(stack.enter_context, self._processes.pop(process))
                    self._note_end(process.returncode, output, errors)
        if self._control.reason is None and self._worst and self._worst.exit_code == EXIT_WRONG:
            self._control.drain("the job is wrong", EXIT_WRONG)
        if self._control.reason is not None:
            self._pass_on_signals()
        return bool(self._processes)

    def close(self) -> None:
        """Kill the processes that have not ended."""
        for process in self._processes:
            process.kill()
            process.wait()

    def report(self, path: str) -> Report:
        """Return the report of the run at `path`; raise the error of a failed process if the run is not done.

        If no rows remain, the process that ended last tells whether the run is done. It may have refused the
        job, or found new input files, so that the stored results are those of an earlier start.
        """
        control = self._control
        try:
            report = report_of_all(path)
        except OutputError:  # no process has begun the run
            if self._worst is not None:
                raise self._worst from None
            raise control.interrupted("before the first row was sent") from None
        if not report.rows_left and self._last is None:
            return report
        # If a signal stopped the run, its exit code matters more than the error of a process.
        if self._worst is not None and control.exit_code in {EXIT_STOPPED, EXIT_WRONG}:
            self._worst.report = report
            raise self._worst
        if control.reason is not None:
            return replace(report, reason=control.reason, exit_code=control.exit_code)
        return report

    def _pass_on_signals(self) -> None:
        """Tell the processes to stop gently or at once, as this process was told."""
        # A process that gets one signal stops gently, and one that gets two stops at once.
        signals = 2 if self._control.at_once else 1
        exit_code = self._control.exit_code
        # The exit code tells which signal this process got. If it was stopped by other means, SIGTERM stops
        # the others gently.
        number = next((number for number, (_, code) in SIGNALS.items() if code == exit_code), signal.SIGTERM)
        for _ in range(self._signals_sent, signals):
            for process in self._processes:
                process.send_signal(number)
        self._signals_sent = signals

    def _note_end(self, code: int, output: IO[bytes], errors: IO[bytes]) -> None:
        """Keep the error of a process that failed, unless the processes were told to stop."""
        if code in {EXIT_DONE, EXIT_FAILED_ROWS}:
            self._last = None
            return
        error = self._last = _error_of(code, output, errors)
        if self._control.reason is not None:
            return
        if self._worst is None or str(error) != str(self._worst):
            others = ", and the others take over its rows" if self._processes else ""
            log.warning("a process ended%s: %s", others, error)
        if self._worst is None or error.exit_code > self._worst.exit_code:
            self._worst = error


def _error_of(code: int, output: IO[bytes], errors: IO[bytes]) -> BatchrunError:
    """Return the error of a failed process, from its exit code (negative for a signal) and its output.

    `output` and `errors` are its standard output and error.
    """
    output.seek(0)
    errors.seek(0)
    # With --json, a process prints its report or its error. It prints nothing if it was killed.
    result: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        result = json.loads(output.read())
    if code < 0:
        message, hint = f"signal {-code} killed a process of the run", None
    elif "error" in result:
        message, hint = result["error"]["message"], result["error"]["hint"]
    else:
        last_lines = errors.read().decode(errors="replace").splitlines()[-1:]
        message, hint = result.get("reason") or "".join(last_lines) or f"exit code {code}", None
    error = BatchrunError(message, hint=hint)
    error.exit_code = code if code > 0 else EXIT_STOPPED
    return error
