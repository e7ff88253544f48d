"""Streams: runs that take their rows from a program, and give it each outcome once its row ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import BatchrunError, InputError
from batchrunner.core.loop_thread import LoopThread
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Outcome, Request, RowRef
from batchrunner.input.dataset import RowBatch, carried_of
from batchrunner.input.parquet_copy import fitted, normalized
from batchrunner.input.render import Renderer
from batchrunner.input.tables import (
    as_batches,
    as_mapping,
    as_rows,
    batches_of_rows,
    bytes_of,
    rows_known,
    rows_of_like_types,
)
from batchrunner.input.templates import unknown_column
from batchrunner.job.answers import AnswerPlan, plan_answers
from batchrunner.job.call import LibraryCall
from batchrunner.job.output import RETURNED
from batchrunner.job.python_functions import open_functions
from batchrunner.job.spec import Job
from batchrunner.output.columns import schema_of_run, table_of
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.runner.control import Control
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.progress import Display
from batchrunner.runner.send import Outlet, Sending
from batchrunner.runner.shared_engine import SharedEngine, open_engine_of

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool


log = logging.getLogger(__name__)

MOST_ROWS, MOST_BYTES = 256, 16 << 20
"""Most rows, and bytes of their texts, that are read ahead. MOST_ROWS also limits the rows that are rendered
together, and the finished rows that wait for the program."""
MOST_RENDERERS = 64
"""Schemas whose renderers are kept."""

Piece: TypeAlias = dict[str, Any] | pa.RecordBatch
"""A row, or a batch of rows."""


class RowBuffer:
    """Rows between the thread or task that reads them and the thread that renders them. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._rows = 0
        self._bytes = 0
        self._ended = False
        self.stopped = False
        """Whether no more rows are wanted."""
        self._changed = threading.Condition()
        self.failure: BaseException | None = None
        """Exception of the program's iterator."""

    def comes_soon(self) -> bool:
        """Wait until `take` would not block, for at most `TIMING.more_rows`; tell whether it would not."""
        with self._changed:
            return self._changed.wait_for(self._can_take, TIMING.more_rows)

    def offer(self, piece: Piece) -> bool:
        """Add a piece if there is room; tell whether it is dealt with. A stopped buffer drops it."""
        with self._changed:
            if not self.stopped and not self._has_room():
                return False
            self._append(piece)
            return True

    def put(self, piece: Piece) -> bool:
        """Add a piece once there is room; tell whether more are wanted. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._has_room())
            self._append(piece)
            return not self.stopped

    def _has_room(self) -> bool:
        return self._rows < MOST_ROWS and self._bytes < MOST_BYTES

    def _append(self, piece: Piece) -> None:
        if self.stopped:
            return
        self._pieces.append(piece)
        self._count(piece, 1)
        self._changed.notify_all()

    def take(self, most: int = MOST_ROWS) -> list[Piece]:
        """Take the pieces that are there, at most `most`; waits for the first. Empty at the end. Blocks."""
        with self._changed:
            self._changed.wait_for(self._can_take)
            pieces, self._pieces = self._pieces[:most], self._pieces[most:]
            for piece in pieces:
                self._count(piece, -1)
            self._changed.notify_all()
            return [] if self.stopped else pieces

    def end(self, failure: BaseException | None = None) -> None:
        """Record that no more rows come, because of `failure` if there is one."""
        with self._changed:
            self._ended, self.failure = True, failure
            self._changed.notify_all()

    def stop(self) -> None:
        """Record that no more rows are wanted."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def _count(self, piece: Piece, sign: int) -> None:
        """Count the rows and bytes of a piece that comes (1) or goes (-1)."""
        rows, size = (1, bytes_of(piece)) if isinstance(piece, dict) else (piece.num_rows, piece.nbytes)
        self._rows += sign * rows
        self._bytes += sign * size

    def _can_take(self) -> bool:
        return bool(self._pieces) or self._ended or self.stopped


@contextlib.asynccontextmanager
async def reading(data: object, buffer: RowBuffer) -> AsyncGenerator[None]:
    """Read a program's rows into a buffer while the `with` block runs.

    An async iterator is read in this loop, other data in a thread. At the end, a thread whose iterator blocks
    is left behind after `TIMING.iterator_end`.
    """
    if isinstance(data, AsyncIterable):
        task = asyncio.create_task(_read_in_loop(data, buffer))
        try:
            yield
        finally:
            buffer.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    else:
        thread = threading.Thread(target=_read, args=[data, buffer], name="batchrunner rows", daemon=True)
        thread.start()
        try:
            yield
        finally:
            buffer.stop()
            await asyncio.to_thread(thread.join, TIMING.iterator_end)


