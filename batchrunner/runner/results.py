"""What becomes of outcomes: one sink parses answers, stores them, and hands them over to a program."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import LEFT_OUT, ColumnKind, Completion, Outcome
from batchrunner.dispatch.queue import Slots
from batchrunner.input.dataset import carried_of
from batchrunner.job.answers import AnswerPlan, of_sample
from batchrunner.job.fields import PARSE
from batchrunner.job.output import SAMPLE
from batchrunner.job.tasks import numbers_of
from batchrunner.output.columns import ResultRow, answer_value, result_rows
from batchrunner.output.counts import RowCounts
from batchrunner.runner.control import Control

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool


MOST_ROWS = 256
"""Rows that wait for the program; with more the run pauses."""


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


class Handover:
    """Rows that ended, as dicts, bounded: `put` waits while the program is behind.

    All methods are called in the event loop of the run.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        """Make rows of outcomes as `plan` says."""
        self._plan = plan
        self._rows: deque[dict[str, Any]] = deque()
        self._ended = False
        self._came = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, outcome: Outcome) -> None:
        """Add the rows that an outcome becomes, each once there is room."""
        for row in result_rows([outcome], self._plan):
            while len(self._rows) >= MOST_ROWS:
                self._room.clear()
                await self._room.wait()
            self._rows.append(_row_given(row, self._plan))
            self._came.set()

    def check(self) -> None:
        """Do nothing: a program that is behind is waited for."""

    async def take(self) -> list[dict[str, Any]]:
        """Take all rows that are there; waits for the first. Empty at the end."""
        while not self._rows and not self._ended:
            self._came.clear()
            await self._came.wait()
        rows = list(self._rows)
        self._rows.clear()
        self._room.set()
        return rows

    def end(self) -> None:
        """Record that no more rows come."""
        self._ended = True
        self._came.set()


def _row_given(row: ResultRow, plan: AnswerPlan) -> dict[str, Any]:
    """Return a row of the results as its columns have it."""
    outcome, sample = row
    completion = outcome.completion
    decodes = plan.task is None
    reason: Any = None
    if outcome.is_left_out:
        reason = LEFT_OUT if plan.samples == 1 or plan.explode else [LEFT_OUT] * plan.samples

    def each(values: list[Any]) -> Any:
        return values if sample is None else values[sample]

    given: dict[str, Any] = {"row": outcome.ref.row, **({SAMPLE: sample} if plan.explode else {})}
    given |= carried_of(outcome.ref)
    if decodes:
        given["output"] = each(completion.texts) if completion else None
        given["finish_reason"] = each(completion.finish_reasons) if completion else reason
    given["prompt_tokens"] = completion.prompt_tokens if completion else None
    given["cached_tokens"] = completion.cached_tokens if completion else None
    if decodes:
        given["completion_tokens"] = each(completion.completion_tokens) if completion else None
    given |= {"latency_s": outcome.latency_s, "attempts": outcome.attempts, "error": outcome.error}
    if decodes:
        return given | {name: answer_value(row, name) for name in plan.names}
    return given | {name: _value_of(completion, name, kind) for name, kind in plan.parsed}


def _value_of(completion: Completion | None, name: str, kind: ColumnKind) -> Any:
    """Return the value of a column of a task without decoding; a vector as a list of numbers."""
    value = completion.columns[name][0] if completion and name in completion.columns else None
    return numbers_of(value, kind[1]) if isinstance(value, bytes) else value
