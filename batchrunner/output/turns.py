"""Durable answers of unfinished multi-turn rollouts, so that a killed run need not generate them again.

The answers are appended to segments, which are journal files in the task's directory. A segment is deleted
when the results of all its rows are in parts (Parquet files of results), except the newest segment. So the
disk holds little more than the answers of rollouts that have not ended.
"""

import asyncio
import contextlib
import functools
import json
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.types import Completion, Lease, Outcome, RowRef
from batchrunner.output.away import DiskWait
from batchrunner.output.files import make_directory, writing
from batchrunner.output.parts import Journal, read_journal
from batchrunner.output.run_dir import MAIN_TASK, SEGMENT, RunDir

SEGMENT_BYTES = 64 << 20
"""Size in bytes of the answers in a segment (one of the journal files) after which a new segment begins."""
_SCHEMA = pa.schema({"row": pa.int64(), "turn": pa.string()})
"""Columns of a segment (a journal file). `turn` is an answer as JSON: its TurnKey, the number of attempts,
the error, and the Completion. A null instead of an answer makes the earlier answers of the row invalid,
because the row failed or starts anew."""
TurnKey: TypeAlias = tuple[str, int]
"""Identity of a request in a rollout: its digest, and the number of equal requests that the rollout sent
before."""


@dataclass(eq=False)
class TurnStore:
    """The stored answers of a task's open rollouts, from this and earlier attempts and from other tasks."""

    _run_dir: RunDir
    _token: str
    """Token of the task's lock."""
    _disk: DiskWait

    def __post_init__(self) -> None:
        """Create a store without answers. No file is written before the first answer."""
        self._segments: dict[Path, BitMap64] = {}
        """Segments (journal files) of this attempt. Each has the set of its rows that are in no part file
        yet."""
        self._recovered: dict[int, list[str]] = defaultdict(list)
        """Answers that earlier attempts and other tasks have written, by row, in the form of the column
        `turn`."""
        self._unwritten: list[tuple[int, str | None]] = []
        """Entries (pairs of the columns in _SCHEMA) that are not on disk yet."""
        self._writing = asyncio.Lock()
        self._journal: Journal | None = None
        """Journal of the newest segment, to which answers are appended; None before the first answer."""
        self._bytes = 0
        """Size in bytes of the answers in the newest segment (journal file)."""
        self._next_number = 0
        """Number in the name of the next segment (journal file)."""
        # The lock is necessary because `ended` is called in the thread that writes part files.
        self._lock = threading.Lock()

    def load(self, lease: Lease) -> None:
        """Read the stored answers of the rows of a lease (the rows that this worker reserved). Blocks.

        Raises StorageError if they cannot be read.
        """
        if not lease.turn and self._run_dir.task != MAIN_TASK:
            # No other task has held this lease, so there are no answers. The main task, whose run is not
            # shared, may have written answers in an earlier attempt.
            return
        segments = self._run_dir.tasks.glob(f"*/{SEGMENT}*")
        # Later segments have higher numbers, even if another task has written them. A null in the column
        # `turn` removes the answers that were written before it, so the order matters.
        for path in sorted(segments, key=lambda path: path.name):
            self._next_number = max(self._next_number, 1 + int(path.name.split("-")[1]))
            # The worker that wrote this segment may delete the file while it is being read.
            with writing(path), contextlib.suppress(FileNotFoundError):
                for table in read_journal(path):
                    for row, turn in zip(*table.to_pydict().values(), strict=True):
                        if turn is None:
                            self._recovered.pop(row, None)
                        elif row in lease.rows:
                            self._recovered[row].append(turn)

    def take(self, ref: RowRef) -> dict[TurnKey, Outcome]:
        """Return the stored answers of a row by request, and forget them.

        The key of an answer is the digest of its request, and the number of equal requests before it.
        """
        answers = {}
        for turn in self._recovered.pop(ref.row, ()):
            digest, number, attempts, error, values = json.loads(turn)
            completion = values and Completion(*values)
            answers[digest, number] = Outcome(
                ref, completion=completion, error=error, latency_s=None, attempts=attempts
            )
        return answers

    async def put(self, key: TurnKey, outcome: Outcome) -> None:
        """Store an answer. It survives a power failure once this method has returned.

        Raises StorageError if the answer cannot be written within `limits.disk_wait`.
        """
        # JSON needs a dict in place of `columns`, the last field of the completion.
        values = outcome.completion and [*outcome.completion[:-1], dict(outcome.completion.columns)]
        turn = json.dumps([*key, outcome.attempts, outcome.error, values])
        await self._put((outcome.ref.row, turn))

    async def drop(self, row: int) -> None:
        """Make the stored answers of a row invalid, so that a later attempt starts anew.

        Raises StorageError if that cannot be written within `limits.disk_wait`.
        """
        await self._put((row, None))

    async def _put(self, turn: tuple[int, str | None]) -> None:
        """Write an entry (the answer of a row, or None) to a segment, durably.

        Entries that arrive during a write are then written together, so that one sync serves many calls.
        """
        self._unwritten.append(turn)
        async with self._writing:
            if turn in self._unwritten:  # An earlier call may have written this entry together with its own.
                batch = [*self._unwritten]
                await self._disk.write(self._run_dir.task_directory, functools.partial(self._append, batch))
                # The entries are removed only after the write, because the row of this call may be cancelled
                # during the write.
                del self._unwritten[: len(batch)]

    def ended(self, rows: BitMap64) -> None:
        """Delete the segments (journal files) whose rows are all in part files now.

        The newest segment is kept, because it is still open for further answers. `rows` are the rows of a new
        part file. Raises OSError if a segment cannot be deleted.
        """
        with self._lock:
            for path in [*self._segments]:
                self._segments[path] -= rows
                if not self._segments[path] and (self._journal is None or path != self._journal.path):
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def close(self) -> None:
        """Write the answers that are not on disk yet, and close the newest segment (journal file)."""
        # Answers that cannot be written are only generated again by the next attempt.
        with contextlib.suppress(OSError):
            if self._unwritten:
                self._append(self._unwritten)
        with self._lock:
            self._end_segment()

    def _append(self, turns: list[tuple[int, str | None]]) -> None:
        """Append entries to the newest segment (journal file), or to a new one if the newest is full.

        Raises OSError if they cannot be written.
        """
        rows, texts = zip(*turns, strict=True)
        table = pa.table([rows, texts], schema=_SCHEMA)
        with self._lock:
            if self._journal is None or self._bytes > SEGMENT_BYTES:
                self._end_segment()
                make_directory(self._run_dir.task_directory)
                # The token keeps this name apart from that of a process which held the task before.
                path = self._run_dir.task_directory / f"{SEGMENT}{self._next_number:06d}-{self._token}"
                self._journal = Journal(path)
                self._bytes = 0
                self._next_number += 1
                self._segments[path] = BitMap64()
            self._segments[self._journal.path] |= BitMap64(rows)
            self._journal.append(table)
            self._bytes += table.nbytes

    def _end_segment(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.close()
            self._journal = None
