"""The background law: the window of one scheduler that serves its users first. Pure.

All requests that run or wait at the scheduler, except our rows, belong to its users. A fresh sample sets the
window W:

    W ← 0                       while users wait; and between two rounds of sending while users are there
    W ← slots + ahead           while there are no users, if the server lets users go first
    W ← slots - spare - users   otherwise
    W ≤ full·fits - users

- slots: `max_running_requests`. ahead: the number of rows that end within a forward pass.
- fits: how many requests the KV pool holds, judged by the requests that run now, and at first by their
  expected lengths.
- spare: slots that are kept free for the next users. With a server that lets users go first, it is the
  largest recent rise of users between two samples. With any other server it is twice that rise, and at least
  an eighth of the slots.
- full: the token usage up to which the pool is filled. It is 0.9 with a server that lets users go first. With
  any other server it is 0.75, because a user who finds no room there has to wait for our next sample, which
  is up to 15 forward passes late.

Rows of ours are preempted in three cases:

- Rows wait sample after sample although slots are free, because the server's admission accepts no more. The
  waiting rows are preempted, and the server counts as full with the requests that it runs now.
- Users wait. As many rows are preempted as users wait, twice as many at the next sample, and so on. Nothing
  else makes room in the KV pool, because SGLang's own preemption looks at slots only. If that preemption is
  on and all slots are taken, it does the work instead of us. The rows that it preempts keep their tokens and
  wait for a slot.
- A server that does not let users go first has less than half of `spare` free. Rows are preempted before any
  user has to wait.

The gauges are older than our count of rows in flight. When they were taken, the number of our rows was
between this count and the count at the last sample. So the larger of the two counts gives the number of users
that are there for certain, and the smaller one gives the number of users that may be there.
"""

import math

from batchrunner.core.engine_info import QueueBand
from batchrunner.dispatch.concurrency.law import (
    CALM_S,
    GOOD_USAGE,
    IN_USE,
    MINUTE_S,
    UNKNOWN_ENGINE_WINDOW,
    Controller,
    CornerChange,
    Decision,
    Reading,
)

CAUTIOUS_USAGE = 0.75
"""Token usage up to which the pool is filled if the server does not let users go first."""
LEAST_SPARE, MOST_SPARE = 1 / 8, 3 / 8
"""Minimum fraction of the slots that is kept free on a server that does not let users go first, and maximum
fraction that is kept free on any server."""
FIRST_SHARE = 0.6
"""Fraction of the rows that fit the pool that is sent at first. It is below 1, because SGLang's admission
reserves more room for new rows than for running ones."""
PACE_S = 0.25
"""Seconds between two rounds of sending while users are there: they have to wait for each prefill pass."""
TRUST_S = 30.0
"""Seconds in which the number of rows that the server's admission is expected to accept doubles."""
PASS_S = 0.05
"""Assumed duration of a forward pass, in seconds."""
MOST_ROUNDS = 10
"""Maximum number of times that the number of preempted rows doubles while users wait."""


