"""Concurrency law: the window of one scheduler, by its token usage, queue and retractions. Pure.

The window W is the number of requests that are kept in flight at a scheduler. Requests that the scheduler
cannot run wait there as `#queue-req`. Each row that ends makes room for one more, so a slower engine gets
fewer rows without any decision. A fresh load sample moves W:

    W ← 2·W                 while the queue is empty, the pool is not nearly full, and sent rows have arrived
    W ← W + 0.37·(q* - q)   otherwise, if |q* - q| > q*/4
    W ≤ running + min(queue, w) + λ'·τ + u      while the pool is nearly full; w is 0 while it is overfull
    W ≤ 0.9·mean(running) / mean(usage) + u     while it is overfull

- q* is the wanted length of the queue: q* = w / 0.75 with w = low + 2·λ·τ. `low` is the lower end of the
  queue's band, λ rows/s end, and samples are τ s apart. So each row that ends between two samples has a
  successor in the queue, and w, the lower end of the dead band, is not below `low`. While the pool is
  overfull, q* is 1.5·low.
- q is `#queue-req` as long as running + queue account for the requests in flight. Otherwise the gauges are
  older than W's last move, and q is predicted: q = min(in flight, W) - mean(in flight - queue), where the
  mean has a half-life of 4 s. Without the prediction, W would swing when gauges are 4 s late. The prediction
  alone would be too slow for the workload heavy tail, where the number of running rows keeps growing.
- The pool is nearly full if token usage was 0.8 or more within the last life of a row, mean(running) /
  mean(λ), and the slots are not the limit. Then rows begin at the pace λ' = mean(λ)·0.9 / mean(usage), as
  fast as a well used pool takes them. Without this pace, rows that begin together would fill the pool
  together, be retracted, and begin together again, which was 3 % slower on the workload short/long. The queue
  still grows at this pace (workload KV-starved).
- u is the number of requests in flight that no gauge shows: on their way to the scheduler or back, or in a
  prefill. Without u, each sample would narrow W by them, down to 0.64 of the throughput where 6 of 40 rows
  are under way. Requests that were sent in the last seconds do not count, since late gauges lack those, too.
- The pool is overfull if there is more than about one retraction a minute: a count of retractions that halves
  each minute is 3 or more. The count is capped at 12, so that one burst counts for two minutes (workload
  drifting). All other means have the life of a row as their half-life.

The law follows these rules of SGLang's guides:

- `#queue-req` is frequently 0: submit more (W doubles). 100-2000 is healthy (q*).
- Token usage over 0.9 is good, and about one retraction a minute is fine (nothing is held back before the
  pool is overfull).
- Token usage is under 0.9, and there is frequently a queue: the server is too conservative, and sending more
  does not help (the load state `held`).

States: `start` until the queue has reached `low`, then `steady`. `pressure`: a 429, a 503 or a timeout makes
W 0.7·W, once a second at most, and nothing grows for 5 s. `blind`: no fresh sample for a while; W stays.
`tail`: no row remains to be sent. `fixed`: the job sets W. `stop_steering` sets the last two.

A full state pool of a hybrid model holds no row back, since a state does not grow with its request. The load
state is then `states`: the state pool is the limit, and the scheduler is not too conservative.

A load state (`Corner`) is the summary of a scheduler's load that users see, for example `held`.

Sources: integral control with dead time, K·τ ≤ 1/e; Past-Future Scheduler (ASPLOS 2025) for the pace.
"""

import math
from dataclasses import dataclass

from batchrunner.core.engine_info import QueueBand
from batchrunner.core.timing import TIMING
from batchrunner.tuning.signals import (
    GUIDES,
    Corner,
    corner_of,
    holds_back,
    is_overfull,
    reaches_cap,
)

