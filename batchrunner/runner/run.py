"""One run, from the check of its input to the report: what happens around the sending (`sending.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pyroaring import BitMap64

from batchrunner.core.console import counted
from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import (
    EXIT_STOPPED,
    BatchrunError,
    EngineStartError,
    InputChangedError,
    JobError,
    StorageError,
    StoreAwayError,
)
from batchrunner.core.files import read_json
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.timing import TIMING
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import make_engine, model_of
from batchrunner.input.order import OrderDecision
from batchrunner.input.sorted_copy import find_sorted_copy, prepare_order, remove_sorted_copies
from batchrunner.job.engine import ServerEngine, SimulatedEngine
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TaskName
from batchrunner.output.counts import RowCounts
from batchrunner.output.discard import check_nobody_works, discard_failed_rows, discard_run, hold_own_task
from batchrunner.output.events import EventLog, attempt_spans, union_s, uploading_logs
from batchrunner.output.files import refresh_listing, writing
from batchrunner.output.liveness import engine_starting
from batchrunner.output.parts import recover
from batchrunner.output.resume import DoneRows, done_by_all, read_done
from batchrunner.output.run_dir import ESTIMATE, MAIN_TASK, SEGMENT
from batchrunner.output.run_json import (
    without_secrets,
    write_limits,
    write_run_json,
)
from batchrunner.output.task_lock import TaskLock
from batchrunner.output.writer import FLUSH_FRACTION, PAUSE_S, DiskWait, ResultWriter
from batchrunner.report.report import Report, make_report, save_report, verdict_of_done, versions
from batchrunner.runner.control import Control
from batchrunner.runner.prepare import (
    PreparedJob,
    check_resumes,
    drop_copies,
    new_task,
    prepare,
)
from batchrunner.runner.progress import Display
from batchrunner.runner.reuse import Reuse
from batchrunner.runner.rows import FixedRows
from batchrunner.runner.sending import Sending, open_control

if TYPE_CHECKING:
    from batchrunner.output.turns import TurnStore
    from batchrunner.runner.join import LeasedRows

log = logging.getLogger(__name__)
T = TypeVar("T")


GC_THRESHOLD = 10_000
"""New objects between two searches for garbage cycles. Python's 700 means a search every few rows, through
all rows that wait to be written: a quarter of our CPU time."""


async def execute(
    job: Job,
    *,
    engine: Engine | None = None,
    info: EngineInfo | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
    only: BitMap64 | None = None,
    displays: Sequence[Display] = (),
    control: Control | None = None,
) -> Report:
    """Run a job to its end and return the report, which is also in report.json.

    `engine` is an open engine, with its `info`; without one the job's own is opened and closed. With `join`
    this task shares the rows with all others that do; with `only` it leaves other rows to a later start.
    Raises BatchrunError if the run could not start or go on; finished rows are kept.
    """
    if join and fresh:
        raise JobError(
            "--fresh would discard what other tasks have done", hint="delete the directory instead"
        )
    task = new_task() if join else MAIN_TASK
    control = control or Control()
    prepared = await unless_away(
        lambda: asyncio.to_thread(prepare, job, task, fresh=fresh, keeps_copies=True), job, control
    )
    run_dir = prepared.run_dir
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(leave, prepared)
        for display in displays:
            stack.enter_context(contextlib.closing(display))
        if 0 < (threshold := gc.get_threshold())[0] < GC_THRESHOLD:  # a second run here leaves it
            gc.set_threshold(GC_THRESHOLD, *threshold[1:])
            stack.callback(gc.set_threshold, *threshold)
        lock = await unless_away(
            lambda: control.run(lambda: stack.enter_context(hold_own_task(run_dir, control.sleep))),
            job,
            control,
        )
        run = Run(prepared, lock, control, displays, only)
        model = info.model if info else model_of(job.engine)
        await control.run(lambda: run.plan(model, fresh=fresh, retry_failed=retry_failed))
        stack.push_async_callback(give_back, run.rows, lock)
        stack.enter_context(uploading_logs(run_dir))
        if not run.rows.unread and run.to_discard != "run":
            return run.finished_before()
        if engine is None or info is None:
            task_of_model = await asyncio.to_thread(lambda: prepared.model_task)
            with engine_starting(run_dir):
                engine, info = await open_engine_of(job, task_of_model, run_dir.log_directory, control, stack)
        check_engine(job, info)
        if model_of(job.engine) is None and run.to_discard != "run":
            await asyncio.to_thread(check_resumes, prepared, info.model, info.weights)
        await control.run(run.discard)  # only now: a refused attempt changes nothing
        with contextlib.closing(run.events):
            run.events.open()
            return await run.go(engine, info)


async def unless_away(work: Callable[[], Coroutine[Any, Any, T]], job: Job, control: Control) -> T:
    """Do what may ask an object store, again while that is away; raises StoreAwayError in the end."""
    failed_at: float | None = None
    while True:
        try:
            return await work()
        except StoreAwayError as failure:
            if failed_at is None:
                failed_at = time.monotonic()
                log.warning("%s: waiting for the store (limits.disk_wait)", failure)
            if time.monotonic() - failed_at > job.limits.disk_wait:
                raise
            await control.wait_for(asyncio.sleep(PAUSE_S), "while the object store was away")


def leave(prepared: PreparedJob) -> None:
    """Close what is open, and delete what no later start needs: copies of the input, and of a joined run."""
    is_done = read_json(prepared.run_dir.report_json).get("rows_left") == 0
    drop_copies(prepared.run_dir, is_done=is_done)
    if is_done:
        with contextlib.suppress(OSError):  # what stays does no harm
            remove_sorted_copies(prepared.run_dir.task_directory)
            for path in prepared.run_dir.tasks.glob(f"*/{SEGMENT}*"):  # turns that a dead task left
                path.unlink(missing_ok=True)
    prepared.close()
    if prepared.joins and not any(prepared.run_dir.task_directory.glob("journal-*")):
        prepared.run_dir.store.discard_copy(prepared.run_dir.task)


OF_RUN = ("exit_code", "reason", "rows_total", "rows_ok", "rows_failed", "rows_cut", "rows_left")
"""What a start that finds nothing to do writes anew: the start before may have died without its report."""


def shape_of(job: Job, task: TaskName) -> str | None:
    """Return a digest of what makes jobs alike; None if the servers' flags may not change for this one."""
    engine = job.engine
    if not isinstance(engine, ServerEngine) or engine.adapt == "off" or "config" in engine.args:
        return None  # what a file of SGLang's flags names is not known here
    if task != GENERATE or job.window != "auto":
        return None
    alike = job.model_dump_json(include={"prompt", "sampling", "engine"})
    return hashlib.sha256(alike.encode()).hexdigest()[:12]


