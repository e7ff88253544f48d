"""Runs a job for a command, with signals, a display and log lines."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from batchrunner.core.console import LogLine
from batchrunner.core.processes import SignalWatch
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.report.report import Report
from batchrunner.runner.control import SIGNALS, Control, RunSignals
from batchrunner.runner.progress import Display, ProgressBar, ProgressLines
from batchrunner.runner.run import execute

log = logging.getLogger(__name__)
T = TypeVar("T")

TERM_DRAIN_S = 15.0
"""Maximum seconds that requests in flight get after SIGTERM. Slurm and Kubernetes send SIGKILL 30 s after
SIGTERM by default, and the engine must shut down before that."""


def run_in_foreground(
    job: str | Job,
    overrides: Sequence[str],
    *,
    fresh: bool,
    retry_failed: bool,
    quiet: bool,
    as_json: bool,
    join: bool = False,
    metrics: str | None = None,
) -> Report:
    """Run a job until it ends or a signal stops it. Raises BatchrunError.

    After a signal, no more rows are sent, and requests in flight end. A second SIGINT cancels these requests.
    `metrics` is the address on which the run's metrics are served.
    """
    loaded = load_job(job, overrides=overrides)
    control = Control()
    displays: list[Display] = []
    if not quiet and not as_json:
        displays = [ProgressBar() if sys.stderr.isatty() else ProgressLines()]
    if metrics is not None:
        from batchrunner.runner.metrics import MetricsServer  # noqa: PLC0415 - for few runs

        server = MetricsServer(metrics)
        log.info("metrics: %s", server.url)
        displays.append(server)
    with _log_above(displays):
        running = execute(
            loaded, fresh=fresh, retry_failed=retry_failed, join=join, displays=displays, control=control
        )
        return under_signals(running, control, loaded.limits)


def under_signals(work: Coroutine[Any, Any, T], control: Control, limits: LimitsSpec) -> T:
    """Run `work` on a new event loop until it ends or a signal stops it.

    After a signal, no more rows are sent, and requests in flight end. A second SIGINT cancels them.
    """
    grace_s = {signal.SIGTERM: TERM_DRAIN_S, signal.SIGUSR1: limits.drain}

    async def supervised() -> T:
        signals = RunSignals(control, asyncio.get_running_loop(), grace_s)
        with SignalWatch(signals.came, SIGNALS), contextlib.closing(signals):
            return await work

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(supervised())
    finally:
        # Closing the loop waits for the threads of its executor, and a read from a mount may hang for ever.
        # So a stopped run gets a new executor without threads.
        if control.reason is not None:
            runner.get_loop().set_default_executor(ThreadPoolExecutor(1))
        if not control.at_once:  # after an immediate stop the process ends, so the loop may stay open
            runner.close()


def log_to_stderr(*, quiet: bool = False, verbose: bool = False) -> None:
    """Print the log lines of batchrunner on standard error, but not those of other libraries.

    With `quiet`, print only errors. With `verbose`, print debug lines too.
    """
    level = logging.DEBUG if verbose else logging.INFO
    ours = logging.getLogger("batchrunner")
    ours.setLevel(logging.ERROR if quiet else level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine())
    ours.addHandler(handler)
    ours.propagate = False


def _log_above(displays: Sequence[Display]) -> contextlib.AbstractContextManager[None]:
    """Print log lines above the progress bar, so that they do not break it."""
    if not any(isinstance(display, ProgressBar) for display in displays):
        return contextlib.nullcontext()
    from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415 - only for a terminal

    return logging_redirect_tqdm([logging.getLogger("batchrunner")])
