"""Writes finished rows: within `output.durable` seconds to a journal, and later to a part file.

A part file is a complete Parquet file of results. A journal stores rows safely until they are in a part file.
A write that fails is repeated for up to `limits.disk_wait`, so that somebody can free space or restore a
mount.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.types import Outcome, rows_of_column
from batchrunner.job.answers import AnswerPlan
from batchrunner.output.away import DiskWait
from batchrunner.output.columns import table_of
from batchrunner.output.counts import count, with_counts
from batchrunner.output.files import make_directory, writing
from batchrunner.output.parts import Journal, write_part
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)

FLUSH_FRACTION = 0.7
"""Fraction of `output.durable` after which the oldest row in memory is written; the rest is for the write."""
FLUSH_BYTES = 64 << 20
"""Size in bytes at which the rows in memory are written early."""
LAG_FRACTION = 0.05
"""Time between two part files, as a fraction of the age of the attempt.

With a constant time, a run of a week would write 20,000 small files, and every reader would have to list and
open them.
"""
LONGEST_LAG_S = 1800.0
"""Maximum time between two part files in seconds. A run of a week then writes about 420 part files."""
_STRUCT_BYTES = 16
"""Approximate size in bytes of a number, or of a token with its log probability."""


def part_interval_s(age_s: float, first_s: float) -> float:
    """Return the maximum seconds from the end of a row until it is in a part file.

    `age_s` is the age of the attempt in seconds. The result grows with it, from a minimum of `first_s`, so
    that users see the first results soon.
    """
    return max(first_s, min(LAG_FRACTION * age_s, LONGEST_LAG_S))


@dataclass(eq=False)
class ResultWriter:
    """Writes finished rows to a journal, and later to a part file (a Parquet file of results).

    A part file is written after `part_rows` rows, or after `part_interval_s`. While the disk accepts no
    writes, rows wait in memory, up to a limit. At the limit `put` blocks, so that the run pauses.
    """

    run_dir: RunDir
    schema: pa.Schema
    part_rows: int
    plan: AnswerPlan
    """Result columns and checks of answers."""
    durable_s: float
    """Maximum seconds from the end of a row until it is in a journal on disk."""
    part_s: float
    """Maximum seconds from the end of a row until it is in a part file; with `lag_grows`, only at first."""
    lag_grows: bool
    """Whether the time between two part files grows with the age of the attempt.

    In an object store, it must not: journals stay on this machine, so only part files are safe.
    """
    lock: TaskLock
    """Lock of this worker, which the caller holds."""
    committed: Callable[[BitMap64], None]
    """Called in a thread after each part file, with its rows. It may block and raise OSError."""
    disk: DiskWait

    def __post_init__(self) -> None:
        """Create the directory of the part files. Raises StorageError if that fails."""
        run_dir = self.run_dir
        with writing(run_dir.parts):
            make_directory(run_dir.parts)
        self._buffer: list[Outcome] = []
        self._bytes = 0
        self._oldest_at = 0.0
        """When the oldest row came into the buffer, by `time.monotonic`."""
        self._began = time.monotonic()
        self._part = _PendingPart(run_dir, run_dir.next_number(), self.lock)
        self._writing: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Set when the buffer gets its first row or is full, or when no more rows come."""
        self._has_room = asyncio.Event()
        """Set when rows have left the buffer, or when writing has ended."""
        self._is_closing = False

    async def put(self, outcome: Outcome) -> None:
        """Add a finished row to the buffer. Wait while the buffer is full because the disk is slow.

        Raises StorageError if earlier rows could not be written within `limits.disk_wait`.
        """
        if not self._buffer:
            self._oldest_at = time.monotonic()
            self._changed.set()
        self._buffer.append(outcome)
        self._bytes += _text_bytes(outcome)
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_when_due())
        # Wake `_write_when_due`, and wait until it has taken rows out of the buffer. If it has failed,
        # `check` raises its error.
        while self._is_full():
            self.check()
            self._changed.set()
            self._has_room.clear()
            await self._has_room.wait()

    def check(self) -> None:
        """Raise the StorageError of a background write that has failed for good."""
        for task in (self._writing, self._publishing):
            if task is not None and task.done():
                task.result()

    async def close(self) -> None:
        """Write the remaining rows as a part file. Raises StorageError if they could not be written."""
        self._is_closing = True
        self._changed.set()
        try:
            if self._writing is not None:
                # `shield` makes a cancellation end only this wait. The code below cancels the tasks.
                await asyncio.shield(self._writing)
            await self._wait_for_part()
        finally:
            for task in (self._writing, self._publishing):
                if task is not None:
                    task.cancel()  # If one of the tasks has failed, the other must not continue.
                    await asyncio.gather(task, return_exceptions=True)
            self._part.close()

    def _is_full(self) -> bool:
        """Tell whether the rows in memory are enough for a part file, so that they must be written now."""
        return self._part.rows + len(self._buffer) >= self.part_rows or self._bytes >= FLUSH_BYTES

    async def _write_when_due(self) -> None:
        """Write rows whenever they are due, until no more rows come and all are in part files."""
        try:
            while self._buffer or self._part.rows or not self._is_closing:
                must_write_now = self._is_closing or self._is_full()
                wait_s = 0.0 if must_write_now else self._due_s()
                # None means that the buffer is empty: wait for the first row.
                if wait_s is None or wait_s > 0:
                    self._changed.clear()
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), wait_s)
                else:
                    await self._write()
        finally:
            # If this task has failed, a waiting `put` then raises the error.
            self._has_room.set()

    def _due_s(self) -> float | None:
        """Return the seconds until rows must be written to the journal or as a part file.

        None without rows.
        """
        # The buffered rows are due for the journal, and the rows of the journal for a part file.
        due_at = [self._oldest_at + self.durable_s * FLUSH_FRACTION] if self._buffer else []
        if self._part.rows:
            due_at.append(self._part_due_at(self._part))
        return min(due_at) - time.monotonic() if due_at else None

    def _part_due_at(self, part: _PendingPart) -> float:
        """Return the time, by `time.monotonic`, at which a part file must be written."""
        interval_s = self.part_s
        if self.lag_grows:
            interval_s = part_interval_s(part.first_at - self._began, self.part_s)
        return part.first_at + interval_s

    async def _write(self) -> None:
        """Write the oldest rows of the buffer to the journal, and the part file if it is due."""
        part = self._part
        outcomes = self._take_oldest(self.part_rows - part.rows)
        if outcomes:
            table = await asyncio.to_thread(self._table_of, outcomes)
            part.add(table, len(outcomes))
        is_full = part.rows >= self.part_rows or part.bytes >= FLUSH_BYTES
        part_is_due = self._is_closing or is_full or time.monotonic() >= self._part_due_at(part)
        last_part_is_late = self._publishing is not None and not self._publishing.done()
        # If the part file is written at once, its rows need no journal. It may be late if the previous one is
        # not written yet, or in an object store, which may be unavailable.
        in_store = self.run_dir.store.objects is not None
        part_comes_at_once = part_is_due and not last_part_is_late and not in_store
        needs_journal = bool(outcomes) and not part_comes_at_once
        if needs_journal:
            await self.disk.write(part.path, part.append_journal)
        if part_is_due:
            await self._begin_next_part()

    def _take_oldest(self, rows: int) -> list[Outcome]:
        """Take at most `rows` rows out of the buffer. More may have come during a write."""
        outcomes, self._buffer = self._buffer[:rows], self._buffer[rows:]
        self._bytes = sum(map(_text_bytes, self._buffer))
        self._oldest_at = time.monotonic()  # The remaining rows came during the last write.
        self._has_room.set()
        return outcomes

    def _table_of(self, outcomes: list[Outcome]) -> pa.Table:
        """Return outcomes as a table for a part file, with their counts in its metadata."""
        return with_counts(table_of(outcomes, self.schema, self.plan), count(outcomes))

    async def _begin_next_part(self) -> None:
        """Publish the part file in the background, and begin another one for the next rows."""
        # At most two part files may be in memory, so wait for the previous one.
        await self._wait_for_part()
        part = self._part
        self._publishing = asyncio.ensure_future(self._publish(part))
        self._part = _PendingPart(self.run_dir, part.number + 1, self.lock)
        # The new part file is empty, so `put` has room again.
        self._has_room.set()

    async def _publish(self, part: _PendingPart) -> None:
        """Write a part file. Rows that finish meanwhile belong to the next one."""
        await self.disk.write(part.path, part.publish)
        # `publish` skips numbers that another attempt has used, so the next part file may need a higher
        # number.
        self._part.number = max(self._part.number, part.number + 1)
        # `committed` tells the run which rows are in a part file now. If it fails, it is called again.
        await self.disk.write(part.path, functools.partial(self.committed, part.row_set()))
        log.debug("wrote %s (%d rows)", part.path.name, part.rows)

    async def _wait_for_part(self) -> None:
        """Wait until the previous part file is written. Raises StorageError if it could not be written."""
        if self._publishing is not None:
            await asyncio.shield(self._publishing)


