"""A whole job on a Ray cluster: workers that share its rows, one display, one report."""

import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import ray

from batchrunner.core.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_TIME_UP,
    EXIT_WRONG,
    BatchrunError,
    JobError,
    OutputError,
)
from batchrunner.core.timing import TIMING
from batchrunner.job.load import load_job
from batchrunner.output.task_holder import DEAD_AFTER_S
from batchrunner.ray.connection import HeadNode, connected
from batchrunner.ray.progress import RunProgress
from batchrunner.ray.shared_path import shared_path
from batchrunner.ray.stages import gpus_asked, gpus_of_nodes
from batchrunner.ray.workers import WorkerNeeds, Workers
from batchrunner.report.report import Report, report_of_all
from batchrunner.runner.foreground import TERM_DRAIN_S
from batchrunner.runner.run import discard_run, plan_failed_rows

log = logging.getLogger(__name__)

_SIGNALS = {
    signal.SIGINT: ("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: ("interrupted", EXIT_TERMINATED),
    signal.SIGUSR1: ("time is nearly up", EXIT_TIME_UP),
}


ROUND_S, ROUNDS = DEAD_AFTER_S / 5, 10
"""Pause before another worker is started for rows that a dead node holds, and the most such starts."""


class Stops:
    """The signals that this process got; the handlers do no more than to note them."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.since = 0.0
        """When the first one came, by the monotonic clock, in seconds."""
        self.interrupts = 0

    def note(self, number: int, _: FrameType | None) -> None:
        """Take a signal."""
        if self.first is None:
            self.first, self.since = signal.Signals(number), time.monotonic()
        self.interrupts += number == signal.SIGINT

    @property
    def at_once(self) -> bool:
        """Whether the rows in flight are waited for no longer."""
        late = self.first == signal.SIGTERM and time.monotonic() - self.since > TERM_DRAIN_S
        return self.interrupts > 1 or late


def run_on_ray(
    job: str,
    overrides: Sequence[str],
    *,
    workers: int,
    address: str | None,
    cpus: float,
    no_python: bool,
    fresh: bool,
    retry_failed: bool,
    quiet: bool,
    as_json: bool,
) -> Report:
    """Do a job with so many workers, each with `cpus` cores and the GPUs of its engine; return the report.

    `fresh` discards what earlier attempts wrote, `retry_failed` sends their failed rows again. Raises
    BatchrunError. A signal drains the run, a second SIGINT ends it at once.
    """
    if workers < 1:
        raise JobError(f"--workers {workers}", hint="give a number from 1 on")
    if cpus <= 0:
        raise JobError(f"--cpus {cpus:g}", hint="give a number above 0")
    loaded = load_job(job, overrides=overrides, no_python=no_python)
    silent = quiet or as_json
    with connected(address, log_to_driver=not silent), shared_path(loaded.output.path) as shared:
        needs = WorkerNeeds(cpus, gpus_asked(loaded.engine, gpus_of_nodes()))
        _check_cores(cpus)
        if fresh:
            discard_run(loaded)
        elif retry_failed:
            plan_failed_rows(loaded)
        group = Workers(loaded, shared, needs, quiet=silent)
        progress = RunProgress(loaded.output.path, quiet=silent)
        with _noted_signals() as stops, contextlib.closing(group), contextlib.closing(progress):
            head = HeadNode(ray.get_runtime_context().gcs_address)
            Supervision(group, stops, progress, head).run(workers)
        return _report(group, loaded.output.path, stops)


def _check_cores(cpus: float) -> None:
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if cpus > most:
        raise JobError(
            f"--cpus {cpus:g}: no node of the Ray cluster has more than {most:g} cores", hint="give fewer"
        )


class Supervision:
    """Looks after the workers until all rows are done, none can go on, or the run is to stop."""

    def __init__(self, group: Workers, stops: Stops, seen: RunProgress, head: HeadNode) -> None:
        self._group = group
        self._head = head
        self._stops = stops
        self._seen = seen
        self._stopping = False
        self._alone_since: float | None = None
        """When the last worker ended although rows were left, by the monotonic clock, in seconds."""
        self._rounds = 0

    def run(self, workers: int) -> None:
        """Start so many workers, and return at the end."""
        for _ in range(workers):
            self._group.start()
        while self._goes_on():
            if self._group:
                self._group.wait(TIMING.ray_poll)
            else:
                time.sleep(TIMING.ray_poll)
            if self._seen.is_due:
                self._head.look()  # before Ray is asked, which waits for it
                if self._seen.update(self._group.placed):
                    self._group.progressed()
                    self._rounds = 0
            self._stop_if_told()

    def _goes_on(self) -> bool:
        if self._stops.at_once:
            return False
        if self._group:
            self._alone_since = None
            return True
        if self._stopping or self._group.error is not None:
            return False
        # a node died with rows in its leases: they are free once it counts as dead
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > ROUND_S:
            self._rounds += 1
            self._group.start()
        return self._rounds <= ROUNDS

    def _stop_if_told(self) -> None:
        if self._stopping:
            return
        if self._stops.first is not None:
            reason, exit_code = _SIGNALS[self._stops.first]
            log.warning("%s: waiting for the rows in flight; once more stops now", reason)
        elif self._is_over():
            reason, exit_code = "the run is over", EXIT_TERMINATED
        else:
            return
        self._stopping = True
        self._group.stop(reason, exit_code)

    def _is_over(self) -> bool:
        """Tell whether nothing is left, the job is wrong, or a limit of the job is reached.

        A worker that has done its own rows is no reason to end, whatever its exit code: rows have failed, or
        a worker died whose rows are free now.
        """
        error, last = self._group.error, self._group.last
        if error is not None and error.exit_code == EXIT_WRONG:
            return True
        if last is None or not last.rows_left:
            return last is not None
        return last.wall_s > 0 and last.rows_left > last.rows_of_others


def _report(group: Workers, path: str, stops: Stops) -> Report:
    """Return the report of all workers; raises the error of one where rows are left because of it."""
    try:
        report: Report | None = report_of_all(path)
    except OutputError:  # no worker has begun
        report = None
    if stops.first is not None and (report is None or report.rows_left):
        reason, exit_code = _SIGNALS[stops.first]
        if report is None:
            error = BatchrunError(f"{reason} before the first row")
            error.exit_code = exit_code
            raise error
        return replace(report, reason=reason, exit_code=exit_code)
    if group.error is not None and (report is None or report.rows_left):
        group.error.report = report
        raise group.error
    assert report is not None
    last = group.last
    added = last is not None and last.exit_code == EXIT_STOPPED and not last.rows_left  # files, in mid-run
    if last is not None and last.exit_code != EXIT_DONE and (report.rows_left or added):
        return replace(report, reason=last.reason, exit_code=last.exit_code)
    return report


@contextlib.contextmanager
def _noted_signals() -> Iterator[Stops]:
    """Note signals instead of ending at once; those that are ignored stay so."""
    stops = Stops()
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, stops.note)
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
