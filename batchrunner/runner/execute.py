"""One run from start to end: the only place where the parts are put together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from batchrunner.core.errors import BatchrunError, JobError, StorageError
from batchrunner.dispatch.concurrency.controller import Band
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.concurrency.window import tokens_a_row
from batchrunner.dispatch.dispatcher import Dispatcher, RetryPolicy
from batchrunner.dispatch.load_loop import LoadLoop, write_sample
from batchrunner.dispatch.prefix_order.distance import ReuseDistance
from batchrunner.dispatch.prefix_order.lengths import OutputLengths
from batchrunner.dispatch.prefix_order.reorder import Reorderer
from batchrunner.dispatch.slots import Slots
from batchrunner.dispatch.snapshot import Rates, Silent, Snapshot
from batchrunner.dispatch.tokenize import PromptTokenizer, reader_for
from batchrunner.engines.registry import make_engine, model_of
from batchrunner.output.columns import result_schema
from batchrunner.output.counts import RowCounts
from batchrunner.output.disk_wait import DiskWait
from batchrunner.output.events import EventLog, earlier_wall_s
from batchrunner.output.resume import (
    DISCARD,
    drop_failed,
    fingerprint,
    read_done,
    read_run_json,
    without_secrets,
    write_run_json,
)
from batchrunner.output.run_dir import writing
from batchrunner.output.task_lock import hold_task
from batchrunner.output.writer import ResultWriter
from batchrunner.report.html.page import leave_page
from batchrunner.report.totals import make_report, verdict_of_done, versions
from batchrunner.runner.cluster.shard import JoinTask
from batchrunner.runner.control import Control, Sleeper
from batchrunner.runner.prepare import check_resumes, prepare
from batchrunner.runner.startup import begin, check_nobody_works

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchrunner.core.types import EngineInfo, Outcome, SchedulerLoad
    from batchrunner.dispatch.snapshot import Display
    from batchrunner.dispatch.source import Source
    from batchrunner.engines.base import Engine
    from batchrunner.job.spec import Job
    from batchrunner.output.run_dir import RunDir
    from batchrunner.output.task_lock import TaskLock
    from batchrunner.report.report import Report
    from batchrunner.runner.cluster.shard import Shard
    from batchrunner.runner.prepare import PreparedJob
    from batchrunner.runner.startup import Attempt

log = logging.getLogger(__name__)

LEAST_ROWS_TO_ABORT = 100
"""`abort_failed_share` looks at a run once so many rows have ended."""


GC_THRESHOLD = 10_000
"""New objects between two searches for garbage cycles; Python's 700 is a search every few rows, through all
rows that wait to be written: a quarter of our CPU time."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage cycles less often; a second run in the same process finds it done and leaves it."""
    before = gc.get_threshold()
    if not 0 < before[0] < GC_THRESHOLD:
        yield
        return
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def execute(
    job: Job,
    *,
    engine: Engine | None = None,
    info: EngineInfo | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    part: Shard | JoinTask | None = None,
    display: Display | None = None,
    control: Control | None = None,
    page: bool = True,
) -> Report:
    """Run a job to its end and return the report, which is also in report.json, and report.html (`page`).

    `engine` is an open engine to use, with its `info`; without one the job's own is opened and closed.
    `part` is what this task is to do of a run that several do; without it all is its own.
    Raises BatchrunError where the run could not start or not go on; finished rows are kept.
    """
    if part and fresh:
        raise JobError("--fresh would discard what other tasks have done: delete the directory instead")
    prepared = await asyncio.to_thread(prepare, job, part)
    control, display = control or Control(), display or Silent()
    async with contextlib.AsyncExitStack() as at_last, contextlib.AsyncExitStack() as stack:
        stack.enter_context(contextlib.closing(display))
        stack.enter_context(rare_collections())
        sleeper = Sleeper(control)
        holding = hold_task(prepared.run_dir, sleeper.sleep, rows=prepared.dataset.total_rows)
        claim = await sleeper.run(lambda: stack.enter_context(holding))
        model = info.model if info else model_of(job.engine)
        start = await sleeper.run(
            lambda: begin(prepared, claim, model, sleeper.sleep, fresh=fresh, retry_failed=retry_failed)
        )
        stack.push_async_callback(_give_back, start.source, claim)
        if engine is None or info is None:
            engine = make_engine(
                job.engine, log_dir=prepared.run_dir.own, limits=job.limits, reader=reader_for(job)
            )
            stack.push_async_callback(engine.close)
            if start.source.unread or fresh:
                info = await _open(engine, control)
        if info is None or not (start.source.unread or fresh):  # nothing to do
            return _finished_before(prepared, start)
        if model is None and not fresh:
            await asyncio.to_thread(check_resumes, prepared, info.model)
        if fresh:
            await sleeper.run(lambda: check_nobody_works(prepared.run_dir, sleeper.sleep))
            with writing(prepared.run_dir.path):
                prepared.run_dir.discard()
        elif retry_failed:  # only now: a start that was refused changes nothing
            await asyncio.to_thread(drop_failed, prepared.run_dir)
        if page:
            at_last.push_async_callback(_show, prepared.run_dir, control)
        return await _Run(prepared, engine, info, start, display, control, claim).go()


