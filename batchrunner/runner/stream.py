"""Streams: runs that take rows from a Python program, and return each row to the program when it ends."""

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
from batchrunner.dispatch.sharing import Account
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

MOST_ROWS = 256
"""Maximum number of rows that are read ahead, and of finished rows that wait for the program. Also the number
of rows whose prompts are built together."""
MOST_BYTES = 16 << 20
"""Maximum size in bytes of the rows that are read ahead."""
MOST_RENDERERS = 64
"""Maximum number of prompt renderers in memory. Rows with other columns or types need another renderer."""

Piece: TypeAlias = dict[str, Any] | pa.RecordBatch
"""A row as a dict, or a batch of rows of a table."""


class RowBuffer:
    """Buffer of rows between the program's iterator and the thread that renders prompts. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        """Rows, or batches of a table, that wait for `take`."""
        self._rows = 0
        self._bytes = 0
        """Number and size of the rows in `_pieces`."""
        self._ended = False
        """Whether the program has passed its last row."""
        self.stopped = False
        """Whether the stream needs no more rows."""
        self._changed = threading.Condition()
        """Lock of all attributes; notified when one of them changes."""
        self.failure: BaseException | None = None
        """Exception that the program's iterator raised; None if it raised none."""

    def comes_soon(self) -> bool:
        """Wait at most `TIMING.more_rows` seconds for rows; return whether `take` would return at once."""
        with self._changed:
            return self._changed.wait_for(self._can_take, TIMING.more_rows)

    def offer(self, piece: Piece) -> bool:
        """Add a row or batch if there is room; return False if there is none.

        A stopped buffer drops it and returns True.
        """
        with self._changed:
            if not self.stopped and not self._has_room():
                return False
            self._append(piece)
            return True

    def put(self, piece: Piece) -> bool:
        """Wait for room, and add a row or batch. Return whether the stream needs more rows. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._has_room())
            self._append(piece)
            return not self.stopped

    def _has_room(self) -> bool:
        return self._rows < MOST_ROWS and self._bytes < MOST_BYTES

    def _append(self, piece: Piece) -> None:
        """Add a row or batch, unless the buffer is stopped. The caller holds the lock."""
        if self.stopped:
            return
        self._pieces.append(piece)
        self._count(piece, 1)
        self._changed.notify_all()

    def take(self, most: int = MOST_ROWS) -> list[Piece]:
        """Wait for rows or batches and take at most `most` of them.

        Return an empty list at the end. Blocks.
        """
        with self._changed:
            self._changed.wait_for(self._can_take)
            pieces, self._pieces = self._pieces[:most], self._pieces[most:]
            for piece in pieces:
                self._count(piece, -1)
            # Wake a `put` that waits for room.
            self._changed.notify_all()
            return [] if self.stopped else pieces

    def end(self, failure: BaseException | None = None) -> None:
        """Record that no more rows come. `failure` is the exception that ended the program's iterator."""
        with self._changed:
            self._ended, self.failure = True, failure
            self._changed.notify_all()

    def stop(self) -> None:
        """Record that the stream needs no more rows."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def _count(self, piece: Piece, sign: int) -> None:
        """Add the rows and bytes of a row or batch to the totals (`sign` 1), or subtract them (-1)."""
        rows, size = (1, bytes_of(piece)) if isinstance(piece, dict) else (piece.num_rows, piece.nbytes)
        self._rows += sign * rows
        self._bytes += sign * size

    def _can_take(self) -> bool:
        return bool(self._pieces) or self._ended or self.stopped


@contextlib.asynccontextmanager
async def reading(data: object, buffer: RowBuffer) -> AsyncGenerator[None]:
    """Read a program's rows into a buffer while the `with` block runs.

    An async iterator is read in this event loop, other data in a thread. At the end, the thread gets
    `TIMING.iterator_end` seconds to finish, and is then left running.
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
    """Read all rows that the calling program passes into a buffer. It blocks, so it runs in a thread."""
    failure: BaseException | None = None
    pieces = _pieces_of(data)
    try:
        for piece in pieces:
            if not buffer.put(piece):
                break
    except BaseException as raised:  # noqa: BLE001 - `StreamCall` raises it again, in the program's own loop
        failure = raised
    buffer.end(failure)
    # The rows have ended, so an error while the program's iterator is closed no longer matters.
    with contextlib.suppress(Exception):
        pieces.close()


