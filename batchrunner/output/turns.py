"""Answers of rollouts that have not ended, on disk: what a killed run need not ask again.

They are appended to segments, journals in the task's directory. A segment but the newest is deleted when all
its rows are in parts, so that the disk holds about the answers of the rows that are open.
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
"""Bytes of answers after which another segment begins."""
_SCHEMA = pa.schema({"row": pa.int64(), "turn": pa.string()})
"""Columns of a segment. `turn` is JSON: a TurnKey, how often the request was sent, its error, and its
Completion; null where the row failed, or starts anew."""
TurnKey: TypeAlias = tuple[str, int]
"""What a rollout asks: the digest of the request, and how often it has asked that."""


@dataclass(eq=False)
class TurnStore:
    """The answers of a task's open rollouts: its own, and those that earlier attempts and tasks left."""

    _run_dir: RunDir
    _token: str
    """That of the task's lock."""
    _disk: DiskWait

    def __post_init__(self) -> None:
        """Write nothing yet."""
        self._segments: dict[Path, BitMap64] = {}
        """Rows that have answers in a segment of this attempt and are in no part."""
        self._left: dict[int, list[str]] = defaultdict(list)
        self._new: list[tuple[int, str | None]] = []
        """Turns that are not on disk yet."""
        self._writing = asyncio.Lock()
        self._journal: Journal | None = None
        self._bytes = self._next = 0
        self._lock = threading.Lock()  # parts are written in another thread

    def load(self, lease: Lease) -> None:
        """Read what was left of the rows of a lease; blocks. Raises StorageError."""
        if not lease.turn and self._run_dir.task != MAIN_TASK:  # nobody had it
            return
        segments = self._run_dir.tasks.glob(f"*/{SEGMENT}*")
        for path in sorted(segments, key=lambda path: path.name):  # what is written later has higher numbers
            self._next = max(self._next, 1 + int(path.name.split("-")[1]))
            with writing(path), contextlib.suppress(FileNotFoundError):  # its task may delete it now
                for table in read_journal(path):
                    for row, turn in zip(*table.to_pydict().values(), strict=True):
                        if turn is None:
                            self._left.pop(row, None)
                        elif row in lease.rows:
                            self._left[row].append(turn)

    def take(self, ref: RowRef) -> dict[TurnKey, Outcome]:
        """Return what was left of a row, once."""
        found = {}
        for turn in self._left.pop(ref.row, ()):
            digest, number, attempts, error, answer = json.loads(turn)
            found[digest, number] = Outcome(ref, answer and Completion(*answer), error, None, attempts)
        return found

    async def put(self, key: TurnKey, outcome: Outcome) -> None:
        """Store an answer; once this returns it survives a power failure. Raises StorageError."""
        answer = outcome.completion and [*outcome.completion[:-1], dict(outcome.completion.columns)]
        turn = json.dumps([*key, outcome.attempts, outcome.error, answer])
        await self._put((outcome.ref.row, turn))

    async def drop(self, row: int) -> None:
        """Forget the answers of a row, which is done anew if it is done again. Raises StorageError."""
        await self._put((row, None))

    async def _put(self, new: tuple[int, str | None]) -> None:
        self._new.append(new)
        async with self._writing:  # what came during the last write is written together
            if new in self._new:
                some = [*self._new]
                await self._disk.write(self._run_dir.task_directory, functools.partial(self._append, some))
                del self._new[: len(some)]  # not before: the row that waits here may end

    def ended(self, rows: BitMap64) -> None:
        """Delete the segments whose last rows are in parts now, but for the newest one. Raises OSError."""
        with self._lock:
            for path in [*self._segments]:
                self._segments[path] -= rows
                if not self._segments[path] and (self._journal is None or path != self._journal.path):
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def close(self) -> None:
        """Write what came last, and close the file."""
        with contextlib.suppress(OSError):
            if self._new:
                self._append(self._new)
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
