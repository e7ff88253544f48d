"""What becomes of outcomes: one sink parses answers, stores them, and hands them over to a program."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import LEFT_OUT, ColumnKind, Completion, Outcome
from batchrunner.input.dataset import RowBatch, UnreadableValue, carried_of, rows_of
from batchrunner.job.answers import AnswerPlan, of_sample
from batchrunner.job.fields import PARSE
from batchrunner.job.output import SAMPLE
from batchrunner.job.tasks import numbers_of
from batchrunner.output.columns import ResultRow, answer_value, result_rows
from batchrunner.output.parts import open_part
from batchrunner.output.run_dir import RunDir
from batchrunner.output.writer import ResultWriter
from batchrunner.runner.control import FailureLimit

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool


MOST_ROWS = 256
"""Rows that wait for the program; with more the run pauses."""


class Outlet(Protocol):
    """Takes outcomes for a program, in the event loop of the run."""

    async def give(self, outcome: Outcome, plan: AnswerPlan) -> None:
        """Take an outcome, which becomes what `plan` says; waits while the program is behind."""

    def end(self) -> None:
        """Record that no more outcomes come."""


class OutcomeSink:
    """Takes every outcome once: makes columns of its answer, stores it, and gives it to the program.

    A row keeps its answer where the job's Python function cannot parse it.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        counter: FailureLimit,
        *,
        writer: ResultWriter | None = None,
        outlet: Outlet | None = None,
        functions: HookPool | None = None,
    ) -> None:
        """Without a `writer` nothing is stored; `plan` says what an outcome becomes."""
        self.plan = plan
        """What outcomes become."""
        self._counter = counter
        self._writer = writer
        self._outlet = outlet
        self._functions = functions if functions is not None and PARSE in functions.facts else None
        self._last: tuple[Completion, Completion, str | None] | None = None

    async def put(self, outcome: Outcome) -> None:
        """Count, store and give an outcome; waits while disk or program are behind.

        Raises StorageError, and HookLostError where the Python function's processes cannot go on.
        """
        if outcome.completion is not None and outcome.error is None and self._functions is not None:
            outcome = await self._parsed(outcome, outcome.completion, self._functions)
        self._counter.add(outcome)  # first: the row is in a part even if a stop comes while we wait
        if self._writer is not None:
            await self._writer.put(outcome)
        if self._outlet is not None:
            await self._outlet.give(outcome, self.plan)

    def check(self) -> None:
        """Raise the StorageError of a background write that failed for good."""
        if self._writer is not None:
            self._writer.check()

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

    def __init__(self) -> None:
        self._rows: deque[dict[str, Any]] = deque()
        self._further: dict[str, None] = {}  # columns that only rows of earlier attempts have
        self._ended = False
        self._came = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, row: dict[str, Any]) -> None:
        """Add a row once there is room."""
        while len(self._rows) >= MOST_ROWS:
            self._room.clear()
            await self._room.wait()
        self._rows.append(row)
        self._came.set()

    async def give(self, outcome: Outcome, plan: AnswerPlan) -> None:
        """Add the rows that an outcome becomes, as `plan` says, each once there is room."""
        for row in result_rows([outcome], plan):
            await self.put({**_row_given(row, plan), **self._further})

    async def take(self) -> list[dict[str, Any]]:
        """Take all rows that are there; waits for the first. Empty at the end."""
        while not self._rows and not self._ended:
            self._came.clear()
            await self._came.wait()
        rows = list(self._rows)
        self._rows.clear()
        self._room.set()
        return rows

    async def put_earlier(self, run_dir: RunDir, columns: Sequence[str]) -> None:
        """Add the rows in the parts of a run, each once; raises ResumeError where a part is damaged.

        `columns` are those of the rows of this attempt. All rows have the same ones: what a row was not asked
        for is None.
        """
        parts = [*run_dir.all_parts()]
        found = await asyncio.to_thread(_columns_of, parts)
        self._further = dict.fromkeys(name for name in found if name not in columns)
        blank = dict.fromkeys([*columns, *self._further])
        given = BitMap64()
        for path in parts:
            of_this_part = BitMap64()
            with open_part(path) as part:
                for batch in part.iter_batches(MOST_ROWS):
                    for row in await asyncio.to_thread(_rows_of, batch):
                        if row["row"] not in given:  # it may have several samples here
                            of_this_part.add(row["row"])
                            await self.put(blank | row)
            given |= of_this_part

    def end(self) -> None:
        """Record that no more rows come."""
        self._ended = True
        self._came.set()


def _columns_of(parts: Sequence[Path]) -> dict[str, None]:
    """Return the columns of parts, in the order in which they are met."""
    found: dict[str, None] = {}
    for path in parts:
        with open_part(path) as part:
            found |= dict.fromkeys(part.schema_arrow.names)
    return found


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


def _rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a part."""
    rows = rows_of(RowBatch(list(range(batch.num_rows)), batch), batch.schema.names)
    return [
        {name: None if isinstance(value, UnreadableValue) else value for name, value in row.items()}
        for row in rows
    ]