def _read(data: object, buffer: RowBuffer) -> None:
    failure: BaseException | None = None
    pieces = _pieces_of(data)
    try:
        for piece in pieces:
            if not buffer.put(piece):
                break
    except BaseException as raised:  # noqa: BLE001 - it is raised again in the program's own thread
        failure = raised
    buffer.end(failure)
    with contextlib.suppress(Exception):  # an error of the closing iterator no longer matters
        pieces.close()


async def _read_in_loop(data: AsyncIterable[Any], buffer: RowBuffer) -> None:
    rows, number = aiter(data), 0
    try:
        async for row in rows:
            mapping = dict(as_mapping(row, number))
            if not buffer.offer(mapping):
                await asyncio.to_thread(buffer.put, mapping)
            if buffer.stopped:
                break
            number += 1
    except BaseException as raised:
        buffer.end(raised)
        if isinstance(raised, asyncio.CancelledError) and buffer.stopped:
            raise
    else:
        buffer.end()
    finally:
        if hasattr(rows, "aclose"):
            with contextlib.suppress(Exception):
                await rows.aclose()


def _pieces_of(data: object) -> Generator[Piece]:
    """Yield a table in small batches, or the rows of an iterable one by one, as soon as they come."""
    if (batches := as_batches(data)) is not None:
        for batch in batches:
            for at in range(0, max(1, batch.num_rows), MOST_ROWS):
                yield batch.slice(at, MOST_ROWS)
        return
    rows = iter(as_rows(data))
    try:
        for number, row in enumerate(rows):
            yield dict(as_mapping(row, number))  # the program may use its mapping again
    finally:
        if isinstance(rows, Generator):
            rows.close()


def take_batches(buffer: RowBuffer, first: int, most: int = MOST_ROWS) -> list[pa.RecordBatch | str]:
    """Wait for rows and return them as batches; `first` is the number of the first one. Empty at the end.

    At most `most` rows, or batches of a table, are taken. All rows of a batch have the same types, so the
    values of a row do not depend on its neighbours. A row that cannot be sent is returned as its error text.
    """
    pieces = buffer.take(most)
    rows = [piece for piece in pieces if isinstance(piece, dict)]
    if len(rows) < len(pieces):  # a table's batches
        return [piece for piece in pieces if isinstance(piece, pa.RecordBatch)]
    batches: list[pa.RecordBatch | str] = []
    number = first
    for alike in rows_of_like_types(rows):
        batches += _batches_or_errors(alike, number)
        number += len(alike)
    return batches


def _batches_or_errors(rows: Sequence[Mapping[str, Any]], first: int) -> list[pa.RecordBatch | str]:
    """Return rows as batches. If one cannot be sent, return each row alone, as a batch or its error text."""
    try:
        return [*batches_of_rows(rows, first)]
    except InputError as failure:
        if len(rows) == 1:
            return [str(failure)]
    alone = (_batches_or_errors([row], number) for number, row in enumerate(rows, first))
    return [*chain.from_iterable(alone)]


