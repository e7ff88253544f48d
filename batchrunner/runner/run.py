"""One run: its parts, built in the order in which rows and load samples flow through them, and its course."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from batchrunner.core.console import DETAIL
from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EXIT_STOPPED, BatchrunError, StorageError
from batchrunner.dispatch.load_control import write_decisions
from batchrunner.engines.base import Engine
from batchrunner.job.tasks import GENERATE
from batchrunner.output.columns import RunSchema
from batchrunner.output.counts import RowCounts
from batchrunner.output.disk_wait import DiskWait
from batchrunner.output.events import EventLog, attempts_in
from batchrunner.output.resume import read_done, schema_of_results
from batchrunner.output.run_json import fingerprint, without_secrets, write_run_json
from batchrunner.output.task_lock import TaskLock
from batchrunner.output.writer import ResultWriter
from batchrunner.report.report import Report, make_report, verdict_of_done, versions
from batchrunner.runner.attempt import Attempt
from batchrunner.runner.cluster.leased_rows import LeasedRows
from batchrunner.runner.control import Control
from batchrunner.runner.fitting_results import fitting
from batchrunner.runner.handover import Handover, StoredAndGiven
from batchrunner.runner.parsed_results import parsing
from batchrunner.runner.prepare import facts_of_functions
from batchrunner.runner.prepared_job import PreparedJob
from batchrunner.runner.progress import Display
from batchrunner.runner.screen import Opening
from batchrunner.runner.sending import Results, Sending, Windows, build_sending, open_windows
from batchrunner.runner.stop_rules import FailureLimit
from batchrunner.runner.task_rows import FixedRows

log = logging.getLogger(__name__)

SPOOL_S = 1.0
"""Seconds within which a row is in the journal on this machine, where results are uploaded."""


async def build_run(
    prepared: PreparedJob,
    attempt: Attempt,
    engine: Engine,
    info: EngineInfo,
    lock: TaskLock,
    counts: RowCounts,
    events: EventLog,
    control: Control,
    display: Display,
    handover: Handover | None = None,
) -> Run:
    """Return a run that is ready to send its first row; the `engine` is open, `lock` is held on the task.

    `handover` gets the rows too. Raises StorageError, or CannotTokenizeError if the job needs client-side
    tokenization and it is not possible.
    """
    job, run_dir, rows = prepared.job, prepared.run_dir, attempt.rows
    began = time.monotonic()
    earlier_starts, earlier_s = attempts_in(run_dir.events)
    _write_start(prepared, attempt, info, events)
    decodes = await asyncio.to_thread(lambda: prepared.model_task) == GENERATE
    own_bytes = attempt.order.own_bytes(caches_prefixes=info.caches_prefixes)
    windows = await open_windows(
        job, engine, info, unsent=rows.unread, now=began, decodes=decodes, prompt_bytes=own_bytes
    )
    schema = await asyncio.to_thread(_schema, prepared, info)
    writer = ResultWriter(
        run_dir,
        schema,
        part_rows=job.output.part_rows,
        plan=prepared.answers,
        durable_s=job.output.durable if run_dir.store.objects is None else min(job.output.durable, SPOOL_S),
        upload_s=None if run_dir.store.objects is None else job.output.uploaded_within_s,
        lock=lock,
        counter=FailureLimit(counts, control, windows.slots, job.limits.abort_failed_share),
        listener=rows,
        disk=DiskWait(job.limits.disk_wait, control),
    )
    results: Results = writer
    if handover is not None:
        results = StoredAndGiven(writer, handover, prepared.answers)
    results = parsing(fitting(results, schema, prepared.answers), prepared.functions)
    sending = build_sending(
        job, prepared.renderer.kind, rows, attempt.done, engine, info, windows, results, counts, events,
        control, display, prepared.answers, prepared.dataset.schema.names, began=began,
        functions=prepared.functions,
    )  # fmt: skip
    _log_start(attempt, windows, events)
    display.begin(
        Opening(
            rows=attempt.rows.unread,
            rows_done=len(attempt.done.rows),
            model=info.model,
            kind=job.engine.kind,
            window=windows.slots.window,
            is_fixed=windows.limits.fixed is not None,
            results=f"{run_dir.name}/parts",
        )
    )
    return Run(
        prepared=prepared,
        attempt=attempt,
        info=info,
        lock=lock,
        control=control,
        counts=counts,
        events=events,
        sending=sending,
        writer=writer,
        began=began,
        earlier_starts=earlier_starts,
        earlier_s=earlier_s,
    )


def _write_start(prepared: PreparedJob, attempt: Attempt, info: EngineInfo, events: EventLog) -> None:
    for note in info.notes:
        log.info("%s", note)
    events.write(
        "start",
        rows_total=attempt.rows.total,
        rows_done=len(attempt.done.rows),
        engine=asdict(info),
        args=without_secrets(prepared.job)["engine"].get("args", {}),
    )


def _schema(prepared: PreparedJob, info: EngineInfo) -> RunSchema:
    metadata = {"batchrunner": versions(info)["batchrunner"] or "", "model": info.model}
    if info.simulated:
        metadata["simulated"] = "true"
    task = prepared.answers.task
    earlier = None if task is None else schema_of_results(prepared.run_dir, prepared.answers.names)
    return RunSchema(prepared.renderer.carried_schema, prepared.answers, metadata, earlier)


def _log_start(attempt: Attempt, windows: Windows, events: EventLog) -> None:
    if windows.limits.fixed is not None:
        why = "set by the job"
    else:
        write_decisions(events, windows.first)
        why = windows.first[0].reason + (f"; {len(windows.first)} schedulers" if windows.first[1:] else "")
    log.info(
        "%d rows to do, %d done before; window %d (%s)",
        attempt.rows.unread,
        len(attempt.done.rows),
        windows.slots.window,
        why,
        extra=DETAIL,
    )
    log.info("%s", attempt.order, extra=DETAIL)
    events.write("order", **asdict(attempt.order))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run, built by `build_run`."""

    prepared: PreparedJob
    attempt: Attempt
    info: EngineInfo
    lock: TaskLock
    control: Control
    counts: RowCounts
    events: EventLog
    sending: Sending
    writer: ResultWriter
    began: float
    """Time of the beginning, in seconds of the monotonic clock."""
    earlier_starts: int
    """Number of earlier attempts of this task."""
    earlier_s: float
    """Seconds that they took together."""

    async def go(self) -> Report:
        """Send all rows and return the report, which is also in report.json.

        Raises BatchrunError if the run could not go on; the error has the report too.
        """
        self._write_run_json()  # not before: a job that was refused is not the one that is to go on
        failure: BatchrunError | None = None
        added: list[str] = []
        rows_on_disk, self.control.stage = True, "sending"
        sending = asyncio.ensure_future(self.sending.dispatcher.run(self.sending.feeder))
        polling = asyncio.ensure_future(self.sending.load_control.run(self.sending.observers))
        self.control.listen(functools.partial(self._stop, sending))
        try:
            await asyncio.wait((sending, polling), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                polling.result()  # it failed: that ends the run
            await sending
            added = await self.control.reading(self._look_at_input, "while the input was looked at")
        except BatchrunError as error:
            failure = error
        except asyncio.CancelledError:
            if not self.control.at_once:
                self.control.stop("cancelled")
                raise
        finally:
            for task in (sending, polling):
                task.cancel()
            try:
                await asyncio.gather(sending, polling, return_exceptions=True)
                await self.writer.close()
            except BaseException as error:  # also a second cancellation: rows may be in a journal only
                rows_on_disk = False
                if self.prepared.joins or self.prepared.run_dir.store.uri:
                    self.lock.abandon()
                if not isinstance(error, BatchrunError):
                    raise
                failure = failure or error
            self.control.stage = "ending"
            await give_back(self.attempt.rows, self.lock)
            report = self._finish(failure, added, rows_on_disk=rows_on_disk)
        if failure is not None:
            failure.report = report
            raise failure
        return report

    def _stop(self, sending: asyncio.Future[None]) -> None:
        """Send no row any more; if all is to end at once, cancel those in flight."""
        self.sending.backlog.stop()
        self.attempt.rows.stop()
        if self.control.at_once:
            sending.cancel()

    def _look_at_input(self) -> list[str]:
        """Return the files that were added since the start and that the job's limit does not exclude.

        Raises InputChangedError where a file is not the same any more.
        """
        dataset, limit = self.prepared.dataset, self.prepared.job.input.limit
        dataset.check_unchanged()
        is_full = limit is not None and self.attempt.rows_of_run >= limit
        return [] if is_full else dataset.added_files()

    def _write_run_json(self) -> None:
        job, rows = self.prepared.job, self.attempt.rows
        mine, total = fingerprint(job, self.prepared.dataset.files, self.info.model), self.attempt.rows_of_run
        if isinstance(rows, LeasedRows):  # another task may have found more files since this one was planned
            plan = rows.newest_plan()
            mine, total = {**plan.fingerprint, "model": self.info.model}, plan.rows_total
        write_run_json(
            self.prepared.run_dir,
            job,
            fingerprint=mine,
            rows_total=total,
            engine=asdict(self.info),
            versions=versions(self.info),
            functions=facts_of_functions(self.prepared.functions),
        )

    def _rows_elsewhere(self) -> tuple[int, int]:
        """Return the rows that other living tasks hold, and those that nobody living holds."""
        with contextlib.suppress(OSError, BatchrunError):
            if isinstance(self.attempt.rows, LeasedRows):
                return self.attempt.rows.held_elsewhere()
        return 0, 0

    def _finish(self, failure: BatchrunError | None, added: Sequence[str], *, rows_on_disk: bool) -> Report:
        """Make the report, and write the end of the event log."""
        now = time.monotonic()
        self.sending.progress.write_incidents()
        report = self._report(failure, added, now - self.began, rows_on_disk=rows_on_disk)
        with contextlib.suppress(StorageError):  # a full disk: the rows matter, and they are safe
            self.sending.shown.finish(now)
            self.events.write("end", exit_code=report.exit_code, reason=report.reason)
            report.save(self.prepared.run_dir)
        return report

    def _report(
        self, failure: BatchrunError | None, added: Sequence[str], wall_s: float, *, rows_on_disk: bool
    ) -> Report:
        attempt, counts, run_dir = self.attempt, self.counts, self.prepared.run_dir
        report = make_report(run_dir, attempt.done, attempt.rows.total, counts)
        held, unheld = self._rows_elsewhere() if failure is None else (0, 0)
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
            wall_s_all_starts=round(self.earlier_s + wall_s, 3),
            starts=self.earlier_starts + 1,
            output_tokens_per_s=round(counts.output_tokens / wall_s, 1),
            rows_per_s=round(counts.done / wall_s, 2),
            task=self.prepared.job.task,
            engine=asdict(self.info),
            window=self.sending.limits.window,
            load=self.sending.progress.load_report(),
            incidents=self.sending.progress.incidents,
            sharing=self.sending.reorderer.sharing(),
            bundles=self.sending.bundles.as_dict(),
            simulated=self.info.simulated,
            versions=versions(self.info),
        )

    def _verdict(
        self, report: Report, failure: BatchrunError | None, added: Sequence[str], unheld: int
    ) -> tuple[int, str]:
        """Return the exit code and its reason; `unheld` rows of the run are held by no living task."""
        if failure is not None:
            return failure.exit_code, str(failure)
        if report.rows_left > report.rows_of_others:
            return self.control.exit_code, self.control.reason or "stopped"
        if unheld:
            gone = f"{unheld} rows are left that no living task holds: run the same command again"
            return self.control.exit_code, self.control.reason or gone
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            return EXIT_STOPPED, (
                f"{added[0]}{more} came into the input during the run: run the same command again"
            )
        return verdict_of_done(report, self.prepared.job.limits.max_failed_rows)
