"""How many requests one scheduler is given: its window, moved by its own `#queue-req`. Pure, no clock.

**What is controlled.** W requests are kept in flight at a scheduler; whatever it cannot run waits in its
queue, so `#queue-req` = W - running - what is on its way. An empty queue starves the GPU, a very long one
makes each scheduling pass dearer: SGLang's tuning guide calls 100-2000 healthy. W is moved, not a rate:
completions clock the next submissions, so an engine that slows down is sent less without any decision.

**The band** `low-high` is the job's (`queue: [100, 2000]`). A scheduler with a small `max_running_requests`
needs no hundred in wait to fill each place at once and would only make rows late: the band is scaled by
max_running / 256, `low` to 8 at least and `high` in proportion.

**Estimate** q of the queue. The gauges are up to seconds old; the number in flight is exact. As long as
running + queue account for what is in flight, up to q*/4, the gauge is believed, plus what W still changes.
Else it is from before W's last move, and q = min(in_flight, W) - running - offset, which is where the queue
goes: `running` and `offset` = in_flight - running - queue are averages (half-life 4 s). The offset is what is
being tokenised and sent or, below 0, what others submit.

**Set-point** q* = (low + max(2·λ·τ, b, d)) / 0.75 within [1.5·low, min(10·low, high/2)]: λ rows/s leave here,
τ s pass between fresh samples, b rows came back in the fullest recent tenth of a second (rows of one length
end in waves), and d is how far the gauge dipped under its own recent average (half-life 10 s). What leaves
between two looks, or at once, must find its successors in the queue; and the lowest point is to be in the
band, not the middle, with W at the lower end of its dead band too: hence 0.75.

**States**
- `start`: W doubles at each fresh sample that shows what was sent (running + queue ≥ 80 % of W) and finds
  the queue under `low`; a step adds high/2 at most. It ends when the queue reaches `low`, when the KV pool is
  full or fills up (`corners.py`), or at a retraction.
- `steady`: once a fresh sample, W += g·(q* - q), g = 0.37, unless |q* - q| ≤ q*/4. The loop is an integrator
  with a delay, which does not overshoot while g ≤ 1/e. Above the band the step is taken whole; an empty queue
  is a new start, unless the pool is full. W shrinks no faster than rows end (4 s of them ahead), and grows
  only when 80 % of it is in use: else it is the input that is slow.
- `pressure` (backpressure): after a 429, a 503 or a timeout W becomes 0.7 W, once a second at most and not
  under a quarter of the first window; no growth for 5 s. Then `steady` goes on.
- `blind`: no fresh sample for 5 s and four times τ: W is held, at most running + q* as last known; without
  decoding as it is, since the rows of a long forward pass are in no gauge.
- `probe`: the engine tells no load. Each time two windows of rows have ended, W grows by half as long as
  that made rows/s grow by 5 %; otherwise the last step is taken back, and W stays: `settled`.
- `tail`: nothing is left to send; W is left alone. A row that comes back for another try ends it.
- `fixed`: the job sets W. This state and `tail` are set from outside.

For 10 s after a retraction, and while the queue is empty though the KV pool is full, q* is 1.5·low: more in
the queue cannot help. While the pool fills up, W is also what it has room for (`corners.py`).

Sources: SGLang's hyperparameter tuning guide (the band); Vegas (a band instead of a point); integral
control with dead time, K·τ ≤ 1/e; BBR (throughput's plateau, for `probe`).
"""

from dataclasses import dataclass

from batchrunner.core.engine_info import LEAST_LOW, Corner, EngineInfo, QueueBand
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.concurrency.corners import CornerChange, CornerWatch, Reading

