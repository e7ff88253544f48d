"""A whole job on a Ray cluster: workers that share its rows as `--join` does, one display, one report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchrunner.core.console import counted, duration, tell
from batchrunner.core.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_WRONG,
    BatchrunError,
    JobError,
    OutputError,
)
from batchrunner.core.processes import listened_to
from batchrunner.core.timing import TIMING
from batchrunner.engines.launched.server import GROUP
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from batchrunner.output.addresses import store_address
from batchrunner.output.files import make_directory, writing
from batchrunner.ray.stages import gpus_asked, of_nodes
from batchrunner.report.report import Report, report_of_all
from batchrunner.runner.control import SIGNALS, Control
from batchrunner.runner.foreground import log_to_stderr, under_signals
from batchrunner.runner.progress import LINE_EVERY_S
from batchrunner.runner.run import execute
from batchrunner.runner.status import status
from batchrunner.runner.work import plan_failed_rows

log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""Deaths of workers after which none is started again."""
COST_SHARE = 0.1
"""Most of the time that is spent on reading the run's files for the display."""


@dataclass(frozen=True, slots=True)
class SharedPath:
    """What every node must see: the command's directory, and a mark beside the job's results."""

    directory: str | None
    """Where relative paths start; None where Ray gives each worker a copy of the working directory."""
    mark: str | None
    """Path of a file; None where the results are in an object store."""

    def enter(self) -> None:
        """Go to the directory, and look for the mark; raises JobError where this node lacks one."""
        host = socket.gethostname()
        if self.directory is not None:
            try:
                os.chdir(self.directory)
            except OSError as failure:
                raise JobError(
                    f"{self.directory}: the node {host} has no such directory ({failure.strerror})",
                    hint="start the command in a directory that all nodes share",
                ) from None
        if self.mark is not None and not Path(self.mark).exists():
            raise JobError(
                f"output.path: the node {host} does not share {Path(self.mark).parent} with the command",
                hint="give a path on a file system that all nodes share, or a URI of an object store",
            )


class JobWorker:
    """An actor that does a share of a job, as `batchrun JOB --join` does. Ray calls it in one event loop."""

    def __init__(self, *, quiet: bool) -> None:
        log_to_stderr(quiet=quiet)
        if group := get_current_placement_group():  # which the engine's other machines are in
            os.environ[GROUP] = group.id.hex()
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._control = Control()

    async def run(self, job: Job, shared: SharedPath) -> Report:
        """Do rows until none is free, and return the report; raises BatchrunError."""
        shared.enter()
        return await execute(job, join=True, control=self._control)

    async def begun(self) -> None:
        """Return at once: the worker has found room."""

    async def stop(self, reason: str, exit_code: int) -> None:
        """Send no more rows; those in flight end."""
        self._control.drain(reason, exit_code)


def run_on_ray(
    job: str,
    overrides: Sequence[str],
    *,
    workers: int,
    address: str | None,
    cpus: float,
    retry_failed: bool,
    quiet: bool,
    as_json: bool,
) -> Report:
    """Do a job with so many workers, each with `cpus` cores and the GPUs of its engine; return the report.

    `retry_failed` sends the failed rows of earlier attempts again. Raises BatchrunError.
    """
    if workers < 1:
        raise JobError(f"--workers {workers}", hint="give a number from 1 on")
    if cpus <= 0:
        raise JobError(f"--cpus {cpus:g}", hint="give a number above 0")
    loaded = load_job(job, overrides=overrides)
    path, quiet = loaded.output.path, quiet or as_json
    control = Control()

    async def work() -> Report:
        with _connected(address, control, quiet=quiet), _shared_path(path) as shared:
            gpus = gpus_asked(loaded.engine, of_nodes("GPU"))
            most = max(of_nodes("CPU"), default=0)
            if cpus > most:
                raise JobError(
                    f"--cpus {cpus:g}: no node of the Ray cluster has more than {most:g} cores",
                    hint="give fewer",
                )
            if retry_failed:
                plan_failed_rows(loaded)
            actor_class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1)(JobWorker)
            next_line = 0.0
            with contextlib.closing(Workers(loaded, shared, control)) as group:
                for _ in range(workers):
                    place = _place(getattr(loaded.engine, "nodes", 1), cpus, gpus)
                    group.start(actor_class.options(**place).remote(quiet=quiet))
                while await asyncio.to_thread(group.go_on):
                    if not quiet and time.monotonic() >= next_line:
                        next_line = await asyncio.to_thread(show_progress, path, group.working)
            return _report(group, path, control)

    return under_signals(work(), control, loaded.limits)


