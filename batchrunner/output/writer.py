"""Outcomes → journal → parts, while rows end: durable within a second, and a part every 30 s."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.output.columns import table_of
from batchrunner.output.journal import Journal
from batchrunner.output.parts import write_part
from batchrunner.output.run_dir import make_directory, number_of, writing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa

    from batchrunner.core.types import Outcome
    from batchrunner.output.disk_wait import DiskWait
    from batchrunner.output.run_dir import RunDir
    from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)

PART_S = 30.0
"""A finished row waits at most this long for its part to be written."""
EARLY = 0.7
"""Of the time in which a row must be durable passes before it is written: the rest is for the disk."""
FLUSH_BYTES = 64 << 20
"""Bytes kept in memory, at most, before a part is written."""


class ResultWriter:
    """Makes finished rows durable in a journal, and parts of them, by number of rows or every 30 s.

    A disk that takes nothing is waited for: rows then wait in memory, and those that no longer fit there
    hold their places, so that the run pauses.
    """

    def __init__(
        self,
        run_dir: RunDir,
        schema: pa.Schema,
        *,
        part_rows: int,
        samples: int,
        durable_s: float,
        claim: TaskLock,
        landed: Callable[[BitMap64], None],
        disk: DiskWait,
    ) -> None:
        """`claim` is held on the task; `landed` is told of rows that are in parts.

        Raises StorageError.
        """
        with writing(run_dir.parts):
            make_directory(run_dir.parts)
        self._run_dir = run_dir
        self._schema = schema
        self._part_rows = part_rows
        self._samples = samples
        self._disk = disk
        self._durable_s = durable_s
        self._claim = claim
        self._landed = landed
        self._buffer: list[Outcome] = []
        self._bytes = 0
        self._part = _Part(run_dir, 1 + max(map(number_of, run_dir.own_parts()), default=-1), claim)
        self._writing: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handle does not know, where that is at once

    async def put(self, outcome: Outcome) -> None:
        """Take one outcome; waits while the disk is behind.

        Raises StorageError where earlier rows could not be written.
        """
        self._buffer.append(outcome)
        self._bytes += _text_bytes(outcome)
        if len(self._buffer) == 1:
            self._set_timer()
        if self._is_full():
            await self._wait()
            if self._is_full():
                self._start_writing()

    def check(self) -> None:
        """Raise the StorageError of a write that failed for good, in the background."""
        for task in (self._writing, self._publishing):
            if task is not None and task.done():
                task.result()

    async def close(self) -> None:
        """Write what is left as a part; raises StorageError where it could not be written."""
        try:
            await self._wait()
            while self._buffer or self._part.rows or self._is_writing():
                self._start_writing(last=True)
                await self._wait()
            await self._published()
        finally:
            if self._publishing is not None:  # where something else has failed, this may not go on either
                self._publishing.cancel()
                await asyncio.gather(self._publishing, return_exceptions=True)
            self._drop_timer()
            self._part.close()

    def _is_full(self) -> bool:
        return self._part.rows + len(self._buffer) >= self._part_rows or self._bytes >= FLUSH_BYTES

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _wait(self) -> None:
        """Wait for what is being written, and pass on what went wrong with it."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _start_writing(self, *, last: bool = False) -> None:
        """Write the oldest rows, unless some are being written or could not be written."""
        self._drop_timer()
        if self._writing is None or (self._writing.done() and not self._writing.exception()):
            room = self._part_rows - self._part.rows  # more may have come while others were written
            outcomes, self._buffer = self._buffer[:room], self._buffer[room:]
            self._bytes = sum(map(_text_bytes, self._buffer))
            self._writing = asyncio.ensure_future(self._write(outcomes, last=last))

    async def _write(self, outcomes: list[Outcome], *, last: bool) -> None:
        part = self._part
        if outcomes:
            part.take(await asyncio.to_thread(table_of, outcomes, self._schema, samples=self._samples))
        whole = part.rows >= self._part_rows or part.bytes >= FLUSH_BYTES
        if part.rows and (last or whole or time.monotonic() - part.began >= PART_S):
            if outcomes and self._publishing is not None and not self._publishing.done():
                await self._disk.do(part.path, part.keep)  # that may take long
            await self._published()  # the part before: two are in memory at most
            self._publishing = asyncio.ensure_future(self._publish(part))
            self._part = _Part(self._run_dir, part.number + 1, self._claim)
        elif outcomes:
            await self._disk.do(part.path, part.keep)
        self._set_timer()

    async def _publish(self, part: _Part) -> None:
        """Write a part, while the rows that end meanwhile go into the next one's journal."""
        await self._disk.do(part.path, part.publish)
        self._part.number = max(self._part.number, part.number + 1)
        await self._disk.do(part.path, functools.partial(self._landed, part.row_numbers()))
        log.debug("wrote %s (%d rows)", part.path.name, part.rows)

    async def _published(self) -> None:
        if self._publishing is not None:
            await asyncio.shield(self._publishing)

    def _set_timer(self) -> None:
        """Look again when the first of the buffer's rows is due to be durable, or the part to be written."""
        if not self._buffer and not self._part.rows:
            return
        due = self._part.began + PART_S - time.monotonic() if self._part.rows else PART_S
        wait_s = max(0.0, min(self._durable_s * EARLY, due) if self._buffer else due)
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


class _Part:
    """The rows of one part to come: in its journal, and in memory. Its methods block, and may be repeated.

    One that was stopped for a while may have lost its task meanwhile, to somebody who tidied up after it. So
    that nothing of it appears later, it asks when its file is there and before that file counts.
    """

    def __init__(self, run_dir: RunDir, number: int, claim: TaskLock) -> None:
        self._run_dir = run_dir
        self._claim = claim
        self.number = number
        self.rows = 0
        self.bytes = 0
        self.began = 0.0
        self._journal_path = run_dir.journal(number, claim.token)
        self._journal: Journal | None = None
        self._tables: list[pa.Table] = []

    @property
    def path(self) -> Path:
        """Where it is to be, unless another part is there."""
        return self._run_dir.part(self.number)

    def take(self, table: pa.Table) -> None:
        """Add rows, which are then to be kept, or published."""
        self.began = self.began or time.monotonic()
        self._tables.append(table)
        self.rows += table.num_rows
        self.bytes += table.nbytes

    def keep(self) -> None:
        """Make the rows that were taken last durable."""
        self._claim.verify()
        if self._journal is None:
            make_directory(self._journal_path.parent)
            self._journal = Journal(self._journal_path)
        self._journal.append(self._tables[-1])

    def publish(self) -> None:
        """Write the part, which from now on stands for its journal."""
        number = write_part(self._run_dir, self.number, self._tables, self._claim)
        self.close()
        self._journal_path.unlink(missing_ok=True)
        self.number = number  # now: a repeated try is to see the same parts

    def row_numbers(self) -> BitMap64:
        """Return the rows in it."""
        return BitMap64(row for table in self._tables for row in table.column("row").to_pylist())

    def close(self) -> None:
        """Let go of the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _text_bytes(outcome: Outcome) -> int:
    return 0 if outcome.completion is None else sum(map(len, outcome.completion.texts))