GAIN = 0.37
"""Fraction of the queue's error that one step corrects: 1/e, the largest that does not overshoot with late
gauges."""
DEAD_BAND = 0.25
"""Maximum deviation of the queue from its wanted length that is not corrected, as a fraction of that length.
"""
IN_USE = 0.8
"""The window may grow only if at least this fraction of it is in use. Otherwise the input is too slow."""
GOOD_USAGE = GUIDES.usage_good
"""Token usage from which on the KV pool counts as well used."""
NEAR_USAGE = 0.8
"""Token usage from which on the KV pool counts as nearly full."""
MOST_COUNTED = 12.0
"""Maximum of the count of recent retractions, so that one burst of them counts for two minutes."""
MINUTE_S = 60.0
"""Half-life, in seconds, of the count of recent retractions."""
HALF_LIFE_S = 4.0
"""Half-life, in seconds, of the mean number of requests that run, or that were sent and have not reached the
scheduler."""
LEAST_LIFE_S = 30.0
"""Minimum, in seconds, of a row's mean running time as the half-life of moving averages."""
LONGEST_LIFE_S = 600.0
"""Maximum, in seconds, of a row's mean running time as the half-life of moving averages."""
BACK_OFF = 0.7
"""Factor by which a refusal or a timeout narrows the window."""
BACK_OFF_EVERY_S = 1.0
"""Minimum time, in seconds, between two refusals or timeouts that narrow the window."""
CALM_S = 5.0
"""Time, in seconds, in which the window does not grow after a refusal or a timeout."""
BLIND_AFTER_PERIODS = 4
"""The state becomes `blind` after this many sampling periods without a fresh sample, but not before
`TIMING.silent_scheduler` seconds."""
SMALL = 0.05
"""Changes of the window up to this fraction of it are not logged."""
SHOWN_AFTER_S = 5.0
"""Seconds that a scheduler's load state must last before users see it."""
HELD_HALF_LIFE_S = 144.0
"""Half-life, in seconds, of the share of time in which the server holds requests back although it has room.
With this half-life, a minute without a break is enough for the load state `held`."""
HELD_ENDS = 0.8
"""The load state `held` ends only when the share of time in which the server holds requests back falls below
this fraction of the share at which the state began. So the state does not flicker."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a scheduler's load: the server's gauges, and the client's counts at the same moment."""

    running: int
    """Number of requests that run, SGLang's `#running-req`."""
    queue: int
    """Number of requests that wait, SGLang's `#queue-req`."""
    in_flight: int
    """This run's requests at the scheduler."""
    ended: float
    """Number of rows that have ended at the scheduler so far."""
    usage: float = 0.0
    """Fraction of the KV pool in use. It is set to 0 for a task without decoding, where it would mean
    nothing."""
    retractions: float = 0.0
    """Number of requests that the scheduler has retracted so far."""
    max_running: int | None = None
    """Maximum number of requests that the scheduler runs at once; None if it does not report it."""
    state_usage: float = 0.0
    """Fraction of a hybrid model's state pool that running requests take; 0 for any other model."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of a scheduler's window, with the fields of the event `window`."""

    scheduler: str
    old: int
    new: int
    state: str
    """Phase of the law, see `Controller.state`; `share` if the route's share of the rows is the limit."""
    reason: str


@dataclass(frozen=True, slots=True)
class CornerChange:
    """A load state that a scheduler entered, with the fields of the event `corner`."""

    scheduler: str
    corner: str
    queue: int
    token_usage: float
    reason: str


