"""The background law: the window of one scheduler that serves its users first. Pure.

What runs or waits there beyond our rows belongs to its users. A fresh sample sets the window W:

    W ← 0                       while users wait; and between two rounds of sending while users are there
    W ← slots + ahead           while there are no users, if the server lets users go first
    W ← slots - spare - users   otherwise
    W ≤ full·fits - users

- slots: `max_running_requests`. ahead: the rows that end within a forward pass.
- fits: the requests that the KV pool holds, by those that run now; at first by their expected lengths.
- spare: room for the next users. With a server that lets users go first, it is the largest recent rise of
  users between two samples. With any other server it is twice that rise, and at least an eighth of the slots.
- full: 0.9 with a server that lets users go first, and 0.75 with any other: a user who finds no room there
  waits for the next sample, which is up to 15 forward passes late.

Rows of ours are preempted in three cases:

- Rows wait sample after sample though slots are free: the server's admission takes no more. The waiting rows
  are preempted, and the server counts as full with what it runs now.
- Users wait: as many rows as users that wait, twice as many at the next sample, and so on. Nothing else makes
  room in the KV pool, as SGLang's own preemption looks at slots alone. Where that is on and all slots are
  taken, it does the work: its victims keep their tokens and wait for a slot.
- A server that does not let users go first has less than half of `spare` free: before any user has to wait.

The gauges are older than our count of rows in flight. When they were taken, our rows were between that count
and the one at the last sample. So the larger count says how many users there are for certain, and the smaller
one how many there may be.
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
"""Token usage to which the pool is filled where the server does not let users go first."""
LEAST_SPARE, MOST_SPARE = 1 / 8, 3 / 8
"""Least share of the slots that is kept free there, and largest share that is kept free on any server."""
FIRST_SHARE = 0.6
"""Share of the rows that fit the pool which is sent at first: admission reserves more for new rows."""
PACE_S = 0.25
"""Seconds between two rounds of sending while users are there: they have to wait for each prefill pass."""
TRUST_S = 30.0
"""Seconds in which the number of rows that admission is expected to take doubles."""
PASS_S = 0.05
"""Seconds of a forward pass."""
MOST_ROUNDS = 10
"""Samples up to which the number of preempted rows doubles."""


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
        """Requests at the last sample."""
        self.kept: int | None = None
        """Rows of ours that may stay in flight; None if none is to be preempted."""
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
            self._rounds = 0  # SGLang preempts rows of ours, which may be those that wait
            return
        if self._rounds or waiting_users > ahead or not self._yields:
            self.kept = max(0, reading.in_flight - waiting_users * 2**self._rounds)
        self._rounds = min(self._rounds + 1, MOST_ROUNDS)

    def _kept_without_stuck(self, gap_s: float, reading: Reading, slots: int, ahead: int) -> int | None:
        """Return how many of ours may stay if waiting rows are stuck; None if they are not."""
        stuck, self._last_queue = min(reading.queue, self._last_queue), reading.queue
        starts = reading.running > self._last_running
        self._last_running = reading.running
        self._admits *= 2 ** (gap_s / TRUST_S)
        # rows without decoding use no pool, and are in no gauge while they run
        if starts or stuck <= ahead or reading.running >= IN_USE * slots or not reading.usage:
            return None
        self._admits = reading.running
        return max(0, reading.in_flight - stuck)

    def _free_slots(self, slots: int, ahead: int) -> int:
        """Return how many requests, ours and the users', the slots allow."""
        if self._yields and not self.users:
            return slots + ahead
        spare = self._rise if self._yields else max(1, LEAST_SPARE * slots, 2 * self._rise)
        self._spare = math.ceil(min(spare, MOST_SPARE * slots))
        return max(1, slots - self._spare)

    def _free_pool(self, now: float, reading: Reading) -> float:
        """Return how many requests, ours and the users', the KV pool allows."""
        fits = float(self._fits)
        if self._usage and now - self._began > self._life_s:
            fits = self._running / self._usage
        room = self._full * min(fits, self._admits)
        over = reading.usage / self._full
        return max(1.0, room if over < 1 else min(room, (reading.running + reading.queue) / over))