class BackgroundController(Controller):
    """The window of one scheduler that serves others first."""

    least = 0

    def __init__(
        self, scheduler: str, fits: int, band: QueueBand, *, most: int, now: float, yields: bool
    ) -> None:
        """`fits` is the number of rows that fit the pool; a server that `yields` lets users go first."""
        super().__init__(scheduler, 0, band, most=most, now=now)
        self.state = "background"
        self.users = self.ours = 0
        """Number of the users' and of our requests at the last sample."""
        self.kept: int | None = None
        """Number of our rows that may stay in flight; None if no row is to be preempted."""
        self._yields = yields
        self._full = GOOD_USAGE if yields else CAUTIOUS_USAGE
        self._fits = fits
        self._admits = FIRST_SHARE * fits  # rows that the server's admission is expected to take
        self._spare = self._last_queue = self._last_running = 0
        self._rise = 0.0  # largest recent rise of users between two samples
        self._rounds = 0  # consecutive samples in which users wait
        self._sent_at = now

    def sample(
        self,
        now: float,
        reading: Reading,
        *,
        may_grow: bool = True,  # noqa: ARG002 - the users say it
    ) -> list[Decision | CornerChange]:
        """Process a fresh sample; return the changes."""
        gap_s = self._learn(now, reading)
        most_users = self._count_users(gap_s, reading)
        slots = reading.max_running or UNKNOWN_ENGINE_WINDOW
        ahead = math.ceil(self._rate * PASS_S) + 1
        self.kept = self._kept_without_stuck(gap_s, reading, slots, ahead)
        room = min(self._free_slots(slots, ahead), self._free_pool(now, reading)) - most_users
        if most_users and reading.queue:  # users may be among those who wait
            room = min(room, reading.in_flight - min(reading.queue, most_users))
        is_calm = now - self._refused_at >= CALM_S
        self.state = "background" if is_calm else "pressure"
        if not is_calm:
            room = min(room, self.window)
        why = f"{self.users} requests of users, #queue-req {reading.queue}, token usage {reading.usage:.2f}"
        waiting_users = min(reading.queue, self.users)
        if waiting_users:
            room, why = 0, f"{why}: {waiting_users} of the users' wait"
            self._make_room(reading, waiting_users, slots, ahead)
        else:
            self._rounds = 0
            may_stay = max(0, int(room) + most_users - self.users + self._spare // 2)
            if self.users and not self._yields and reading.in_flight > may_stay:
                self.kept = may_stay
        decisions = self._move(int(room), why)
        if self.users and now - self._sent_at < PACE_S:
            self.window = 0
        else:
            self._sent_at = now
        return [*decisions]

    def _count_users(self, gap_s: float, reading: Reading) -> int:
        """Update the certain number of users, and its recent rise; return their largest possible number."""
        total, before = reading.running + reading.queue, self.users
        smaller, larger = sorted((reading.in_flight, self.ours))
        self.ours, self.users = reading.in_flight, max(0, total - larger)
        self._rise = max(self.users - before, self._rise * 0.5 ** (gap_s / MINUTE_S))
        return max(0, total - smaller)

    def _make_room(self, reading: Reading, waiting_users: int, slots: int, ahead: int) -> None:
        """Choose how many of our rows may stay while users wait."""
        if self._yields and reading.running >= IN_USE * slots and reading.usage <= GOOD_USAGE:
            self._rounds = 0  # SGLang preempts rows of ours, and the waiting requests may be these
            return
        if self._rounds or waiting_users > ahead or not self._yields:
            self.kept = max(0, reading.in_flight - waiting_users * 2**self._rounds)
        self._rounds = min(self._rounds + 1, MOST_ROUNDS)

    def _kept_without_stuck(self, gap_s: float, reading: Reading, slots: int, ahead: int) -> int | None:
        """Return how many of our rows may stay in flight if waiting requests are stuck; None if none are.

        Requests are stuck if they wait from one sample to the next, although slots are free and no request
        starts: the server's admission does not accept them.
        """
        stuck, self._last_queue = min(reading.queue, self._last_queue), reading.queue
        starts = reading.running > self._last_running
        self._last_running = reading.running
        self._admits *= 2 ** (gap_s / TRUST_S)
        # usage 0 marks a task without decoding: its rows use no pool, and are in no gauge while they run
        if starts or stuck <= ahead or reading.running >= IN_USE * slots or not reading.usage:
            return None
        self._admits = reading.running
        return max(0, reading.in_flight - stuck)

    def _free_slots(self, slots: int, ahead: int) -> int:
        """Return how many requests (ours and the users') the slots allow."""
        if self._yields and not self.users:
            return slots + ahead
        spare = self._rise if self._yields else max(1, LEAST_SPARE * slots, 2 * self._rise)
        self._spare = math.ceil(min(spare, MOST_SPARE * slots))
        return max(1, slots - self._spare)

    def _free_pool(self, now: float, reading: Reading) -> float:
        """Return how many requests (ours and the users') the KV pool allows."""
        fits = float(self._fits)
        if self._usage and now - self._began > self._life_s:
            fits = self._running / self._usage
        room = self._full * min(fits, self._admits)
        over = reading.usage / self._full
        return max(1.0, room if over < 1 else min(room, (reading.running + reading.queue) / over))