GAIN = 0.37
"""Share of the error that one step corrects: 1/e, the largest that does not overshoot with a delay."""
DEAD_BAND = 0.25
"""Error, as a share of the set-point, that is left alone."""
IN_USE = 0.8
"""Share of the window that must be in use before it grows."""
HALF_LIFE_S = 4.0
"""Half-life of the averages, in seconds. Gauges can be seconds late: a window that has just moved must not
look like an offset."""
DIP_HALF_LIFE_S = 10.0
BACK_OFF = 0.7
"""Factor of the window at a refusal or timeout."""
BACK_OFF_EVERY_S = 1.0
CALM_S = 5.0
"""Seconds without growth after a refusal or timeout."""
RETRACTION_CALM_S = 10.0
"""Seconds after a retraction during which the set-point is low."""
BLIND_AFTER_PERIODS = 4
"""Silence, in usual sampling periods, after which a scheduler counts as silent; see `Timing` too."""
SMALL = 0.05
"""Change of the window, as a share of it, that is not logged while the KV pool fills: there are many."""
PROBE_STEP, PROBE_GAIN = 1.5, 1.05
"""Factor of a probing step, and the gain in rows/s that justifies the next one."""
MOST_PROBED = 4096
"""Largest window that probing tries."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of a window, as the event log has it."""

    scheduler: str
    old: int
    new: int
    state: str
    reason: str