def _finished_before(prepared: PreparedJob, start: Attempt) -> Report:
    """Make the report of a start that found nothing to do."""
    report = make_report(prepared.run_dir, start.done, start.source.total, RowCounts())
    exit_code, reason = verdict_of_done(report, prepared.job.limits.max_failed_rows)
    if report.rows_left:
        reason = "nothing is free: other tasks do the rest"
    starts, wall_s = earlier_wall_s(prepared.run_dir.events)
    old = read_run_json(prepared.run_dir) or {}
    engine = old.get("engine", {})
    report = replace(
        report, exit_code=exit_code, reason=reason, starts=starts, wall_s_all_starts=round(wall_s, 3),
        engine=engine, simulated=bool(engine.get("simulated")), versions=old.get("versions", {}),
    )  # fmt: skip
    has_none = not prepared.run_dir.report_json.exists()  # that of the last start says more than these zeros
    if has_none and not isinstance(prepared.part, JoinTask):
        report.save(prepared.run_dir.report_json)
    return report


async def _show(run_dir: RunDir, control: Control) -> None:
    """Leave the page; when the engine has gone, since a card is not to be held for it."""
    # a start that was refused leaves no run; and when all is to stop at once a SIGKILL may be near
    if run_dir.run_json.exists() and not control.at_once:
        await asyncio.to_thread(leave_page, run_dir)


async def _give_back(source: Source, claim: TaskLock) -> None:
    """Let other tasks have what was not done, unless it is not known what is on disk: they can find out."""
    source.stop()

    def give_back() -> None:
        claim.verify()  # else they are another's by now
        source.give_back()

    if not claim.is_left:
        try:
            await asyncio.to_thread(give_back)
        except (OSError, StorageError) as failure:
            claim.leave()
            log.warning("leases were not given back: %s", failure)


async def _open(engine: Engine, control: Control) -> EngineInfo | None:
    """Open the engine; a stop while it loads ends the wait."""
    opening = asyncio.ensure_future(engine.open())
    asked = asyncio.Event()
    control.listen(asked.set)
    stopped = asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            return opening.result()
        raise control.interrupted("while the engine was starting")
    finally:
        opening.cancel()
        stopped.cancel()
        await asyncio.gather(opening, stopped, return_exceptions=True)


