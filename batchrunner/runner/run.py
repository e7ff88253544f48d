"""One start of a job: plan the rows, open the engine, send the rows, report."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.console import counted
from batchrunner.core.errors import (
    BatchrunError,
    InputChangedError,
    StorageError,
    StoreAwayError,
)
from batchrunner.core.files import read_json
from batchrunner.core.timing import TIMING
from batchrunner.core.types import BYTES_PER_TOKEN
from batchrunner.dispatch.load_control import LoadControl
from batchrunner.dispatch.sharing import Account
from batchrunner.engines.registry import model_of
from batchrunner.job.engine import ServerEngine, SimulatedEngine
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE
from batchrunner.output.away import PAUSE_S, AwayWait, DiskWait
from batchrunner.output.discard import hold_own_task
from batchrunner.output.events import EventLog, attempt_spans, union_s, uploading_logs
from batchrunner.output.files import refresh_listing
from batchrunner.output.liveness import engine_starting
from batchrunner.output.resume import done_by_all, read_done
from batchrunner.output.run_dir import ESTIMATE, MAIN_TASK
from batchrunner.output.run_json import (
    code_versions,
    read_run_json,
    without_secrets,
    write_limits,
    write_run_json,
)
from batchrunner.output.task_lock import TaskLock
from batchrunner.output.writer import FLUSH_FRACTION, ResultWriter
from batchrunner.report.report import Report, make_report, save_report, versions
from batchrunner.report.verdict import RunEnd, RunVerdict, verdict_of
from batchrunner.runner.control import Control
from batchrunner.runner.plan import StartOptions, may_grow
from batchrunner.runner.prepare import (
    PreparedJob,
    check_resumes,
    drop_copies,
    leave,
    new_task,
    prepare,
)
from batchrunner.runner.progress import Display
from batchrunner.runner.rows import TaskRows
from batchrunner.runner.send import Sending
from batchrunner.runner.shared_engine import SharedEngine, open_engine_of
from batchrunner.runner.work import Work, WorkFinder

if TYPE_CHECKING:
    from batchrunner.engines.http.client import HttpEngine
    from batchrunner.output.turns import TurnStore
    from batchrunner.runner.adapt import Adaptation
    from batchrunner.runner.corpora import CorpusFeeder

log = logging.getLogger(__name__)
T = TypeVar("T")


GC_THRESHOLD = 10_000
"""Number of new Python objects between two searches for garbage cycles. With Python's default of 700, a
search ran every few rows and visited all rows that waited to be written. This took a quarter of the CPU time.
"""
SPOOL_S = 1.0
"""For a run in an object store: maximum seconds until a finished row is in the journal on this machine. It is
uploaded later, in a Parquet file."""
OF_RUN = ("exit_code", "reason", "next_step", "rows_total", "rows_ok", "rows_failed", "rows_cut", "rows_left")
"""Fields of report.json that are written even if no row was left to send. The earlier start may have died
before it wrote its report."""


async def execute(
    job: Job,
    *,
    engine: SharedEngine | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    join: bool = False,
    sample: BitMap64 | None = None,
    displays: Sequence[Display] = (),
    control: Control | None = None,
    account: Account | None = None,
    rank: str = "",
) -> Report:
    """Run a job to its end and return the report, which is also in report.json.

    Without an open `engine`, the job's own engine is opened and closed. With `join`, this worker shares the
    rows with all other workers that join. With `sample`, only the rows in it are sent. The runs of an
    `account` share its part of the open `engine`, in the order of their `rank`; a run without an account has
    one of its own. Raises BatchrunError if the run could not start or go on; finished rows are kept.
    """
    start = StartOptions(fresh=fresh, retry_failed=retry_failed, join=join, sample=sample)
    control = control or Control()
    task = new_task() if join else MAIN_TASK
    checking = functools.partial(prepare, job, task, fresh=fresh, keeps_copies=True)
    prepared = await unless_away(lambda: asyncio.to_thread(checking), job, control)
    run_dir = prepared.run_dir
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(leave, prepared)
        for display in displays:
            stack.enter_context(contextlib.closing(display))
        stack.enter_context(rare_garbage_collection())

        def lock_task() -> TaskLock:
            # Each try needs a new context manager.
            return stack.enter_context(hold_own_task(run_dir, control.sleep))

        lock = await unless_away(lambda: control.run(lock_task), job, control)
        disk = DiskWait(job.limits.disk_wait, lambda: control.at_once)
        turns = turn_store(prepared, lock, disk)
        events = EventLog(run_dir.events)

        async def ready_engine() -> SharedEngine:
            """Return the engine that was passed, or else open the job's own. Check that it can do the job."""
            opened = engine
            if opened is None:
                # For a batch file, `model_task` reads the input, which may block.
                task_of_model = await asyncio.to_thread(lambda: prepared.model_task)
                with engine_starting(run_dir):
                    opened = await open_engine_of(
                        job, task_of_model, log_directory=run_dir.log_directory, control=control, stack=stack
                    )
            opened.check(job)
            return opened

        # Plan the rows to send.
        finder = WorkFinder(
            prepared=prepared, start=start, lock=lock, control=control, events=events, turns=turns
        )
        model = engine.info.model if engine else model_of(job.engine)
        weights: str | None = None
        ready: SharedEngine | None = None
        if start.discards and job.output.reuse is not None:
            # The plan discards old results and stores reused answers, so the engine must be ready first.
            await control.run(lambda: finder.check(model))
            ready = await ready_engine()
            model, weights = ready.info.model, ready.info.weights
        work = await control.run(lambda: finder.find(model, weights))
        stack.push_async_callback(give_back, work.rows, lock)
        stack.enter_context(uploading_logs(run_dir))
        if work.is_empty:
            # `code_versions` warns if the code of a Python function has changed.
            code_versions(read_run_json(run_dir), prepared.code_digests)
            return report_of_empty(prepared, work)

        # Open the engine.
        ready = ready or await ready_engine()
        if model_of(job.engine) is None and work.discard != "run":
            # Only the open engine could tell its model, so it is compared with the stored results now.
            info = ready.info
            await asyncio.to_thread(check_resumes, prepared, info.model, info.weights)
        # Results are discarded only now. A start that is refused must not change anything.
        await control.run(lambda: finder.discard_outdated(work.discard))

        # Send the rows, and report.
        with contextlib.closing(events):
            events.open()
            run = Run(
                prepared=prepared,
                start=start,
                work=work,
                engine=ready,
                lock=lock,
                disk=disk,
                turns=turns,
                events=events,
                control=control,
                displays=displays,
                account=None if engine is None else account or Account(),
                rank=rank,
            )
            return await run.send_and_report()


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Let Python search for garbage cycles rarely during the block.

    A nested block leaves the setting as it is.
    """
    threshold = gc.get_threshold()
    # A program may have switched the search off (0), or made it as rare already.
    if not 0 < threshold[0] < GC_THRESHOLD:
        yield
        return
    gc.set_threshold(GC_THRESHOLD, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


async def unless_away(work: Callable[[], Coroutine[Any, Any, T]], job: Job, control: Control) -> T:
    """Call `work`, and call it again while it raises StoreAwayError, for at most `limits.disk_wait`."""
    wait = AwayWait(job.limits.disk_wait)
    while True:
        try:
            return await work()
        except StoreAwayError as failure:
            if not wait.may_go_on(f"{failure}: waiting for the store (limits.disk_wait)"):
                raise
            await control.wait_for(asyncio.sleep(PAUSE_S), "while the object store was unreachable")


def turn_store(prepared: PreparedJob, lock: TaskLock, disk: DiskWait) -> TurnStore | None:
    """Return the store of the answers of multi-turn rollouts; None for a job without rollouts."""
    if prepared.job.prompt.rollout is None:
        return None
    from batchrunner.output.turns import TurnStore  # noqa: PLC0415 - only where there are rollouts

    return TurnStore(prepared.run_dir, lock.token, disk)


async def give_back(rows: TaskRows, lock: TaskLock) -> None:
    """Read no more rows, and leave the remaining rows to other workers.

    If the lock was abandoned, this worker does not know which of its rows are on disk. It then keeps its
    leases (parts of the rows). The worker that takes over recovers the rows, and ends the leases.
    """
    rows.stop()

    def give_back_now() -> None:
        lock.verify()  # another worker may have taken over the lock and the leases
        rows.give_back()

    if not lock.is_abandoned:
        try:
            await asyncio.to_thread(give_back_now)
        except (OSError, StorageError) as failure:
            lock.abandon()
            log.warning("the leases of this worker could not be released: %s", failure)


def report_of_empty(prepared: PreparedJob, work: Work) -> Report:
    """Write and return the report of a start that found nothing to do."""
    job, run_dir = prepared.job, prepared.run_dir
    report = make_report(run_dir, work.done_before, work.rows.total, work.counts)
    end = RunEnd(
        rows_total=report.rows_total,
        rows_failed=report.rows_failed,
        max_failed_rows=job.limits.max_failed_rows,
        rows_unheld=max(0, report.rows_left - work.rows_of_others),
        rows_held=work.rows_of_others,
        was_empty=True,
    )
    verdict = verdict_of(end)
    if not report.rows_left:
        drop_copies(run_dir, is_done=True)
        write_limits(run_dir, job)
    simulated = isinstance(job.engine, SimulatedEngine)
    report = replace(report, **verdict._asdict(), simulated=simulated)
    if not prepared.joins:
        values = report.as_dict()
        # The stored report has the measured rates and times of the last start that sent rows. They would be 0
        # here, so only the fields in OF_RUN are replaced.
        last_values = read_json(run_dir.report_json)
        save_report(run_dir, {**values, **last_values, **{name: values[name] for name in OF_RUN}})
    return report


@dataclass
class SendingEnd:
    """How the sending of the rows ended."""

    failure: BatchrunError | None = None
    """Error that stopped the run; None if there was none."""
    added_files: Sequence[str] = ()
    """Paths of input files that were added or grew during the run, and whose new rows belong to the run."""
    is_on_disk: bool = True
    """Whether the results of all finished rows are on disk."""


@dataclass(kw_only=True)
class Run:
    """Sends the rows of a run to an open engine, writes the results, and reports."""

    prepared: PreparedJob
    start: StartOptions
    work: Work
    engine: SharedEngine
    lock: TaskLock
    """The worker's lock, which the caller holds."""
    disk: DiskWait
    turns: TurnStore | None
    """Store of the answers of multi-turn rollouts; None if the job has none."""
    events: EventLog
    control: Control
    displays: Sequence[Display]
    account: Account | None
    """Owner of the run, for a fair division of a shared engine. None if no other run can use the engine."""
    rank: str
    """Place of the run among the runs of its account; see `SendingRun`."""
    began: float = field(default_factory=time.monotonic)
    """Time at which this start of the run began, on the monotonic clock."""

    async def send_and_report(self) -> Report:
        """Send all rows and return the report, which is also in report.json.

        Raises BatchrunError if the run could not go on, for example CannotTokenizeError or StorageError. Once
        sending has begun, the error carries the report.
        """
        earlier = attempt_spans(self.prepared.run_dir.events)
        load_control, why_window = await self._open_load_control()
        writer = self._writer()
        sending = self._sending(load_control, writer)
        # Another process may have taken the lock while the engine started.
        self.lock.verify()

        # A refused job must not change run.json, so it is written only now.
        self._write_run_json()
        self._log_begin(load_control, why_window)
        end, self.control.stage = SendingEnd(), "sending"
        try:
            await self._send(sending, end)
        finally:
            await self._close(writer, end)
            report = self._report(sending, end, earlier)
            # If the disk is full, the report is lost but the results are not.
            with contextlib.suppress(StorageError):
                sending.show_end(time.monotonic())
                self.events.write(
                    "end",
                    exit_code=report.exit_code,
                    reason=report.reason,
                    next_step=report.next_step,
                )
                save_report(self.prepared.run_dir, report.as_dict())
        if end.failure is not None:
            end.failure.report = report
            raise end.failure
        return report

    async def _open_load_control(self) -> tuple[LoadControl, str]:
        """Write the event `start`; return the load control and the reason for its first concurrency limit."""
        prepared, work, info = self.prepared, self.work, self.engine.info
        self.events.write(
            "start",
            rows_total=work.rows.total,
            rows_done=len(work.done_before),
            engine=asdict(info),
            args=without_secrets(prepared.job)["engine"].get("args", {}),
        )
        model_task = await asyncio.to_thread(lambda: prepared.model_task)
        prompt_bytes = work.order.computed_bytes(caches_prefixes=info.caches_prefixes)
        if self.account is not None:
            self.account.expect_prompts((prompt_bytes or 0) / BYTES_PER_TOKEN)
        return await self.engine.load_control(
            prepared.job,
            self.events,
            unsent=work.rows.unread,
            now=self.began,
            decodes=model_task == GENERATE,
            prompt_bytes=prompt_bytes,
        )

    def _writer(self) -> ResultWriter:
        """Return the writer of the results. Raises StorageError.

        On a disk, the journal makes rows durable; in an object store, the uploaded part files do.
        """
        prepared, info = self.prepared, self.engine.info
        output = prepared.job.output
        durable_s, part_s = output.durable, TIMING.part
        is_in_store = prepared.run_dir.store.objects is not None
        if is_in_store:  # here `output.durable` is the time until a part file is uploaded
            durable_s = min(output.durable, SPOOL_S)
            part_s = min(TIMING.part, output.uploaded_within_s * FLUSH_FRACTION)
        schema: pa.Schema = prepared.results_schema
        metadata: dict[Any, Any] = {**(schema.metadata or {}), "model": info.model}
        metadata["batchrunner"] = versions(info)["batchrunner"] or ""
        if info.simulated:
            metadata["simulated"] = "true"
        return ResultWriter(
            prepared.run_dir,
            schema.with_metadata(metadata),
            part_rows=output.part_rows,
            plan=prepared.answers,
            durable_s=durable_s,
            part_s=part_s,
            # On a disk the journal makes rows durable, so part files can be written less and less often.
            lag_grows=not is_in_store,
            lock=self.lock,
            committed=self.work.rows.committed,
            disk=self.disk,
        )

    def _sending(self, load_control: LoadControl, writer: ResultWriter) -> Sending:
        """Return the sender of the rows. Raises CannotTokenizeError."""
        prepared, work = self.prepared, self.work
        # The estimate covers all rows of the run, not a sample or the rows of one worker.
        is_as_estimated = self.start.sample is None and not self.start.join
        estimate = read_json(prepared.run_dir.path / ESTIMATE) if is_as_estimated else {}
        return Sending(
            job=prepared.job,
            rows=work.rows,
            engine=self.engine.engine,
            load_control=load_control,
            answers=prepared.answers,
            outlet=writer,
            counts=work.counts,
            events=self.events,
            control=self.control,
            displays=self.displays,
            began=self.began,
            functions=prepared.functions,
            done_before=work.done_before,
            turns=self.turns,
            estimated_row_s=estimate.get("row_s"),
            adaptation=self._adaptation(load_control),
            corpora=self._corpora(load_control),
            account=self.account,
            rank=self.rank,
        )

    def _adaptation(self, load_control: LoadControl) -> Adaptation | None:
        """Return the flag tuning during this run; None if the servers keep their flags."""
        job = self.prepared.job
        if not isinstance(job.engine, ServerEngine):
            return None
        if load_control.in_use:  # another run may already tune these servers
            return None
        from batchrunner.runner.adapt import adaptation_of  # noqa: PLC0415 - only for such engines

        ends_at = self.began + (job.limits.deadline or math.inf)
        return adaptation_of(self.engine.engine, self.prepared.run_dir, ends_at)

    def _corpora(self, load_control: LoadControl) -> CorpusFeeder | None:
        """Return what gives servers earlier answers for n-gram speculation; None if no server may get any.

        Such a corpus takes memory and time of a server, so background runs load none. Another run on the same
        engine may already load its own.
        """
        job, engine = self.prepared.job, self.engine.engine
        is_background = getattr(job.engine, "background", False)
        if not engine.may_speculate() or job.forward is not None or is_background or load_control.in_use:
            return None
        from batchrunner.runner.corpora import CorpusFeeder  # noqa: PLC0415

        return CorpusFeeder(cast("HttpEngine", engine), self.prepared.run_dir)

    def _write_run_json(self) -> None:
        """Write the job, its fingerprint and the engine to run.json. Raises StorageError."""
        fingerprint = self.prepared.fingerprint(self.engine.info.model)
        rows_total = self.work.rows_of_run
        plan = self.work.rows.newest_plan()
        if plan is not None:  # another worker may have added input files
            fingerprint, rows_total = {**plan.fingerprint, "model": self.engine.info.model}, plan.rows_total
        write_run_json(
            self.prepared.run_dir,
            self.prepared.job,
            self.prepared.code_digests,
            fingerprint=fingerprint,
            rows_total=rows_total,
            engine=asdict(self.engine.info),
            versions=versions(self.engine.info),
        )

    def _log_begin(self, load_control: LoadControl, why_window: str) -> None:
        """Log the number of rows to send, the concurrency limit, and the order of the rows."""
        work = self.work
        if self.start.sample is not None:
            why_window = "for the sample"
        window = load_control.concurrency.current_window
        rows = f"{counted(work.rows.unread, 'row')} to do, {len(work.done_before):,} done before"
        log.info("%s; window %s (%s)", rows, f"{window:,}", why_window)
        log.info("%s", work.order)
        self.events.write("order", **asdict(work.order))

    async def _send(self, sending: Sending, end: SendingEnd) -> None:
        """Send the rows, then look for changes of the input. Record in `end` how the sending ended."""
        try:
            await sending.send()
            looking = asyncio.to_thread(self._look_at_input)
            when = "while the input was checked for changes"
            end.added_files = await self.control.wait_for(looking, when, grace_s=TIMING.stop_start)
        except BatchrunError as failure:
            end.failure = failure
        except asyncio.CancelledError:
            # An immediate stop has cancelled the sending. Any other cancellation comes from the caller of the
            # run.
            if not self.control.at_once:
                self.control.stop("cancelled")
                raise

    def _look_at_input(self) -> list[str]:
        """Return the input files that were added or grew during the run, if `input.limit` permits more rows.

        Log a warning about an input file that changed after it was read.
        """
        dataset, limit = self.prepared.dataset, self.prepared.job.input.limit
        try:
            dataset.check_unchanged()
        except InputChangedError as failure:
            log.warning("%s, after it was read: the results are from the old file", failure.message)
        return dataset.added_files() if may_grow(rows_of_run=self.work.rows_of_run, limit=limit) else []

    async def _close(self, writer: ResultWriter, end: SendingEnd) -> None:
        """Write the last rows, and leave the remaining rows to other workers."""
        try:
            await writer.close()
        except BaseException as failure:
            # Rows may now be in a journal and in no part file. The mark of an abandoned lock tells the next
            # worker to recover the journal.
            end.is_on_disk = False
            if self.start.join or self.prepared.run_dir.store.uri:
                self.lock.abandon()
            if not isinstance(failure, BatchrunError):
                raise
            end.failure = end.failure or failure
        self.control.stage = "ending"
        if self.turns is not None:
            self.turns.close()
        await give_back(self.work.rows, self.lock)

    def _report(self, sending: Sending, end: SendingEnd, earlier: Sequence[tuple[float, float]]) -> Report:
        """Return the report. `earlier` has the start and end times of earlier starts of the run."""
        wall_s = time.monotonic() - self.began
        sending.progress.write_incidents()
        work, info = self.work, self.engine.info
        report = make_report(self.prepared.run_dir, work.done_before, work.rows.total, work.counts)
        held = unheld = 0
        # If this worker did not fail, its exit code depends on whether other workers do the remaining rows.
        if end.failure is None:
            with contextlib.suppress(OSError, BatchrunError):
                held, unheld = work.rows.held_elsewhere()
        # If rows of this worker remain, only those are reported.
        rows_of_others = 0 if report.rows_left else held + unheld
        report = replace(report, rows_of_others=rows_of_others)
        verdict = self._verdict(report, end, held=held, unheld=unheld)
        if not end.is_on_disk:
            report = self._counted_on_disk(report)
        return replace(
            report,
            **verdict._asdict(),
            wall_s=round(wall_s, 3),
            wall_s_all_starts=round(union_s(earlier) + wall_s, 3),
            starts=len(earlier) + 1,
            output_tokens_per_s=round(work.counts.output_tokens / wall_s, 1),
            rows_per_s=round(work.counts.own / wall_s, 2),
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

    def _counted_on_disk(self, report: Report) -> Report:
        """Return the report with the counts of the rows on disk, or unchanged if they cannot be read."""
        with contextlib.suppress(BatchrunError):
            done = read_done(self.prepared.run_dir)
            counts = done.counts
            return replace(report, rows_ok=len(done.answered), rows_failed=counts.failed, rows_cut=counts.cut)
        return report

    def _verdict(self, report: Report, end: SendingEnd, *, held: int, unheld: int) -> RunVerdict:
        """Return the exit code of this start, and its reason.

        `held` is the number of remaining rows that other living workers will do, and `unheld` the number of
        rows that nobody will do.
        """
        # A signal, a limit or a caller may have stopped this start.
        control = self.control
        stop = None
        if control.reason is not None:
            stop = RunVerdict(control.exit_code, control.reason, control.next_step)
        run_end = RunEnd(
            rows_total=report.rows_total,
            rows_failed=report.rows_failed,
            max_failed_rows=self.prepared.job.limits.max_failed_rows,
            rows_left=report.rows_left - report.rows_of_others,
            rows_unheld=unheld,
            rows_held=held,
            is_sample=self.start.sample is not None,
            failure=end.failure,
            stop=stop,
            added_files=end.added_files,
        )
        if self.start.join and not run_end.is_cut_short:
            run_end = self._over_all_workers(run_end)
        return verdict_of(run_end)

    def _over_all_workers(self, end: RunEnd) -> RunEnd:
        """Replace the counts in `end` by those over all workers of a shared run; this worker's rows are done.

        Only the last worker can do so, by reading the results of all, so that its exit code is that of the
        whole run. In an object store it would have to fetch all results, so there its exit code is that of
        its own rows.
        """
        run_dir, rows_of_run = self.prepared.run_dir, self.work.rows_of_run
        # If other running workers hold rows, this worker is not the last one.
        if end.rows_held or run_dir.store.uri:
            return replace(end, rows_total=rows_of_run)
        try:
            plan = self.work.rows.newest_plan()
            refresh_listing(run_dir.parts)
            stored = done_by_all(run_dir)
        except (OSError, BatchrunError) as failure:
            return replace(end, failure=BatchrunError(str(failure)))
        if plan is not None:  # another worker may have added rows
            rows_of_run = plan.rows_total
        return replace(
            end,
            rows_total=rows_of_run,
            rows_lost=max(0, rows_of_run - len(stored)),
            rows_failed=len(stored.failed),
        )
