"""Finds IDs that stand on several lines of a file, in bounded memory: checksums, sorted on disk."""

from __future__ import annotations

import tempfile
from array import array
from hashlib import blake2b
from pathlib import Path
from struct import Struct

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from batchrunner.output.buckets import Buckets

BUCKETS = 64
"""Parts that are sorted one after the other: of ten million IDs each has 4 MB."""
CHUNK_IDS = 1 << 17
"""IDs that are collected before they are handed on, 3 MB."""
_CHECKSUM = Struct("<qq")
"""A checksum of 128 bits as two numbers: among ten million IDs two have the same by chance in one of 10**24
files."""
_SPAN = (1 << 64) // BUCKETS
_ENDS = [number * _SPAN - (1 << 63) for number in range(1, BUCKETS)] + [1 << 63]


class UniqueIds:
    """The IDs of a file, each with its line."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="batchrunner-ids-")
        self._buckets = Buckets(Path(self._directory.name), "first", _ENDS)
        self._first, self._second, self._lines = array("q"), array("q"), array("q")

    def add(self, name: str, line: int) -> None:
        """Add an ID; lines come in ascending order. Raises OSError."""
        first, second = _CHECKSUM.unpack(blake2b(name.encode(), digest_size=16).digest())
        self._first.append(first)
        self._second.append(second)
        self._lines.append(line)
        if len(self._lines) >= CHUNK_IDS:
            self._hand_on()

    def repeated(self) -> BitMap64:
        """Return the lines whose ID an earlier line has, and delete the files. Raises OSError."""
        self._hand_on()
        lines = BitMap64()
        for table in self._buckets.take():
            lines |= _repeated_in(table)
        self.close()
        return lines

    def close(self) -> None:
        """Delete the files."""
        self._directory.cleanup()

    def _hand_on(self) -> None:
        columns = {"first": self._first, "second": self._second, "line": self._lines}
        if self._lines:
            arrays = [
                pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])
                for numbers in columns.values()
            ]
            self._buckets.put(pa.Table.from_arrays(arrays, names=list(columns)))
        self._first, self._second, self._lines = array("q"), array("q"), array("q")


def _repeated_in(table: pa.Table) -> BitMap64:
    """Return the lines of a bucket, which is sorted by `first`, whose ID an earlier line has."""
    firsts = table.column("first").combine_chunks()
    same = pc.equal(firsts.slice(1), firsts.slice(0, max(len(firsts) - 1, 0)))
    lines = BitMap64()
    if not pc.any(same).as_py():
        return lines
    seen: dict[tuple[int, int], int] = {}
    values = pc.unique(firsts.slice(1).filter(same))
    found = table.filter(pc.is_in(table.column("first"), value_set=values))
    for first, second, line in zip(
        *(found.column(name).to_pylist() for name in found.schema.names), strict=True
    ):
        before = seen.setdefault((first, second), line)
        if before != line:
            lines.add(max(before, line))
            seen[first, second] = min(before, line)
    return lines
