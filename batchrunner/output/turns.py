"""Answers of rollouts that have not ended, on disk: what a killed run need not ask again.

They are appended to segments, journals of the task's directory. A segment is deleted when all its rows are in
parts, so that the disk holds about the turns of the rows that are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.output.arrow_arrays import arrow_array
from batchrunner.output.parts import Journal, read_journal
from batchrunner.output.run_dir import SEGMENT
from batchrunner.output.writer import DiskWait

SEGMENT_BYTES = 64 << 20
"""Bytes of turns after which another segment begins."""
_SCHEMA = pa.schema(
    [("row", pa.int64()), ("digest", pa.binary()), ("number", pa.int32()), ("turn", pa.string())]
)
TurnKey = tuple[bytes, int]
"""What a rollout asks: the digest of the request, and how often it asked that."""


class _Turn(NamedTuple):
    row: int
    digest: bytes | None
    """None where the row starts anew: its turns before this one do not count."""
    number: int
    turn: str | None


class TurnStore:
    """The turns of the open rollouts of a task: those that earlier attempts left, and its own."""

    def __init__(self, directory: Path, token: str, disk: DiskWait) -> None:
        """Write into the task's directory; `token` is that of its lock, `disk` repeats what fails."""
        self._directory, self._token, self._disk = directory, token, disk
        self._segments: dict[Path, BitMap64] = {}
        """Rows that have turns in a segment and are in no part."""
        self._left: dict[int, dict[TurnKey, str]] = defaultdict(dict)
        self._new: list[_Turn] = []
        self._writing = asyncio.Lock()
        self._journal: Journal | None = None
        self._bytes = self._next = 0
        self._lock = threading.Lock()  # of the segments: parts are written in another thread

    def load(self, directory: Path, wanted: Callable[[BitMap64], BitMap64]) -> None:
        """Read what earlier attempts left in a directory, of the rows that are `wanted` of some; blocks."""
        for path in sorted(directory.glob(f"{SEGMENT}*")):
            tables = [*read_journal(path)]
            rows = wanted(BitMap64(row for table in tables for row in table.column("row").to_pylist()))
            for turn in (_Turn(**each) for table in tables for each in table.to_pylist()):
                if turn.digest is None or turn.turn is None:
                    self._left.pop(turn.row, None)
                elif turn.row in rows:
                    self._left[turn.row][turn.digest, turn.number] = turn.turn
            with self._lock:
                self._segments[path] = rows
            if path.parent == self._directory:
                self._next = max(self._next, 1 + int(path.name.split("-")[1]))
        self.ended(BitMap64())

    def take(self, row: int) -> dict[TurnKey, str]:
        """Return the turns that earlier attempts left of a row, once."""
        return self._left.pop(row, {})

    async def put(self, row: int, key: TurnKey, turn: str) -> None:
        """Store a turn; once this returns it survives a power failure. Raises StorageError."""
        await self._put(_Turn(row, *key, turn))

    async def forget(self, row: int) -> None:
        """Store that a row starts anew."""
        await self._put(_Turn(row, None, 0, None))

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

    async def _put(self, turn: _Turn) -> None:
        self._new.append(turn)
        async with self._writing:  # what came during the last write is written together
            if turn in self._new:
                some, self._new = self._new, []
                await self._disk.write(self._directory, lambda: self._append(some))

    def _append(self, turns: list[_Turn]) -> None:
        columns = zip(zip(*turns, strict=True), _SCHEMA, strict=True)
        arrays = [arrow_array(values, field.type) for values, field in columns]
        table = pa.Table.from_arrays(arrays, schema=_SCHEMA)
        with self._lock:
            if self._journal is None:
                path = self._directory / f"{SEGMENT}{self._next:06d}-{self._token}"
                self._journal, self._bytes = Journal(path), 0
                self._next += 1
            self._segments[self._journal.path] = self._segments.get(
                self._journal.path, BitMap64()
            ) | BitMap64(turn.row for turn in turns)
            self._journal.append(table)
            self._bytes += table.nbytes
            if self._bytes > SEGMENT_BYTES:
                self._end_segment()

    def _end_segment(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.close()
            self._journal = None
