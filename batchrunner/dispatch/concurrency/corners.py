"""In which corner a scheduler is, by its `#queue-req` and its token usage, and what its window may do. Pure.

| `#queue-req` | token usage | corner | the window |
| --- | --- | --- | --- |
| 0 | < 0.9 | `short`: it can run more than it is sent | doubles |
| 0 | ≥ 0.9 | `full`: the KV pool is full, and the queue is not short | aims at the lower end of the band |
| > 0 | ≥ 0.9 | `good` | follows the queue |
| any | rises to 1 | `filling`: rows grow, and soon they will not fit | is what the pool has room for |
| in the band | < 0.9 for 60 s | `held`: fewer run than may, the server holds back | follows the queue |

`filling.py` says when the pool fills, and how many rows it has room for.

A corner is told (event log, display) once it has lasted TOLD_AFTER_S; `held` begins after HELD_AFTER_S. A
scheduler with a queue and an unused pool is in no corner before that, nor is one whose window is not in use.
"""

from dataclasses import dataclass

from batchrunner.core.engine_info import Corner, QueueBand
from batchrunner.dispatch.concurrency.filling import Filling
from batchrunner.dispatch.concurrency.reading import Reading

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
        self._filling = Filling()
        self._held_since: float | None = None
        self._since = 0.0

    def sample(self, now: float, seen: Reading, *, in_use: bool) -> CornerChange | None:
        """Use a fresh sample; return the corner if it is news.

        Where the window is not `in_use`, the input is slow or at its end, and there is no corner.
        """
        self._filling.sample(now, seen)
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

    def ended(self) -> None:
        """Record a row that ended."""
        self._filling.ended()

    def retracted(self, now: float) -> None:
        """Record that it was retracted before."""
        self._filling.retracted(now)

    @property
    def may_double(self) -> bool:
        """Whether the window may double, where the queue is short."""
        return self.now not in {Corner.FULL, Corner.FILLING}

    def most(self, seen: Reading) -> int | None:
        """Return how many rows may be in flight by the tokens that they will need; None for no such limit."""
        if self.now is not Corner.FILLING or seen.fits is None:
            return None
        return self._filling.most(seen)

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
        if self._filling.lasts(now):
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
                return f"{usage}, {self._filling.why}: rows are sent by the tokens that they need{fits}"
            case Corner.HELD:
                least = f"{queue}, {usage}, {seen.running} running for {HELD_AFTER_S:.0f} s"
                return f"{least}: the server admits too few, sending more cannot help"
