"""Whether a scheduler's KV pool fills up, and how many rows it may have meanwhile. Pure.

**The sign.** Token usage is near 1, and is 1 within a quarter of a row's life if it goes on rising as in the
last seconds. Rows that are retracted are a sign too, but a late one: the engine tells it when the row ends.

**The limit.** Rows that began together grow together: they take the whole pool at once, some are retracted,
the scheduler then admits few rows, and soon many together, which is the next wave. Two things damp it:

- No more rows are in flight than ROOM of those that the pool holds on average (`row_tokens.py`).
- Rows begin at an even pace: of those that do not run yet, no more are in flight than begin in one
  sampling period, PACE times as fast as the pool can take them in the long run.

It lasts for GUARD lives of a row after the last sign, as the next rows would do the same, or until token
usage is under EASED.

Source: "Past-Future Scheduler" (Gong et al., ASPLOS 2025), which admits by the lengths of past outputs; here
without a look into the running rows, whose progress a client does not see.
"""

import math

from batchrunner.dispatch.concurrency.reading import Reading

NEAR = 0.8
"""Token usage from which a rise counts."""
EASED = 0.4
"""Token usage below which the pool does not fill any more."""
AHEAD = 0.25
"""Share of a row's life over which a rise of token usage is carried on."""
SHORTEST_AHEAD_S, LONGEST_AHEAD_S = 2.0, 10.0
"""Bounds of that time, in seconds: a sample may be seconds old, and a rise does not last."""
RISE_HALF_LIFE_S = 2.0
"""Half-life of the average of the speed at which token usage rises, in seconds."""
SHORTEST_LIFE_S, LONGEST_LIFE_S = 4.0, 600.0
"""Bounds of a row's life in the scheduler, in seconds: requests that run / rows that end a second."""
LEAST_HALF_LIFE_S = 20.0
"""Half-life of the averages that a row's life is made of, in seconds; it is that life if that is longer, but
no longer than the scheduler is known: before the first rows end, a life looks endless."""
ROOM = 0.9
"""Rows in flight, as a share of those that the pool holds on average: some are longer, or older."""
PACE = 1.3
"""Speed at which rows begin, in relation to what the pool can take in the long run: at 1, a time in which few
began would never be made up for."""
GUARD = 2.0
"""Lives of a row for which the pool counts as filling after the last sign of it."""
OFTEN = 0.02
"""Share of the rows that were retracted, among some hundred that ended, from which that is a sign."""
ROWS_COUNTED = 100


class Filling:
    """Follows the token usage of one scheduler. Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self.why = ""
        """The last sign that the pool fills, in words."""
        self._began: float | None = None
        self._last: tuple[float, float] | None = None
        self._rise = 0.0
        self._gap_s = 0.0
        self._life_s = 0.0
        self._running = 0.0
        self._rate = 0.0
        self._retracted = 0.0
        self._until = float("-inf")

    def sample(self, now: float, seen: Reading) -> None:
        """Use a fresh sample."""
        last, self._last = self._last, (now, seen.usage)
        if last is None or self._began is None or now <= last[0]:
            self._began = now
            self._running, self._rate = float(seen.running), seen.rate
            return
        gap_s = now - last[0]
        self._gap_s = (self._gap_s + gap_s) / 2 if self._gap_s else gap_s
        self._rise += _weight(gap_s, RISE_HALF_LIFE_S) * ((seen.usage - last[1]) / gap_s - self._rise)
        known_s = min(self._life_s, now - self._began)
        weight = _weight(gap_s, max(known_s, LEAST_HALF_LIFE_S))
        self._running += weight * (seen.running - self._running)
        self._rate += weight * (seen.rate - self._rate)
        if self._rate > 0:
            self._life_s = min(max(self._running / self._rate, SHORTEST_LIFE_S), LONGEST_LIFE_S)
        ahead_s = min(max(AHEAD * self._life_s, SHORTEST_AHEAD_S), LONGEST_AHEAD_S)
        if seen.usage < EASED:
            self._until = now
        elif seen.usage >= NEAR and seen.usage + self._rise * ahead_s >= 1:
            self._guard(now, f"which will be 1 in {ahead_s:.0f} s if it rises on")

    def ended(self) -> None:
        """Record a row that ended."""
        self._retracted -= self._retracted / ROWS_COUNTED

    def retracted(self, now: float) -> None:
        """Record that it was retracted before."""
        self._retracted += 1 / ROWS_COUNTED
        if self._retracted >= OFTEN:
            self._guard(now, "and rows were retracted")

    def lasts(self, now: float) -> bool:
        """Tell whether the pool fills now, or did so a few lives of a row ago."""
        return now < self._until

    def most(self, seen: Reading) -> int | None:
        """Return how many rows may be in flight while the pool fills; None where that is not known."""
        if seen.fits is None or not self._life_s:
            return None
        rows = ROOM * seen.fits
        begin = PACE * rows / self._life_s * self._gap_s
        return max(1, round(min(rows, seen.running + max(1.0, begin))))

    def _guard(self, now: float, why: str) -> None:
        self._until = now + GUARD * max(self._life_s, SHORTEST_LIFE_S)
        self.why = why


def _weight(gap_s: float, half_life_s: float) -> float:
    return 1 - math.exp2(-gap_s / half_life_s)