async def open_engine_of(
    job: Job, task: TaskName, log_directory: Path, control: Control, stack: contextlib.AsyncExitStack
) -> tuple[Engine, EngineInfo]:
    """Open the engine of a job for a task of a model; `stack` closes it. Raises BatchrunError."""
    shape = shape_of(job, task)
    engine = make_engine(job.engine, log_dir=log_directory, limits=job.limits, task=task, shape=shape)
    stack.push_async_callback(engine.close)
    return engine, await control.wait_for(engine.open(), "while the engine was starting")


def check_engine(job: Job, info: EngineInfo) -> None:
    """Raise EngineStartError where an open engine cannot do a job, and log what is worth knowing of it."""
    for name in job.prompt.media:
        kind = KIND_OF_FIELD[name]
        if getattr(info, f"takes_{kind.field}") is False:
            raise EngineStartError(
                f"prompt.{name}: {info.model} takes no {kind.field}",
                hint="choose a model for them; one whose part for them is off needs --enable-multimodal",
            )
    for note in info.notes:
        log.info("%s", note)


def plan_failed_rows(job: Job) -> None:
    """Plan the failed rows again, as the first of several tasks; raises BatchrunError."""
    from batchrunner.runner.join import join  # noqa: PLC0415 - only where tasks share a run

    prepared = prepare(job, new_task())
    try:
        with hold_own_task(prepared.run_dir, time.sleep):
            events = EventLog(prepared.run_dir.events)
            rows, *_ = join(prepared, Control(), RowCounts(), events, retry_failed=True)
            rows.give_back()
    finally:
        leave(prepared)


SPOOL_S = 1.0
"""Seconds within which a row is in the journal on this machine, where results are uploaded."""


async def give_back(rows: FixedRows | LeasedRows, lock: TaskLock) -> None:
    """Let other tasks have what was not done, unless it is not known what is on disk: they can find out."""
    rows.stop()

    def give_back_now() -> None:
        lock.verify()  # else they are another's by now
        rows.give_back()

    if not lock.is_abandoned:
        try:
            await asyncio.to_thread(give_back_now)
        except (OSError, StorageError) as failure:
            lock.abandon()
            log.warning("leases were not given back: %s", failure)


