"""A whole job on a Ray cluster (`batchrun ray`): workers that share its rows, one display, one report."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchrunner.core.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    EXIT_WRONG,
    BatchrunError,
    JobError,
    OutputError,
)
from batchrunner.core.processes import ignore_signal
from batchrunner.core.timing import TIMING
from batchrunner.engines.launched.server import GROUP
from batchrunner.job.load import load_job
from batchrunner.job.spec import Job
from batchrunner.output.addresses import store_address
from batchrunner.output.files import make_directory, writing
from batchrunner.ray.stages import gpus_required, resource_of_nodes
from batchrunner.report.report import Report, report_of_all
from batchrunner.runner.control import SIGNALS, Control
from batchrunner.runner.foreground import log_to_stderr, under_signals
from batchrunner.runner.run import execute
from batchrunner.runner.status import show_progress, status
from batchrunner.runner.work import plan_failed_rows

log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""Maximum number of deaths of a worker in succession between which the run finished no row. After one more,
the worker is not called again. Deaths between which rows finish have no limit, because nodes come and go."""


@dataclass(frozen=True, slots=True)
class SharedPaths:
    """Paths that every node of the cluster must see: the command's directory, and a mark file.

    The mark file is an empty file beside the job's results. A node that sees it has access to the results.
    """

    directory: str | None
    """Directory from which relative paths start; None if Ray gives each worker a copy of it."""
    mark: str | None
    """Path of the mark file; None if the results are in an object store."""

    def enter(self) -> None:
        """Change to the directory; raise JobError if the directory or the mark file does not exist here."""
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
                f"output.path: {Path(self.mark).parent} of the command is not visible on the node {host}",
                hint="give a path on a file system that all nodes share, or a URI of an object store",
            )


class JobWorker:
    """An actor that runs a share of a job's rows, like `batchrun JOB --join`.

    Ray calls the methods in one event loop.
    """

    def __init__(self, *, quiet: bool) -> None:
        log_to_stderr(quiet=quiet)
        if group := get_current_placement_group():
            # The engine needs several machines, which are in this placement group. `ranks.py` reads these
            # variables.
            os.environ[GROUP] = group.id.hex()
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._control = Control()
        self._process_id = secrets.token_hex(8)
        self._run_lock = asyncio.Lock()
        """Held by the call that runs rows."""

    async def run(self, job: Job, shared: SharedPaths) -> Report:
        """Run rows of the job until none are left for this worker, and return the report.

        Raises BatchrunError.
        """
        # Relative paths of the job start from the directory of the command.
        shared.enter()
        # After a break of the network, this method is called again while its first call still runs.
        async with self._run_lock:
            return await execute(job, join=True, control=self._control)

    async def process(self) -> str:
        """Return an ID of this process. Ray completes this call when the worker runs on a node."""
        return self._process_id

    async def stop(self, reason: str, exit_code: int) -> None:
        """Stop sending rows, and let the rows in flight finish."""
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
    """Run a job with several workers on the Ray cluster at `address`, and return the report.

    `job` is the path of the job file, and `overrides` are values for its fields. Each worker gets `cpus`
    cores and the GPUs of its engine. `retry_failed` retries the failed rows of earlier starts. Raises
    BatchrunError.
    """
    if workers < 1:
        raise JobError(f"--workers {workers}", hint="give a number of at least 1")
    if cpus <= 0:
        raise JobError(f"--cpus {cpus:g}", hint="give a number above 0")
    loaded_job = load_job(job, overrides=overrides)
    path = loaded_job.output.path
    is_quiet = quiet or as_json
    control = Control()

    async def work() -> Report:
        with _connected(address, control, quiet=is_quiet), _shared_paths(path) as shared:
            gpus = gpus_required(loaded_job.engine, resource_of_nodes("GPU"))
            most_cores = max(resource_of_nodes("CPU"), default=0)
            if cpus > most_cores:
                raise JobError(
                    f"--cpus {cpus:g}: no node of the Ray cluster has more than {most_cores:g} cores",
                    hint="give fewer cores",
                )
            if retry_failed:
                plan_failed_rows(loaded_job)
            # Ray restarts dead actors without limit. `Workers` sets the limit.
            actor_class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1)(JobWorker)
            nodes = getattr(loaded_job.engine, "nodes", 1)
            # This process sends no rows. But in another stage, a signal would end it before its workers.
            control.stage = "sending"
            next_line_at = 0.0
            with contextlib.closing(Workers(loaded_job, shared, control)) as all_workers:
                for _ in range(workers):
                    options = _scheduling_options(nodes, cpus=cpus, gpus=gpus)
                    all_workers.start(Worker(actor_class.options(**options).remote(quiet=is_quiet)))
                while await asyncio.to_thread(all_workers.watch):
                    if not is_quiet and time.monotonic() >= next_line_at:
                        next_line_at = await asyncio.to_thread(show_progress, path, all_workers.working)
            return _report(all_workers, path, control)

    return under_signals(work(), control, loaded_job.limits)


