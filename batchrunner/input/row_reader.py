"""The protocol of what reads the rows of a run in the order in which they are sent."""

from collections.abc import Iterator
from typing import Protocol

from pyroaring import BitMap64

from batchrunner.input.dataset import RowBatch


class RowReader(Protocol):
    """Reads rows in one order: DatasetReader in input order, SortedCopy in that of a sorted copy.

    A position is the index of a row in that order, counted from 0; in input order it is the ordinal.
    """

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows, a bounded batch at a time; raises InputError.

        All of them lie at these positions; None means anywhere.
        """

    def close(self) -> None:
        """Close open files."""