class Controller:
    """The window of one scheduler. Times are seconds of any clock that does not go back."""

    def __init__(self, scheduler: str, window: int, band: QueueBand, *, most: int, now: float) -> None:
        """`most` is the largest window that the connections allow."""
        self.scheduler = scheduler
        self.band = band
        self.window = min(window, most)
        self.state = "start"
        self.corner_change: CornerChange | None = None
        """Corner that the scheduler came into by the newest sample; None for no news."""
        self._corners = CornerWatch(scheduler, band)
        self._logged = self._first = self.window
        self._most = most
        self._running = 0.0
        self._offset = 0.0
        self._queue = 0.0
        self._dip = 0.0
        self._period_s = 0.0
        self._target = 1.5 * band.low
        self._fresh_at: float | None = None
        self._began = now
        self._pressed_at = -CALM_S
        self._retracted_at = -RETRACTION_CALM_S
        self._epoch = (now, 0)
        self._best_rate = 0.0
        self._decodes = True

    def sample(self, now: float, seen: Reading, *, may_grow: bool = True) -> Decision | None:
        """Use a fresh sample; return the change. `may_grow` is false if a queue of the route is full."""
        self._learn(now, seen)
        self._decodes = seen.decodes
        if self.state in {"blind", "probe", "settled", "tail"}:
            self.state = "steady"
        if self.state == "pressure" and now - self._pressed_at >= CALM_S:
            self.state = "steady"
        in_use = seen.in_flight >= IN_USE * self.window
        self.corner_change = self._corners.sample(now, seen, in_use=in_use)
        growing = may_grow and in_use and self.state != "pressure"
        may_double = self._corners.may_double and not self._is_retracting(now)
        if self.state == "steady" and seen.queue == 0 and may_double:
            self.state = "start"  # who knows how many more it can run
        if self.state == "start":
            if seen.queue >= self.band.low or not may_double:
                self.state = "steady"
            else:
                return self._double(seen) if growing else None
        return self._steer(now, seen, growing=growing)

    def tick(self, now: float, ended: int) -> Decision | None:
        """React to time that passes without a fresh sample; so many rows have `ended` here so far."""
        if self._fresh_at is None:
            if self.state in {"start", "probe"} and now - self._began >= TIMING.silent_scheduler:
                return self._probe(now, ended)
            return None
        silence_s = now - self._fresh_at
        if self.state == "blind" or silence_s < max(
            TIMING.silent_scheduler, BLIND_AFTER_PERIODS * self._period_s
        ):
            return None
        self.state = "blind"
        known = max(1, round(self._running + self._target))
        return self._move(
            min(self.window, known) if self._decodes else self.window,
            f"no fresh load for {silence_s:.0f} s: held to what was last known",
            log=True,
        )

    def backpressure(self, now: float, what: str) -> Decision | None:
        """Narrow the window after a refusal or a timeout."""
        if now - self._pressed_at < BACK_OFF_EVERY_S:
            return None
        self._pressed_at = now
        self.state = "pressure"
        least = max(1, self._first // 4)
        return self._move(max(min(self.window, least), round(self.window * BACK_OFF)), what)

    def retracted(self, now: float, ended: int) -> None:
        """Record the retraction of a row, the last of so many that `ended`: the KV pool is full."""
        self._retracted_at = now
        self._corners.filling.retracted(now, ended)

    @property
    def corner(self) -> Corner | None:
        """Corner that the scheduler is in; None where it is in none, or not long enough."""
        return None if self.state == "tail" else self._corners.shown

    def _is_retracting(self, now: float) -> bool:
        return now - self._retracted_at < RETRACTION_CALM_S

    def _learn(self, now: float, seen: Reading) -> None:
        offset = seen.in_flight - seen.running - seen.queue
        if self._fresh_at is None:
            self._running = seen.running
            self._queue = seen.queue
        else:
            gap = now - self._fresh_at
            self._period_s = gap if not self._period_s else (self._period_s + gap) / 2
            weight = 1 - 0.5 ** (gap / HALF_LIFE_S)
            self._running += weight * (seen.running - self._running)
            self._offset += weight * (offset - self._offset)
            self._queue += weight * (seen.queue - self._queue)
            dip = self._queue - seen.queue if self.state == "steady" else 0.0
            self._dip = max(dip, self._dip * 0.5 ** (gap / DIP_HALF_LIFE_S))
        self._fresh_at = now
        low, high = self.band.low, self.band.high
        wanted = (low + max(2 * seen.rate * self._period_s, seen.burst, self._dip)) / (1 - DEAD_BAND)
        self._target = min(max(wanted, 1.5 * low), 10 * low, high / 2)

    def _double(self, seen: Reading) -> Decision | None:
        # a forward pass is in no gauge, and ends all of its rows at once
        if seen.decodes and seen.running + seen.queue < IN_USE * self.window:
            return None  # it has not seen yet what it was given
        step = min(self.window, max(1, self.band.high // 2))
        return self._move(
            self.window + step, f"#queue-req {seen.queue} is under {self.band.low}: growing fast"
        )

    def _steer(self, now: float, seen: Reading, *, growing: bool) -> Decision | None:
        most = self._corners.most(seen)
        if most is not None and self.window > most:
            return self._move(most, f"token usage {seen.usage:.2f}: the KV pool takes {most} rows", few=True)
        is_full = self._corners.now is Corner.FULL or self._is_retracting(now)
        target = 1.5 * self.band.low if is_full else self._target
        ours = min(seen.in_flight, self.window)  # what is over the window is on its way out
        unseen = seen.in_flight - seen.running - seen.queue - self._offset
        seen_all = abs(unseen) <= DEAD_BAND * target
        # else the gauges are from before the window's last move
        newest, expected = seen.queue + ours - seen.in_flight, ours - self._running - self._offset
        queue = newest if seen_all else expected
        error = target - queue
        if abs(error) <= DEAD_BAND * target or (error > 0 and not growing):
            return None
        step = round(error if seen.queue > self.band.high else GAIN * error)
        reason = f"#queue-req {seen.queue} (about {queue:.0f}), wanted {target:.0f}"
        if error > 0:
            return self._move(min(self.window + step, most or self._most), reason, few=most is not None)
        # no further ahead of the rows than they can follow: by then the scheduler may run more of them
        least = seen.in_flight - max(1, round(seen.rate * HALF_LIFE_S))
        return self._move(min(self.window, max(ours + step, least)), reason)

    def _probe(self, now: float, ended: int) -> Decision | None:
        since, ended_then = self._epoch
        if self.state == "start":
            self.state, self._epoch = "probe", (now, ended)
            return self._move(self.window, "the engine tells no load: finding the window by rows/s", log=True)
        if ended - ended_then < 2 * self.window or now <= since:
            return None
        rate = (ended - ended_then) / (now - since)
        self._epoch = (now, ended)
        if rate >= PROBE_GAIN * self._best_rate and self.window < min(self._most, MOST_PROBED):
            self._best_rate = rate
            return self._move(
                min(MOST_PROBED, round(self.window * PROBE_STEP)), f"{rate:.1f} rows/s: trying more"
            )
        self.state = "settled"
        return self._move(
            max(self._first, round(self.window / PROBE_STEP)),
            f"{rate:.1f} rows/s: more did not help",
            log=True,
        )

    def _move(self, window: int, reason: str, *, log: bool = False, few: bool = False) -> Decision | None:
        """Set the window; return the change. Of many small ones in succession, return only a `few`."""
        self.window = max(1, min(window, self._most))
        change = abs(self.window - self._logged)
        if not log and change <= (SMALL * self._logged if few else 0):
            return None
        old, self._logged = self._logged, self.window
        return Decision(self.scheduler, old, self.window, self.state, reason)


UNKNOWN_ENGINE_WINDOW = 256
"""First window for an engine that does not say how many requests it runs."""
TYPICAL_PROMPT_TOKENS = 256
"""Assumed unless the prompts that were read before the run are shorter. For longer ones a smaller first
window made jobs of a minute up to 2 % slower in virtual time, and a long queue at the start costs nothing."""
TYPICAL_MAX_NEW_TOKENS = 512
"""Assumed if the job sets no `max_new_tokens`, or takes it from a column."""
SHORT_OUTPUT_TOKENS = 256
"""Most `max_new_tokens` with which prompts that are known to be short count as such. Rows with longer outputs
grow together: a larger first window had five times as many of them retracted, at the same throughput."""
BYTES_A_TOKEN, BYTES_AN_ID = 3, 4
"""Bytes of a prompt that stand for a token, of a text and of token ids. Of a text few: too many rows at the
start cost more than too few."""


def tokens_a_row(max_new_tokens: int | None, prompt_tokens: float | None = None) -> int:
    """Return the KV tokens that a row holds on average while it runs: its prompt and half its output.

    `prompt_tokens` are the prompt's on average, without those that the prefix cache holds; None if unknown.
    """
    output = TYPICAL_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompt = TYPICAL_PROMPT_TOKENS
    if prompt_tokens is not None and output <= SHORT_OUTPUT_TOKENS:
        prompt = min(prompt, max(1, round(prompt_tokens)))
    return prompt + output // 2


def cost_of_connections(info: EngineInfo, fixed: int | None) -> str | None:
    """Return what to do about too few connections, in a line; None where they are enough.

    `fixed` is the job's window, if it sets one; else as many are needed as the engine can run.
    """
    wanted = fixed or info.max_running or UNKNOWN_ENGINE_WINDOW
    if info.connections is None or info.connections >= wanted:
        return None
    who = "the job's window is" if fixed else "the engine can run"
    return (
        f"at most {info.connections} requests can be in flight, and {who} {wanted}: up to "
        f"{1 - info.connections / wanted:.0%} of the speed is lost. The limit is {info.connections_by}: "
        "raise it (ulimit -Hn, LimitNOFILE, or the container's --ulimit nofile)"
    )


def first_window(
    max_running: int | None, max_total_tokens: int | None, row_tokens: int, low: int, high: int
) -> tuple[int, str]:
    """Return the window and, in a sentence, where it comes from; `low` and `high` bound the queue band.

    The window is max_running_requests plus `low`, so that a slot which becomes free is filled in the same
    scheduler step. If the KV pool holds far fewer, their number takes the place of max_running_requests.
    It is a guess, since lengths are not known: too low a one doubles at the next load samples, while what is
    sent too early cannot be taken back. Rows that begin together grow together, until they do not fit.
    """
    if max_running is None:
        return UNKNOWN_ENGINE_WINDOW, "the engine does not tell how many requests it runs"
    running, why = max_running, f"max_running_requests {max_running}"
    if max_total_tokens is not None:
        fits = max(1, max_total_tokens // row_tokens)
        if fits + high // 2 < running + low:
            why = f"the KV pool of {max_total_tokens:,} tokens holds about {fits:,} requests"
            return fits + low, f"{why}, and {low} waiting"
    return running + low, f"{why}, and {low} waiting"


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