def _scheduling_options(nodes: int, *, cpus: float, gpus: int) -> dict[str, Any]:
    """Return Ray's scheduling options of a worker whose engine runs on this number of nodes.

    An engine on several nodes gets a placement group with `cpus` cores and `gpus` GPUs on each node. The
    worker runs on the first node. Ray reserves all nodes of the group at once, until this process ends.
    """
    if nodes == 1:
        return {}
    machine = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    group = placement_group([machine] * nodes, strategy="STRICT_SPREAD")
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}


@contextlib.contextmanager
def _connected(address: str | None, control: Control, *, quiet: bool) -> Iterator[None]:
    """Connect this process to a Ray cluster for the duration of the block.

    The address of the cluster is `address`, or else RAY_ADDRESS, or else that of a cluster on this machine.
    Unless `quiet`, the logs of the workers are shown. Raises JobError with Ray's reason.
    """
    cluster = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in cluster:
        raise JobError(
            f"--address {cluster}: a Ray client cannot start a job",
            hint="give host:port of the head node, or submit the command with `ray job submit`",
        )
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    try:
        ray.init(address=cluster, log_to_driver=not quiet, logging_level=logging.ERROR)
    except (RayError, RuntimeError, ValueError, OSError) as failure:
        raise JobError(
            f"--address {cluster}: Ray cannot connect: {_first_line(failure)}",
            hint="give host:port of the head node, or --address local for a cluster of this machine alone",
        ) from None
    except SystemExit:
        # Ray's handler of SIGTERM raises this error.
        control.drain(*SIGNALS[signal.SIGTERM])
        raise control.interrupted("before the first row was sent") from None
    # `ray.init` has set its own handler of SIGTERM. It is replaced, so that the run can drain the workers.
    signal.signal(signal.SIGTERM, ignore_signal)
    try:
        # Ray prints to standard output, which must have only the result.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _shared_paths(output: str) -> Iterator[SharedPaths]:
    """Yield the paths that the workers check. The mark file exists until the block ends.

    `output` is the job's output path. Raises OutputError if the mark file cannot be written, and JobError if
    Ray would delete the results together with its copy of the working directory.
    """
    # With a `working_dir`, each node works in its own copy of the directory, which Ray deletes at the end.
    is_copy = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    directory = None if is_copy else str(Path.cwd())
    if store_address(output) is not None:
        yield SharedPaths(directory, mark=None)
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
        yield SharedPaths(directory, mark=str(mark))
    finally:
        mark.unlink(missing_ok=True)


@dataclass(slots=True)
class Worker:
    """A worker of a job: an actor, and the deaths of its processes."""

    actor: Any
    process_id: Any = None
    """Ray reference to the ID of its process. It becomes ready when the actor runs on a node."""
    dead_processes: set[str] = field(default_factory=set)
    """IDs of the processes that died since a row of the run finished."""
    rows_at_death: int = 0
    """Number of finished rows of the run at the last of these deaths."""


