"""Writes outcomes while a run goes on: to a journal within `output.durable`, to a part every 30 s."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.timing import TIMING
from batchrunner.core.types import Outcome, rows_of_column
from batchrunner.job.answers import AnswerPlan
from batchrunner.output.check_counts import with_checks
from batchrunner.output.columns import RunSchema, table_of
from batchrunner.output.disk_wait import DiskWait
from batchrunner.output.files import make_directory, writing
from batchrunner.output.journal import Journal
from batchrunner.output.parts import write_part
from batchrunner.output.run_dir import RunDir, number_of
from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)

FLUSH_FRACTION = 0.7
"""Fraction of `output.durable` to wait before rows are written; the rest is headroom for the disk."""
FLUSH_BYTES = 64 << 20
"""Most bytes of rows in memory before they are written."""
_STRUCT_BYTES = 16
"""Approximate bytes of a number, or of a token with its probability, in a part."""


class CommitListener(Protocol):
    """Learns which rows are in a part, and so need no journal or input any more."""

    def committed(self, rows: BitMap64) -> None:
        """Note that these rows are in a part. Called in a thread; may block and raise OSError."""


class OutcomeCounter(Protocol):
    """Counts outcomes."""

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""


class ResultWriter:
    """Writes finished rows to a journal, and to a part every `part_rows` rows or 30 s.

    While the disk accepts no writes, rows wait in memory up to a limit; `put` then blocks, so that their
    slots stay taken and the run pauses.
    """

    def __init__(
        self,
        run_dir: RunDir,
        schema: RunSchema,
        *,
        part_rows: int,
        plan: AnswerPlan,
        durable_s: float,
        upload_s: float | None = None,
        lock: TaskLock,
        counter: OutcomeCounter,
        listener: CommitListener,
        disk: DiskWait,
    ) -> None:
        """Create the directory of the parts; raises StorageError.

        `plan` says what an outcome becomes, `durable_s` the seconds within which a row is on disk, `upload_s`
        those within which it is in the run's store, where that is not the disk. `lock` is the lock of the
        task, which the caller holds.
        """
        with writing(run_dir.parts):
            make_directory(run_dir.parts)
        self._run_dir = run_dir
        self._schema = schema
        self._part_rows = part_rows
        self._plan = plan
        self._disk = disk
        self._durable_s = durable_s
        self._upload_s = upload_s
        self._uploading: asyncio.Task[None] | None = None
        self._lock = lock
        self._counter = counter
        self._listener = listener
        self._buffer: list[Outcome] = []
        self._bytes = 0
        self._part = _PendingPart(run_dir, 1 + max(map(number_of, run_dir.own_parts()), default=-1), lock)
        self._writing: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handle lacks it where the delay is 0

    async def put(self, outcome: Outcome) -> None:
        """Count and store one outcome; waits while the disk is behind.

        Raises StorageError where earlier rows could not be written within `limits.disk_wait`.
        """
        self._counter.add(outcome)  # first: the row is in a part even if a stop comes while we wait
        self._buffer.append(outcome)
        self._bytes += _text_bytes(outcome)
        if len(self._buffer) == 1:
            self._set_timer()
        if self._upload_s is not None and self._uploading is None:
            self._uploading = asyncio.ensure_future(self._upload(self._upload_s))
        if self._is_full():
            await self._wait()
            if self._is_full():
                self._start_writing()

    def check(self) -> None:
        """Raise the StorageError of a background write that failed for good."""
        for task in (self._writing, self._publishing, self._uploading):
            if task is not None and task.done():
                task.result()

    async def close(self) -> None:
        """Write the remaining rows as a part; raises StorageError where they could not be written."""
        try:
            await self._wait()
            while self._buffer or self._part.rows or self._is_writing():
                self._start_writing(last=True)
                await self._wait()
            await self._wait_for_part()
        finally:
            for task in (self._publishing, self._uploading):
                if task is not None:  # after another failure this must not go on either
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            self._drop_timer()
            self._part.close()

    def _is_full(self) -> bool:
        return self._part.rows + len(self._buffer) >= self._part_rows or self._bytes >= FLUSH_BYTES

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _wait(self) -> None:
        """Wait for the running write and raise its StorageError."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _start_writing(self, *, last: bool = False) -> None:
        """Write the oldest rows, unless a write is running or has failed for good."""
        self._drop_timer()
        if self._writing is None or (self._writing.done() and not self._writing.exception()):
            free = self._part_rows - self._part.rows  # more rows may have come during the last write
            outcomes, self._buffer = self._buffer[:free], self._buffer[free:]
            self._bytes = sum(map(_text_bytes, self._buffer))
            self._writing = asyncio.ensure_future(self._write(outcomes, last=last))

    async def _write(self, outcomes: list[Outcome], *, last: bool) -> None:
        part = self._part
        if outcomes:
            part.add(await asyncio.to_thread(self._table_of, outcomes), len(outcomes))
        whole = part.rows >= self._part_rows or part.bytes >= FLUSH_BYTES
        if part.rows and (last or whole or time.monotonic() - part.began >= TIMING.part):
            if outcomes and self._publishing is not None and not self._publishing.done():
                await self._disk.write(part.path, part.append_journal)  # the wait below may take long
            await self._wait_for_part()  # so that at most two parts are in memory
            self._publishing = asyncio.ensure_future(self._publish(part))
            self._part = _PendingPart(self._run_dir, part.number + 1, self._lock)
        elif outcomes:
            await self._disk.write(part.path, part.append_journal)
        self._set_timer()

    def _table_of(self, outcomes: list[Outcome]) -> pa.Table:
        plan = self._plan
        table = table_of(
            outcomes, self._schema.schema, samples=plan.samples, columns=plan.names, explode=plan.explode
        )
        return with_checks(table, outcomes) if plan.checks else table

    async def _publish(self, part: _PendingPart) -> None:
        """Write a part; rows that finish meanwhile go into the journal of the next part."""
        await self._disk.write(part.path, part.publish)
        self._part.number = max(self._part.number, part.number + 1)
        await self._disk.write(part.path, functools.partial(self._listener.committed, part.row_set()))
        log.debug("wrote %s (%d rows)", part.path.name, part.rows)

    async def _upload(self, upload_s: float) -> None:
        """Publish what came into the journal, again and again."""
        while True:
            await asyncio.sleep(upload_s * FLUSH_FRACTION)
            part = self._part
            await self._disk.write(part.path, part.publish_journal)

    async def _wait_for_part(self) -> None:
        if self._publishing is not None:
            await asyncio.shield(self._publishing)

    def _set_timer(self) -> None:
        """Start a write when the oldest buffered row must become durable, or the part is due."""
        if not self._buffer and not self._part.rows:
            return
        due = self._part.began + TIMING.part - time.monotonic() if self._part.rows else TIMING.part
        wait_s = max(0.0, min(self._durable_s * FLUSH_FRACTION, due) if self._buffer else due)
        at = time.monotonic() + wait_s
        if self._timer is None or at < self._timer_at:
            self._drop_timer()
            self._timer, self._timer_at = (
                asyncio.get_running_loop().call_later(wait_s, self._start_writing),
                at,
            )

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _PendingPart:
    """The rows of the next part, in memory and in its journal.

    Its methods block, and may be repeated after an OSError.

    A process that was stopped for a while may have lost its task to another one, which recovered it. So
    `append_journal` and `publish` verify the lock before what they write counts.
    """

    def __init__(self, run_dir: RunDir, number: int, lock: TaskLock) -> None:
        self._run_dir = run_dir
        self._lock = lock
        self.number = number
        self.rows = 0
        """Rows of the input, each with all its samples."""
        self.bytes = 0
        self.began = 0.0
        self._journal_path = run_dir.journal(number, lock.token)
        self._journal: Journal | None = None
        self._segments = 0
        self._published = 0  # bytes of the journal that are in segments
        self._turn = threading.Lock()  # of what publishes segments, and what deletes them
        self._tables: list[pa.Table] = []

    @property
    def path(self) -> Path:
        """Path under which the part will be written, unless another part has it."""
        return self._run_dir.part(self.number)

    def add(self, table: pa.Table, rows: int) -> None:
        """Add the table of so many rows of the input, in memory only."""
        self.began = self.began or time.monotonic()
        self._tables.append(table)
        self.rows += rows
        self.bytes += table.nbytes

    def append_journal(self) -> None:
        """Append the rows that were added last to the journal, durably."""
        self._lock.verify()
        if self._journal is None:
            make_directory(self._journal_path.parent)
            self._journal = Journal(self._journal_path)
        self._journal.append(self._tables[-1])

    def publish_journal(self) -> None:
        """Publish what the journal has got since the last call, as a segment."""
        with self._turn:
            if self._journal is None or self._journal.end == self._published:
                return
            self._lock.verify()
            end = self._journal.end
            with self._journal_path.open("rb") as file:
                file.seek(self._published)
                content = file.read(end - self._published)
            self._run_dir.store.add_segment(self._journal_path, self._segments, content)
            self._segments, self._published = self._segments + 1, end

    def publish(self) -> None:
        """Write the part and delete its journal."""
        number = write_part(self._run_dir, self.number, self._tables, self._lock)
        with self._turn:
            self.close()
            self._run_dir.store.remove(self._journal_path)
        self.number = number  # not earlier: a repeated call must begin at the same number

    def row_set(self) -> BitMap64:
        """Return the ordinals of its rows."""
        return rows_of_column(
            pa.chunked_array([part for table in self._tables for part in table.column("row").chunks])
        )

    def close(self) -> None:
        """Close the journal, where it is open."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _text_bytes(outcome: Outcome) -> int:
    completion = outcome.completion
    if completion is None:
        return 0
    size = sum(map(len, filter(None, completion.texts)))
    return size + sum(map(_bytes_of, completion.columns.values())) if completion.columns else size


def _bytes_of(value: Any) -> int:
    """Return the approximate bytes of a value in a part."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    return _STRUCT_BYTES
