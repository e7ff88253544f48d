"""Blocks of rows through one stream: the next one is sent while the last rows of the one before run."""

import asyncio
import functools
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa

from batchrunner.core.errors import BatchrunError
from batchrunner.core.types import Outcome
from batchrunner.input.live_rows import LiveRenderer
from batchrunner.job.answers import AnswerPlan, plan_answers
from batchrunner.job.python_functions import open_functions
from batchrunner.job.tasks import VECTOR
from batchrunner.output.columns import RunSchema, table_of, with_vectors
from batchrunner.ray.stage_call import StageCall
from batchrunner.runner.open_engine import EngineLoop
from batchrunner.runner.progress_calls import make_displays
from batchrunner.runner.row_feed import MOST_ROWS, RowBuffer
from batchrunner.runner.stream_rows import LiveRows
from batchrunner.runner.stream_run import send_stream


class SentBlock:
    """Rows that are sent together; done when each has an outcome."""

    def __init__(self, first: int, rows: int) -> None:
        """`first` is the ordinal of the first row in the stream."""
        self.first = first
        self.outcomes: list[Outcome | None] = [None] * rows
        self._missing = rows
        self.done: Future[list[Outcome] | None] = Future()
        """Becomes the outcomes in the order of the rows; None if the stream ends before."""
        self.done.set_running_or_notify_cancel()  # who waits may be cancelled, and this cannot

    @property
    def end(self) -> int:
        """Ordinal of the row after the last one."""
        return self.first + len(self.outcomes)

    def put(self, outcome: Outcome) -> None:
        """Take the outcome of a row."""
        self.outcomes[outcome.ref.row - self.first] = outcome
        self._missing -= 1
        if not self._missing:
            self.done.set_result([outcome for outcome in self.outcomes if outcome is not None])


class BlockOutlet:
    """Takes the outcomes of a stream and sorts them into their blocks. `add` is thread-safe."""

    def __init__(self, schema: RunSchema) -> None:
        """Take the schema of the results, which says what vectors fit."""
        self._schema = schema
        self._blocks: deque[SentBlock] = deque()  # in the order of their rows
        self._lock = threading.Lock()
        self._rows = 0
        self._ended = False

    def add(self, rows: int) -> SentBlock:
        """Return a new block of the next rows."""
        with self._lock:
            block = SentBlock(self._rows, rows)
            self._rows += rows
            if self._ended:
                block.done.set_result(None)
            else:
                self._blocks.append(block)
            return block

    async def give(self, outcome: Outcome, plan: AnswerPlan) -> None:
        """Take the outcome of a row; one whose vector fits no column of the results becomes a failed one."""
        if plan.task is not None and outcome.completion is not None and outcome.error is None:
            misfit = self._schema.misfit(outcome.completion)
            if misfit is not None:
                outcome = outcome._replace(completion=None, error=misfit)
        with self._lock:
            block = next(block for block in self._blocks if outcome.ref.row < block.end)
            block.put(outcome)
            if block.done.done():
                self._blocks.remove(block)

    def end(self) -> None:
        """Give up the blocks that are not done: no more outcomes come."""
        with self._lock:
            self._ended = True
            for block in self._blocks:
                block.done.set_result(None)
            self._blocks.clear()


class BlockStream:
    """One endless stream of rows to an engine, which answers tables in tables of the same rows.

    All methods but `close` are called in one event loop, which is not that of the engine.
    """

    def __init__(self, call: StageCall, loop: EngineLoop, columns: pa.Schema) -> None:
        """Begin with rows of these columns; raises JobError or InputError. Blocks."""
        self._call = call
        self._order = asyncio.Lock()  # first come, first sent
        self._feeding = threading.Lock()  # a call that is cancelled still feeds
        self._buffer = RowBuffer()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchrunner-")))
            job = call.job(columns, scratch)
            functions = open_functions(job)
            if functions is not None:
                stack.enter_context(closing(functions))
            renderer = LiveRenderer(job, columns, functions)
            self._plan = plan_answers(job, functions)
            self._schema = RunSchema(pa.schema([]), self._plan, {})
            call.check_names(columns, self._plan)
            self._outlet = BlockOutlet(self._schema)
            display = make_displays(progress=False, on_progress=None)
            rows = LiveRows(renderer, self._buffer, [], 0)
            work = functools.partial(
                send_stream, job, renderer.kind, rows, self._outlet, display, scratch, functions=functions
            )
            self._running = loop.start_stream(work)
            self._stack = stack.pop_all()

    async def answer(self, block: pa.Table) -> pa.Table:
        """Send the rows of a block and return them with their answers, in the same order.

        Several calls may wait at once: their rows are sent in the order of the calls, without a pause between
        blocks. Raises BatchrunError where the stream ends: the engine is lost, or too many rows fail.
        """
        if not block.num_rows:
            return self._with_answers(block, self._answer_table([]), 0)
        async with self._order:
            sent = await asyncio.to_thread(self._feed, block)
        outcomes = await asyncio.wrap_future(sent.done)
        if outcomes is None:
            await self._running.wait_async()
            raise BatchrunError("the stream ended before its rows did")
        return await asyncio.to_thread(
            lambda: self._with_answers(block, self._answer_table(outcomes), sent.first)
        )

    def close(self) -> None:
        """End the stream, whose requests in flight are cancelled. Blocks."""
        self._buffer.stop()
        self._running.cancel_blocking()
        self._stack.close()

    def _feed(self, block: pa.Table) -> SentBlock:
        """Add the rows of a block as there is room; stops where none are wanted any more. Blocks."""
        with self._feeding:
            sent = self._outlet.add(block.num_rows)
            for batch in block.to_batches(max_chunksize=MOST_ROWS):
                if not self._buffer.put(batch):
                    break
            return sent

    def _answer_table(self, outcomes: list[Outcome]) -> pa.Table:
        """Return the columns of the results; vectors are lists, whose type is the same in all blocks."""
        plan, schema = self._plan, self._schema.schema
        if outcomes:
            table = table_of(outcomes, schema, samples=plan.samples, columns=plan.names, explode=plan.explode)
        else:
            table = schema.empty_table()
        vectors = {name for name, kind in plan.parsed if kind[0] == VECTOR}
        for field in with_vectors(schema):
            if field.name not in vectors:
                continue
            at = schema.get_field_index(field.name)
            if at < 0:  # no row has one so far
                table = table.append_column(field.name, pa.nulls(table.num_rows, field.type))
            else:
                kind = pa.list_(field.type.value_type)
                table = table.set_column(at, field.name, table.column(at).cast(kind))
        return table

    def _with_answers(self, block: pa.Table, answers: pa.Table, first: int) -> pa.Table:
        """Return the rows of a block beside their answers."""
        kept = block if self._call.columns is None else block.select(self._call.columns)
        if self._plan.explode:
            kept = kept.take(pa.array(row - first for row in answers.column("row").to_pylist()))
        for name in answers.column_names:
            if name != "row":
                kept = kept.append_column(f"{self._call.prefix}{name}", answers.column(name))
        return kept
