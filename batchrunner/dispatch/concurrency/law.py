"""Sets the concurrency limit of one scheduler from its token usage, queue and retractions. No I/O.

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

These rules of SGLang's guides are in force:

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
"""Fraction of the queue's error that one step corrects: 1/e, the most that does not overshoot with late
gauges."""
DEAD_BAND = 0.25
"""The queue length is not corrected if it is off by at most this fraction of its wanted length."""
IN_USE = 0.8
"""The concurrency limit may grow only if at least this fraction of it is in use. Otherwise the input is too
slow."""
GOOD_USAGE = GUIDES.usage_good
"""The KV pool counts as well used from this token usage on."""
NEAR_USAGE = 0.8
"""The KV pool counts as nearly full from this token usage on."""
MOST_COUNTED = 12.0
"""Maximum of the count of recent retractions, so that one burst of them counts for two minutes."""
MINUTE_S = 60.0
"""Half-life, in seconds, of the count of recent retractions."""
HALF_LIFE_S = 4.0
"""Half-life, in seconds, of the mean number of requests that run or are on their way to the scheduler."""
LEAST_LIFE_S = 30.0
"""Means have the running time of a row as their half-life, but at least this many seconds."""
LONGEST_LIFE_S = 600.0
"""Means have the running time of a row as their half-life, but at most this many seconds."""
BACK_OFF = 0.7
"""Factor by which a refusal or a timeout lowers the concurrency limit."""
BACK_OFF_EVERY_S = 1.0
"""Minimum time, in seconds, between two reductions of the limit by refusals or timeouts."""
CALM_S = 5.0
"""Seconds after a refusal or a timeout in which the concurrency limit does not grow."""
BLIND_AFTER_PERIODS = 4
"""The load counts as unknown (state `blind`) after this many sampling periods without a fresh sample, but not
before `TIMING.silent_scheduler` seconds."""
SMALL = 0.05
"""Changes of the concurrency limit up to this fraction of it are not logged."""
SHOWN_AFTER_S = 5.0
"""Seconds that a scheduler's load state must last before users see it."""
HELD_HALF_LIFE_S = 144.0
"""Half-life, in seconds, of the share of time in which the server queues requests although it has room. With
this half-life, one minute without a break is enough for the load state `held`."""
HELD_ENDS = 0.8
"""Hysteresis of the load state `held` (requests queue although the server has room). The state begins when
the share of such time reaches a threshold. It ends when the share is below this fraction of the threshold."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of a scheduler's load: the server's gauges, and the client's counts at that time."""

    running: int
    """Number of requests that run, SGLang's `#running-req`."""
    queue: int
    """Number of requests that wait, SGLang's `#queue-req`."""
    in_flight: int
    """This run's requests at the scheduler."""
    ended: float
    """Number of rows that have ended at the scheduler so far."""
    usage: float = 0.0
    """Fraction of the KV pool in use. It is set to 0 for a task without decoding, which does not use the
    pool."""
    retractions: float = 0.0
    """Number of requests that the scheduler has retracted so far."""
    max_running: int | None = None
    """Maximum number of requests that the scheduler runs at once; None if it does not report it."""
    state_usage: float = 0.0
    """Fraction of a hybrid model's state pool that running requests take; 0 for any other model."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of a scheduler's concurrency limit; its fields are those of the event `window`."""

    scheduler: str
    old: int
    new: int
    state: str
    """State of the controller, see `Controller.state`; `share` if the server's share of the rows is the
    limit."""
    reason: str


@dataclass(frozen=True, slots=True)
class CornerChange:
    """A load state that a scheduler entered; the fields are those of the event `corner`."""

    scheduler: str
    corner: str
    queue: int
    token_usage: float
    reason: str