@dataclass(frozen=True, slots=True)
class ProgramColumns:
    """The columns of one batch of a program's rows, for its renderer."""

    schema: pa.Schema

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column; raises InputError where there is none, or several."""
        indices = self.schema.get_all_field_indices(name)
        if not indices:
            raise unknown_column(InputError, where, name, self.schema.names)
        if len(indices) > 1:
            raise InputError(f"{where}: the rows have {len(indices)} columns {name!r}", hint="give one only")
        return self.schema.field(indices[0])

    def directory_of(self, row: int) -> str | None:
        """Return None: the rows are in no file."""


class ProgramRows:
    """The rows of a program as a run's source; they are sent in their order, some 500 at a time.

    The first row, or the table, sets the columns. A later row may lack a column, which is then null, or have
    another type in it. A row fails if its types do not fit the job. Columns that the job does not use are
    ignored.
    """

    is_shared = True
    """Rows are ordered in small windows, so that they are sent, and read, only a little ahead."""

    def __init__(
        self,
        job: Job,
        columns: pa.Schema,
        buffer: RowBuffer,
        *,
        first: list[pa.RecordBatch | str] | None = None,
        total: int = 0,
        functions: HookPool | None = None,
    ) -> None:
        """Check the job against the `columns`; raises JobError or InputError.

        `first` are batches that were already taken from the buffer. `total` is the number of rows, or 0 if it
        is unknown. `functions` are the job's Python functions.
        """
        self.total = total
        """Number of rows; 0 where nobody knows it."""
        self._columns = normalized(columns, pa.null())
        self.names: Sequence[str] = self._columns.names
        """Names of the columns."""
        self.job, self.functions = job, functions
        self.plan = plan_answers(job, functions)
        """Result columns and checks."""
        self._buffer, self._first = buffer, first or []
        self._renderer_of = functools.lru_cache(MOST_RENDERERS)(self._make_renderer)
        self._renderer = self._renderer_of(self._columns)
        self.kind = self._renderer.kind
        """The kind of the prompts; None where a Python function makes them."""
        self._read = 0
        self._ended = False

    @property
    def unread(self) -> int:
        """Number of rows still to be read; a large number where nobody knows it."""
        if self._ended:
            return 0
        return max(0, self.total - self._read) if self.total else sys.maxsize >> 1

    def stop(self) -> None:
        """End `batches` soon, also while it waits."""
        self._buffer.stop()

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Render the rows in the buffer, and wait for more. An empty list means that none come soon.

        `RowBuffer.failure` has the exception of the program's iterator.
        """
        pieces, self._first = self._first or take_batches(self._buffer, 0), []
        while pieces:
            for piece in pieces:
                rows = range(self._read, self._read + (1 if isinstance(piece, str) else piece.num_rows))
                self._read = rows.stop
                yield self._failed(rows, piece) if isinstance(piece, str) else self._rendered(rows, piece)
            if not self._buffer.comes_soon():
                yield []
            pieces = take_batches(self._buffer, self._read)
        self._ended = True

    def _rendered(self, rows: range, data: pa.RecordBatch) -> list[Request | Outcome]:
        data = self._used(data)
        try:
            renderer = self._renderer_of(data.schema)
        except BatchrunError as failure:
            return self._failed(rows, str(failure))
        return renderer.render(RowBatch(list(rows), data), lambda: self._buffer.stopped)

    def _failed(self, rows: range, error: str) -> list[Request | Outcome]:
        """Return failed outcomes for rows whose values are unusable; their carried columns are null."""
        schema = self._renderer.carried_schema
        carried = pa.RecordBatch.from_arrays(
            [pa.nulls(len(rows), kind) for kind in schema.types], schema=schema
        )
        return [Outcome.unsent(RowRef(row, carried, at), error) for at, row in enumerate(rows)]

    def _used(self, data: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns that the job uses. A column of nulls has its type in the first row."""
        columns = {}
        for name in self._renderer.columns:
            values = data.column(name) if name in data.schema.names else pa.nulls(data.num_rows)
            kind = self._columns.field(name).type
            columns[name] = pa.nulls(data.num_rows, kind) if pt.is_null(values.type) else values
        if not columns:  # a prompt without a column: the number of rows matters
            return data.select([])
        batch = pa.RecordBatch.from_pydict(columns)
        return fitted(batch, normalized(batch.schema, pa.null()))

    def _make_renderer(self, schema: pa.Schema) -> Renderer:
        return Renderer(self.job, ProgramColumns(schema), self.plan, self.functions)


class Handover:
    """Bounded queue of finished rows, as dicts: `put` waits while the program is behind.

    All methods are called in the event loop of the run.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        """Convert outcomes to rows with the columns of `plan`."""
        self._plan, self._schema = plan, schema_of_run(pa.schema([]), plan)
        self._outcomes: list[Outcome] = []
        self._ended = False
        self._changed = asyncio.Event()

    async def put(self, outcome: Outcome) -> None:
        """Add the outcome of a row, once there is room."""
        while len(self._outcomes) >= MOST_ROWS:
            await self._change()
        self._outcomes.append(outcome)
        self._changed.set()

    def check(self) -> None:
        """Do nothing: no work runs in the background."""

    async def take(self) -> list[dict[str, Any]]:
        """Wait for finished rows and take all of them; an empty list means the end.

        The values that a rollout returned become columns.
        """
        while not self._outcomes and not self._ended:
            await self._change()
        outcomes, self._outcomes = self._outcomes, []
        self._changed.set()
        if not outcomes:
            return []
        carried = {outcome.ref.row: carried_of(outcome.ref) for outcome in outcomes}
        rows = table_of(outcomes, self._schema, self._plan).to_pylist()
        returned = [orjson.loads(row.pop(RETURNED, None) or "{}") for row in rows]
        return [
            {"row": row["row"]} | carried[row["row"]] | row | columns
            for row, columns in zip(rows, returned, strict=True)
        ]

    def end(self) -> None:
        """Record that no more rows come."""
        self._ended = True
        self._changed.set()

    async def _change(self) -> None:
        """Wait until rows are added or taken, or the stream ends."""
        self._changed.clear()
        await self._changed.wait()


class ProgramOutlet(Outlet, Protocol):
    """Where the outcomes of a stream go."""

    def end(self) -> None:
        """Record that no more outcomes come."""


async def send_stream(
    rows: ProgramRows,
    outlet: ProgramOutlet,
    displays: Sequence[Display],
    log_directory: Path,
    *,
    engine: SharedEngine | None = None,
) -> None:
    """Send all rows, put their outcomes into `outlet`, and end it.

    Without `engine`, the job's own engine is opened, and closed at the end. A cancellation cancels the
    requests in flight. Raises BatchrunError if the engine cannot be opened or is lost, or if a limit of the
    job ended the stream.
    """
    job, control, counts, events = rows.job, Control(), RowCounts(), EventLog(log_directory / "events.jsonl")
    try:
        async with contextlib.AsyncExitStack() as stack:
            for display in displays:
                stack.enter_context(contextlib.closing(display))
            if engine is None:
                engine = await open_engine_of(
                    job, job.task, log_directory=log_directory, control=control, stack=stack
                )
            engine.check(job)
            stack.enter_context(contextlib.closing(events))
            events.open()
            began = time.monotonic()
            load_control, _ = await engine.load_control(job, events, unsent=rows.unread, now=began)
            sending = Sending(
                job=job,
                rows=rows,
                engine=engine.engine,
                load_control=load_control,
                answers=rows.plan,
                outlet=outlet,
                counts=counts,
                events=events,
                control=control,
                displays=displays,
                began=began,
                functions=rows.functions,
            )
            try:
                await sending.send()
            finally:
                sending.show_end(time.monotonic())
        if control.reason is not None:
            raise BatchrunError(f"{control.reason}: the stream ended after {counts.done:,} rows")
    finally:
        rows.stop()
        outlet.end()


@dataclass(frozen=True, slots=True)
class StreamCall:
    """One running call of `stream`, in the program's event loop."""

    data: object
    call: LibraryCall
    open_engine: OpenEngine | None
    """The engine to use; None to open the job's own engine."""
    displays: Sequence[Display]

    async def rows(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield rows as they end; nothing stays on disk."""
        async with contextlib.AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchrunner-")))
            buffer = RowBuffer()
            await stack.enter_async_context(reading(self.data, buffer))
            rows = await asyncio.to_thread(self._read_first, buffer, scratch, stack)
            if rows is not None:
                handover = Handover(rows.plan)
                work = functools.partial(send_stream, rows, handover, self.displays, scratch)
                if self.open_engine is not None:
                    loop = self.open_engine.loop
                    sending = self.open_engine.start(work)
                else:
                    loop = await _new_loop(stack)
                    sending = loop.start(work)
                stack.push_async_callback(sending.cancel_and_wait_async)
                while finished_rows := await loop.start(handover.take).wait_async():
                    for row in finished_rows:
                        yield row
                await sending.wait_async()
            if buffer.failure is not None:
                raise buffer.failure

    def _read_first(
        self, buffer: RowBuffer, scratch: Path, stack: contextlib.AsyncExitStack
    ) -> ProgramRows | None:
        """Return the rows; None if there are none. Blocks until a row or a table sets the columns."""
        first: list[pa.RecordBatch | str] = []
        readable = None
        while readable is None:  # rows that cannot be sent have no columns
            batches = take_batches(buffer, len(first), most=1)
            if not batches and first:
                raise InputError(str(first[0]))
            if not batches:
                return None
            first += batches
            readable = next((batch for batch in batches if not isinstance(batch, str)), None)
        job = self.call.job(readable.schema, [str(scratch)], scratch)
        if not any(map(len, first)):  # a table's columns came before its first rows
            first = take_batches(buffer, 0, most=1)
        functions = open_functions(job)
        if functions is not None:
            stack.callback(functions.close)
        total = rows_known(self.data)
        rows = ProgramRows(job, readable.schema, buffer, first=first, total=total, functions=functions)
        return rows if first else None


async def _new_loop(stack: contextlib.AsyncExitStack) -> LoopThread:
    """Start an event loop in another thread; `stack` ends it without blocking the program's own loop."""
    loop = LoopThread()
    await asyncio.to_thread(loop.__enter__)
    stack.push_async_callback(asyncio.to_thread, loop.__exit__, None, None, None)
    return loop