class Run:
    """One attempt of a task: finds its rows, sends them, writes the results, and makes the report."""

    rows: FixedRows | LeasedRows
    """The rows that it has to do."""
    rows_of_run: int
    """Rows of the whole run, over all tasks."""
    order: OrderDecision
    earlier: Sequence[tuple[float, float]]
    """Times of earlier attempts of this task."""

    def __init__(
        self,
        prepared: PreparedJob,
        lock: TaskLock,
        control: Control,
        displays: Sequence[Display],
        only: BitMap64 | None,
    ) -> None:
        """Begin an attempt of a task on which the `lock` is held; `only` these rows are sent, if given."""
        self.prepared, self.lock, self.control, self.displays = prepared, lock, control, displays
        self.counts, self.events = RowCounts(), EventLog(prepared.run_dir.events)
        self._only = only
        self.done = DoneRows()
        """Rows that earlier attempts of this task ended."""
        self.turns: TurnStore | None = None
        """Where turns of rollouts are stored; None where there are none."""
        self.rows_of_others = 0
        """Rows that other living tasks held when this attempt found nothing to do."""
        self.to_discard: Literal["run", "failed rows", "nothing"] = "nothing"
        """What this attempt has still to discard before it writes its first result."""

    def discard(self) -> None:
        """Delete what this attempt replaces. Raises TaskHeldError, TaskLockLostError or StorageError."""
        run_dir = self.prepared.run_dir
        if self.to_discard == "run":
            discard_run(run_dir, self.lock, self.control.sleep)
        elif self.to_discard == "failed rows":
            discard_failed_rows(run_dir, self.lock)
        self.to_discard = "nothing"
        with writing(run_dir.merged):
            self.lock.verify()
            run_dir.discard_merged()

    def plan(self, model: str | None, *, fresh: bool, retry_failed: bool) -> None:
        """Find the rows that this attempt does, and recover what the attempt before left half done.

        Raises InputError, OutputError, ResumeError or StorageError.
        """
        prepared, control, run_dir = self.prepared, self.control, self.prepared.run_dir
        reuse = None
        if prepared.job.output.reuse is not None and not prepared.joins:
            reuse = Reuse(prepared, control)
        with writing(run_dir.path):
            for directory in (run_dir.path, run_dir.tasks, run_dir.parts, run_dir.leases):
                refresh_listing(directory)
            if fresh:
                check_nobody_works(run_dir, control.sleep)
                self.to_discard = "run"
            else:
                check_resumes(prepared, model)
            if prepared.joins:
                self._plan_joined(retry_failed=retry_failed)
                return
            if not fresh:
                recover(run_dir, self.lock, prepared.results_schema)
                self.done = read_done(run_dir, without_failed=retry_failed)
                self.to_discard = "failed rows" if retry_failed else "nothing"
            selected = prepared.selected(control.check)
            todo = selected - self.done.rows
            if reuse is not None and todo:
                # The answers that are taken are stored at once, in place of what is discarded.
                todo -= reuse.take(run_dir, self.lock, selected, todo, before_first=self.discard)
                self.counts = reuse.counts
            total, todo = len(selected | self.done.rows), todo if self._only is None else todo & self._only
            place = run_dir.task_directory
            copy, self.order = find_sorted_copy(prepared, todo, place) or prepare_order(
                prepared, todo, place, self.lock.token, control.check
            )
            self.rows = FixedRows(prepared, todo, total, copy)
            self.rows_of_run = len(selected)

    def _plan_joined(self, *, retry_failed: bool) -> None:
        from batchrunner.runner.join import join  # noqa: PLC0415 - only where tasks share a run

        rows, self.rows_of_run, self.order = join(
            self.prepared, self.control, self.counts, self.events, retry_failed=retry_failed
        )
        self.rows = rows
        if not rows.take_first(self.control.sleep):
            self.rows = FixedRows(self.prepared, BitMap64(), self.rows_of_run, None)
            # before the done rows are counted: what is held may end meanwhile
            self.rows_of_others, _ = rows.held_elsewhere()
            self.done = done_by_all(self.prepared.run_dir)

    def finished_before(self) -> Report:
        """Make the report of an attempt that found nothing to do."""
        prepared, run_dir = self.prepared, self.prepared.run_dir
        report = make_report(run_dir, self.done, self.rows.total, self.counts)
        exit_code, reason = verdict_of_done(report, prepared.job.limits.max_failed_rows)
        if report.rows_left > self.rows_of_others:
            exit_code = EXIT_STOPPED
            reason = "rows are left that no living task holds: run the same command again"
        elif report.rows_left:
            reason = "nothing is free: other tasks do the rest"
        else:
            drop_copies(run_dir, is_done=True)
            write_limits(run_dir, prepared.job)
        simulated = isinstance(prepared.job.engine, SimulatedEngine)
        report = replace(report, exit_code=exit_code, reason=reason, simulated=simulated)
        if not prepared.joins:
            found = report.as_dict()
            last = read_json(run_dir.report_json)  # it says more than these zeros
            save_report(run_dir, {**found, **last, **{name: found[name] for name in OF_RUN}})
        return report

    async def go(self, engine: Engine, info: EngineInfo) -> Report:
        """Send all rows to an open engine and return the report, which is also in report.json.

        Raises BatchrunError if the run could not go on, as CannotTokenizeError or StorageError; once rows
        were sent the error has the report too.
        """
        self.earlier = attempt_spans(self.prepared.run_dir.events)
        sending, writer = await self._build(engine, info)
        failure: BatchrunError | None = None
        added: list[str] = []
        rows_on_disk, self.control.stage = True, "sending"
        try:
            await sending.send()
            looking = asyncio.to_thread(self._look_at_input)
            when = "while the input was looked at"
            added = await self.control.wait_for(looking, when, grace_s=TIMING.stop_start)
        except BatchrunError as error:
            failure = error
        except asyncio.CancelledError:
            if not self.control.at_once:  # else our own stop cancelled the sending
                self.control.stop("cancelled")
                raise
        finally:
            try:
                await writer.close()
            except BaseException as error:  # also a second cancellation: rows may be in a journal only
                rows_on_disk = False
                if self.prepared.joins or self.prepared.run_dir.store.uri:
                    self.lock.abandon()
                if not isinstance(error, BatchrunError):
                    raise
                failure = failure or error
            self.control.stage = "ending"
            if self.turns is not None:
                self.turns.close()
            await give_back(self.rows, self.lock)
            report = self._report(sending, failure, added, rows_on_disk=rows_on_disk)
            with contextlib.suppress(StorageError):  # a full disk: the rows matter, and they are safe
                sending.show_end(time.monotonic())
                self.events.write("end", exit_code=report.exit_code, reason=report.reason)
                save_report(self.prepared.run_dir, report.as_dict())
        if failure is not None:
            failure.report = report
            raise failure
        return report

    async def _build(self, engine: Engine, info: EngineInfo) -> tuple[Sending, ResultWriter]:
        """Return what sends the rows and what writes their results, and say what the run is going to do."""
        began = time.monotonic()
        prepared, rows, events = self.prepared, self.rows, self.events
        job, run_dir, rows_done = prepared.job, prepared.run_dir, len(self.done.rows)
        args = without_secrets(job)["engine"].get("args", {})
        events.write("start", rows_total=rows.total, rows_done=rows_done, engine=asdict(info), args=args)
        decodes = await asyncio.to_thread(lambda: prepared.model_task) == GENERATE
        load_control, why = await open_control(
            job,
            engine,
            info,
            events,
            unsent=rows.unread,
            now=began,
            decodes=decodes,
            prompt_bytes=self.order.computed_bytes(caches_prefixes=info.caches_prefixes),
        )
        schema = prepared.results_schema
        metadata: dict[Any, Any] = {**(schema.metadata or {}), "model": info.model}
        metadata["batchrunner"] = versions(info)["batchrunner"] or ""
        if info.simulated:
            metadata["simulated"] = "true"
        in_store = run_dir.store.objects is not None
        stored_within_s = job.output.uploaded_within_s * FLUSH_FRACTION
        writer = ResultWriter(
            run_dir,
            schema.with_metadata(metadata),
            part_rows=job.output.part_rows,
            plan=prepared.answers,
            durable_s=min(job.output.durable, SPOOL_S) if in_store else job.output.durable,
            part_s=min(TIMING.part, stored_within_s) if in_store else TIMING.part,
            lock=self.lock,
            committed=rows.committed,
            disk=DiskWait(job.limits.disk_wait, lambda: self.control.at_once),
        )
        if job.prompt.rollout is not None:
            self.turns = self._open_turns(writer)
        expected = {} if self._only is not None or prepared.joins else read_json(run_dir.path / ESTIMATE)
        sending = Sending(
            job, rows, engine, load_control, prepared.answers, writer, self.counts, events, self.control,
            self.displays, began, prepared.functions, self.done, self.turns, expected.get("row_s"),
        )  # fmt: skip
        self.lock.verify()  # the task may be another's since the engine began to start
        self._write_run_json(info)  # not before: a job that was refused is not the one that is to go on
        if isinstance(job.engine, ServerEngine) and not load_control.in_use:  # one run alone adapts it
            from batchrunner.runner.adapt import adaptation_of  # noqa: PLC0415 - only for such engines

            ends_at = began + (job.limits.deadline or math.inf)
            sending.adaptation = adaptation_of(engine, run_dir, ends_at)
        window = sum(load_control.concurrency.windows.values())
        if self._only is not None:
            why = "for the sample"
        todo = f"{counted(rows.unread, 'row')} to do, {rows_done:,} done before"
        log.info("%s; window %s (%s)", todo, f"{window:,}", why)
        log.info("%s", self.order)
        events.write("order", **asdict(self.order))
        return sending, writer

    def _open_turns(self, writer: ResultWriter) -> TurnStore:
        """Return the store of turns; it reads what was left of each lease, and drops what is in parts."""
        from batchrunner.output.turns import TurnStore  # noqa: PLC0415 - only where there are rollouts

        rows, turns = self.rows, TurnStore(self.prepared.run_dir, self.lock.token, writer.disk)
        rows.leased = turns.load

        def committed(done: BitMap64) -> None:
            rows.committed(done)
            turns.ended(done)

        writer.committed = committed
        return turns

    def _look_at_input(self) -> list[str]:
        """Return the files that were added since the start and that the job's limit does not exclude.

        A file that is not the same any more changed after it was read, which a warning says.
        """
        dataset, limit = self.prepared.dataset, self.prepared.job.input.limit
        try:
            dataset.check_unchanged()
        except InputChangedError as failure:
            log.warning("%s, after it was read: the results are those of the old file", failure.message)
        is_full = limit is not None and self.rows_of_run >= limit
        return [] if is_full else dataset.added_files()

    def _write_run_json(self, info: EngineInfo) -> None:
        mine, total = self.prepared.fingerprint(info.model), self.rows_of_run
        if not isinstance(self.rows, FixedRows):  # another task may have found more files
            plan = self.rows.newest_plan()
            mine, total = {**plan.fingerprint, "model": info.model}, plan.rows_total
        write_run_json(
            self.prepared.run_dir,
            self.prepared.job,
            fingerprint=mine,
            rows_total=total,
            engine=asdict(info),
            versions=versions(info),
        )

    def _report(
        self, sending: Sending, failure: BatchrunError | None, added: Sequence[str], *, rows_on_disk: bool
    ) -> Report:
        """Make the report of this attempt; `added` are files that came into the input meanwhile."""
        wall_s = time.monotonic() - sending.progress.began
        sending.progress.write_incidents()
        rows, counts, run_dir, info = self.rows, self.counts, self.prepared.run_dir, sending.concurrency.info
        report = make_report(run_dir, self.done, rows.total, counts)
        held = unheld = 0
        if failure is None and not isinstance(rows, FixedRows):
            with contextlib.suppress(OSError, BatchrunError):
                held, unheld = rows.held_elsewhere()
        report = replace(report, rows_of_others=held + unheld if not report.rows_left else 0)
        exit_code, reason = self._verdict(report, failure, added, unheld)
        if not rows_on_disk:
            with contextlib.suppress(BatchrunError):  # count what is there
                done = read_done(run_dir)
                report = replace(
                    report, rows_ok=done.ok, rows_failed=done.counts.failed, rows_cut=done.counts.cut
                )
        return replace(
            report,
            exit_code=exit_code,
            reason=reason,
            wall_s=round(wall_s, 3),
            wall_s_all_starts=round(union_s(self.earlier) + wall_s, 3),
            starts=len(self.earlier) + 1,
            output_tokens_per_s=round(counts.output_tokens / wall_s, 1),
            rows_per_s=round(counts.own / wall_s, 2),
            task=self.prepared.job.task,
            engine=asdict(info),
            window=sending.concurrency.window,
            load=sending.progress.load.as_dict(),
            incidents=sending.progress.incidents,
            sharing=sending.reorderer.sharing(),
            bundles=sending.bundles.as_dict(),
            rollouts=sending.rollouts.state() if sending.rollouts is not None else {},
            simulated=info.simulated,
            versions=versions(info),
        )

    def _verdict(
        self, report: Report, failure: BatchrunError | None, added: Sequence[str], unheld: int
    ) -> tuple[int, str]:
        """Return the exit code and its reason; `unheld` rows of the run are held by no living task."""
        if failure is not None:
            return failure.exit_code, str(failure)
        if report.rows_left > report.rows_of_others:
            sampled = "stopped" if self._only is None else "a sample is done: the job asks no row again"
            return self.control.exit_code, self.control.reason or sampled
        if unheld:
            gone = f"{unheld:,} rows are left that no living task holds: run the same command again"
            return self.control.exit_code, self.control.reason or gone
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            return EXIT_STOPPED, (
                f"{added[0]}{more} came into the input, or grew, during the run: run the same command again"
            )
        return verdict_of_done(report, self.prepared.job.limits.max_failed_rows)
