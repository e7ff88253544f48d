"""What a trial shows: its speed once it is steady, the signs that say what limits it, when it cannot win.

Pure: ends of rows and readings of the load in, with their times; the same for a real engine and a simulated
one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from batchrunner.engines.logs.thresholds import Thresholds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import SchedulerLoad

LEAST_STEADY_S, MOST_STEADY_S = 10.0, 120.0
"""A trial is measured for so long: long beside a poll; no longer, however slow the rows are."""
GENERATIONS = 2
"""A generation is as many rows as run at once. One warms up (its rows began together), two are measured."""
LEAST_JUDGED_S = 5.0
"""Of steady time, and a generation, before a trial may be found to be behind."""
HOPELESS = 0.5
"""A trial that is not steady yet is behind when it has put out less than this share of what the best had."""
MOST_POINTS = 240
GUIDES = Thresholds()
"""Their numbers, as advice has them."""
AT_LIMIT = 0.9
"""The share of max-running-requests from which that is the limit, of a mean that has waves in it."""
EMPTY_OFTEN = 0.5

Ended = Literal["measured", "behind", "died", "cut"]
End = tuple[Ended, str]
"""How a trial ended, and why."""
Curve = tuple[tuple[float, int], ...]
"""(seconds since the first row was sent, output tokens of the rows that had ended)."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Means over steady time; None where nobody told."""

    running: float = 0.0
    max_running: int | None = None
    queue: float = 0.0
    empty_share: float = 1.0
    """Of the readings: nothing waited."""
    usage: float = 0.0
    pool_tokens: int | None = None
    retractions_per_min: float = 0.0
    cached_share: float = 0.0
    """Of the prompts' tokens: found in the cache."""
    prefill_limit: int | None = None
    """Tokens of prompts that a pass computes at most."""
    tokens_per_pass: float | None = None
    """Output tokens per forward pass: the scheduler's own count, free of noise."""
    prefill_per_pass: float | None = None
    """Tokens that a prefill pass computed."""
    graph_off_share: float | None = None
    """Of the decode passes: run without a captured graph, on a GPU that captured some."""
    spare_gb: float | None = None
    """`available_gpu_mem` when the server was ready."""
    mem_fraction: float | None = None
    attention_backend: str | None = None
    model: str | None = None
    """Its class."""

    @property
    def waits(self) -> bool:
        """Whether there was work waiting most of the time: else no flag of the scheduler can help."""
        return self.empty_share < EMPTY_OFTEN

    @property
    def at_limit(self) -> bool:
        """Whether max-running-requests is what limits; a row in its prefill is not in `running`."""
        return self.max_running is not None and self.running >= AT_LIMIT * self.max_running - 1

    @property
    def full(self) -> bool:
        """Whether the KV pool is."""
        return self.usage >= GUIDES.usage_good


@dataclass(frozen=True, slots=True)
class Result:
    """One trial."""

    ended: Ended
    """`behind`: stopped when it could not win; `cut`: for want of time, which says nothing of it."""
    why: str
    """In a sentence."""
    cost_s: float
    """Wall time with the launch."""
    tokens_per_s: float = 0.0
    """Output tokens a second in steady time; of a trial that was stopped, until then."""
    steady_s: float = 0.0
    failed_share: float = 0.0
    """Of the rows that ended."""
    signs: Signs = field(default_factory=Signs)
    curve: Curve = ()

    @property
    def is_speed(self) -> bool:
        """Whether it says how fast the setting is: it was measured, and rows were answered."""
        return self.ended == "measured" and self.tokens_per_s > 0


@dataclass(frozen=True, slots=True)
class Rival:
    """The best trial so far, which another has to beat."""

    curve: Curve
    margin: float
    """The share by which it has to be behind at the same moment to be given up: noise is less."""


class Moment(NamedTuple):
    """How far a trial had come."""

    at_s: float
    tokens: int
    rows: int
    log_bytes: int = 0
    """Size of the server's log, whose passes are those of the rows counted here."""


