"""Runs a job in the foreground of a terminal or batch job, with signal handlers and a display."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import uvloop

from batchrunner.core.console import is_no_detail, tell_failure, wants_json
from batchrunner.core.endpoints import MetricsAddress
from batchrunner.core.errors import BatchrunError, JobError
from batchrunner.core.exit_codes import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIME_UP
from batchrunner.core.open_files import need_files_of_loop
from batchrunner.core.timing import TIMING
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from batchrunner.report.report import Report
from batchrunner.runner.cluster.slurm import task_name
from batchrunner.runner.control import Control
from batchrunner.runner.execute import execute
from batchrunner.runner.metrics import metrics_server
from batchrunner.runner.progress import Display, ProgressBar, make_display
from batchrunner.runner.progress_calls import Displays
from batchrunner.runner.shard import JoinTask, Shard, new_join_task, parse_shard

log = logging.getLogger(__name__)

TERM_DRAIN_S = 15.0
"""Seconds that requests in flight get after SIGTERM. SIGKILL follows, after 30 s by default with Slurm and
Kubernetes, and the engine has to end too."""

_SIGNALS = {
    signal.SIGINT: ("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: ("interrupted", EXIT_TERMINATED),
    signal.SIGHUP: ("interrupted", EXIT_TERMINATED),  # no terminal; what nohup ignores stays so
    signal.SIGUSR1: ("time is nearly up", EXIT_TIME_UP),
}


def run_in_foreground(
    job: str | Job,
    overrides: Sequence[str],
    *,
    fresh: bool,
    retry_failed: bool,
    quiet: bool,
    as_json: bool,
    shard: str | None = None,
    join: bool = False,
    no_python: bool = False,
    metrics: MetricsAddress | None = None,
) -> Report:
    """Run a job; a signal drains the run, a second SIGINT stops it at once. Raises BatchrunError.

    `no_python` refuses a job that runs Python functions. `metrics` is where its metrics are served.
    """
    loaded = load_job(job, overrides=overrides, no_python=no_python)
    part = _part_of(shard, join=join)
    control = Control()

    async def supervised() -> Report:
        loop = asyncio.get_running_loop()
        for number in before:
            loop.add_signal_handler(number, _on_signal, control, number, bounds.get(number))
        display = make_display(quiet=quiet or as_json)
        with _log_above(display):
            return await execute(
                loaded,
                fresh=fresh,
                retry_failed=retry_failed,
                part=part,
                display=Displays([display, *pages]),
                control=control,
            )

    bounds = {signal.SIGTERM: TERM_DRAIN_S, signal.SIGUSR1: loaded.limits.drain}
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    need_files_of_loop()
    stack = contextlib.ExitStack()
    pages = stack.enter_context(metrics_server(metrics))
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(supervised())
    finally:
        stack.close()
        if not control.at_once:  # else it would wait for threads, such as one that renders a row
            runner.close()
        # uvloop leaves its own handlers behind, which would ignore a Ctrl-C
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _part_of(shard: str | None, *, join: bool) -> Shard | JoinTask | None:
    if shard and join:
        raise JobError("--shard and --join: a task has a share of its own or takes what is left, not both")
    if join:
        return new_join_task()
    return parse_shard(shard, os.environ) if shard else None


def _log_above(display: Display) -> contextlib.AbstractContextManager[None]:
    """Let log lines appear above the bar and not in it."""
    if not isinstance(display, ProgressBar):
        return contextlib.nullcontext()
    from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415 - only where there is a terminal

    return logging_redirect_tqdm([logging.getLogger("batchrunner")])


def _stop_at_once(control: Control, reason: str) -> None:
    """Stop the run without its rows in flight, and end the process in any case some seconds later."""
    if not control.at_once:
        threading.Thread(target=_end_process, args=[control.exit_code], daemon=True).start()
    control.stop(reason)


def _end_process(exit_code: int) -> None:
    """End the process if it has not ended by itself, whatever its threads do; journals need no end."""
    time.sleep(TIMING.stop_at_once)
    ended = BatchrunError("interrupted: ended without waiting for its threads")
    ended.exit_code = exit_code
    os._exit(tell_failure(ended, as_json=wants_json(sys.argv[1:])))


def _on_signal(control: Control, number: signal.Signals, within_s: float | None) -> None:
    """Drain; a second SIGINT stops at once. Slurm may send other signals twice."""
    reason, exit_code = _SIGNALS[number]
    again = control.reason is not None
    control.drain(reason, exit_code)
    if number == signal.SIGINT and again:
        _stop_at_once(control, reason)
    elif within_s is not None:
        asyncio.get_running_loop().call_later(within_s, _stop_at_once, control, reason)
    if not again:
        limit = "; once more stops now" if within_s is None else f", for {within_s:g} s at most"
        log.warning("%s: waiting for the rows in flight%s", reason, limit)
