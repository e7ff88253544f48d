"""What sends rows and watches the engine meanwhile, built in the order in which rows and samples flow.

It is the same for a run, whose outcomes are written, and for a stream, whose outcomes go to a program.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import PARSE, Completion, Outcome, PromptKind
from batchrunner.dispatch.bundles import BundleSenders, BundleTotals, ForwardPasses
from batchrunner.dispatch.concurrency.law import (
    BYTES_A_TOKEN,
    BYTES_AN_ID,
    TYPICAL_PROMPT_TOKENS,
    UNKNOWN_ENGINE_WINDOW,
    tokens_a_row,
)
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.dispatcher import Dispatcher, Feeder
from batchrunner.dispatch.load_control import LoadControl, SendingRun, write_changes
from batchrunner.dispatch.progress import AttemptProgress
from batchrunner.dispatch.queue import Backlog, ResultSink, RowSource, Slots
from batchrunner.dispatch.reorder import OutputLengths, Reorderer, ReuseDistance
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.input.dataset import carried_of
from batchrunner.job.answers import AnswerPlan, judges_by_row, of_sample
from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.runner.control import Control
from batchrunner.runner.progress import Display

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.dispatch.rollouts import Rollouts
    from batchrunner.output.turns import TurnStore
    from batchrunner.runner.adapt import Adaptation


log = logging.getLogger(__name__)


def _cost_of_connections(info: EngineInfo, fixed: int | None) -> str | None:
    """Return what to do about too few connections, in a line; None where they are enough.

    `fixed` is the job's window, if it sets one; else as many are needed as the engine can run.
    """
    wanted = fixed or info.max_running or UNKNOWN_ENGINE_WINDOW
    if info.connections is None or info.connections >= wanted:
        return None
    who = "the job's window is" if fixed else "the engine can run"
    return (
        f"at most {info.connections} requests can be in flight, and {who} {wanted}: up to "
        f"{1 - info.connections / wanted:.0%} of the speed is lost. The limit is {info.connections_by}: "
        "raise it (ulimit -Hn, LimitNOFILE, or the container's --ulimit nofile)"
    )


_CONTROLS: WeakValueDictionary[Engine, LoadControl] = WeakValueDictionary()
"""The control of each engine that runs use."""


async def open_control(
    job: Job,
    engine: Engine,
    info: EngineInfo,
    events: EventLog,
    *,
    unsent: int,
    now: float,
    decodes: bool = True,
    prompt_bytes: float | None = None,
) -> tuple[LoadControl, str]:
    """Return the load control of an open engine, with the first windows by its load `now`, and their reason.

    Runs that use the engine at once have the same one, unless their jobs set different windows.

    Tell how many rows are `unsent`, whether the engine `decodes`, as far as the job's task does not say, and
    how many bytes of a prompt it computes on average, where that is known.
    """
    fixed = None if job.window == "auto" else job.window
    bytes_a_token = BYTES_A_TOKEN if job.prompt.input_ids is None else BYTES_AN_ID
    prompt_tokens = None if prompt_bytes is None else prompt_bytes / bytes_a_token
    concurrency = ConcurrencyLimits(
        info,
        QueueBand(),
        tokens_a_row(_most_new_tokens(job), prompt_tokens),
        most=max(1, (info.connections or sys.maxsize) // len(info.routes)),
        fixed=fixed,
        passes=None if job.forward is None and decodes else ForwardPasses(info.prefill_tokens),
        prompt_tokens=prompt_tokens or TYPICAL_PROMPT_TOKENS,
    )
    loads = await engine.loads()
    if (control := _CONTROLS.get(engine)) and control.in_use and control.concurrency.fixed == fixed:
        return control, "shared with other runs"
    control = _CONTROLS[engine] = LoadControl(engine, concurrency)
    if cost := _cost_of_connections(info, fixed):
        log.warning("%s", cost)
    first = concurrency.begin(loads, now, unsent=unsent)
    if fixed is not None:
        return control, "set by the job"
    write_changes(events, first)
    return control, first[0].reason + (f"; {len(first)} schedulers" if first[1:] else "")


def _most_new_tokens(job: Job) -> int | None:
    """Return the most output tokens of a row; None where they differ by row."""
    if job.forward is not None:
        return 0
    return job.sampling.max_new_tokens if isinstance(job.sampling.max_new_tokens, int) else None


class Outlet(ResultSink, Protocol):
    """Where outcomes go, in the event loop of the run: the writer of a run's results, or a program."""

    def check(self) -> None:
        """Raise what failed in the background for good."""


FEWEST_ROWS = 100
"""Rows that must have been sent and ended before `limits.abort_failed_share` stops a run."""


@dataclass(slots=True)
class OutcomeSink:
    """Takes every outcome once: makes columns of its answer, counts it, and stores it or hands it over.

    A row keeps its answer where the job's Python function cannot parse it. The run is stopped if too
    large a share of the rows that were sent failed.
    """

    _outlet: Outlet
    _counts: RowCounts
    _control: Control
    _slots: Slots
    _most_failed_share: float
    """`limits.abort_failed_share`, from 0 to 1."""
    _parser: HookPool | None
    """What runs the job's Python function that makes columns of an answer; None without one."""
    _sent: int = 0
    _failed: int = 0
    _last: tuple[Completion, Completion, str | None] | None = None
    """The last answer, what the function made of it, and its error."""

    async def put(self, outcome: Outcome) -> None:
        """Count, store and give an outcome; waits while disk or program are behind.

        Raises StorageError, and HookLostError where the Python function's processes cannot go on.
        """
        if outcome.completion is not None and outcome.error is None and self._parser is not None:
            outcome = await self._parsed(outcome, outcome.completion, self._parser)
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

    kind: PromptKind | None
    """The kind of all prompts; None where they may be of any."""
    names: Sequence[str]
    """Names of the columns."""