@dataclass(slots=True)
class TrialWatch:
    """Follows one trial; times are seconds since its first row was sent."""

    rival: Rival | None = None
    tokens: int = 0
    rows: int = 0
    _warm: Moment | None = None
    """When steady time began."""
    _busy: Moment | None = None
    """The last reading that showed work waiting."""
    _peak: int = 0
    _readings: list[SchedulerLoad] = field(default_factory=list)
    _curve: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _retractions: int = 0
    _prompt_tokens: int = 0
    _cached_tokens: int = 0

    def row_ended(self, tokens: int, *, prompt: int = 0, cached: int = 0, retractions: int = 0) -> None:
        """Count a row that ended well."""
        self.rows += 1
        self.tokens += tokens
        self._prompt_tokens += prompt
        self._cached_tokens += cached
        self._retractions += retractions if self._warm else 0

    def look(self, at_s: float, signals: Sequence[SchedulerLoad], log_bytes: int = 0) -> End | None:
        """Take a reading of the load; return why the trial may end now, once it may."""
        if not signals:
            return None
        now = Moment(at_s, self.tokens, self.rows, log_bytes)
        self._curve.append(now[:2])
        self._peak = max(self._peak, sum(signal.running for signal in signals))
        if self._warm is None:
            if 0 < self._peak <= self.rows or at_s >= MOST_STEADY_S:
                self._warm = now
            return self._hopeless(at_s, sum(signal.used_tokens or 0 for signal in signals))
        self._readings += signals
        if any(signal.queue for signal in signals):
            self._busy = now
        return self._behind(at_s) or self._measured(at_s)

    def _hopeless(self, at_s: float, held: int) -> End | None:
        """Compare before it is steady; what it holds in the pool is more than it has put out there."""
        if self.rival is None or at_s < LEAST_STEADY_S:
            return None
        theirs = tokens_at(self.rival.curve, at_s)
        if self.tokens + held >= HOPELESS * theirs:
            return None
        return "behind", f"{self.tokens} output tokens after {at_s:.0f} s, the best had {theirs:.0f}"

    def _behind(self, at_s: float) -> End | None:
        assert self._warm is not None
        since_s, tokens, rows, _ = self._warm
        if self.rival is None or at_s - since_s < LEAST_JUDGED_S or self.rows - rows < self._peak:
            return None
        theirs = tokens_at(self.rival.curve, at_s) - tokens_at(self.rival.curve, since_s)
        share = (self.tokens - tokens) / max(theirs, 1.0)
        if share >= 1 - self.rival.margin:
            return None
        return "behind", f"{share:.2f} x the best's output between {since_s:.0f} and {at_s:.0f} s"

    def _measured(self, at_s: float) -> End | None:
        assert self._warm is not None
        since_s, _, rows, _ = self._warm
        enough = self.rows - rows >= GENERATIONS * self._peak and at_s - since_s >= LEAST_STEADY_S
        if enough or at_s - since_s >= MOST_STEADY_S:
            return "measured", f"{self.rows - rows} rows in {at_s - since_s:.0f} s of steady time"
        return None

    def span(self, end: Moment) -> tuple[Moment, Moment]:
        """Return between which moments a trial with this end counts.

        Where it ended by itself, its tail is left out; where steady time is too short for that the whole of
        it counts.
        """
        begin, until = self._warm or Moment(0.0, 0, 0), self._busy or end
        if until.at_s - begin.at_s < LEAST_JUDGED_S or until.tokens <= begin.tokens:
            return Moment(0.0, 0, 0), end
        return begin, until

    def result(self, ended: Ended, why: str, at_s: float, cost_s: float) -> Result:
        """Say what it came to, at its end."""
        end = Moment(at_s, self.tokens, self.rows)
        begin, until = self.span(end)
        span_s = max(until.at_s - begin.at_s, 1e-9)
        return Result(
            ended, why, round(cost_s, 1),
            tokens_per_s=round((until.tokens - begin.tokens) / span_s, 2),
            steady_s=round(span_s, 1), signs=self._signs(span_s), curve=thinned([*self._curve, end[:2]]),
        )  # fmt: skip

    def _signs(self, span_s: float) -> Signs:
        readings = self._readings
        if not readings:
            return Signs(running=self._peak)
        schedulers = len({reading.scheduler for reading in readings})
        looks = len(readings) / schedulers
        newest = readings[-schedulers:]
        limits = [reading.max_running for reading in newest if reading.max_running is not None]
        pools = [reading.max_total_tokens for reading in newest if reading.max_total_tokens is not None]
        return Signs(
            running=round(sum(reading.running for reading in readings) / looks, 1),
            max_running=sum(limits) if limits else None,
            queue=round(sum(reading.queue for reading in readings) / looks, 1),
            empty_share=round(sum(reading.queue == 0 for reading in readings) / len(readings), 3),
            usage=round(sum(reading.token_usage for reading in readings) / len(readings), 3),
            pool_tokens=sum(pools) if pools else None,
            retractions_per_min=round(60 * self._retractions / span_s, 1),
            cached_share=round(self._cached_tokens / max(self._prompt_tokens, 1), 3),
        )


def tokens_at(curve: Curve, at_s: float) -> float:
    """Return the output tokens of a moment; beyond the curve's end it goes on as its second half went."""
    if len(curve) < 2:  # noqa: PLR2004
        return 0.0
    place = bisect_right(curve, at_s, key=lambda point: point[0])
    if place == len(curve):
        (from_s, from_tokens), (to_s, to_tokens) = curve[len(curve) // 2 - 1], curve[-1]
    else:
        (from_s, from_tokens), (to_s, to_tokens) = curve[max(place, 1) - 1], curve[max(place, 1)]
    slope = (to_tokens - from_tokens) / max(to_s - from_s, 1e-9)
    return max(0.0, to_tokens + slope * (at_s - to_s))


def thinned(curve: Sequence[tuple[float, int]]) -> Curve:
    """Return some 240 points of a curve at most, in order, the last among them, no two at one moment."""
    apart = [point for point, after in pairwise(curve) if point[0] < after[0]]
    kept = [*apart[:: len(apart) // MOST_POINTS + 1], curve[-1]]
    return tuple((round(at_s, 2), tokens) for at_s, tokens in kept)