async def _read_in_loop(data: AsyncIterable[Any], buffer: RowBuffer) -> None:
    """Read all rows of an async iterator into a buffer, in the program's event loop."""
    rows, number = aiter(data), 0
    try:
        async for row in rows:
            mapping = dict(as_mapping(row, number))
            # `put` blocks while the buffer is full, so it runs in a thread.
            if not buffer.offer(mapping):
                await asyncio.to_thread(buffer.put, mapping)
            if buffer.stopped:
                break
            number += 1
    except BaseException as raised:
        buffer.end(raised)
        # A cancellation by `reading` ends this task. `StreamCall` raises any other exception to the program.
        if isinstance(raised, asyncio.CancelledError) and buffer.stopped:
            raise
    else:
        buffer.end()
    finally:
        if hasattr(rows, "aclose"):
            with contextlib.suppress(Exception):
                await rows.aclose()


def _pieces_of(data: object) -> Generator[Piece]:
    """Yield a table in batches of at most MOST_ROWS rows, or the rows of an iterable as soon as they come."""
    if (batches := as_batches(data)) is not None:
        for batch in batches:
            # An empty table is yielded too, because it has columns.
            for start in range(0, max(1, batch.num_rows), MOST_ROWS):
                yield batch.slice(start, MOST_ROWS)
        return
    rows = iter(as_rows(data))
    try:
        for number, row in enumerate(rows):
            # The program may change its mapping later, so the row is copied.
            yield dict(as_mapping(row, number))
    finally:
        if isinstance(rows, Generator):
            rows.close()


def take_batches(buffer: RowBuffer, first: int, most: int = MOST_ROWS) -> list[pa.RecordBatch | str]:
    """Wait for rows and return them as batches; return an empty list at the end.

    `first` is the number of the first row. At most `most` rows, or batches of a table, are taken. All rows of
    a batch have the same types, so no value is converted to the type of another row's. A row that cannot be
    sent is returned as the text of its error.
    """
    pieces = buffer.take(most)
    rows = [piece for piece in pieces if isinstance(piece, dict)]
    if len(rows) < len(pieces):  # the program passed a table, so all pieces are batches
        return [piece for piece in pieces if isinstance(piece, pa.RecordBatch)]
    batches: list[pa.RecordBatch | str] = []
    number = first
    for alike in rows_of_like_types(rows):
        batches += _batches_or_errors(alike, number)
        number += len(alike)
    return batches


def _batches_or_errors(rows: Sequence[Mapping[str, Any]], first: int) -> list[pa.RecordBatch | str]:
    """Return rows as batches; `first` is the number of the first row.

    If a row cannot be converted, return each row by itself, as a batch or as the text of its error.
    """
    try:
        return [*batches_of_rows(rows, first)]
    except InputError as failure:
        if len(rows) == 1:
            return [str(failure)]
    results = (_batches_or_errors([row], number) for number, row in enumerate(rows, first))
    return [*chain.from_iterable(results)]


@dataclass(frozen=True, slots=True)
class ProgramColumns:
    """The columns of a batch of rows that a program passed, as the prompt renderer needs them."""

    schema: pa.Schema

    def field(self, name: str, *, where: str) -> pa.Field:
        """Return the field of a column. Raises InputError if there is no such column, or more than one."""
        indices = self.schema.get_all_field_indices(name)
        if not indices:
            raise unknown_column(InputError, where, name, self.schema.names)
        if len(indices) > 1:
            raise InputError(
                f"{where}: the rows have {len(indices)} columns with the name {name!r}",
                hint="rename all but one of them",
            )
        return self.schema.field(indices[0])

    def directory_of(self, row: int) -> str | None:
        """Return None: the rows do not come from files."""


