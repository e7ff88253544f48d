"""Sets of rows, by their ordinals: a stretch of one, one as text, one from a column."""

from __future__ import annotations

import base64
from array import array

import pyarrow as pa
from pyroaring import BitMap64


def between(rows: BitMap64, start: int, stop: int) -> BitMap64:
    """Return those of the rows that are at `start` or behind it, and before `stop`."""
    found = BitMap64()
    found.add_range(start, stop)
    return found & rows


def to_text(rows: BitMap64) -> str:
    """Write rows as text for a JSON file: some bytes for a stretch, two and a half for a row by itself."""
    rows = rows.copy()
    rows.run_optimize()
    return base64.b85encode(rows.serialize()).decode()


def from_text(text: str) -> BitMap64:
    """Read what `to_text` wrote."""
    return BitMap64.deserialize(base64.b85decode(text))


def from_column(rows: pa.ChunkedArray) -> BitMap64:
    """Take the numbers as they lie in memory: as Python's they would need five times as much."""
    numbers = array("Q")
    for chunk in filter(len, rows.cast(pa.uint64()).chunks):
        numbers.frombytes(chunk.buffers()[1].slice(8 * chunk.offset, 8 * len(chunk)))
    return BitMap64(numbers)
