"""Stores the answers of unfinished multi-turn rollouts, so that a killed run need not generate them again.

The answers are appended to journal files ("segments") in the task's directory. A segment is deleted once the
results of all its rows are in part files (Parquet files of results), except for the newest segment. So the
disk has little more than the answers of rollouts that have not ended.
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
"""Size in bytes at which a segment (a journal file of answers) is full and a new one begins."""
_SCHEMA = pa.schema({"row": pa.int64(), "turn": pa.string()})
"""Columns of a segment (a journal file of answers).

`turn` is an answer as JSON: its TurnKey, the number of attempts, the error, and the Completion. A null makes
the earlier answers of the row invalid, because the row failed or starts anew.
"""
TurnKey: TypeAlias = tuple[str, int]
"""Identity of a request in a rollout: its digest, and the number of equal requests before it."""


@dataclass(eq=False)
class TurnStore:
    """Answers of unfinished rollouts, from this and earlier attempts and from other workers."""

    _run_dir: RunDir
    _token: str
    """Random name of this process, a part of the names of the files."""
    _disk: DiskWait

    def __post_init__(self) -> None:
        """Begin without answers. No file is written before the first answer."""
        self._segments: dict[Path, BitMap64] = {}
        """Journal files of this attempt, each with its rows that are in no part file yet."""
        self._recovered: dict[int, list[str]] = defaultdict(list)
        """Answers that earlier attempts and other workers have written, by row, as JSON."""
        self._unwritten: list[tuple[int, str | None]] = []
        """Rows and answers (as JSON) that are not on disk yet."""
        self._writing = asyncio.Lock()
        self._journal: Journal | None = None
        """Newest journal file, to which answers are appended; None before the first answer."""
        self._bytes = 0
        """Size in bytes of the answers in the newest journal file."""
        self._next_number = 0
        """Number in the name of the next journal file."""
        # `ended` is called in another thread, the one that writes part files.
        self._lock = threading.Lock()

    def load(self, lease: Lease) -> None:
        """Read the stored answers of the rows of a lease (the rows that this worker reserved). Blocks.

        Raises StorageError if they cannot be read.
        """
        if not lease.turn and self._run_dir.task != MAIN_TASK:
            # No other worker has held these rows, so there are no answers. Only the main worker, whose run is
            # not shared, may have answers from an earlier attempt.
            return
        segments = self._run_dir.tasks.glob(f"*/{SEGMENT}*")
        # Later files have higher numbers, even from another worker. The order matters, because a null removes
        # the answers before it.
        for path in sorted(segments, key=lambda path: path.name):
            self._next_number = max(self._next_number, 1 + int(path.name.split("-")[1]))
            # The worker that wrote this file may delete it meanwhile.
            with writing(path), contextlib.suppress(FileNotFoundError):
                for table in read_journal(path):
                    for row, turn in zip(*table.to_pydict().values(), strict=True):
                        if turn is None:
                            self._recovered.pop(row, None)
                        elif row in lease.rows:
                            self._recovered[row].append(turn)

    def take(self, ref: RowRef) -> dict[TurnKey, Outcome]:
        """Remove the stored answers of a row, and return them by request."""
        answers = {}
        for turn in self._recovered.pop(ref.row, ()):
            digest, number, attempts, error, values = json.loads(turn)
            completion = values and Completion(*values)
            answers[digest, number] = Outcome(
                ref, completion=completion, error=error, latency_s=None, attempts=attempts
            )
        return answers

    async def put(self, key: TurnKey, outcome: Outcome) -> None:
        """Store an answer. Once this method has returned, it survives a power failure.

        Raises StorageError if the answer cannot be written within `limits.disk_wait`.
        """
        # JSON needs a dict for `columns`, the last field of the completion.
        values = outcome.completion and [*outcome.completion[:-1], dict(outcome.completion.columns)]
        turn = json.dumps([*key, outcome.attempts, outcome.error, values])
        await self._put((outcome.ref.row, turn))

    async def drop(self, row: int) -> None:
        """Make the stored answers of a row invalid, so that a later attempt starts the row anew.

        Raises StorageError if that cannot be written within `limits.disk_wait`.
        """
        await self._put((row, None))

    async def _put(self, turn: tuple[int, str | None]) -> None:
        """Write a row's answer (or None) to the newest journal file, and sync it.

        Answers that arrive during a write are then written together, with one sync.
        """
        self._unwritten.append(turn)
        async with self._writing:
            if turn in self._unwritten:  # An earlier call may have written this answer together with its own.
                batch = [*self._unwritten]
                await self._disk.write(self._run_dir.task_directory, functools.partial(self._append, batch))
                # The answers are removed only after the write, because this call may be cancelled meanwhile.
                del self._unwritten[: len(batch)]

    def ended(self, rows: BitMap64) -> None:
        """Delete the journal files whose rows are all in part files now, except for the newest file.

        `rows` are the rows of a new part file. Raises OSError if a file cannot be deleted.
        """
        with self._lock:
            for path in [*self._segments]:
                self._segments[path] -= rows
                if not self._segments[path] and (self._journal is None or path != self._journal.path):
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def close(self) -> None:
        """Write the answers that are not on disk yet, and close the newest journal file."""
        # If an answer cannot be written, the next attempt only has to generate it again.
        with contextlib.suppress(OSError):
            if self._unwritten:
                self._append(self._unwritten)
        with self._lock:
            self._end_segment()

    def _append(self, turns: list[tuple[int, str | None]]) -> None:
        """Append answers to the newest journal file, or to a new one if it is full.

        Raises OSError if they cannot be written.
        """
        rows, texts = zip(*turns, strict=True)
        table = pa.table([rows, texts], schema=_SCHEMA)
        with self._lock:
            if self._journal is None or self._bytes > SEGMENT_BYTES:
                self._end_segment()
                make_directory(self._run_dir.task_directory)
                # The token in the name distinguishes the file from those of the worker's earlier processes.
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