class ProgramRows:
    """The rows that a Python program passes, as the source of rows of a run.

    Only about 500 rows at a time are reordered.

    The first row, or the table, determines the columns. A later row may lack a column, whose value is then
    null, or have a value of another type. A row fails if its types do not fit the job. Columns that the job
    does not use are ignored.
    """

    is_shared = True
    """Says that only a few rows are read and reordered ahead, as in a run that several workers share."""

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
        """Check that the job fits the `columns`. Raises JobError or InputError.

        `first` are batches that were already taken from the buffer. `total` is the number of rows; 0 if
        unknown. `functions` runs the job's Python functions.
        """
        self.total = total
        """Number of rows of the program; 0 if unknown."""
        self._columns = normalized(columns, pa.null())
        self.names: Sequence[str] = self._columns.names
        self.job, self.functions = job, functions
        self.plan = plan_answers(job, functions)
        """Result columns of the job, and checks of its answers."""
        self._buffer, self._first = buffer, first or []
        self._renderer_of = functools.lru_cache(MOST_RENDERERS)(self._make_renderer)
        self._renderer = self._renderer_of(self._columns)
        self.kind = self._renderer.kind
        """Kind of the prompts; None if a Python function makes them."""
        self._read = 0
        """Number of rows whose prompts were built."""
        self._ended = False
        """Whether the prompts of all rows were built."""

    @property
    def unread(self) -> int:
        """Number of rows that have not been read yet; a very large number if unknown."""
        if self._ended:
            return 0
        return max(0, self.total - self._read) if self.total else sys.maxsize >> 1

    def stop(self) -> None:
        """Make `batches` end soon, even while it waits for rows."""
        self._buffer.stop()

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Build the prompts of the buffered rows, until the program has no more rows. Blocks.

        An empty list means that no row came for a while, so the rows so far should be sent. If the program's
        iterator raises an exception, the rows end, and `RowBuffer.failure` is the exception.
        """
        # `_first` has the batches that were read before to find the columns.
        pieces, self._first = self._first or take_batches(self._buffer, 0), []
        while pieces:
            for piece in pieces:
                if isinstance(piece, str):  # This piece is the error of a single row.
                    rows = range(self._read, self._read + 1)
                    batch = self._failed(rows, error=piece)
                else:
                    rows = range(self._read, self._read + piece.num_rows)
                    batch = self._rendered(rows, piece)
                self._read = rows.stop
                yield batch
            if not self._buffer.comes_soon():
                yield []
            pieces = take_batches(self._buffer, self._read)
        self._ended = True

    def _rendered(self, rows: range, data: pa.RecordBatch) -> list[Request | Outcome]:
        """Return a request for each row of a batch. The rows fail if their types do not fit the job."""
        data = self._used(data)
        try:
            renderer = self._renderer_of(data.schema)
        except BatchrunError as failure:
            return self._failed(rows, str(failure))
        return renderer.render(RowBatch(list(rows), data), lambda: self._buffer.stopped)

    def _failed(self, rows: range, error: str) -> list[Request | Outcome]:
        """Return outcomes with an error, for rows that cannot be used. Their other columns are null."""
        schema = self._renderer.carried_schema
        carried = pa.RecordBatch.from_arrays(
            [pa.nulls(len(rows), kind) for kind in schema.types], schema=schema
        )
        return [Outcome.unsent(RowRef(row, carried, index), error) for index, row in enumerate(rows)]

    def _used(self, data: pa.RecordBatch) -> pa.RecordBatch:
        """Return those columns of a batch that the job uses.

        A missing or null column gets the type that it had in the first row.
        """
        columns = {}
        for name in self._renderer.columns:
            values = data.column(name) if name in data.schema.names else pa.nulls(data.num_rows)
            kind = self._columns.field(name).type
            columns[name] = pa.nulls(data.num_rows, kind) if pt.is_null(values.type) else values
        if not columns:  # the batch must keep its number of rows
            return data.select([])
        batch = pa.RecordBatch.from_pydict(columns)
        return fitted(batch, normalized(batch.schema, pa.null()))

    def _make_renderer(self, schema: pa.Schema) -> Renderer:
        return Renderer(self.job, ProgramColumns(schema), self.plan, self.functions)


class Handover:
    """Bounded queue of finished rows for the program. `put` waits while the queue is full.

    All methods are called in the event loop of the run.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        """`plan` names the result columns of the rows that `take` returns."""
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
        """Do nothing: a stream writes nothing in the background."""

    async def take(self) -> list[dict[str, Any]]:
        """Wait for finished rows and return all of them as dicts; return an empty list at the end.

        The values that a rollout function returned for a row are columns of the row too.
        """
        while not self._outcomes and not self._ended:
            await self._change()
        outcomes, self._outcomes = self._outcomes, []
        # Wake a `put` that waits for room.
        self._changed.set()
        if not outcomes:
            return []
        # The columns of the program's own rows are returned too.
        carried = {outcome.ref.row: carried_of(outcome.ref) for outcome in outcomes}
        rows = table_of(outcomes, self._schema, self._plan).to_pylist()
        returned = [orjson.loads(row.pop(RETURNED, None) or "{}") for row in rows]
        # If two columns have the same name, the later one in this order wins.
        return [
            {"row": row["row"]} | carried[row["row"]] | row | columns
            for row, columns in zip(rows, returned, strict=True)
        ]

    def end(self) -> None:
        """Record that no more outcomes come."""
        self._ended = True
        self._changed.set()

    async def _change(self) -> None:
        """Wait until rows are added or taken, or the stream ends."""
        self._changed.clear()
        await self._changed.wait()


