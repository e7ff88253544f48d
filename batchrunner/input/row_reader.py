"""Reads the rows of a run in the order in which they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchrunner.input.dataset import DatasetReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyroaring import BitMap64

    from batchrunner.input.dataset import Dataset, RowBatch


class RowReader(Protocol):
    """Reads rows in one order: that of the input, or that of a sorted copy.

    A position is the index of a row in that order, counted from 0; in input order it is the ordinal.
    """

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows, a bounded batch at a time; raises InputError.

        All of them lie at these positions; None means anywhere.
        """

    def close(self) -> None:
        """Close open files."""


class InputOrderReader:
    """Reads rows in input order."""

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._reader = DatasetReader(dataset, columns)

    def read(self, rows: BitMap64, positions: range | None = None) -> Iterator[RowBatch]:
        """Yield the rows; the row groups that hold them are found without `positions`."""
        del positions
        return self._reader.read(rows)

    def close(self) -> None:
        """Close the open file."""
        self._reader.close()
