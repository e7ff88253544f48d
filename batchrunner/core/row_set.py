"""Sets of row ordinals (compressed bitmaps): conversions from and to other forms."""

import base64
from array import array

import pyarrow as pa
from pyroaring import BitMap64


def to_text(rows: BitMap64) -> str:
    """Return rows as base-85 text for a JSON file: a few bytes per consecutive range, 2.5 per single row."""
    rows = rows.copy()
    rows.run_optimize()
    return base64.b85encode(rows.serialize()).decode()


def from_text(text: str) -> BitMap64:
    """Return the rows that `to_text` encoded."""
    return BitMap64.deserialize(base64.b85decode(text))


def from_column(rows: pa.ChunkedArray) -> BitMap64:
    """Return the rows in a column of whole numbers without nulls.

    The numbers are copied from Arrow's memory; as Python integers they would take five times as much.
    """
    numbers = array("Q")
    for chunk in filter(len, rows.cast(pa.uint64()).chunks):
        numbers.frombytes(chunk.buffers()[1].slice(8 * chunk.offset, 8 * len(chunk)))
    return BitMap64(numbers)
