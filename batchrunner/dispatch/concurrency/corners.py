"""In which corner a scheduler is, by its `#queue-req` and its token usage, and what its window may do. Pure.

| `#queue-req` | token usage | corner | the window |
| --- | --- | --- | --- |
| 0 | < 0.9 | `short`: it can run more than it is sent | doubles |
| 0 | ≥ 0.9 | `full`: the KV pool is full, and the queue is not short | aims at the lower end of the band |
| > 0 | ≥ 0.9 | `good` | follows the queue |
| any | rises to 1 | `filling`: rows grow, and soon they will not fit | is what the pool has room for |
| in the band | < 0.9 for 60 s | `held`: fewer run than may, the server holds back | follows the queue |

`Filling` says when the pool fills, and how many rows it has room for.

A corner is told (event log, display) once it has lasted TOLD_AFTER_S; `held` begins after HELD_AFTER_S. A
scheduler with a queue and an unused pool is in no corner before that, nor is one whose window is not in use.
"""

import math
from dataclasses import dataclass

from batchrunner.core.engine_info import Corner, QueueBand


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a scheduler: its gauges, and what the client knows at the same moment."""

    running: int
    queue: int
    in_flight: int
    """This run's requests at the scheduler."""
    rate: float
    """Rows that end at the scheduler, per second."""
    burst: float = 0.0
    """Rows that ended in the fullest recent tenth of a second."""
    usage: float = 0.0
    """Token usage, the share of the KV pool in use."""
    max_running: int | None = None
    """Most requests that the scheduler runs at once; None where it does not say."""
    decodes: bool = True
    """Whether rows are answered by decoding; else a forward pass ends them, and token usage says nothing."""
    fits: float | None = None
    """Rows that the KV pool holds on average; None before enough of them have ended."""


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
    """Whether a scheduler's KV pool fills up, and how many rows it may have meanwhile.

    **The sign.** Token usage is near 1, and is 1 within a quarter of a row's life if it goes on rising as in
    the last seconds. Rows that are retracted are a sign too, but a late one: the engine tells it when the row
    ends.

    **The limit.** Rows that began together grow together: they take the whole pool at once, some are
    retracted, the scheduler then admits few rows, and soon many together, which is the next wave. So no more
    rows are in flight than ROOM of those that the pool holds on average, and rows begin at an even pace: of
    those that do not run yet, no more are in flight than begin in one sampling period, PACE times as fast as
    the pool can take them in the long run. It lasts for GUARD lives of a row after the last sign, or until
    token usage is under EASED.

    Source: "Past-Future Scheduler" (Gong et al., ASPLOS 2025), which admits by the lengths of past outputs;
    here without a look into the running rows, whose progress a client does not see. Times are seconds of any
    clock that does not go back.
    """

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
        self._ended = 0
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

    def retracted(self, now: float, ended: int) -> None:
        """Record the retraction of a row, the last of so many that `ended`."""
        self._retracted *= (1 - 1 / ROWS_COUNTED) ** (ended - self._ended)
        self._retracted += 1 / ROWS_COUNTED
        self._ended = ended
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


GOOD_USAGE = 0.9
"""Token usage from which the KV pool is well used (SGLang's tuning guides)."""
AT_CAP = 0.95
"""Running requests, as a share of `max_running_requests`, from which that is the limit."""
HELD_AFTER_S = 60.0
"""Seconds with a queue and an unused pool after which the server counts as holding back."""
TOLD_AFTER_S = 5.0
"""Seconds that a corner lasts before it is told."""


@dataclass(frozen=True, slots=True)
class CornerChange:
    """A corner that a scheduler came into, as the event log has it."""

    scheduler: str
    corner: str
    queue: int
    token_usage: float
    reason: str


class CornerWatch:
    """Follows one scheduler from corner to corner. Times are seconds of any clock that does not go back."""

    def __init__(self, scheduler: str, band: QueueBand) -> None:
        self.now: Corner | None = None
        """Corner of the newest sample; None where it is in none, or has not what it could have."""
        self.shown: Corner | None = None
        """Corner that has lasted long enough to be told; None once it has been in none for as long."""
        self._told: Corner | None = None
        self._scheduler = scheduler
        self._band = band
        self.filling = Filling()
        """Whether the KV pool fills up."""
        self._held_since: float | None = None
        self._since = 0.0

    def sample(self, now: float, seen: Reading, *, in_use: bool) -> CornerChange | None:
        """Use a fresh sample; return the corner if it is news.

        Where the window is not `in_use`, the input is slow or at its end, and there is no corner.
        """
        self.filling.sample(now, seen)
        corner = self._corner(now, seen) if in_use else None
        if not in_use:
            self._held_since = None
        if corner != self.now:
            self.now, self._since = corner, now
        lasts = corner is Corner.HELD or now - self._since >= TOLD_AFTER_S
        if lasts:
            self.shown = corner
        if corner is None or not lasts or corner is self._told:
            return None
        self._told = corner
        return CornerChange(
            self._scheduler, corner, seen.queue, round(seen.usage, 4), self._why(corner, seen)
        )

    @property
    def may_double(self) -> bool:
        """Whether the window may double, where the queue is short."""
        return self.now not in {Corner.FULL, Corner.FILLING}

    def most(self, seen: Reading) -> int | None:
        """Return how many rows may be in flight by the tokens that they will need; None for no such limit."""
        if self.now is not Corner.FILLING or seen.fits is None:
            return None
        return self.filling.most(seen)

    def _corner(self, now: float, seen: Reading) -> Corner | None:
        holds_back = (
            seen.decodes
            and seen.queue >= self._band.low
            and seen.usage < GOOD_USAGE
            and (seen.max_running is None or seen.running < AT_CAP * seen.max_running)
        )
        if not holds_back:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        elif now - self._held_since >= HELD_AFTER_S:
            return Corner.HELD
        if self.filling.lasts(now):
            return Corner.FILLING
        if seen.usage >= GOOD_USAGE:
            return Corner.GOOD if seen.queue else Corner.FULL
        return None if seen.queue else Corner.SHORT

    def _why(self, corner: Corner, seen: Reading) -> str:
        queue, usage = f"#queue-req {seen.queue}", f"token usage {seen.usage:.2f}"
        match corner:
            case Corner.SHORT:
                return f"{queue}, {usage}: more rows are sent"
            case Corner.FULL:
                return f"{queue}, {usage}: the pool is full, more rows in the queue cannot help"
            case Corner.GOOD:
                return f"{queue}, {usage}: as it should be"
            case Corner.FILLING:
                fits = "" if seen.fits is None else f", which holds {seen.fits:.0f} of the rows seen so far"
                return f"{usage}, {self.filling.why}: rows are sent by the tokens that they need{fits}"
            case Corner.HELD:
                least = f"{queue}, {usage}, {seen.running} running for {HELD_AFTER_S:.0f} s"
                return f"{least}: the server admits too few, sending more cannot help"
