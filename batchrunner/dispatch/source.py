"""What the dispatcher reads its rows from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyroaring import BitMap64

    from batchrunner.core.types import Outcome, Request


class Source(Protocol):
    """The rows that a start is to do."""

    @property
    def total(self) -> int:
        """How many they are, those included that earlier starts have done."""

    @property
    def unread(self) -> int:
        """How many are still to be read; with leases, about how many will be."""

    is_shared: bool
    """Whether other tasks could do them, now or later."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render them, a bounded batch at a time; blocks. An empty one: send those before it."""

    def landed(self, rows: BitMap64) -> None:
        """Take note of rows that are in a part; blocks."""

    def begin(self, tell: Callable[..., None], unfinished: Callable[[], int]) -> None:
        """Take note of whom to tell of events (name, values), and who counts unfinished rows."""

    def stop(self) -> None:
        """End `batches` soon, also where it waits."""

    def give_back(self) -> None:
        """Let others have what was not done; everything that was done has landed. Blocks."""
