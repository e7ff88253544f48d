"""Durable answers of unfinished rollouts, so that a killed run need not generate them again.

They are appended to segments, which are journals in the task's directory. Any segment but the newest is
deleted when all its rows are in parts, so the disk holds little more than the answers of open rollouts.
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
"""Bytes of answers after which a new segment begins."""
_SCHEMA = pa.schema({"row": pa.int64(), "turn": pa.string()})
"""Columns of a segment. `turn` is JSON: a TurnKey, the number of attempts, the error, and the Completion. A
null voids the earlier turns of the row, because the row failed or starts anew."""
TurnKey: TypeAlias = tuple[str, int]
"""A request of a rollout: its digest, and how many equal requests the rollout has sent before it."""


@dataclass(eq=False)
class TurnStore:
    """The answers of a task's open rollouts, those of earlier attempts and other tasks included."""

    _run_dir: RunDir
    _token: str
    """Token of the task's lock."""
    _disk: DiskWait

    def __post_init__(self) -> None:
        """Begin without turns, and write nothing yet."""
        self._segments: dict[Path, BitMap64] = {}
        """Segments of this attempt, each with its rows that are in no part yet."""
        self._recovered: dict[int, list[str]] = defaultdict(list)
        """Turns that earlier attempts and other tasks have written, by row."""
        self._unwritten: list[tuple[int, str | None]] = []
        """Turns that are not on disk yet."""
        self._writing = asyncio.Lock()
        self._journal: Journal | None = None
        self._bytes = self._next = 0
        self._lock = threading.Lock()  # parts are written in another thread

    def load(self, lease: Lease) -> None:
        """Recover the turns of the rows of a lease; blocks. Raises StorageError."""
        if not lease.turn and self._run_dir.task != MAIN_TASK:  # no task has held this lease before
            return
        segments = self._run_dir.tasks.glob(f"*/{SEGMENT}*")
        for path in sorted(segments, key=lambda path: path.name):  # later segments have higher numbers
            self._next = max(self._next, 1 + int(path.name.split("-")[1]))
            with writing(path), contextlib.suppress(FileNotFoundError):  # its task may delete it now
                for table in read_journal(path):
                    for row, turn in zip(*table.to_pydict().values(), strict=True):
                        if turn is None:
                            self._recovered.pop(row, None)
                        elif row in lease.rows:
                            self._recovered[row].append(turn)

    def take(self, ref: RowRef) -> dict[TurnKey, Outcome]:
        """Return the recovered answers of a row, and forget them."""
        answers = {}
        for turn in self._recovered.pop(ref.row, ()):
            digest, number, attempts, error, values = json.loads(turn)
            completion = values and Completion(*values)
            answers[digest, number] = Outcome(
                ref, completion=completion, error=error, latency_s=None, attempts=attempts
            )
        return answers

    async def put(self, key: TurnKey, outcome: Outcome) -> None:
        """Store an answer, which survives a power failure once this returns. Raises StorageError."""
        values = outcome.completion and [*outcome.completion[:-1], dict(outcome.completion.columns)]
        turn = json.dumps([*key, outcome.attempts, outcome.error, values])
        await self._put((outcome.ref.row, turn))

    async def drop(self, row: int) -> None:
        """Make a later attempt at this row start anew, without its answers. Raises StorageError."""
        await self._put((row, None))

    async def _put(self, turn: tuple[int, str | None]) -> None:
        self._unwritten.append(turn)
        async with self._writing:  # turns that came during the last write are written together
            if turn in self._unwritten:
                batch = [*self._unwritten]
                await self._disk.write(self._run_dir.task_directory, functools.partial(self._append, batch))
                del self._unwritten[: len(batch)]  # not before: a cancelled row cancels its write

    def ended(self, rows: BitMap64) -> None:
        """Delete the segments whose last rows are now in parts, except the newest. Raises OSError."""
        with self._lock:
            for path in [*self._segments]:
                self._segments[path] -= rows
                if not self._segments[path] and (self._journal is None or path != self._journal.path):
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def close(self) -> None:
        """Write the remaining turns, and close the file."""
        with contextlib.suppress(OSError):
            if self._unwritten:
                self._append(self._unwritten)
        with self._lock:
            self._end_segment()

    def _append(self, turns: list[tuple[int, str | None]]) -> None:
        rows, texts = zip(*turns, strict=True)
        table = pa.table([rows, texts], schema=_SCHEMA)
        with self._lock:
            if self._journal is None or self._bytes > SEGMENT_BYTES:
                self._end_segment()
                make_directory(self._run_dir.task_directory)
                path = self._run_dir.task_directory / f"{SEGMENT}{self._next:06d}-{self._token}"
                self._journal, self._bytes, self._next = Journal(path), 0, self._next + 1
                self._segments[path] = BitMap64()
            self._segments[self._journal.path] |= BitMap64(rows)
            self._journal.append(table)
            self._bytes += table.nbytes

    def _end_segment(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.close()
            self._journal = None