class Controller:
    """Controls the concurrency limit of one scheduler.

    Times are in seconds of any clock that never goes back.
    """

    least = 1
    """Minimum concurrency limit, in requests."""

    def __init__(self, scheduler: str, window: int, band: QueueBand, *, most: int, now: float) -> None:
        """Start with the concurrency limit `window`; it never exceeds `most`, the connections allowed."""
        self.scheduler = scheduler
        self.band = band
        self.window = min(window, most)
        self.state = "start"
        """State: `start`, `steady`, `pressure` (after a refusal), `blind` (no fresh load), `tail` (no row
        left to send) or `fixed` (the job sets the limit)."""
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
        """Time of the last refusal or timeout that lowered the limit."""
        self._nearly_full_at = float("-inf")
        self._ended = self._retractions = 0.0
        """Ended rows and retractions in all, at the last load sample."""
        self._recent_retractions = 0.0
        """Number of recent retractions; the count halves each minute."""
        self._rate = 0.0
        """Number of rows that end per second."""
        self._at_work = 0.0
        """Mean number of requests that run or are on their way to the scheduler."""
        self._least_in_flight = 0.0
        """Smoothed number of requests in flight. It falls at once, and rises only slowly."""
        self._running = self._mean_rate = self._usage = 0.0
        """Means whose half-life is the running time of a row."""
        self._life_s = LONGEST_LIFE_S
        self._start_credit = 0.0
        """Number of further rows that may begin. Its fraction is kept for the next load sample."""
        self._held_share = 0.0
        """Recent share of the time in which requests queued although the server had room."""
        self._newest_corner: Corner | None = None
        """Load state at the last load sample."""
        self._newest_corner_since = now
        self._logged_corner: Corner | None = None
        """Load state that was last written to the event log."""

    def sample(self, now: float, reading: Reading, *, may_grow: bool = True) -> list[Decision | CornerChange]:
        """Process a fresh sample; return the changes.

        `may_grow` is false if the queue of the server is too long.
        """
        gap_s = self._learn(now, reading)
        in_use = reading.in_flight >= IN_USE * self.window
        is_calm = now - self._refused_at >= CALM_S
        is_full = self._is_full(now, reading)
        # The start phase ends once requests wait at the scheduler, or the pool is full.
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
        # Usually `least` is 1, and the window stays. In a background run `least` is 0, and the window becomes
        # 0, because users may have arrived unnoticed.
        window = min(self.window, self.least * self._most)
        return self._move(window, f"no fresh load for {silence_s:.0f} s", always=True)

    def stop_steering(self, state: str) -> None:
        """Keep the concurrency limit until the next `sample`; `state` (`tail` or `fixed`) is the reason."""
        self.state = state
        self.corner = None

    def backpressure(self, now: float, reason: str) -> list[Decision]:
        """Lower the concurrency limit after a refusal or a timeout."""
        if now - self._refused_at < BACK_OFF_EVERY_S:
            return []
        self._refused_at = now
        self.state = "pressure"
        # Refusals alone never lower the limit below a quarter of the first one.
        least = min(self.window, max(1, self._first_window // 4))
        return self._move(max(least, round(self.window * BACK_OFF)), reason)

    @property
    def is_overfull(self) -> bool:
        """Whether the KV pool is overfull: more than about one request a minute is retracted."""
        return is_overfull(self._recent_retractions)

    def _learn(self, now: float, reading: Reading) -> float:
        """Update the averages with a load sample; return the seconds since the last sample."""
        # Requests on their way to the scheduler count as at work, because no gauge shows them.
        at_work = reading.in_flight - reading.queue
        # The first sample has nothing to be compared with. It is compared with itself, so `gap_s` and all
        # differences are 0.
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
        # This number falls at once with the requests in flight, and rises only slowly: late gauges lack the
        # requests of the last seconds, so these do not count yet (u in the module's docstring).
        rise = _weight(gap_s, HALF_LIFE_S) * (reading.in_flight - self._least_in_flight)
        self._least_in_flight = min(reading.in_flight, self._least_in_flight + rise)
        self._learn_means(now, gap_s, reading)
        # The total is partly an estimate and may fall (see limits.py). A fall counts as no retraction. Later
        # increases count from the lower total.
        retracted = max(0.0, reading.retractions - self._retractions)
        self._retractions = reading.retractions
        decayed = self._recent_retractions * 0.5 ** (gap_s / MINUTE_S)
        self._recent_retractions = min(MOST_COUNTED, decayed + retracted)
        return gap_s

    def _learn_means(self, now: float, gap_s: float, reading: Reading) -> None:
        """Update the means whose half-life is the mean running time of a row, and that time itself."""
        # At first the means are plain averages since the beginning. A decaying mean would give a new sample
        # too little weight.
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
        """Set the concurrency limit by the formulas in the module's docstring; return any large change."""
        is_starting = self.state == "start" and reading.queue < self.band.low
        # Without a queue, or with a short one at the start, the scheduler can run more requests.
        if not is_full and (reading.queue == 0 or is_starting):
            return self._double(now, reading) if may_grow else []
        target = self._wanted_queue()
        # Requests in flight beyond the limit are not replaced when they end. So they count as ended.
        in_flight = min(reading.in_flight, self.window)
        ending = reading.in_flight - in_flight
        # The expected queue: requests in flight that neither run nor travel.
        queue = in_flight - self._at_work
        if abs(reading.in_flight - reading.running - reading.queue) <= DEAD_BAND * target:
            # The gauges show all requests in flight, so they are newer than the last change of the window,
            # and the queue that they show is used.
            queue = reading.queue - ending
        error = target - queue
        window = float(self.window)
        reason = f"#queue-req {reading.queue} (about {queue:.0f}), wanted {target:.0f}"
        if error < -DEAD_BAND * target:
            # Lower the limit by at most the rows that end in a half-life, because the scheduler may run more
            # rows by then.
            lowest = reading.in_flight - max(1.0, self._rate * HALF_LIFE_S)
            window = min(window, max(in_flight + GAIN * error, lowest))
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
        """Double the concurrency limit, unless the rows of the last doubling are still on their way."""
        # Ended rows prove their arrival too. No gauge counts a row during its prefill, and short rows may end
        # between two samples.
        ended = self._mean_rate * (now - self._doubled_at)
        if max(reading.running + reading.queue, ended) < IN_USE * self.window:
            return []
        self._doubled_at = now
        # The limit grows by at most half of the longest healthy queue at a time.
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

        `target` is the wanted length of the queue, in requests. New rows may begin as fast as a well used
        pool would take them.
        """
        # At the beginning of a run the mean is close to 0. A division by it would allow far too many rows.
        usage = max(self._usage, NEAR_USAGE / 4)
        self._start_credit += self._mean_rate * GOOD_USAGE / usage * self._period_s
        # Whole rows may begin. The fraction is kept for the next sample.
        may_begin, self._start_credit = divmod(self._start_credit, 1)
        if self.is_overfull:
            room = min(reading.running + may_begin, GOOD_USAGE * self._running / usage)
        else:
            room = reading.running + min(reading.queue, (1 - DEAD_BAND) * target) + may_begin
        # Requests on their way count too. Without them, each sample would lower the limit by their number.
        return max(1.0, room + max(0.0, self._least_in_flight - reading.running - reading.queue))

    def _watch(self, now: float, gap_s: float, reading: Reading, *, in_use: bool) -> list[CornerChange]:
        """Update the load state shown to users; return the change if the event log lacks it.

        A state must last for a few seconds, so that it does not flicker. Only `held` is shown at once,
        because it is already an average over minutes.
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

        `in_use` is whether the run uses its concurrency limit. If the input is too slow for that, the load
        says nothing about the engine, and the result is None.
        """
        # Token usage 0 marks a task without decoding, which the KV pool cannot hold back.
        is_held = in_use and reading.usage > 0 and holds_back(reading) and not self.is_overfull
        self._held_share += _weight(gap_s, HELD_HALF_LIFE_S) * (is_held - self._held_share)
        if not in_use:
            return None
        share = self._held_share
        if self._newest_corner is Corner.HELD:
            # Hysteresis: the state ends at a smaller share than the one at which it begins.
            share /= HELD_ENDS
        return corner_of(reading, overfull=self.is_overfull, share_held=share)

    def _move(self, window: int, reason: str, *, always: bool = False) -> list[Decision]:
        """Set the concurrency limit within its bounds; return the change if it is large, or `always`."""
        self.window = max(self.least, min(window, self._most))
        if not always and abs(self.window - self._logged_window) <= SMALL * self._logged_window:
            return []
        old, self._logged_window = self._logged_window, self.window
        return [Decision(scheduler=self.scheduler, old=old, new=self.window, state=self.state, reason=reason)]


def _weight(gap_s: float, half_life_s: float) -> float:
    """Return the weight of a new value in a moving average, `gap_s` seconds after the last value."""
    return 1.0 - math.exp2(-gap_s / half_life_s)


UNKNOWN_ENGINE_WINDOW = 256
"""First concurrency limit for an engine that does not report how many requests it runs at once."""
TYPICAL_PROMPT_TOKENS = 256
"""Assumed mean prompt length in tokens, unless the prompts read before the run are shorter. Longer prompts do
not raise it. They would make the first concurrency limit smaller, which made jobs of one minute up to 2 %
slower in simulation. Too large a limit only makes a queue at the start, which costs nothing."""
TYPICAL_MAX_NEW_TOKENS = 512
"""Assumed `max_new_tokens` if the job sets none, or takes it from a column."""
SHORT_OUTPUT_TOKENS = 256
"""Short prompts raise the first concurrency limit only if `max_new_tokens` is at most this. With longer
outputs, rows that begin together also grow together. A higher limit then had five times as many rows
retracted, at the same throughput."""


def tokens_a_row(max_new_tokens: int | None, prompt_tokens: float | None = None) -> int:
    """Return the KV tokens that a row holds on average while it runs: its prompt and half its output.

    `prompt_tokens` is the mean prompt length without the tokens that the prefix cache holds; None if unknown.
    """
    output = TYPICAL_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompt = TYPICAL_PROMPT_TOKENS
    # Short prompts may raise the first limit only if outputs are short too. Rows with long outputs grow
    # together, and then many are retracted.
    if prompt_tokens is not None and output <= SHORT_OUTPUT_TOKENS:
        prompt = min(prompt, max(1, round(prompt_tokens)))
    return prompt + output // 2


def first_window(
    max_running: int | None, max_total_tokens: int | None, row_tokens: int, low: int, high: int
) -> tuple[int, str]:
    """Return a scheduler's first concurrency limit, and the reason; `low` and `high` bound its queue.

    The limit is `max_running` (max_running_requests) plus `low`, so that a free slot is filled in the same
    scheduler step. If the KV pool holds far fewer requests, their number replaces `max_running`. The lengths
    of the rows are unknown, so this is a guess. Too small a limit doubles at the next load samples. Too large
    a limit cannot be corrected: the extra rows begin together, and grow together until the pool is full.
    """
    if max_running is None:
        return UNKNOWN_ENGINE_WINDOW, "the engine does not report its max_running_requests"
    running, reason = max_running, f"max_running_requests {max_running}"
    if max_total_tokens is not None:
        fitting = max(1, max_total_tokens // row_tokens)
        # The number of requests that fit the pool is a rough estimate. It counts only if it is much lower
        # than max_running_requests.
        if fitting + high // 2 < running + low:
            running = fitting
            reason = f"the KV pool of {max_total_tokens:,} tokens holds about {fitting:,} requests"
    return running + low, f"{reason}, and {low} waiting"