class Workers:
    """The workers of a job. Ray starts and restarts them as soon as a node has room."""

    def __init__(self, job: Job, shared: SharedPaths, control: Control) -> None:
        self._job = job
        self._shared = shared
        self._control = control
        self._workers: dict[Any, Worker] = {}
        """The workers that have not ended, by the Ray references of their reports."""
        self._stop_reason: tuple[str, int] | None = None
        """Reason why the workers must stop, and their exit code; None while they may go on."""
        self.error: BatchrunError | None = None
        """Error of the first worker that failed, replaced by a later one with a higher exit code."""
        self.last: Report | None = None
        """Report of the worker that ended last; None if no worker has ended."""

    def start(self, worker: Worker) -> None:
        """Tell a new or restarted worker to run rows of the job."""
        report = worker.actor.run.remote(self._job, self._shared)
        worker.process_id = worker.actor.process.remote()
        self._workers[report] = worker

    @property
    def working(self) -> int:
        """Number of workers that Ray has placed."""
        return sum(_is_ready(worker.process_id) for worker in self._workers.values())

    def watch(self) -> bool:
        """Wait a moment, and handle the workers that ended; tell whether to call this method again."""
        ready, _ = ray.wait(list(self._workers), timeout=TIMING.ray_poll)
        for reference in ready:
            worker = self._workers.pop(reference)
            if self._has_ended(worker, reference):
                # Killing its actor frees its cores and GPUs.
                ray.kill(worker.actor)
        self._stop_if_over()
        # A second signal ends the command at once, without waiting for the workers.
        must_wait = not self._control.at_once
        return bool(self._workers) and must_wait

    def _has_ended(self, worker: Worker, reference: Any) -> bool:
        """Record the report or the error of a worker; tell whether it has ended for good.

        `reference` is the Ray reference of its report. If the worker's process is lost, it is started again,
        unless it has died too often or the run is over.
        """
        try:
            self.last = ray.get(reference)
        except RayTaskError as failure:
            self._record_failure(failure.cause)
        except ActorUnavailableError as failure:
            # The connection to the actor is lost. If the actor is dead, Ray restarts it. While Ray finds out,
            # it may raise this error many times.
            time.sleep(TIMING.ray_poll)
            self._count_death(worker)
            if self._stop_reason is None and len(worker.dead_processes) <= MOST_DEATHS:
                log.warning(
                    "a worker died or cannot be reached, and is started again: %s", _first_line(failure)
                )
                self.start(worker)
                return False
            self._record_failure(
                BatchrunError(
                    f"a worker died {len(worker.dead_processes)} times in succession, and no row "
                    f"finished between its deaths; the last one: {_first_line(failure)}",
                    hint="see its log (`ray logs`) and run the same command again: it resumes",
                )
            )
        except RayError as failure:
            # Ray cannot start the actor, or the actor was killed and Ray does not restart it.
            self._record_failure(failure)
        return True

    def _count_death(self, worker: Worker) -> None:
        """Record the process of a failed worker as dead; forget earlier ones if rows have finished since."""
        try:
            process_id = ray.get(worker.process_id, timeout=0)
        except RayError:
            # The connection was lost before the process reported its ID.
            return
        if process_id in worker.dead_processes:
            return
        finished_rows = self._finished_rows()
        if finished_rows > worker.rows_at_death:
            worker.dead_processes.clear()
        worker.rows_at_death = finished_rows
        worker.dead_processes.add(process_id)

    def _finished_rows(self) -> int:
        """Return the number of finished rows of the run; 0 if it has not begun."""
        try:
            return status(self._job.output.path, watch=False).rows_on_disk
        except OutputError:
            return 0

    def close(self) -> None:
        """Kill the workers that have not ended."""
        for worker in self._workers.values():
            ray.kill(worker.actor)
        self._workers.clear()

    def _record_failure(self, cause: Any) -> None:
        """Keep the error of a worker in `error`, unless the workers are stopping anyway."""
        if self._stop_reason is not None:
            return
        if not isinstance(cause, BatchrunError):
            cause = BatchrunError(
                f"a worker failed: {type(cause).__name__}: {_first_line(cause)}",
                hint="see its log (`ray logs`) and run the same command again: it resumes",
            )
        # The command itself prints the error with which it ends: that of the last worker, or that of an
        # invalid job. Any other error is logged here.
        if self._workers and cause.exit_code != EXIT_WRONG:
            log.warning("a worker ended: %s", cause)
        if self.error is None or cause.exit_code > self.error.exit_code:
            # The error of an invalid job takes precedence over that of a lost engine.
            self.error = cause

    def _stop_if_over(self) -> None:
        """Stop the workers if the run is over or a signal asks for a stop.

        Workers let their rows in flight finish. Those that Ray has not placed on a node yet are killed.
        """
        if self._stop_reason is None:
            if self._control.reason is not None:
                self._stop_reason = self._control.reason, self._control.exit_code
            elif self._is_over():
                self._stop_reason = "the run is over", EXIT_TERMINATED
            else:
                return
        for reference, worker in list(self._workers.items()):
            if _is_ready(worker.process_id):
                # The actor runs, so it can let its rows in flight finish.
                worker.actor.stop.remote(*self._stop_reason)
            else:
                del self._workers[reference]
                ray.kill(worker.actor)

    def _is_over(self) -> bool:
        """Tell whether no rows remain, the job is invalid, or a limit of the job is reached.

        If a worker ends because other workers have leased all remaining rows, the run is not over: one of
        them may die, and its rows can be leased again.
        """
        if self.error is not None and self.error.exit_code == EXIT_WRONG:
            return True
        last = self.last
        if last is None:
            return False
        if not last.rows_left:
            return True
        # If the worker sent rows but left some of its own, a limit of the job has stopped it.
        return last.wall_s > 0 and last.rows_left > last.rows_of_others


def _is_ready(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def _report(workers: Workers, path: str, control: Control) -> Report:
    """Return the report of all workers; raises the error of a failed worker if rows remain.

    `path` is the output path of the run. A stop by a signal takes precedence over the error of a worker.
    """
    report: Report | None = None
    # Without a worker that has started the run, the run has no files.
    with contextlib.suppress(OutputError):
        report = report_of_all(path)
    rows_remain = report is None or report.rows_left > 0
    if rows_remain and control.reason is not None:
        if report is None:
            raise control.interrupted("before the first row")
        return replace(report, reason=control.reason, exit_code=control.exit_code)
    if rows_remain and workers.error is not None:
        workers.error.report = report
        raise workers.error
    assert report is not None
    last = workers.last
    if last is None or last.exit_code == EXIT_DONE:
        return report
    # If files were added to the input during the run, a worker ends with EXIT_STOPPED although no rows
    # remain.
    has_new_files = last.exit_code == EXIT_STOPPED and not last.rows_left
    if rows_remain or has_new_files:
        return replace(report, reason=last.reason, exit_code=last.exit_code, next_step=last.next_step)
    return report


def _first_line(failure: Any) -> str:
    """Return the message of a Ray error as one line of at most 300 characters.

    Lines that begin with a tab are left out, because they have only IDs of the actor.
    """
    lines = (line for line in str(failure).splitlines() if not line.startswith("\t"))
    return " ".join(" ".join(lines).split())[:300]
