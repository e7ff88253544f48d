"""Builds all parts of a run, in the order in which rows, and then load samples, flow through them."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchrunner.core.types import EngineInfo
from batchrunner.dispatch.concurrency.controller import Decision
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.concurrency.window import tokens_a_row
from batchrunner.dispatch.dispatcher import Dispatcher
from batchrunner.dispatch.feedback import Feedback, write_decisions
from batchrunner.dispatch.feeder import Feeder
from batchrunner.dispatch.incidents import IncidentLog
from batchrunner.dispatch.load_loop import LoadLoop
from batchrunner.dispatch.load_summary import LoadSummary
from batchrunner.dispatch.prefix_order.distance import ReuseDistance
from batchrunner.dispatch.prefix_order.output_lengths import OutputLengths
from batchrunner.dispatch.prefix_order.priming import PrefixPrimer
from batchrunner.dispatch.prefix_order.reorder import Reorderer
from batchrunner.dispatch.queue import Backlog
from batchrunner.dispatch.retries import Retries, RetryPolicy
from batchrunner.dispatch.route_totals import RouteTotals
from batchrunner.dispatch.slots import Slots
from batchrunner.dispatch.snapshot import Monitor
from batchrunner.dispatch.tokenize import PromptTokenizer
from batchrunner.engines.base import Engine
from batchrunner.job.queue_band import QueueBand
from batchrunner.job.spec import Job
from batchrunner.output.columns import result_schema
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog, attempts_in
from batchrunner.output.run_json import without_secrets
from batchrunner.output.task_lock import TaskLock
from batchrunner.output.writer import ResultWriter
from batchrunner.report.totals import versions
from batchrunner.runner.attempt import Attempt
from batchrunner.runner.control import Control
from batchrunner.runner.prepare import PreparedJob
from batchrunner.runner.progress import Display, ProgressLog
from batchrunner.runner.run import Run
from batchrunner.runner.stop_rules import FailureLimit, StopRules

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


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
) -> Run:
    """Return a run that is ready to send its first row; the `engine` is open, `lock` is held on the task.

    Raises StorageError, or CannotTokenizeError if the job needs client-side tokenization and it is not
    possible.
    """
    job, run_dir, rows = prepared.job, prepared.run_dir, attempt.rows
    began = time.monotonic()
    earlier_starts, earlier_s = attempts_in(run_dir.events)
    writer = ResultWriter(
        run_dir,
        _schema(prepared, info),
        part_rows=job.output.part_rows,
        samples=job.sampling.n,
        durable_s=job.output.durable,
        lock=lock,
        count=FailureLimit(counts, control, job.limits.abort_failed_share).add,
        committed=rows.committed,
        disk_wait_s=job.limits.disk_wait,
        stops_at_once=lambda: control.at_once,
    )
    _write_start(prepared, attempt, info, events)
    tokenizer = PromptTokenizer(job, prepared.renderer.kind, engine, info, events)
    limits = ConcurrencyLimits(
        info,
        QueueBand(*job.queue),
        tokens_a_row(job.sampling.max_new_tokens if isinstance(job.sampling.max_new_tokens, int) else None),
        most=max(1, (info.connections or sys.maxsize) // len(info.routes)),
        fixed=None if job.window == "auto" else job.window,
    )
    first_windows = limits.begin(await engine.loads(), began, unsent=rows.unread)

    # rows: source → reorder → tokenise → queue → slot → engine → count → store
    reorderer = _reorderer(job, info, schedulers=len(first_windows))
    slots = Slots(limits.windows)
    backlog = Backlog(rows, reorderer, slots, writer)
    primer = PrefixPrimer(engine, tokenizer, info.routes, reorderer.caches)
    feeder = Feeder(rows, reorderer, primer, tokenizer, backlog, writer)
    retries = Retries(RetryPolicy(job.limits.max_attempts, job.limits.engine_wait), backlog)
    totals = RouteTotals(info.routes, began)
    feedback = Feedback(limits, slots, reorderer, totals, events)
    dispatcher = Dispatcher(backlog, slots, engine, retries, feedback, by_affinity=info.keeps_together)

    # load samples: engine → slots → summary, display and event log, stop rules
    summary = LoadSummary(limits, slots)
    monitor = Monitor(
        rows, attempt.done, counts, slots, limits, backlog, totals, now=began, simulated=info.simulated
    )
    incidents = IncidentLog(engine, events)
    progress = ProgressLog(monitor, incidents, display, events, now=began)
    stop_rules = StopRules(writer, control, job.limits.deadline, now=began)
    load_loop = LoadLoop(engine, feedback, backlog, [summary, progress, stop_rules])

    _log_start(attempt, slots, first_windows, events, fixed=limits.fixed is not None)
    return Run(
        prepared=prepared,
        attempt=attempt,
        info=info,
        lock=lock,
        control=control,
        counts=counts,
        events=events,
        feeder=feeder,
        backlog=backlog,
        dispatcher=dispatcher,
        writer=writer,
        load_loop=load_loop,
        limits=limits,
        reorderer=reorderer,
        totals=totals,
        summary=summary,
        incidents=incidents,
        progress=progress,
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


def _reorderer(job: Job, info: EngineInfo, *, schedulers: int) -> Reorderer:
    reorders = job.order != "input"
    return Reorderer(
        ReuseDistance(info, schedulers) if reorders and info.caches_prefixes else None,
        OutputLengths() if reorders else None,
        dedupe=job.dedupe,
        caches=schedulers,
    )


def _schema(prepared: PreparedJob, info: EngineInfo) -> pa.Schema:
    metadata = {"batchrunner": versions(info)["batchrunner"] or "", "model": info.model}
    if info.simulated:
        metadata["simulated"] = "true"
    return result_schema(prepared.renderer.carried_schema, samples=prepared.job.sampling.n, metadata=metadata)


def _log_start(
    attempt: Attempt, slots: Slots, first_windows: list[Decision], events: EventLog, *, fixed: bool
) -> None:
    if fixed:
        why = "set by the job"
    else:
        write_decisions(events, first_windows)
        count = len(first_windows)
        why = first_windows[0].reason + (f"; {count} schedulers" if count > 1 else "")
    log.info(
        "%d rows to do, %d done before; window %d (%s)",
        attempt.rows.unread,
        len(attempt.done.rows),
        slots.window,
        why,
    )
    log.info("%s", attempt.order)
    events.write("order", **asdict(attempt.order))
