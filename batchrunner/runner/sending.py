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
from typing import TYPE_CHECKING, Any, Protocol

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Completion, Outcome, PromptKind
from batchrunner.dispatch.bundles import BundleTotals, bundle_senders
from batchrunner.dispatch.concurrency.controller import (
    BYTES_A_TOKEN,
    BYTES_AN_ID,
    Decision,
    ForwardPasses,
    cost_of_connections,
    tokens_a_row,
)
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits, LoadControl
from batchrunner.dispatch.dispatcher import Dispatcher, Feeder
from batchrunner.dispatch.progress import AttemptProgress
from batchrunner.dispatch.queue import Backlog, RowSource, Slots
from batchrunner.dispatch.reorder import OutputLengths, Reorderer, ReuseDistance
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.input.dataset import carried_of
from batchrunner.job.answers import AnswerPlan, judges_by_row, of_sample
from batchrunner.job.hook_loading import PARSE
from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.runner.control import Control
from batchrunner.runner.progress import Display

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


class Outlet(Protocol):
    """Where outcomes go, in the event loop of the run: the writer of a run's results, or a program."""

    async def put(self, outcome: Outcome) -> None:
        """Take an outcome; waits while disk or program are behind."""

    def check(self) -> None:
        """Raise what failed in the background for good."""


FEWEST_ROWS = 100
"""Rows that must have been sent and ended before `limits.abort_failed_share` stops a run."""


class OutcomeSink:
    """Takes every outcome once: makes columns of its answer, counts it, and stores it or hands it over.

    A row keeps its answer where the job's Python function cannot parse it. The run is stopped if too
    large a share of the rows that were sent failed.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        outlet: Outlet,
        counts: RowCounts,
        control: Control,
        slots: Slots,
        most_failed_share: float,
        *,
        functions: HookPool | None = None,
    ) -> None:
        """Say what an outcome becomes (`plan`), and where it goes then.

        `most_failed_share` is `limits.abort_failed_share`, from 0 to 1.
        """
        self.plan = plan
        """What outcomes become."""
        self._outlet = outlet
        self.check = outlet.check
        self._counts = counts
        self._control = control
        self._slots = slots
        self._most_failed_share = most_failed_share
        self._sent = self._failed = 0
        self._functions = functions if functions is not None and PARSE in functions.facts else None
        self._last: tuple[Completion, Completion, str | None] | None = None

    async def put(self, outcome: Outcome) -> None:
        """Count, store and give an outcome; waits while disk or program are behind.

        Raises StorageError, and HookLostError where the Python function's processes cannot go on.
        """
        if outcome.completion is not None and outcome.error is None and self._functions is not None:
            outcome = await self._parsed(outcome, outcome.completion, self._functions)
        self._counts.add(outcome)  # first: the row is in a part even if a stop comes while we wait
        if outcome.attempts:  # rows that were not sent say nothing about the engine or the other rows
            self._sent += 1
            if outcome.error is not None:
                self._stop_if_too_many_fail()
        await self._outlet.put(outcome)

    def _stop_if_too_many_fail(self) -> None:
        """Count a failed row; one in flight counts as good: a refusal comes at once and an answer late."""
        self._failed += 1
        all_sent = self._sent + max(0, self._slots.in_flight - 1)  # the slot of this row is still taken
        if self._sent >= FEWEST_ROWS and self._failed / all_sent > self._most_failed_share:
            self._control.drain(
                f"{self._failed / self._sent:.0%} of the rows failed (limits.abort_failed_share): "
                "correct what the errors below name, and start with --retry-failed"
            )

    async def _parsed(self, outcome: Outcome, completion: Completion, functions: HookPool) -> Outcome:
        """Return an outcome with the columns that the job's Python function makes of its answer."""
        takes_row = functions.facts[PARSE].takes_row
        last = self._last
        if last is None or last[0] is not completion or takes_row:  # else that of an equal row
            row = (carried_of(outcome.ref),) if takes_row else ()
            parsed, error = await _columns_of_answer(completion, row, functions)
            last = self._last = completion, parsed, error
        return outcome._replace(completion=last[1], error=last[2])


async def _columns_of_answer(
    completion: Completion, row: tuple[Any, ...], functions: HookPool
) -> tuple[Completion, str | None]:
    """Return an answer with the values of the columns, or as it is with an error."""
    calls = (functions.call(PARSE, text, *row) for text in completion.texts)
    samples: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    failures = {number: each for number, each in enumerate(samples) if isinstance(each, BaseException)}
    for failure in failures.values():
        if not isinstance(failure, RowRefusedError):
            raise failure
    for number, failure in failures.items():
        return completion, of_sample(str(failure), number, completion)
    names = [name for name, _ in functions.facts[PARSE].columns]
    made = {name: [sample[name] for sample in samples] for name in names}
    return completion._replace(columns={**completion.columns, **made}), None


SAMPLE_S = 2.0
"""Seconds between two samples in the event log: 43,000 lines a day. A young run is sampled more often."""