@dataclass
class Sending:
    """What sends rows to an open engine and watches it meanwhile."""

    _job: Job
    _rows: KnownRows
    _engine: Engine
    _load_control: LoadControl
    _plan: AnswerPlan
    """What outcomes become."""
    _outlet: Outlet
    _counts: RowCounts
    _events: EventLog
    _control: Control
    _displays: Sequence[Display]
    _began: float
    """When the attempt began."""
    _functions: HookPool | None
    """The job's Python functions."""
    _done: DoneRows = field(default_factory=DoneRows)
    """Rows of earlier attempts."""
    _turns: TurnStore | None = None
    """Where turns of rollouts are stored; None where nothing is."""
    _row_s: float | None = None
    """Seconds that a row takes by an estimate of the run."""
    adaptation: Adaptation | None = None
    """What changes the servers' flags, where they may change."""
    _loads: Sequence[SchedulerLoad] = ()
    """The newest load sample."""
    _next_sample: float = 0.0

    def __post_init__(self) -> None:
        """Build the parts in the order in which rows and samples flow.

        Raises CannotTokenizeError if the job needs client-side tokenization and it is not possible.
        """
        job, rows, engine, events = self._job, self._rows, self._engine, self._events
        functions, concurrency = self._functions, self._load_control.concurrency
        self.concurrency, info = concurrency, concurrency.info
        slots = Slots(concurrency.windows)
        tokenizer = RowTokenizer(job, rows.kind, engine, info, events, functions)
        results = OutcomeSink(
            self._outlet, self._counts, self._control, slots, job.limits.abort_failed_share,
            functions if functions is not None and PARSE in functions.facts else None,
        )  # fmt: skip

        # rows: source → reorder → tokenise → queue → slot → engine → check → parse, count, store (`results`)
        self.reorderer = _reorderer(
            job, info, len(concurrency.known), dedupe=job.dedupe and not judges_by_row(functions)
        )
        self._backlog = Backlog(slots, results, lambda: rows.unread + self.reorderer.held)
        self.rollouts: Rollouts | None = None
        if self._plan.asked is not None and functions is not None:
            from batchrunner.dispatch.rollouts import Rollouts  # noqa: PLC0415 - only for such jobs

            self.rollouts = Rollouts(
                job, rows, functions, tokenizer, self._backlog, slots, results, self._turns
            )
        self._feeder = self.rollouts or Feeder(
            rows, self.reorderer, tokenizer, self._backlog, results, engine, info.routes,
            keeps_prompts=job.accept.feedback, primes=info.yields is None,
        )  # fmt: skip
        self.bundles = BundleTotals()
        senders = BundleSenders(job, engine, info, concurrency.passes, self.bundles, events)
        checker = None
        if self._plan.checks:
            from batchrunner.dispatch.checks import AnswerChecker  # noqa: PLC0415 - only for such jobs

            checker = AnswerChecker(job, self._plan, rows.names, tokenizer, functions)

        # load samples: engine → windows → slots → progress: display and event log, `polled`
        self._run = SendingRun(slots, self._backlog, events)
        self.progress = AttemptProgress(
            rows, self._done, self._counts, slots, concurrency, self._backlog, engine, events,
            began=self._began, task=job.task, rollouts=self.rollouts, row_s=self._row_s,
        )  # fmt: skip
        self._dispatcher = Dispatcher(
            self._backlog, slots, senders, checker, self.reorderer, concurrency, self._load_control, events,
            job.limits,
        )  # fmt: skip

    async def send(self) -> None:
        """Send rows until each has an outcome, or the run is to stop; raises BatchrunError.

        A gentle stop lets the rows in flight end; one at once, or a cancellation, cancels them.
        """
        self._load_control.join(self._run)
        sending = asyncio.ensure_future(self._dispatcher.run(self._feeder))
        polling = asyncio.ensure_future(self._load_control.run(self._polled))
        try:
            with self._control.listening(functools.partial(self._stop, sending)):
                await asyncio.wait((sending, polling), return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    polling.result()  # it failed: that ends the run
                await sending
        finally:
            self._rows.stop()
            for task in (sending, polling):
                task.cancel()
            await asyncio.gather(sending, polling, return_exceptions=True)
            self._load_control.leave(self._run)

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
            if self.adaptation is not None:
                try:
                    self.adaptation.take({"time": now, **sample})
                except Exception:  # the rows matter more
                    log.exception("the servers' flags are not adapted any more")
                    self.adaptation = None
        self._outlet.check()
        deadline_s = self._job.limits.deadline
        if deadline_s is not None and now > self._began + deadline_s:
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
            if self.adaptation is not None:
                self.adaptation.stop()
        if self._control.at_once:
            sending.cancel()


def _reorderer(job: Job, info: EngineInfo, schedulers: int, *, dedupe: bool) -> Reorderer:
    reorders = job.order != "input" and job.prompt.rollout is None
    return Reorderer(
        ReuseDistance(info, schedulers) if reorders and info.caches_prefixes else None,
        OutputLengths() if reorders and job.forward is None else None,
        dedupe=dedupe,
        caches=schedulers,
        by_length=reorders and job.forward is not None and not info.caches_prefixes,
    )