def _place(nodes: int, cpus: float, gpus: int) -> dict[str, Any]:
    """Return where Ray is to put a worker: with an engine on several machines, first in a group of as many.

    Ray gives such a group all of its machines at once; it is there as long as this process.
    """
    if nodes == 1:
        return {}
    machine = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    group = placement_group([machine] * nodes, strategy="STRICT_SPREAD")
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}


@contextlib.contextmanager
def _connected(address: str | None, control: Control, *, quiet: bool) -> Iterator[None]:
    """Connect this process to a cluster, by default that of RAY_ADDRESS or of this machine.

    Raises JobError with what Ray says where it cannot. Unless `quiet`, what the workers log is shown.
    """
    found = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in found:
        raise JobError(
            f"--address {found}: a Ray client cannot start a job",
            hint="give host:port of the head node, or submit the command with `ray job submit`",
        )
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    try:
        ray.init(address=found, log_to_driver=not quiet, logging_level=logging.ERROR)
    except (RayError, RuntimeError, ValueError, OSError) as failure:
        raise JobError(
            f"--address {found}: Ray cannot connect: {_first_line(failure)}",
            hint="give host:port of the head node, or --address local for a cluster of this machine alone",
        ) from None
    except SystemExit:  # by Ray's own handler of SIGTERM
        control.drain(*SIGNALS[signal.SIGTERM])
        raise control.interrupted("before the first row was sent") from None
    signal.signal(signal.SIGTERM, listened_to)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where Ray's own lines go; a result is on stdout
            yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _shared_path(output: str) -> Iterator[SharedPath]:
    """Give what the workers look for; the mark is there meanwhile.

    Raises OutputError, and JobError where the results would be deleted with Ray's copy of a directory.
    """
    is_copy = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    directory = None if is_copy else str(Path.cwd())
    if store_address(output) is not None:
        yield SharedPath(directory, None)
        return
    path = Path(output).expanduser()
    if is_copy and not path.is_absolute():
        raise JobError(
            f"output.path {output}: Ray deletes its copy of the working directory after the job",
            hint="give an absolute path on a file system that all nodes share, or a URI of an object store",
        )
    path = path.absolute()
    mark = path.with_name(f".{path.name}-{secrets.token_hex(4)}.ray")
    try:
        with writing(path.parent):
            make_directory(path.parent)
        mark.touch()
    except OSError as failure:
        raise OutputError(f"{path.parent}: cannot be written: {failure.strerror}") from None
    try:
        yield SharedPath(directory, str(mark))
    finally:
        mark.unlink(missing_ok=True)


