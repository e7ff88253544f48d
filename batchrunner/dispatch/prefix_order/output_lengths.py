"""Expected output lengths: what the job allows, and what rows with the same template have had. Pure."""

from batchrunner.dispatch.pending_row import PendingRow

MOST_TEMPLATES = 1024
"""Templates whose averages are kept."""
FEWEST_ROWS = 8
"""Rows that an average needs before it is used."""


class OutputLengths:
    """A running average of the output tokens of each template's rows."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}  # rows and tokens

    def record(self, row: PendingRow, tokens: int) -> None:
        """Add the output tokens of an answered row."""
        rows, sum_ = self._sums.get(row.template, (0, 0))
        if rows or len(self._sums) < MOST_TEMPLATES:
            self._sums[row.template] = rows + 1, sum_ + tokens

    def expected(self, row: PendingRow) -> float:
        """Return the output tokens that a row is expected to have, `max_new_tokens` at most."""
        most = row.request.sampling["max_new_tokens"]
        if row.request.sampling.get("ignore_eos"):
            return float(most)
        rows, tokens = self._sums.get(row.template, (0, 0))
        return min(most, tokens / rows) if rows >= FEWEST_ROWS else float(most)
