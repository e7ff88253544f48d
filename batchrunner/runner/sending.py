"""What sends rows and watches the engine meanwhile, built in the order in which rows and samples flow.

It is the same for a run, whose outcomes are written, and for a stream, whose outcomes go to a program.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrunner.core.engine_info import EngineInfo, QueueBand
from batchrunner.core.types import PromptKind
from batchrunner.dispatch.bundles import BundleTotals, bundle_senders
from batchrunner.dispatch.concurrency.controller import Decision
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.concurrency.window import (
    BYTES_A_TOKEN,
    BYTES_AN_ID,
    ForwardPasses,
    cost_of_connections,
    tokens_a_row,
)
from batchrunner.dispatch.dispatcher import Dispatcher, Feeder
from batchrunner.dispatch.load_control import LoadControl, LoadObserver
from batchrunner.dispatch.pending_row import RowSource
from batchrunner.dispatch.progress import AttemptProgress
from batchrunner.dispatch.queue import Backlog, Slots
from batchrunner.dispatch.reorder import OutputLengths, Reorderer, ReuseDistance
from batchrunner.dispatch.tokenize import make_tokenizer
from batchrunner.engines.base import Engine
from batchrunner.job.answers import AnswerPlan, judges_by_row
from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.runner.control import Control, StopRules
from batchrunner.runner.progress import Display, ProgressLog
from batchrunner.runner.results import OutcomeSink

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Windows:
    """How many requests may be in flight, at the beginning."""

    limits: ConcurrencyLimits
    slots: Slots
    first: list[Decision]
    """The first window of each scheduler, with its reason."""
    passes: ForwardPasses | None = None
    """Forward passes of a task without decoding."""


async def open_windows(
    job: Job,
    engine: Engine,
    info: EngineInfo,
    *,
    unsent: int,
    now: float,
    decodes: bool = True,
    prompt_bytes: float | None = None,
) -> Windows:
    """Return the first windows of an open engine, by its load `now`, for so many unsent rows.

    Tell whether it `decodes`, as far as the job's task does not say, and how many bytes of a prompt it
    computes on average, where that is known.
    """
    bytes_a_token = BYTES_A_TOKEN if job.prompt.input_ids is None else BYTES_AN_ID
    prompt_tokens = None if prompt_bytes is None else prompt_bytes / bytes_a_token
    passes = None if job.forward is None and decodes else ForwardPasses(info.prefill_tokens)
    limits = ConcurrencyLimits(
        info,
        QueueBand(*job.queue),
        tokens_a_row(_most_new_tokens(job), prompt_tokens),
        most=max(1, (info.connections or sys.maxsize) // len(info.routes)),
        fixed=None if job.window == "auto" else job.window,
        passes=passes,
        own_band="queue" in job.model_fields_set,
    )
    if cost := cost_of_connections(info, limits.fixed):
        log.warning("%s", cost)
    first = limits.begin(await engine.loads(), now, unsent=unsent)
    return Windows(limits, Slots(limits.windows), first, passes)


def _most_new_tokens(job: Job) -> int | None:
    """Return the most output tokens of a row; None where they differ by row."""
    if job.forward is not None:
        return 0
    return job.sampling.max_new_tokens if isinstance(job.sampling.max_new_tokens, int) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """The parts that send rows, built by `build_sending`."""

    rows: RowSource
    feeder: Feeder
    backlog: Backlog
    dispatcher: Dispatcher
    load_control: LoadControl
    observers: Sequence[LoadObserver]
    """Those of load samples."""
    limits: ConcurrencyLimits
    reorderer: Reorderer
    bundles: BundleTotals
    progress: AttemptProgress
    shown: ProgressLog

    async def send(self, control: Control) -> None:
        """Send rows until each has an outcome, or `control` says to stop; raises BatchrunError.

        A gentle stop lets the rows in flight end; one at once, or a cancellation, cancels them.
        """
        sending = asyncio.ensure_future(self.dispatcher.run(self.feeder))
        polling = asyncio.ensure_future(self.load_control.run(self.observers))
        control.listen(functools.partial(self._stop, control, sending))
        try:
            await asyncio.wait((sending, polling), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                polling.result()  # it failed: that ends the run
            await sending
        finally:
            self.rows.stop()
            for task in (sending, polling):
                task.cancel()
            await asyncio.gather(sending, polling, return_exceptions=True)

    def _stop(self, control: Control, sending: asyncio.Future[None]) -> None:
        if control.reason is not None:
            self.backlog.stop()
            self.rows.stop()
        if control.at_once:
            sending.cancel()


def build_sending(
    job: Job,
    kind: PromptKind | None,
    rows: RowSource,
    done: DoneRows,
    engine: Engine,
    info: EngineInfo,
    windows: Windows,
    results: OutcomeSink,
    counts: RowCounts,
    events: EventLog,
    control: Control,
    display: Display,
    answers: AnswerPlan,
    columns: Sequence[str],
    *,
    began: float,
    functions: HookPool | None = None,
) -> Sending:
    """Return what sends `rows`, with prompts of a kind, to an open engine, and their outcomes to `results`.

    Without a `kind` prompts may be of any. `answers` says what is asked of them, and `columns` are those of
    the rows. `done` are rows of earlier attempts, `functions` the job's Python functions. Raises
    CannotTokenizeError if the job needs client-side tokenization and it is not possible.
    """
    tokenizer = make_tokenizer(job, kind, engine, info, events)
    if job.prompt.has_media:
        assert functions is not None
        from batchrunner.dispatch.media import MediaPreparer  # noqa: PLC0415 - only where there are files

        tokenizer = MediaPreparer(functions, tokenizer)
    limits, slots = windows.limits, windows.slots

    # rows: source → reorder → tokenise → queue → slot → engine → check → parse, count and store (`results`)
    reorderer = _reorderer(job, info, windows.first, dedupe=job.dedupe and not judges_by_row(functions))
    backlog = Backlog(rows, reorderer, slots, results)
    feeder = Feeder(
        rows, reorderer, tokenizer, backlog, results, engine, info.routes, keeps_prompts=job.check.feedback
    )
    bundles = BundleTotals()
    senders = bundle_senders(job, engine, info, windows.passes, bundles, events, schedulers=reorderer.caches)
    checker = None
    if answers.checks:
        from batchrunner.dispatch.checks import AnswerChecker  # noqa: PLC0415 - only where answers are checked

        checker = AnswerChecker(job, answers, columns, tokenizer, functions)

    # load samples: engine → windows → slots → progress: display and event log, stop rules
    may_admit_more = job.sampling.ignore_eos is not True
    load_control = LoadControl(engine, limits, slots, backlog, events, may_admit_more=may_admit_more)
    progress = AttemptProgress(
        rows, done, counts, slots, limits, backlog, bundles, engine, events, began=began, task=job.task
    )
    shown = ProgressLog(progress, display, events, now=began)
    stop_rules = StopRules(results.check, control, job.limits.deadline, now=began)
    dispatcher = Dispatcher(
        backlog, slots, senders, checker, reorderer, limits, load_control, progress, events, job.limits,
        by_affinity=info.keeps_together,
    )  # fmt: skip
    return Sending(
        rows=rows,
        feeder=feeder,
        backlog=backlog,
        dispatcher=dispatcher,
        load_control=load_control,
        observers=[shown, stop_rules],
        limits=limits,
        reorderer=reorderer,
        bundles=bundles,
        progress=progress,
        shown=shown,
    )


def _reorderer(job: Job, info: EngineInfo, schedulers: Sequence[Decision], *, dedupe: bool) -> Reorderer:
    reorders = job.order != "input"
    return Reorderer(
        ReuseDistance(info, len(schedulers)) if reorders and info.caches_prefixes else None,
        OutputLengths() if reorders and job.forward is None else None,
        dedupe=dedupe,
        caches=len(schedulers),
        by_length=reorders and job.forward is not None and not info.caches_prefixes,
    )