class Workers:
    """The workers of a job. Ray starts those that die again, where there is room; others may wait for it."""

    def __init__(self, job: Job, shared: SharedPath, control: Control) -> None:
        self._job = job
        self._shared = shared
        self._control = control
        control.stage = "sending"
        self._deaths = 0
        self._actors: dict[Any, tuple[Any, Any]] = {}
        """Actors by the reference of their reports, each with the reference that tells when it has begun."""
        self._told: tuple[str, int] | None = None
        """Why the workers are to end, and their exit code."""
        self.error: BatchrunError | None = None
        """What ended the last worker that could not go on."""
        self.last: Report | None = None
        """What the last worker that ended returned."""

    def start(self, actor: Any) -> None:
        """Let an actor do rows."""
        self._actors[actor.run.remote(self._job, self._shared)] = actor, actor.begun.remote()

    @property
    def working(self) -> int:
        """Workers that have found room."""
        return sum(_is_ready(begun) for _, begun in self._actors.values())

    def go_on(self) -> bool:
        """Look after the workers for a moment; tell whether some are left, and are waited for."""
        ended, _ = ray.wait(list(self._actors), timeout=TIMING.ray_poll)
        for reference in ended:
            actor, _ = self._actors.pop(reference)
            try:
                self.last = ray.get(reference)
            except RayTaskError as failure:
                self._failed(failure.cause)
            except RayError as failure:  # the actor, its process or its node is gone, or out of reach
                if isinstance(failure, ActorUnavailableError):  # Ray still finds out whether it died
                    time.sleep(TIMING.ray_poll)
                else:
                    self._deaths += 1
                if self._told is None and self._deaths <= MOST_DEATHS:
                    log.warning("a worker died, another one takes its place: %s", _first_line(failure))
                    self.start(actor)
                    continue
                self._failed(failure)
            ray.kill(actor)
        self._stop_if_over()
        return bool(self._actors) and not self._control.at_once

    def close(self) -> None:
        """End all workers at once."""
        for actor, _ in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    def _failed(self, cause: Any) -> None:
        if self._told is not None:  # it was to end
            return
        if not isinstance(cause, BatchrunError):
            cause = BatchrunError(
                f"a worker failed: {type(cause).__name__}: {_first_line(cause)}",
                hint="look at its log (`ray logs`), and run the same command again: it resumes",
            )
        if self._actors and cause.exit_code != EXIT_WRONG:  # else it is what the command ends with
            log.warning("a worker ended: %s", cause)
        if self.error is None or cause.exit_code > self.error.exit_code:
            self.error = cause  # a wrong job before an engine that was lost

    def _stop_if_over(self) -> None:
        """Let the rows in flight end where the run is over; workers that wait for room are ended."""
        if self._told is None:
            if self._control.reason is not None:
                self._told = self._control.reason, self._control.exit_code
            elif self._is_over():
                self._told = "the run is over", EXIT_TERMINATED
            else:
                return
        for reference, (actor, begun) in list(self._actors.items()):
            if _is_ready(begun):
                actor.stop.remote(*self._told)
            else:
                del self._actors[reference]
                ray.kill(actor)

    def _is_over(self) -> bool:
        """Tell whether nothing is left, the job is wrong, or a limit of the job is reached.

        A worker that has done its own rows is no reason to end, whatever its exit code: rows have failed, or
        a worker died whose rows are free now.
        """
        if self.error is not None and self.error.exit_code == EXIT_WRONG:
            return True
        last = self.last
        if last is None or not last.rows_left:
            return last is not None
        return last.wall_s > 0 and last.rows_left > last.rows_of_others


def _is_ready(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def show_progress(path: str, workers: int) -> float:
    """Show how far a run is by a line, read from its files; return when to show the next one."""
    began = time.monotonic()
    with contextlib.suppress(BatchrunError):  # no worker has begun
        state = status(path, watch=False)  # the cluster knows which workers live
        if state.rows_total is not None:
            done = f"{state.rows_on_disk:,}/{state.rows_total:,} rows"
            at_work = f"{counted(workers, 'worker')}, {state.rows_failed:,} failed"
            left = "" if state.time_left_s is None else f", {duration(state.time_left_s)} left"
            tell(f"{time.strftime('%H:%M:%S')} {done}, {state.rows_per_s:,.1f} rows/s, {at_work}{left}")
    now = time.monotonic()
    return now + max(LINE_EVERY_S, (now - began) / COST_SHARE)


def _report(group: Workers, path: str, control: Control) -> Report:
    """Return the report of all workers; raises the error of one where rows are left because of it."""
    try:
        report: Report | None = report_of_all(path)
    except OutputError:  # no worker has begun
        report = None
    if control.reason is not None and (report is None or report.rows_left):
        if report is None:
            raise control.interrupted("before the first row")
        return replace(report, reason=control.reason, exit_code=control.exit_code)
    if group.error is not None and (report is None or report.rows_left):
        group.error.report = report
        raise group.error
    assert report is not None
    last = group.last
    added = last is not None and last.exit_code == EXIT_STOPPED and not last.rows_left  # files, in mid-run
    if last is not None and last.exit_code != EXIT_DONE and (report.rows_left or added):
        return replace(report, reason=last.reason, exit_code=last.exit_code)
    return report


def _first_line(failure: Any) -> str:
    """Return what Ray says, without the lines of the actor's IDs, which begin with a tab."""
    lines = (line for line in str(failure).splitlines() if not line.startswith("\t"))
    return " ".join(" ".join(lines).split())[:300]