class _PendingPart:
    """The rows of the next part file, in memory and in its journal.

    Methods block, and may be called again after an OSError. If this process was suspended for a while,
    another process may have taken over its work. So `append_journal` and `publish` verify the worker's lock
    before their writes take effect.
    """

    def __init__(self, run_dir: RunDir, number: int, lock: TaskLock) -> None:
        """Begin a part file without rows; `number` is the number in its name, if still free later."""
        self._run_dir = run_dir
        self._lock = lock
        self.number = number
        self.rows = 0
        """Number of input rows in the part file. All completions of a row are in the same part file."""
        self.bytes = 0
        """Size in bytes of the tables in memory."""
        self.first_at = 0.0
        """Time, by `time.monotonic`, at which the first rows were added; 0.0 before."""
        self._journal_path = run_dir.journal(number, lock.token)
        self._journal: Journal | None = None
        self._tables: list[pa.Table] = []

    @property
    def path(self) -> Path:
        """Path of the future part file. If the name is taken, `publish` uses a higher number."""
        return self._run_dir.part(self.number)

    def add(self, table: pa.Table, rows: int) -> None:
        """Add finished rows in memory; `table` has the results of `rows` input rows."""
        self.first_at = self.first_at or time.monotonic()
        self._tables.append(table)
        self.rows += rows
        self.bytes += table.nbytes

    def append_journal(self) -> None:
        """Append the table of the last `add` to the journal, and sync the journal to disk."""
        self._lock.verify()
        if self._journal is None:
            make_directory(self._journal_path.parent)
            self._journal = Journal(self._journal_path)
        self._journal.append(self._tables[-1])

    def publish(self) -> None:
        """Write the rows to a part file, and delete the journal, which is no longer needed.

        If another attempt has used the number, the file gets a higher number.
        """
        number = write_part(self._run_dir, self.number, self._tables, self._lock)
        self.close()
        self._journal_path.unlink(missing_ok=True)
        # The number is set last. A repeated call after an OSError then begins at the same number.
        self.number = number

    def row_set(self) -> BitMap64:
        """Return the numbers, in the input, of the part file's rows."""
        chunks = [chunk for table in self._tables for chunk in table.column("row").chunks]
        return rows_of_column(pa.chunked_array(chunks))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _text_bytes(outcome: Outcome) -> int:
    """Return the approximate size in bytes of a row's texts and optional columns in memory."""
    completion = outcome.completion
    if completion is None:
        return 0
    size = sum(map(len, filter(None, completion.texts)))
    if completion.columns:
        size += sum(map(_bytes_of, completion.columns.values()))
    return size


def _bytes_of(value: Any) -> int:
    """Return the approximate size in bytes of a value of an optional result column."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    if isinstance(value, dict):
        return sum(map(_bytes_of, value.values()))
    return _STRUCT_BYTES
