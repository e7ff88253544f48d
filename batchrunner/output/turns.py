"""Answers of rollouts that have not ended, on disk: what a killed run need not ask again.

They are appended to segments, journals in the task's directory. A segment is deleted when all its rows are in
parts, so that the disk holds about the answers of the rows that are open.
"""

import asyncio
import contextlib
import functools
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.types import Completion, rows_of_column
from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.files import make_directory
from batchrunner.output.parts import Journal, read_journal
from batchrunner.output.run_dir import SEGMENT
from batchrunner.output.writer import DiskWait

SEGMENT_BYTES = 64 << 20
"""Bytes of answers after which another segment begins."""
_TYPES = {"row": pa.int64(), "digest": pa.binary(), "number": pa.int32(), "turn": pa.string()}
"""Columns of a segment; `turn` is JSON: how often the request was sent, and a Completion."""
TurnKey: TypeAlias = tuple[bytes, int]
"""What a rollout asks: the digest of the request, and how often it has asked that."""


class TurnStore:
    """The answers of the open rollouts of a task: those that earlier attempts left, and its own."""

    def __init__(self, directory: Path, token: str, disk: DiskWait) -> None:
        """Write into the task's directory; `token` is that of its lock, `disk` repeats what fails."""
        self._directory, self._token, self._disk = directory, token, disk
        self._segments: dict[Path, BitMap64] = {}
        """Rows that have answers in a segment and are in no part."""
        self._left: dict[int, dict[TurnKey, str]] = defaultdict(dict)
        self._new: list[tuple[int, bytes, int, str]] = []
        self._writing = asyncio.Lock()
        self._journal: Journal | None = None
        self._bytes = self._next = 0
        self._lock = threading.Lock()  # parts are written in another thread

    def load(self, directory: Path, wanted: Callable[[BitMap64], BitMap64]) -> None:
        """Read what earlier attempts left in a directory, of the rows that are `wanted` of some; blocks."""
        for path in sorted(directory.glob(f"{SEGMENT}*")):
            self._next = max(self._next, 1 + int(path.name.split("-")[1]))
            for table in read_journal(path):
                rows = wanted(rows_of_column(table.column("row")))
                self._segments[path] = self._segments.get(path, BitMap64()) | rows
                for turn in table.to_pylist():
                    if turn["row"] in rows:
                        self._left[turn["row"]][turn["digest"], turn["number"]] = turn["turn"]
        self.ended(BitMap64())

    def take(self, row: int) -> dict[TurnKey, tuple[Completion, int]]:
        """Return what earlier attempts left of a row, once: answers, and how often each request was sent."""
        found = {}
        for key, turn in self._left.pop(row, {}).items():
            attempts, *values = json.loads(turn)
            found[key] = Completion(*values), attempts
        return found

    async def put(self, row: int, key: TurnKey, completion: Completion, attempts: int) -> None:
        """Store an answer; once this returns it survives a power failure. Raises StorageError."""
        turn = json.dumps([attempts, *completion[:-1], dict(completion.columns)])
        self._new.append(new := (row, *key, turn))
        async with self._writing:  # what came during the last write is written together
            if new in self._new:
                some, self._new = self._new, []
                await self._disk.write(self._directory, functools.partial(self._append, some))

    def ended(self, rows: BitMap64) -> None:
        """Delete the segments whose last rows are in parts now. Raises OSError."""
        with self._lock:
            for path, left in [*self._segments.items()]:
                self._segments[path] = left - rows
                if not left - rows:
                    if self._journal is not None and self._journal.path == path:
                        self._end_segment()
                    path.unlink(missing_ok=True)
                    del self._segments[path]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._end_segment()

    def _append(self, turns: list[tuple[int, bytes, int, str]]) -> None:
        columns = dict(zip(_TYPES, zip(*turns, strict=True), strict=True))
        table = pa.table({name: arrow_array(columns[name], kind) for name, kind in _TYPES.items()})
        with self._lock:
            if self._journal is None or self._bytes > SEGMENT_BYTES:
                self._end_segment()
                make_directory(self._directory)
                path = self._directory / f"{SEGMENT}{self._next:06d}-{self._token}"
                self._journal, self._bytes, self._next = Journal(path), 0, self._next + 1
                self._segments[path] = BitMap64()
            self._segments[self._journal.path] |= BitMap64(columns["row"])
            self._journal.append(table)
            self._bytes += table.nbytes

    def _end_segment(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.close()
            self._journal = None
