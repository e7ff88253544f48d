"""What the feeder reads its rows from."""

from collections.abc import Iterator
from typing import Protocol

from batchrunner.core.types import Outcome, Request


class RowSource(Protocol):
    """The rows that this attempt does."""

    @property
    def unread(self) -> int:
        """Number of rows still to be read; with leases an estimate."""

    @property
    def is_shared(self) -> bool:
        """Whether other tasks could do these rows, now or later."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows, a bounded batch at a time; blocks.

        A row that cannot be rendered comes as an Outcome with its error. An empty batch asks to send what was
        read so far: the next batch may take a while.
        """
