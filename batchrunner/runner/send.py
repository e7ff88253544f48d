"""Sends the rows of a run to an engine, and watches the engine's load.

The results go to files or, for a stream, to a Python program.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import PARSE, Completion, Outcome, PromptKind
from batchrunner.dispatch.bundles import BundleSenders, BundleTotals
from batchrunner.dispatch.dispatcher import Dispatcher
from batchrunner.dispatch.feeder import Feeder
from batchrunner.dispatch.load_control import LoadControl, SendingRun
from batchrunner.dispatch.progress import AttemptProgress
from batchrunner.dispatch.queue import Backlog, ResultSink, RowSource
from batchrunner.dispatch.reorder import OutputLengths, Reorderer, ReuseDistance
from batchrunner.dispatch.route import Routes
from batchrunner.dispatch.sharing import Account
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.input.dataset import carried_of
from batchrunner.job.answers import AnswerPlan, judges_by_row, of_sample
from batchrunner.job.spec import Job
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.output.samples import RunSample
from batchrunner.runner.control import Control
from batchrunner.runner.progress import Display

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.dispatch.rollouts import Rollouts
    from batchrunner.output.turns import TurnStore
    from batchrunner.runner.adapt import Adaptation
    from batchrunner.runner.corpora import CorpusFeeder


log = logging.getLogger(__name__)


class Outlet(ResultSink, Protocol):
    """Receives the outcomes of rows: the writer of result files, or a program.

    Used in the event loop of the run.
    """

    def check(self) -> None:
        """Raise the error of a background write that failed for good."""


FEWEST_SENT = 100
"""A run is stopped because of too many failed rows only after this many sent rows have ended."""


@dataclass(slots=True, kw_only=True)
class OutcomeSink:
    """Parses the answer of each row, counts the row, and passes it on to the outlet.

    A row keeps its answer even if the job's Python function cannot parse it. The run stops if too large a
    share of the sent rows failed.
    """

    outlet: Outlet
    counts: RowCounts
    control: Control
    routes: Routes
    most_failed_share: float
    """Fraction of failed rows at which the run stops (`limits.abort_failed_share`), from 0 to 1."""
    parser: HookPool | None
    """Pool that runs the job's Python function `parse`; None if the job has none."""
    _sent: int = 0
    """Number of rows that were sent and have ended."""
    _failed: int = 0
    """Number of rows in `_sent` that failed."""
    _last: tuple[Completion, Completion, str | None] | None = None
    """The last parsed answer: as it came, with its parsed columns, and the error of `parse` or None."""

    async def put(self, outcome: Outcome) -> None:
        """Parse and count an outcome, and pass it on. Wait while the disk or the program is too slow.

        Raises StorageError, or HookLostError if the processes of the Python function cannot go on.
        """
        if outcome.completion is not None and outcome.error is None and self.parser is not None:
            outcome = await self._parsed(outcome, outcome.completion, self.parser)
        # Counted before `put`. If a stop interrupts `put` while it waits, the outlet keeps the row all the
        # same.
        self.counts.add(outcome)
        if outcome.attempts:  # a row that was not sent says nothing about the engine
            self._sent += 1
            if outcome.error is not None:
                self._stop_if_too_many_fail()
        await self.outlet.put(outcome)

    def _stop_if_too_many_fail(self) -> None:
        """Count a failed row, and stop the run if too large a share of the sent rows has failed.

        Rows in flight count as successful, because refusals come sooner than answers.
        """
        self._failed += 1
        # The failed row still counts as in flight, so it is subtracted.
        all_sent = self._sent + max(0, self.routes.in_flight - 1)
        if self._sent >= FEWEST_SENT and self._failed / all_sent > self.most_failed_share:
            self.control.drain(
                f"{self._failed / self._sent:.0%} of the rows failed (limits.abort_failed_share): "
                "correct the causes below, and run again with --retry-failed",
                next_step="",
            )

    async def _parsed(self, outcome: Outcome, completion: Completion, functions: HookPool) -> Outcome:
        """Return an outcome with the columns that the job's Python function makes of its answer.

        Equal rows share one answer and come one after the other, so the last result is kept for the next row.
        A function that also gets the row must be called for each row.
        """
        takes_row = functions.facts[PARSE].takes_row
        last = self._last
        if last is None or last[0] is not completion or takes_row:
            row = (carried_of(outcome.ref),) if takes_row else ()
            parsed, error = await _columns_of_answer(completion, row, functions)
            last = self._last = completion, parsed, error
        return outcome._replace(completion=last[1], error=last[2])


