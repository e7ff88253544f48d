"""The size of a bundle: how many rows share a request, by the rows that end together. Pure: no clock."""

from batchrunner.core.types import Request

MOST_ROWS = 64
"""Most rows of a bundle. SGLang's front process wakes all waiting rows of a request at each event, so its
cost grows with the square of their number; from 16 rows on, more save little."""
MOST_TOKENS = 1 << 15
"""Prompt tokens from which on a bundle is full: the server reads its JSON while it does nothing else."""
LEAST_ROWS_S = 25.0
"""Rows that must end in a second for bundles: below, the front process has little to do."""
FIRST_ROWS = 16
"""Size before a period is over, where answers are short; else 1."""
SHORT_TOKENS = 16
"""Most tokens of a short answer."""
PERIOD_S = 0.25
"""Seconds over which the rows that end are counted."""
SHARE = 4
"""A bundle has 1/4 of a replica's rows in flight at most: a larger one would wait for rows just begun."""


class BundleSize:
    """The size for one route: the rows that end while a bundle may wait until it is full.

    An engine ends many rows in one step and then none for a while. So the rows are counted in bursts, each as
    long as a bundle may wait, and the size is that of the burst in which the average row ended.
    """

    def __init__(
        self, fill_s: float, fixed: int | None = None, *, short: bool = False, replicas: int = 1
    ) -> None:
        """Let a bundle wait for `fill_s` seconds at most; `fixed` rows are the size in any case.

        Tell whether answers are known to be `short`, and how many `replicas` share the route's rows.
        """
        self.most_tokens = MOST_TOKENS
        """Prompt tokens that a bundle holds at most, unless one row has more."""
        self._fill_s = fill_s
        self._fixed = fixed
        self._parts = SHARE * replicas
        self._rows = FIRST_ROWS if short else 1
        self._since: float | None = None  # begin of the period
        self._burst_began = 0.0
        self._burst = 0
        self._ended = 0  # rows of the bursts in this period that are over
        self._squares = 0  # sum of the squares of these bursts

    def taken(self, request: Request) -> None:
        """Do nothing: how long the prompts are does not matter."""

    def ended(self, now: float) -> None:
        """Count a row that ended `now`, in seconds of the monotonic clock."""
        if self._since is None:
            self._since = self._burst_began = now
        if now - self._burst_began > self._fill_s:
            self._ended += self._burst
            self._squares += self._burst * self._burst
            self._burst_began, self._burst = now, 0
            self._end_period(now, now - self._since)
        self._burst += 1

    def rows(self, outstanding: int) -> int:
        """Return the size while so many rows are in flight or wait for their bundle; 0 and 1 are one row."""
        if self._fixed is not None:
            return self._fixed
        return min(self._rows, outstanding // self._parts)

    def _end_period(self, now: float, span_s: float) -> None:
        if span_s >= PERIOD_S:
            is_fast = self._ended >= LEAST_ROWS_S * span_s
            self._rows = min(MOST_ROWS, self._squares // self._ended) if is_fast else 1
            self._since, self._ended, self._squares = now, 0, 0