class Controller:
    """The window of one scheduler. Times are seconds of any clock that does not go back."""

    least = 1
    """Minimum window, in requests."""

    def __init__(self, scheduler: str, window: int, band: QueueBand, *, most: int, now: float) -> None:
        """Start with `window` requests.

        The window never exceeds `most`, the number of connections allowed.
        """
        self.scheduler = scheduler
        self.band = band
        self.window = min(window, most)
        self.state = "start"
        """Phase of the law: `start`, `steady`, `pressure`, `blind`, `tail` or `fixed`."""
        self.corner: Corner | None = None
        """Load state that users see; None if there is none. It changes once a state has lasted for 5 s."""
        self._logged_window = self._first_window = self.window
        self._most = most
        self._began = self._doubled_at = now
        self._fresh_at: float | None = None
        """Time of the last fresh load sample; None before the first."""
        self._period_s = 0.0
        """Mean time between two load samples."""
        self._refused_at = -CALM_S
        """Time of the last refusal or timeout that narrowed the window."""
        self._nearly_full_at = float("-inf")
        """Time of the last load sample with a nearly full KV pool."""
        self._ended = self._retractions = 0.0
        """Totals at the last load sample."""
        self._recent_retractions = 0.0
        """Number of recent retractions; the count halves each minute."""
        self._rate = 0.0
        """Number of rows that end per second."""
        self._at_work = 0.0
        """Mean number of requests that run, or that were sent and have not reached the scheduler."""
        self._least_in_flight = 0.0
        """Smoothed number of requests in flight. It follows a fall at once, and a rise only slowly."""
        self._running = self._mean_rate = self._usage = 0.0
        """Means whose half-life is the running time of a row."""
        self._life_s = LONGEST_LIFE_S
        self._start_credit = 0.0
        """Fraction of a row that may begin; it is carried over to the next load sample."""
        self._held_share = 0.0
        """Recent share of the time in which the server was too conservative (load state `held`)."""
        self._newest_corner: Corner | None = None
        """Load state at the last load sample."""
        self._newest_corner_since = now
        self._logged_corner: Corner | None = None
        """Load state that the event log shows."""

    def sample(self, now: float, reading: Reading, *, may_grow: bool = True) -> list[Decision | CornerChange]:
        """Process a fresh sample; return the changes. `may_grow` is false if the route has a long queue."""
        gap_s = self._learn(now, reading)
        in_use = reading.in_flight >= IN_USE * self.window
        is_calm = now - self._refused_at >= CALM_S  # No refusal narrowed the window lately.
        is_full = self._is_full(now, reading)
        # The start ends once requests wait at the scheduler, or the pool is full.
        if self.state != "start" or reading.queue >= self.band.low or is_full:
            self.state = "steady" if is_calm else "pressure"
        decisions = self._steer(now, reading, is_full=is_full, may_grow=may_grow and in_use and is_calm)
        return [*decisions, *self._watch(now, gap_s, reading, in_use=in_use)]

    def tick(self, now: float) -> list[Decision]:
        """Set the state `blind` once there has been no fresh sample for too long."""
        silence_s = now - (now if self._fresh_at is None else self._fresh_at)
        patience_s = max(TIMING.silent_scheduler, BLIND_AFTER_PERIODS * self._period_s)
        if self.state == "blind" or silence_s < patience_s:
            return []
        self.state = "blind"
        # Usually `least` is 1, and the window stays as it is. In a background run `least` is 0, so that the
        # window becomes 0, because users may have arrived unnoticed.
        window = min(self.window, self.least * self._most)
        return self._move(window, f"no fresh load for {silence_s:.0f} s", always=True)

    def stop_steering(self, state: str) -> None:
        """Leave the window as it is; `state` (`tail` or `fixed`) is the reason.

        The next call of `sample` steers the window again.
        """
        self.state = state
        self.corner = None

    def backpressure(self, now: float, reason: str) -> list[Decision]:
        """Narrow the window after a refusal or a timeout."""
        if now - self._refused_at < BACK_OFF_EVERY_S:
            return []
        self._refused_at = now
        self.state = "pressure"
        # Refusals alone never narrow the window to less than a quarter of the first window.
        least = min(self.window, max(1, self._first_window // 4))
        return self._move(max(least, round(self.window * BACK_OFF)), reason)

    @property
    def is_overfull(self) -> bool:
        """Whether the KV pool is overfull: more than about one request a minute is retracted."""
        return is_overfull(self._recent_retractions)

    def _learn(self, now: float, reading: Reading) -> float:
        """Update the averages with a load sample; return the seconds since the last sample."""
        # Requests that are under way to the scheduler count as at work, because no gauge shows them.
        at_work = reading.in_flight - reading.queue
        # The totals start at the first sample, so that the first differences are 0.
        if self._fresh_at is None:
            self._fresh_at = now
            self._at_work, self._ended, self._retractions = at_work, reading.ended, reading.retractions
        gap_s = now - self._fresh_at
        self._fresh_at = now
        if gap_s:
            self._rate = (self._rate + (reading.ended - self._ended) / gap_s) / 2
        self._ended = reading.ended
        self._period_s = (self._period_s + gap_s) / 2 if self._period_s else gap_s
        self._at_work += _weight(gap_s, HALF_LIFE_S) * (at_work - self._at_work)
        # This number follows a fall of the requests in flight at once, but a rise only slowly.
        rise = _weight(gap_s, HALF_LIFE_S) * (reading.in_flight - self._least_in_flight)
        self._least_in_flight = min(reading.in_flight, self._least_in_flight + rise)
        self._learn_means(now, gap_s, reading)
        # The total is partly an estimate and may fall (see limits.py). A fall counts as no retraction, and
        # whatever comes on top of the lower total counts.
        retracted = max(0.0, reading.retractions - self._retractions)
        self._retractions = reading.retractions
        decayed = self._recent_retractions * 0.5 ** (gap_s / MINUTE_S)
        self._recent_retractions = min(MOST_COUNTED, decayed + retracted)
        return gap_s

    def _learn_means(self, now: float, gap_s: float, reading: Reading) -> None:
        """Update the means whose half-life is a row's mean running time, and then that time itself."""
        # At first the means are plain averages since the beginning, because a decaying mean would give a new
        # sample too little weight.
        elapsed_s = max(now - self._began, gap_s) or 1.0
        weight = max(gap_s / elapsed_s, _weight(gap_s, max(self._life_s, LEAST_LIFE_S)))
        self._running += weight * (reading.running - self._running)
        self._mean_rate += weight * (self._rate - self._mean_rate)
        self._usage += weight * (reading.usage - self._usage)
        if self._mean_rate > 0:  # Little's law: running time = running rows / rows per second.
            self._life_s = min(self._running / self._mean_rate, LONGEST_LIFE_S)

    def _is_full(self, now: float, reading: Reading) -> bool:
        """Tell whether the KV pool is nearly full, or overfull."""
        # With as many running requests as the scheduler allows, the slots are the limit and not the pool.
        is_at_cap = reaches_cap(max(reading.running, self._running), reading.max_running)
        if reading.usage >= NEAR_USAGE and not is_at_cap:
            self._nearly_full_at = now
        # Rows that began together keep growing, so a nearly full pool matters for as long as a row runs.
        return self.is_overfull or now - self._nearly_full_at < max(self._life_s, self._period_s)

    def _steer(self, now: float, reading: Reading, *, is_full: bool, may_grow: bool) -> list[Decision]:
        """Move the window by the law in the module's docstring; return the change if it is large."""
        is_starting = self.state == "start" and reading.queue < self.band.low
        # The scheduler has no queue, or only a short one at the start, so it may run more requests.
        if not is_full and (reading.queue == 0 or is_starting):
            return self._double(now, reading) if may_grow else []
        target = self._wanted_queue()
        # When a request beyond the window ends, no other request replaces it. So such requests count as
        # ended.
        in_flight = min(reading.in_flight, self.window)
        queue = in_flight - self._at_work
        if abs(reading.in_flight - reading.running - reading.queue) <= DEAD_BAND * target:
            # The gauges account for all requests in flight, so they are newer than the last change of the
            # window.
            queue = in_flight - reading.in_flight + reading.queue
        error = target - queue
        window = float(self.window)
        reason = f"#queue-req {reading.queue} (about {queue:.0f}), wanted {target:.0f}"
        if error < -DEAD_BAND * target:
            # Narrow by at most the number of rows that end in a half-life, because the scheduler may run more
            # rows by then.
            least = reading.in_flight - max(1.0, self._rate * HALF_LIFE_S)
            window = min(window, max(in_flight + GAIN * error, least))
        elif error > DEAD_BAND * target and may_grow:
            window += GAIN * error
        if is_full:
            room = self._room(reading, target)
            if room < window:
                window = room
                reason = (
                    f"token usage {reading.usage:.2f}: rows are sent only as fast as the KV pool has room"
                )
        return self._move(int(window), reason)

    def _double(self, now: float, reading: Reading) -> list[Decision]:
        """Double the window, unless the rows of its last doubling have not arrived at the scheduler yet."""
        # Ended rows prove arrival too, because no gauge counts a row during its prefill, and short rows may
        # end between two samples.
        ended = self._mean_rate * (now - self._doubled_at)
        if max(reading.running + reading.queue, ended) < IN_USE * self.window:
            return []
        self._doubled_at = now
        # The window grows by no more than half of the longest healthy queue at a time.
        step = min(self.window, max(1, self.band.high // 2))
        reason = f"#queue-req {reading.queue} is under {self.band.low}: the window grows fast"
        return self._move(self.window + step, reason)

    def _wanted_queue(self) -> float:
        """Return the wanted length of the queue, q* in the module's docstring."""
        low = self.band.low
        wanted = 0.0 if self.is_overfull else (low + 2 * self._rate * self._period_s) / (1 - DEAD_BAND)
        return min(max(wanted, 1.5 * low), 10 * low, self.band.high / 2)

    def _room(self, reading: Reading, target: float) -> float:
        """Return the maximum number of requests in flight while the pool is nearly full or overfull.

        `target` is the wanted length of the queue, in requests. Credit for new rows grows at the pace at
        which a well used pool would take them.
        """
        # Near the beginning of a run the mean is close to 0, and a division by it would give a huge credit.
        usage = max(self._usage, NEAR_USAGE / 4)
        self._start_credit += self._mean_rate * GOOD_USAGE / usage * self._period_s
        # As many whole rows may begin; the fraction is kept for the next sample.
        may_begin, self._start_credit = divmod(self._start_credit, 1)
        if self.is_overfull:  # No row may wait, and fewer rows may run, so that the pool becomes well used.
            room = min(reading.running + may_begin, GOOD_USAGE * self._running / usage)
        else:
            room = reading.running + min(reading.queue, (1 - DEAD_BAND) * target) + may_begin
        # Without the requests under way, each sample would narrow the window by their number.
        return max(1.0, room + max(0.0, self._least_in_flight - reading.running - reading.queue))

    def _watch(self, now: float, gap_s: float, reading: Reading, *, in_use: bool) -> list[CornerChange]:
        """Update the load state that users see; return the change if the event log lacks it.

        A state must last for SHOWN_AFTER_S, so that it does not flicker. Only `held` is shown at once,
        because it is an average over minutes already.
        """
        corner = self._find_corner(gap_s, reading, in_use=in_use)
        if corner is not self._newest_corner:
            self._newest_corner, self._newest_corner_since = corner, now
        if corner is not Corner.HELD and now - self._newest_corner_since < SHOWN_AFTER_S:
            return []
        self.corner = corner
        if corner is None or corner is self._logged_corner:
            return []
        self._logged_corner = corner
        return [
            CornerChange(
                scheduler=self.scheduler,
                corner=corner,
                queue=reading.queue,
                token_usage=round(reading.usage, 4),
                reason=f"#queue-req {reading.queue}, token usage {reading.usage:.2f}{corner.meaning}",
            )
        ]

    def _find_corner(self, gap_s: float, reading: Reading, *, in_use: bool) -> Corner | None:
        """Return the load state of this sample; None if no state fits.

        `in_use` is whether the run fills its window. If the input is too slow for that, the load says nothing
        about the engine, so the result is None.
        """
        # Token usage 0 marks a task without decoding. The KV pool cannot hold back such a task.
        is_held = in_use and reading.usage > 0 and holds_back(reading) and not self.is_overfull
        self._held_share += _weight(gap_s, HELD_HALF_LIFE_S) * (is_held - self._held_share)
        if not in_use:
            return None
        share = self._held_share
        if self._newest_corner is Corner.HELD:
            # Hysteresis: the state `held` ends at a smaller share than the share at which it begins.
            share /= HELD_ENDS
        return corner_of(reading, overfull=self.is_overfull, share_held=share)

    def _move(self, window: int, reason: str, *, always: bool = False) -> list[Decision]:
        """Set the window within its limits; return the change if it is large, or `always`."""
        self.window = max(self.least, min(window, self._most))
        if not always and abs(self.window - self._logged_window) <= SMALL * self._logged_window:
            return []
        old, self._logged_window = self._logged_window, self.window
        return [Decision(scheduler=self.scheduler, old=old, new=self.window, state=self.state, reason=reason)]


def _weight(gap_s: float, half_life_s: float) -> float:
    """Return the weight of a new value in a moving average, `gap_s` seconds after the last value."""
    return 1.0 - math.exp2(-gap_s / half_life_s)


UNKNOWN_ENGINE_WINDOW = 256
"""First window for an engine that does not report how many requests it runs at once."""
TYPICAL_PROMPT_TOKENS = 256
"""Assumed mean prompt length, unless the prompts that were read before the run are shorter. Longer
prompts do not raise this assumption. If they did, the first window would be smaller, which made jobs of one
minute up to 2 % slower in simulation. A window that is too large only makes a queue at the start, which costs
nothing."""
TYPICAL_MAX_NEW_TOKENS = 512
"""Assumed `max_new_tokens` if the job sets none, or takes it from a column."""
SHORT_OUTPUT_TOKENS = 256
"""Maximum `max_new_tokens` with which known short prompts enlarge the first window. With longer outputs, rows
that begin together also grow together. A larger first window then had five times as many rows retracted, at
the same throughput."""


def tokens_a_row(max_new_tokens: int | None, prompt_tokens: float | None = None) -> int:
    """Return the KV tokens that a row holds on average while it runs: its prompt and half its output.

    `prompt_tokens` is the mean prompt length without the tokens that the prefix cache holds; None if unknown.
    """
    output = TYPICAL_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompt = TYPICAL_PROMPT_TOKENS
    # The result sets the first window. Only with short outputs may a short prompt make it larger, because
    # rows with long outputs grow together, and then many are retracted.
    if prompt_tokens is not None and output <= SHORT_OUTPUT_TOKENS:
        prompt = min(prompt, max(1, round(prompt_tokens)))
    return prompt + output // 2


def first_window(
    max_running: int | None, max_total_tokens: int | None, row_tokens: int, low: int, high: int
) -> tuple[int, str]:
    """Return the first window of a scheduler, and the reason in words; `low` and `high` bound its queue.

    The window is `max_running` (max_running_requests) plus `low`, so that a free slot is filled in the same
    scheduler step. If the KV pool holds far fewer requests, their number replaces `max_running`. The window
    is a guess, since lengths are unknown. If it is too small, it doubles at the next load samples. If it is
    too large, the extra rows cannot be called back: they begin together and grow together until the pool is
    full.
    """
    if max_running is None:
        return UNKNOWN_ENGINE_WINDOW, "the engine does not report its max_running_requests"
    running, reason = max_running, f"max_running_requests {max_running}"
    if max_total_tokens is not None:
        fitting = max(1, max_total_tokens // row_tokens)
        # The number of requests that fit the pool is a rough estimate. So it counts only if it is much lower
        # than max_running_requests, by half of the longest healthy queue.
        if fitting + high // 2 < running + low:
            running = fitting
            reason = f"the KV pool of {max_total_tokens:,} tokens holds about {fitting:,} requests"
    return running + low, f"{reason}, and {low} waiting"