async def _columns_of_answer(
    completion: Completion, row: tuple[Any, ...], functions: HookPool
) -> tuple[Completion, str | None]:
    """Call `parse` with the text of each completion of an answer; `row` has its further arguments.

    Return the answer with the parsed columns and None, or the unchanged answer and the first error.
    """
    calls = (functions.call(PARSE, text, *row) for text in completion.texts)
    results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    failures = {number: result for number, result in enumerate(results) if isinstance(result, BaseException)}
    for failure in failures.values():
        # Any other error means that the processes of the function are lost, so it must end the run.
        if not isinstance(failure, RowRefusedError):
            raise failure
    if failures:
        number = min(failures)
        return completion, of_sample(str(failures[number]), number, completion)
    parsed: dict[str, list[Any]] = {}
    for name, _ in functions.facts[PARSE].columns:
        parsed[name] = [values[name] for values in results]
    return completion._replace(columns={**completion.columns, **parsed}), None


LOGGED_EVERY_S = 2.0
"""Maximum seconds between two `sample` events of the event log: 43,000 events a day. Events are more frequent
at the beginning of a run."""


class ReadableRows(RowSource, Protocol):
    """A source of rows whose columns and kind of prompts are known."""

    kind: PromptKind | None
    """Kind of all prompts; None if their kinds may differ."""
    names: Sequence[str]


