"""What one forward pass of a scheduler holds, where rows are answered without decoding. Pure: no clock.

A pass takes the rows that wait, in order, until it has its prompt tokens (`--max-prefill-tokens`, and
`--chunked-prefill-size` where rows may be cut) or `max_running_requests` rows. All of them end with it. So a
pass is the unit of work: a request holds up to one, and the queue of each scheduler the next one at least.
"""

from batchrunner.core.engine_info import LEAST_LOW, QueueBand

USUAL_TOKENS = 8192
"""Prompt tokens of a pass where the server does not tell: SGLang's chunk on cards of 80 GB."""
FIRST_ROW_TOKENS = 256
"""Tokens that a row is expected to have before any was sent."""
MEMORY_ROWS = 2000
"""Rows over which the average is taken: of older ones, less and less is left."""
DEEPEST = 8
"""Passes in the queue above which more rows in it only wait."""
FIRST_PASSES = 4
"""Passes in flight at first: one is computed, one waits, and one travels in each direction."""


class ForwardPasses:
    """The passes of an engine's schedulers, by the rows that were sent."""

    def __init__(self, tokens: int | None) -> None:
        """Take the most prompt `tokens` of a pass; None where the server does not tell them."""
        self.tokens = tokens or USUAL_TOKENS
        """Most prompt tokens of a pass."""
        self._row_tokens = float(FIRST_ROW_TOKENS)
        self._rows = 0

    def sent(self, tokens: int) -> None:
        """Count a row that is sent, with the tokens of its prompt."""
        self._rows += 1
        self._row_tokens += (tokens - self._row_tokens) / min(self._rows, MEMORY_ROWS)

    def rows(self, max_running: int | None) -> int:
        """Return the rows of a pass, for a scheduler that runs so many requests at once; 1 at least."""
        rows = max(1, round(self.tokens / max(1.0, self._row_tokens)))
        return rows if max_running is None else min(rows, max_running)

    def first_window(self, max_running: int | None) -> int:
        """Return how many rows a scheduler gets before its load is known."""
        return max(LEAST_LOW, FIRST_PASSES * self.rows(max_running))

    def band(self, max_running: int | None) -> QueueBand:
        """Return the healthy `#queue-req` of a scheduler: from the rows of one pass to those of several."""
        rows = self.rows(max_running)
        return QueueBand(
            max(LEAST_LOW, rows), DEEPEST * max(LEAST_LOW, rows), f"a forward pass takes about {rows} rows"
        )
