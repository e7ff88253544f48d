"""Runs a job for a command: signals, display, log lines."""

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
) -> Report:
    """Run a job; a signal drains the run, a second SIGINT stops it at once. Raises BatchrunError."""
    loaded = load_job(job, overrides=overrides)
    control = Control()
    displays: list[Display] = []
    if not quiet and not as_json:
        displays = [ProgressBar() if sys.stderr.isatty() else ProgressLines()]

    with _log_above(displays):
        running = execute(
            loaded, fresh=fresh, retry_failed=retry_failed, join=join, displays=displays, control=control
        )
        return under_signals(running, control, loaded.limits)


def under_signals(work: Coroutine[Any, Any, T], control: Control, limits: LimitsSpec) -> T:
    """Do work on an event loop of its own; a signal drains it, a second SIGINT stops it at once."""
    bounds_s = {signal.SIGTERM: TERM_DRAIN_S, signal.SIGUSR1: limits.drain}

    async def supervised() -> T:
        signals = RunSignals(control, asyncio.get_running_loop(), bounds_s)
        with SignalWatch(signals.came, SIGNALS), contextlib.closing(signals):
            return await work

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(supervised())
    finally:
        if control.reason is not None:  # a thread that reads from a mount may never end
            runner.get_loop().set_default_executor(ThreadPoolExecutor(1))
        if not control.at_once:
            runner.close()


def log_to_stderr(*, quiet: bool = False, verbose: bool = False) -> None:
    """Show only batchrunner's log: its errors if `quiet`, its notes too if `verbose`."""
    level = logging.DEBUG if verbose else logging.INFO
    ours = logging.getLogger("batchrunner")
    ours.setLevel(logging.ERROR if quiet else level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine())
    ours.addHandler(handler)
    ours.propagate = False


def _log_above(displays: Sequence[Display]) -> contextlib.AbstractContextManager[None]:
    """Let log lines appear above the bar and not in it."""
    if not any(isinstance(display, ProgressBar) for display in displays):
        return contextlib.nullcontext()
    from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415 - only where there is a terminal

    return logging_redirect_tqdm([logging.getLogger("batchrunner")])
