"""What reads rows in the order in which they are sent, and the batches in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyroaring import BitMap64


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some of the rows that were asked for."""

    rows: list[int]
    """Ordinals."""
    data: pa.RecordBatch
    """Columns of these rows, in the same order."""


class RowReader(Protocol):
    """Reads rows in the order in which they are sent: DatasetReader in input order, SortedCopy in its own.

    A position is the index of a row in that order, counted from 0; in input order it is the ordinal.
    """

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows, a bounded batch at a time; raises InputError.

        All of them lie at these positions; None means anywhere.
        """

    def close(self) -> None:
        """Close open files."""