class ProgramOutlet(Outlet, Protocol):
    """Receives the outcomes of a stream's rows."""

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
    """Send all rows, pass their outcomes to `outlet`, and end the outlet.

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
                account=Account(),
            )
            try:
                await sending.send()
            finally:
                sending.show_end(time.monotonic())
        if control.reason is not None:  # no signals here, so a limit of the job ended the stream
            raise BatchrunError(f"{control.reason}: the stream ended after {counts.done:,} rows")
    finally:
        rows.stop()
        outlet.end()


@dataclass(frozen=True, slots=True)
class StreamCall:
    """One call of `stream` by a program.

    It runs in the program's event loop, and the run in another thread.
    """

    data: object
    call: LibraryCall
    open_engine: OpenEngine | None
    """The engine to use; None to open the job's own engine."""
    displays: Sequence[Display]

    async def rows(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield each row as a dict as soon as it has ended. No files stay on the disk."""
        async with contextlib.AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchrunner-")))
            buffer = RowBuffer()
            await stack.enter_async_context(reading(self.data, buffer))
            rows = await asyncio.to_thread(self._read_first, buffer, scratch, stack)
            if rows is not None:  # the program has at least one row
                # The run has its own event loop, so finished rows are passed from one loop to the other.
                handover = Handover(rows.plan)
                work = functools.partial(send_stream, rows, handover, self.displays, scratch)
                if self.open_engine is not None:
                    loop = self.open_engine.loop
                    sending = self.open_engine.start(work)
                else:
                    loop = await _new_loop(stack)
                    sending = loop.start(work)
                # The program may leave its loop early, which cancels the requests in flight.
                stack.push_async_callback(sending.cancel_and_wait_async)
                while finished_rows := await loop.start(handover.take).wait_async():
                    for row in finished_rows:
                        yield row
                await sending.wait_async()
            # The program gets the results of the rows before its iterator's exception, then the exception.
            if buffer.failure is not None:
                raise buffer.failure

    def _read_first(
        self, buffer: RowBuffer, scratch: Path, stack: contextlib.AsyncExitStack
    ) -> ProgramRows | None:
        """Wait for the first row or table, whose columns determine the job, and return the program's rows.

        Return None if the program has no rows. `stack` ends the job's Python functions. Raises InputError if
        no row can be used.
        """
        # A text in place of a batch is the error of a row that cannot be used. It has no columns, so rows are
        # taken until there is a batch.
        first: list[pa.RecordBatch | str] = []
        readable = None
        while readable is None:
            batches = take_batches(buffer, len(first), most=1)
            if not batches and first:
                raise InputError(str(first[0]))
            if not batches:
                return None
            first += batches
            readable = next((batch for batch in batches if not isinstance(batch, str)), None)
        job = self.call.job(readable.schema, [str(scratch)], scratch)
        # The first batch of a table may have no rows. Then the first row is in a later batch.
        if not any(map(len, first)):
            first = take_batches(buffer, 0, most=1)
        functions = open_functions(job)
        if functions is not None:
            stack.callback(functions.close)
        total = rows_known(self.data)
        rows = ProgramRows(job, readable.schema, buffer, first=first, total=total, functions=functions)
        return rows if first else None


async def _new_loop(stack: contextlib.AsyncExitStack) -> LoopThread:
    """Start an event loop in another thread.

    `stack` ends it, without blocking the program's own loop.
    """
    loop = LoopThread()
    await asyncio.to_thread(loop.__enter__)
    stack.push_async_callback(asyncio.to_thread, loop.__exit__, None, None, None)
    return loop