class _Run:
    """The state of one start."""

    def __init__(
        self,
        prepared: PreparedJob,
        engine: Engine,
        info: EngineInfo,
        start: Attempt,
        display: Display,
        control: Control,
        claim: TaskLock,
    ) -> None:
        self._claim = claim
        self._prepared, self._engine, self._info = prepared, engine, info
        self._done, self._source, self._rows_of_run = start.done, start.source, start.rows_of_run
        self._display, self._control = display, control
        job = prepared.job
        self._job = job
        asked = job.sampling.max_new_tokens
        self._admission = ConcurrencyLimits(
            info,
            Band(*job.queue),
            tokens_a_row(asked if isinstance(asked, int) else None),
            most=max(1, (info.connections or sys.maxsize) // len(info.routes)),
            fixed=None if job.window == "auto" else job.window,
        )
        self._tally = RowCounts()
        self._is_short = False  # rows that ended may not be on disk
        self._last_signals: tuple[SchedulerLoad, ...] = ()
        self._began = time.monotonic()
        self._rates = Rates(self._began, counts=4)
        self._patience = RetryPolicy(job.limits.max_attempts, job.limits.engine_wait)

    async def go(self) -> Report:
        run_dir = self._prepared.run_dir
        if self._source.unread:
            with writing(run_dir.merged):
                run_dir.discard_merged()
        self._events = EventLog(run_dir.events)
        try:
            self._earlier_starts, self._earlier_s = earlier_wall_s(run_dir.events)
            self._sink = self._make_sink()
            for note in self._info.notes:
                log.info("%s", note)
            self._events.write(
                "start",
                rows_total=self._source.total,
                rows_done=len(self._done.rows),
                engine=asdict(self._info),
                args=without_secrets(self._job)["engine"].get("args", {}),
            )
            kind = self._prepared.renderer.kind
            self._prompts = PromptTokenizer(self._job, self._engine, self._info, kind, self._events.write)
            await self._open_gate()
            self._write_run_json()  # not before: a job that was refused is not the one that is to go on
            self._source.begin(self._events.write, lambda: self._submitter.unfinished)
            return await self._send_all()
        finally:
            self._events.close()

    async def _open_gate(self) -> None:
        """Set the first windows by what the schedulers say of themselves."""
        first = self._admission.begin(
            await self._engine.signals(), time.monotonic(), unsent=self._source.unread
        )
        self._gate = Slots(self._admission.windows)
        arranger = self._arranger = self._make_arranger(len(first))
        self._feedback = LoadLoop(self._engine, self._admission, arranger, self._gate, self._events)
        self._submitter = Dispatcher(
            self._engine, self._prompts.ready, arranger, self._gate, self._patience, self._deliver,
            self._feedback, keyed=self._info.keeps_together,
        )  # fmt: skip
        if self._admission.fixed is not None:
            why = "set by the job"
        else:
            self._feedback.write_decisions(first)
            why = first[0].reason + (f"; {len(first)} schedulers" if len(first) > 1 else "")
        log.info(
            "%d rows to do, %d done before; window %d (%s)",
            self._source.unread, len(self._done.rows), self._gate.window, why,
        )  # fmt: skip

    def _make_arranger(self, schedulers: int) -> Reorderer:
        arranged = self._job.order != "input"
        return Reorderer(
            ReuseDistance(self._info, schedulers) if arranged and self._info.caches_prefixes else None,
            OutputLengths() if arranged else None,
            dedupe=self._job.dedupe,
            caches=schedulers,
        )

    async def _send_all(self) -> Report:
        failure: BatchrunError | None = None
        sending = asyncio.ensure_future(self._submitter.run(self._source))
        watching = asyncio.ensure_future(
            self._feedback.watch(self._submitter, self._snapshot, self._display, self._check)
        )
        self._control.listen(lambda: self._obey(sending))
        tasks: tuple[asyncio.Future[None], ...] = (sending, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                watching.result()  # it broke: that ends the run
            await sending
        except BatchrunError as error:
            failure = error
        except asyncio.CancelledError:
            if not self._control.at_once:
                self._control.stop("cancelled")
                raise
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._sink.close()
            except BaseException as error:  # also a second cancellation: rows may be in a journal only
                self._is_short = True
                if isinstance(self._prepared.part, JoinTask):
                    self._claim.leave()
                if not isinstance(error, BatchrunError):
                    raise
                failure = failure or error
            await _give_back(self._source, self._claim)
            report = self._finish(failure)
        if failure is not None:
            failure.report = report
            raise failure
        return report

    def _obey(self, sending: asyncio.Future[None]) -> None:
        self._submitter.stop()
        self._source.stop()
        if self._control.at_once:
            sending.cancel()

    async def _deliver(self, outcome: Outcome) -> None:
        # counted first: the row is in a part even if a stop comes while we wait for the disk
        self._tally.add(outcome)
        await self._sink.put(outcome)
        if outcome.completion is None and self._tally.done >= LEAST_ROWS_TO_ABORT:
            share = self._tally.failed / self._tally.done
            if share > self._job.limits.abort_failed_share:
                self._control.drain(
                    f"{share:.0%} of the rows failed (limits.abort_failed_share): correct the job and start "
                    f"with {DISCARD}; or mend the engine and start with --retry-failed"
                )

    def _check(self) -> None:
        self._sink.check()
        deadline = self._job.limits.deadline
        if deadline is not None and time.monotonic() - self._began > deadline:
            self._control.drain("the deadline passed (limits.deadline)")

    def _snapshot(self, signals: Sequence[SchedulerLoad]) -> Snapshot:
        self._last_signals = tuple(signals)
        tally, now = self._tally, time.monotonic()
        rows_s, output_s, prompt_s, cached_s = self._rates.update(
            now, tally.done, tally.output_tokens, tally.prompt_tokens, tally.cached_tokens
        )
        return Snapshot(
            rows_total=self._source.total,
            rows_done=len(self._done.rows) + tally.done,
            rows_failed=self._done.failed + tally.failed,
            rows_per_s=rows_s,
            output_tokens_per_s=output_s,
            prompt_tokens_per_s=prompt_s,
            cached_tokens_per_s=cached_s,
            window=self._gate.window,
            in_flight=self._gate.in_flight,
            resting=self._submitter.resting,
            retractions=self._feedback.summary.retractions,
            signals=tuple(signals),
            bands={name: (band.low, band.high) for name, band in self._admission.bands.items()},
            by_scheduler=self._feedback.by_scheduler(now),
            simulated=self._info.simulated,
        )

    def _write_run_json(self) -> None:
        prepared = self._prepared
        write_run_json(
            prepared.run_dir,
            self._job,
            fingerprint=fingerprint(self._job, prepared.dataset.files, self._info.model).as_dict(),
            rows_total=self._rows_of_run,
            engine=asdict(self._info),
            versions=versions(self._info),
        )

    def _make_sink(self) -> ResultWriter:
        metadata = {"batchrunner": versions(self._info)["batchrunner"] or "", "model": self._info.model}
        if self._info.simulated:
            metadata["simulated"] = "true"
        samples = self._job.sampling.n
        schema = result_schema(self._prepared.renderer.carried_schema, samples=samples, metadata=metadata)
        return ResultWriter(
            self._prepared.run_dir,
            schema,
            part_rows=self._job.output.part_rows,
            samples=samples,
            durable_s=self._job.output.durable,
            claim=self._claim,
            landed=self._source.landed,
            disk=DiskWait(self._job.limits.disk_wait, lambda: self._control.at_once),
        )

    def _finish(self, failure: BatchrunError | None) -> Report:
        wall_s = time.monotonic() - self._began
        self._feedback.write_incidents()
        report = make_report(self._prepared.run_dir, self._done, self._source.total, self._tally)
        exit_code, reason = self._verdict(report, failure)
        if self._is_short:
            report = self._as_on_disk(report)
        report = replace(
            report,
            exit_code=exit_code,
            reason=reason,
            wall_s=round(wall_s, 3),
            wall_s_all_starts=round(self._earlier_s + wall_s, 3),
            starts=self._earlier_starts + 1,
            output_tokens_per_s=round(self._tally.output_tokens / wall_s, 1),
            rows_per_s=round(self._tally.done / wall_s, 2),
            engine=asdict(self._info),
            window=self._admission.window,
            load=self._feedback.summary.as_dict(),
            incidents=self._feedback.incidents,
            sharing=self._arranger.sharing(),
            simulated=self._info.simulated,
            versions=versions(self._info),
        )
        last = self._snapshot(self._last_signals)
        self._display.show(last)
        with contextlib.suppress(StorageError):  # a full disk: the rows matter, and they are safe
            write_sample(self._events, last)
            self._events.write("end", exit_code=exit_code, reason=reason)
            report.save(self._prepared.run_dir.report_json)
        return report

    def _as_on_disk(self, report: Report) -> Report:
        """Count what is there, where not all rows that ended could be written."""
        with contextlib.suppress(BatchrunError):
            done = read_done(self._prepared.run_dir)
            return replace(report, rows_ok=len(done.rows) - done.failed, rows_failed=done.failed)
        return report

    def _verdict(self, report: Report, failure: BatchrunError | None) -> tuple[int, str]:
        if failure is not None:
            return failure.exit_code, str(failure)
        if report.rows_left:
            return self._control.exit_code, self._control.reason or "stopped"
        return verdict_of_done(report, self._job.limits.max_failed_rows)