class Sending:
    """Sends the rows of one run to an open engine, and watches the engine meanwhile."""

    def __init__(
        self,
        *,
        job: Job,
        rows: ReadableRows,
        engine: Engine,
        load_control: LoadControl,
        answers: AnswerPlan,
        outlet: Outlet,
        counts: RowCounts,
        events: EventLog,
        control: Control,
        displays: Sequence[Display],
        began: float,
        functions: HookPool | None,
        done_before: DoneRows | None = None,
        turns: TurnStore | None = None,
        estimated_row_s: float | None = None,
        adaptation: Adaptation | None = None,
        corpora: CorpusFeeder | None = None,
        account: Account | None = None,
        rank: str = "",
    ) -> None:
        """Build the parts through which rows and load samples pass, in this order.

        - `job`: the job whose rows are sent.
        - `rows`: the source of the rows.
        - `engine`: the open engine to which the rows go.
        - `load_control`: sets the concurrency limits, and divides them among runs on the engine.
        - `answers`: the columns and checks of the job's answers.
        - `outlet`: takes the finished rows, for example the writer of result files.
        - `counts`: the numbers of finished rows, which this object updates.
        - `events`: the event log.
        - `control`: stops the run.
        - `displays`: show load samples to the user.
        - `began`: the time, on the monotonic clock, at which the run was started.
        - `functions`: runs the job's Python functions; None if the job has none.
        - `done_before`: the rows that earlier starts finished.
        - `turns`: stores the answers of multi-turn rollouts.
        - `estimated_row_s`: the seconds per row that `batchrun estimate` predicted; None without an estimate.
        - `adaptation`: tunes the servers' flags during the run; None if the flags stay.
        - `corpora`: gives servers earlier answers for n-gram speculation.
        - `account`: the account to which the rows are charged; None if no other run can use the engine.
        - `rank`: the place of the run among the runs of its account.

        Raises CannotTokenizeError if the job needs client-side tokenization that is not possible.
        """
        self._job, self._rows, self._outlet, self._events = job, rows, outlet, events
        self._control, self._displays, self._load_control = control, displays, load_control
        self._began, self._adaptation = began, adaptation
        self._adapting: asyncio.Task[None] | None = None
        """Task in which flag tuning processes a load sample. A restart may take minutes, so polling does not
        wait for it."""
        self._corpora = corpora
        self._feeding: asyncio.Task[None] | None = None
        """Task in which `corpora` processes a load sample."""
        self._loads: Sequence[SchedulerLoad] = ()
        """The newest load of each scheduler."""
        self._next_sample_at = 0.0
        """Time of the next `sample` event, on the monotonic clock."""
        self.concurrency = load_control.concurrency
        concurrency, info = self.concurrency, self.concurrency.info
        routes = Routes(account)
        tokenizer = RowTokenizer(
            job=job, kind=rows.kind, engine=engine, info=info, events=events, functions=functions
        )
        results = OutcomeSink(
            outlet=outlet,
            counts=counts,
            control=control,
            routes=routes,
            most_failed_share=job.limits.abort_failed_share,
            parser=functions if functions is not None and PARSE in functions.facts else None,
        )

        # rows: source → reorder → tokenise → queue → slot → engine → check → parse, count, store (`results`)
        # If `accept.python` gets the row, it may judge equal answers differently. So each row is sent.
        dedupe = job.dedupe and not judges_by_row(functions)
        self.reorderer = _reorderer(job, info, len(concurrency.schedulers), dedupe=dedupe)
        self._backlog = Backlog(routes, results, lambda: rows.unread + self.reorderer.held)
        self.rollouts: Rollouts | None = None
        # `asked` is None without `prompt.rollout`.
        if answers.asked is not None and functions is not None:
            from batchrunner.dispatch.rollouts import Rollouts  # noqa: PLC0415 - only for such jobs

            self.rollouts = Rollouts(
                job=job,
                source=rows,
                functions=functions,
                tokenizer=tokenizer,
                backlog=self._backlog,
                routes=routes,
                results=results,
                store=turns,
            )
        self._feeder = self.rollouts or Feeder(
            source=rows,
            reorderer=self.reorderer,
            tokenizer=tokenizer,
            backlog=self._backlog,
            results=results,
            engine=engine,
            urls=info.routes,
            keeps_prompts=job.accept.feedback,
            # A background run computes no prefixes in advance, because the engine's users come first.
            primes=info.yields is None,
        )
        self.bundles = BundleTotals()
        senders = BundleSenders(
            job=job,
            engine=engine,
            info=info,
            passes=concurrency.passes,
            totals=self.bundles,
            events=events,
        )
        checker = None
        if answers.checks:
            from batchrunner.dispatch.checks import AnswerChecker  # noqa: PLC0415 - only for such jobs

            checker = AnswerChecker(
                job=job, plan=answers, columns=rows.names, tokenizer=tokenizer, functions=functions
            )

        # load samples: engine → windows → progress → display and event log (`_polled`)
        self._run = SendingRun(routes, self._backlog, events, rank)
        self.progress = AttemptProgress(
            rows=rows,
            done=done_before or DoneRows(),
            counts=counts,
            routes=routes,
            concurrency=concurrency,
            backlog=self._backlog,
            engine=engine,
            events=events,
            began=began,
            task=job.task,
            rollouts=self.rollouts,
            row_s=estimated_row_s,
        )
        self._dispatcher = Dispatcher(
            backlog=self._backlog,
            routes=routes,
            senders=senders,
            checker=checker,
            reorderer=self.reorderer,
            load_control=load_control,
            events=events,
            limits=job.limits,
        )

    async def send(self) -> None:
        """Send rows until each has an answer or an error, or the run is stopped. Raises BatchrunError.

        A gentle stop lets the rows in flight end. An immediate stop, or a cancellation, cancels them.
        """
        self._load_control.join(self._run)
        sending = asyncio.ensure_future(self._dispatcher.run(self._feeder))
        polling = asyncio.ensure_future(self._load_control.run(self._polled))
        try:
            with self._control.listening(functools.partial(self._stop, sending)):
                await asyncio.wait((sending, polling), return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    # The polling ends before the sending only if it failed. `result` then raises its error.
                    polling.result()
                await sending
        finally:
            self._rows.stop()
            tasks = [task for task in (sending, polling, self._adapting, self._feeding) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._corpora is not None:
                await self._corpora.close()
            self._load_control.leave(self._run)

    def _polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Show the state of the run after a poll of the load, and log the state from time to time.

        After `limits.deadline`, send no more rows. Raises the StorageError of a failed background write.
        """
        self._loads = loads
        if self._control.reason is not None and self._adaptation is not None:
            self._adaptation.stop()
        sample = self.progress.polled(loads, now)
        self._show(sample)
        if now >= self._next_sample_at:
            # Samples are more frequent early in a run: at intervals of 2 % of its age.
            self._next_sample_at = now + min(LOGGED_EVERY_S, (now - self._began) / 50)
            self._events.write("sample", **msgspec.to_builtins(sample))
            # Flag tuning and corpora get this sample, unless they still process an earlier one.
            is_adapting = self._adapting is not None and not self._adapting.done()
            if self._adaptation is not None and not is_adapting:
                self._adapting = asyncio.create_task(self._adapt(self._adaptation, sample, now))
            is_feeding = self._feeding is not None and not self._feeding.done()
            if self._corpora is not None and not is_feeding:
                self._feeding = asyncio.create_task(self._feed(self._corpora, sample, now))
        self._outlet.check()
        deadline_s = self._job.limits.deadline
        if deadline_s is not None and now > self._began + deadline_s:
            self._control.drain("the deadline passed (limits.deadline)")

    async def _adapt(self, adaptation: Adaptation, sample: RunSample, now: float) -> None:
        """Let flag tuning process a load sample. An error ends only the tuning; the run goes on."""
        try:
            await adaptation.take(sample, now)
        except Exception:
            log.exception("automatic flag tuning failed: the servers keep their flags from now on")
            self._adaptation = None

    async def _feed(self, corpora: CorpusFeeder, sample: RunSample, now: float) -> None:
        """Let `corpora` process a load sample. If that fails, the run goes on without corpora."""
        try:
            await corpora.take(sample, now)
        except Exception:
            log.exception("no more answers are loaded for n-gram speculation")
            self._corpora = None

    def show_end(self, now: float) -> None:
        """Show and log the last state of the run, at its end."""
        last = self.progress.sample(self._loads, now)
        self._show(last)
        self._events.write("sample", **msgspec.to_builtins(last))

    def _show(self, sample: RunSample) -> None:
        for display in self._displays:
            display.show(sample)

    def _stop(self, sending: asyncio.Future[None]) -> None:
        """Send no more rows, because the run must stop. If it must stop at once, cancel `sending` too."""
        if self._control.reason is not None:
            self._backlog.stop()
            self._rows.stop()
            if self._adaptation is not None:
                self._adaptation.stop()
        if self._control.at_once:
            sending.cancel()


def _reorderer(job: Job, info: EngineInfo, schedulers: int, *, dedupe: bool) -> Reorderer:
    """Return what puts a job's rows into the order of sending.

    Rows are ordered by common prefixes if the engine has a prefix cache, and by output length if the task
    decodes. With neither, they are ordered by prompt length.
    """
    reorders = job.order != "input" and job.prompt.rollout is None
    decodes = job.forward is None
    return Reorderer(
        ReuseDistance(info, schedulers) if reorders and info.caches_prefixes else None,
        OutputLengths() if reorders and decodes else None,
        dedupe=dedupe,
        caches=schedulers,
        longest_prompt_first=reorders and not decodes and not info.caches_prefixes,
    )
