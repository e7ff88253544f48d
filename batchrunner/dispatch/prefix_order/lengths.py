"""How long an output will be: what the job allows, and what rows that begin alike have had."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrunner.dispatch.pending_row import PendingRow

MOST_KINDS = 1024
LEAST_ROWS = 8
"""Below, a kind's average says little."""


class OutputLengths:
    """A running average of the output tokens of each kind of rows."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}  # rows and tokens

    def saw(self, work: PendingRow, tokens: int) -> None:
        """Take note of an output."""
        rows, sum_ = self._sums.get(work.kind, (0, 0))
        if rows or len(self._sums) < MOST_KINDS:
            self._sums[work.kind] = rows + 1, sum_ + tokens

    def expected(self, work: PendingRow) -> float:
        """Return the tokens that a row's output will have; what is not known is the same for all."""
        most = work.request.sampling["max_new_tokens"]
        if work.request.sampling.get("ignore_eos"):
            return float(most)
        rows, tokens = self._sums.get(work.kind, (0, 0))
        return min(most, tokens / rows) if rows >= LEAST_ROWS else float(most)
