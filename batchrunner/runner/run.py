"""One run from its first row to its report."""

import asyncio
import contextlib
import functools
import logging
import time
from dataclasses import asdict, dataclass, replace

from batchrunner.core.errors import BatchrunError, StorageError
from batchrunner.core.types import EngineInfo
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.dispatcher import Dispatcher
from batchrunner.dispatch.feeder import Feeder
from batchrunner.dispatch.incidents import IncidentLog
from batchrunner.dispatch.load_loop import LoadLoop
from batchrunner.dispatch.load_summary import LoadSummary
from batchrunner.dispatch.prefix_order.reorder import Reorderer
from batchrunner.dispatch.queue import Backlog
from batchrunner.dispatch.route_totals import RouteTotals
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import read_done
from batchrunner.output.run_json import fingerprint, write_run_json
from batchrunner.output.task_lock import TaskLock
from batchrunner.output.writer import ResultWriter
from batchrunner.report.report import Report
from batchrunner.report.totals import make_report, verdict_of_done, versions
from batchrunner.runner.attempt import Attempt
from batchrunner.runner.control import Control
from batchrunner.runner.prepare import PreparedJob
from batchrunner.runner.progress import ProgressLog
from batchrunner.runner.shard import JoinTask
from batchrunner.runner.task_rows import TaskRows

log = logging.getLogger(__name__)


async def give_back(rows: TaskRows, lock: TaskLock) -> None:
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
    feeder: Feeder
    backlog: Backlog
    dispatcher: Dispatcher
    writer: ResultWriter
    load_loop: LoadLoop
    limits: ConcurrencyLimits
    reorderer: Reorderer
    totals: RouteTotals
    summary: LoadSummary
    incidents: IncidentLog
    progress: ProgressLog
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
        rows_on_disk = True
        sending = asyncio.ensure_future(self.dispatcher.run(self.feeder))
        polling = asyncio.ensure_future(self.load_loop.run())
        self.control.listen(functools.partial(self._stop, sending))
        try:
            await asyncio.wait((sending, polling), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                polling.result()  # it failed: that ends the run
            await sending
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
                if isinstance(self.prepared.part, JoinTask):
                    self.lock.abandon()
                if not isinstance(error, BatchrunError):
                    raise
                failure = failure or error
            await give_back(self.attempt.rows, self.lock)
            report = self._finish(failure, rows_on_disk=rows_on_disk)
        if failure is not None:
            failure.report = report
            raise failure
        return report

    def _stop(self, sending: asyncio.Future[None]) -> None:
        """Send no row any more; if all is to end at once, cancel those in flight."""
        self.backlog.stop()
        self.attempt.rows.stop()
        if self.control.at_once:
            sending.cancel()

    def _write_run_json(self) -> None:
        job = self.prepared.job
        write_run_json(
            self.prepared.run_dir,
            job,
            fingerprint=fingerprint(job, self.prepared.dataset.files, self.info.model),
            rows_total=self.attempt.rows_of_run,
            engine=asdict(self.info),
            versions=versions(self.info),
        )

    def _finish(self, failure: BatchrunError | None, *, rows_on_disk: bool) -> Report:
        """Make the report, and write the end of the event log."""
        now = time.monotonic()
        self.incidents.update()
        report = self._report(failure, now - self.began, rows_on_disk=rows_on_disk)
        with contextlib.suppress(StorageError):  # a full disk: the rows matter, and they are safe
            self.progress.finish(now)
            self.events.write("end", exit_code=report.exit_code, reason=report.reason)
            report.save(self.prepared.run_dir.report_json)
        return report

    def _report(self, failure: BatchrunError | None, wall_s: float, *, rows_on_disk: bool) -> Report:
        attempt, counts, run_dir = self.attempt, self.counts, self.prepared.run_dir
        report = make_report(run_dir, attempt.done, attempt.rows.total, counts)
        exit_code, reason = self._verdict(report, failure)
        if not rows_on_disk:
            with contextlib.suppress(BatchrunError):  # count what is there
                done = read_done(run_dir)
                report = replace(report, rows_ok=done.ok, rows_failed=done.counts.failed)
        return replace(
            report,
            exit_code=exit_code,
            reason=reason,
            wall_s=round(wall_s, 3),
            wall_s_all_starts=round(self.earlier_s + wall_s, 3),
            starts=self.earlier_starts + 1,
            output_tokens_per_s=round(counts.output_tokens / wall_s, 1),
            rows_per_s=round(counts.done / wall_s, 2),
            engine=asdict(self.info),
            window=self.limits.window,
            load=self.summary.as_dict(retractions=self.totals.retractions),
            incidents=self.incidents.reported,
            sharing=self.reorderer.sharing(),
            simulated=self.info.simulated,
            versions=versions(self.info),
        )

    def _verdict(self, report: Report, failure: BatchrunError | None) -> tuple[int, str]:
        if failure is not None:
            return failure.exit_code, str(failure)
        if report.rows_left:
            return self.control.exit_code, self.control.reason or "stopped"
        return verdict_of_done(report, self.prepared.job.limits.max_failed_rows)