class KnownRows(RowSource, Protocol):
    """A source of rows whose columns and kind of prompts are known."""

    @property
    def kind(self) -> PromptKind | None:
        """The kind of all prompts; None where they may be of any."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns."""


class Sending:
    """What sends rows and watches the engine meanwhile."""

    def __init__(
        self,
        job: Job,
        rows: KnownRows,
        done: DoneRows,
        engine: Engine,
        info: EngineInfo,
        windows: Windows,
        plan: AnswerPlan,
        outlet: Outlet,
        counts: RowCounts,
        events: EventLog,
        control: Control,
        displays: Sequence[Display],
        *,
        began: float,
        functions: HookPool | None = None,
    ) -> None:
        """Send `rows` to an open engine; their outcomes become what `plan` says, and go to `outlet`.

        `done` are rows of earlier attempts, `functions` the job's Python functions. Raises
        CannotTokenizeError if the job needs client-side tokenization and it is not possible.
        """
        tokenizer = RowTokenizer(job, rows.kind, engine, info, events, functions)
        limits, slots = windows.limits, windows.slots
        self._rows, self._control, self.limits = rows, control, limits
        self._results = results = OutcomeSink(
            plan, outlet, counts, control, slots, job.limits.abort_failed_share,
            functions=functions,
        )  # fmt: skip

        # rows: source → reorder → tokenise → queue → slot → engine → check → parse, count, store (`results`)
        self.reorderer = _reorderer(
            job, info, windows.first, dedupe=job.dedupe and not judges_by_row(functions)
        )
        self._backlog = Backlog(slots, results, lambda: rows.unread + self.reorderer.held)
        self._feeder = Feeder(
            rows, self.reorderer, tokenizer, self._backlog, results, engine, info.routes,
            keeps_prompts=job.check.feedback,
        )  # fmt: skip
        self.bundles = BundleTotals()
        senders = bundle_senders(
            job, engine, info, windows.passes, self.bundles, events, schedulers=self.reorderer.caches
        )
        checker = None
        if plan.checks:
            from batchrunner.dispatch.checks import AnswerChecker  # noqa: PLC0415 - only for such jobs

            checker = AnswerChecker(job, plan, rows.names, tokenizer, functions)

        # load samples: engine → windows → slots → progress: display and event log, `polled`
        self._load_control = LoadControl(engine, limits, slots, self._backlog, events)
        self.progress = AttemptProgress(
            rows, done, counts, slots, limits, self._backlog, self.bundles, engine, events, began=began,
            task=job.task,
        )  # fmt: skip
        self._displays, self._events = displays, events
        self._loads: Sequence[SchedulerLoad] = ()
        self._next_sample = 0.0
        self._deadline_s, self._began = job.limits.deadline, began
        self._dispatcher = Dispatcher(
            self._backlog, slots, senders, checker, self.reorderer, limits, self._load_control, events,
            job.limits, by_affinity=info.keeps_together,
        )  # fmt: skip

    async def send(self) -> None:
        """Send rows until each has an outcome, or the run is to stop; raises BatchrunError.

        A gentle stop lets the rows in flight end; one at once, or a cancellation, cancels them.
        """
        sending = asyncio.ensure_future(self._dispatcher.run(self._feeder))
        polling = asyncio.ensure_future(self._load_control.run(self._polled))
        self._control.listen(functools.partial(self._stop, sending))
        try:
            await asyncio.wait((sending, polling), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                polling.result()  # it failed: that ends the run
            await sending
        finally:
            self._rows.stop()
            for task in (sending, polling):
                task.cancel()
            await asyncio.gather(sending, polling, return_exceptions=True)

    def _polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Show a load sample, and write it from time to time; drain after `limits.deadline`.

        Raises the StorageError of a write that failed in the background.
        """
        self._loads = loads
        sample = self.progress.polled(loads, now)
        self._show(sample)
        if now >= self._next_sample:
            self._next_sample = now + min(SAMPLE_S, (now - self._began) / 50)
            self._events.write("sample", **sample)
        self._results.check()
        if self._deadline_s is not None and now > self._began + self._deadline_s:
            self._control.drain("the deadline passed (limits.deadline)")

    def show_end(self, now: float) -> None:
        """Show and write the last state."""
        last = self.progress.sample(self._loads, now)
        self._show(last)
        self._events.write("sample", **last)

    def _show(self, sample: dict[str, Any]) -> None:
        for display in self._displays:
            display.show(sample)

    def _stop(self, sending: asyncio.Future[None]) -> None:
        if self._control.reason is not None:
            self._backlog.stop()
            self._rows.stop()
        if self._control.at_once:
            sending.cancel()


def _reorderer(job: Job, info: EngineInfo, schedulers: Sequence[Decision], *, dedupe: bool) -> Reorderer:
    reorders = job.order != "input"
    return Reorderer(
        ReuseDistance(info, len(schedulers)) if reorders and info.caches_prefixes else None,
        OutputLengths() if reorders and job.forward is None else None,
        dedupe=dedupe,
        caches=len(schedulers),
        by_length=reorders and job.forward is not None and not info.caches_prefixes,
    )
