"""The background law: how many requests one scheduler is given that serves others first. Pure.

What runs and waits there beyond ours is its users'. A fresh sample sets the window W:

    W ← 0                            while users wait, and between two times of sending while they are there
    W ← slots + ahead                while no users are there; slots is max_running_requests, and
                                     `ahead` is what ends in a forward pass
    W ← slots - spare - users        else
    W ≤ full·fits - users            fits: what the KV pool holds, by the rows that run, at first by lengths

Of ours, those are given back that wait, sample after sample, as the server's admission takes no more: it
counts as full with what it runs then. And where users wait, as many of ours as of them, twice as many at the
next sample, and so on: nothing else makes room in the pool, as SGLang's own preemption regards slots alone.
Where that is on and all slots are taken, it is left to it: the rows keep their tokens, and wait for a slot.

With a server that lets users go first, `spare` is what came at once lately, and `full` is 0.9. With any other
one it is twice as many, an eighth of the slots at least, and `full` 0.75: who finds no room there waits for
the next gauge, 15 passes late. Rows in the way of half of `spare` are given back before somebody waits.

Gauges are older than our own count. Ours were between that count and the one at the last sample: the larger
says how many users there are for sure, the smaller how many there may be.
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
"""Share of the slots that is kept free there at least, and anywhere at most."""
FIRST_SHARE = 0.6
"""Share of the rows that the pool fits with which it begins: admission reserves more for new rows."""
PACE_S = 0.25
"""Seconds between two times of sending while users are there, who have to wait for each prefill pass."""
TRUST_S = 30.0
"""Time in which that doubles which admission is trusted to take."""
PASS_S = 0.05
"""Seconds of a forward pass."""
MOST_ROUNDS = 10
"""Samples up to which the number of rows that are given back doubles."""


class BackgroundController(Controller):
    """The window of one scheduler that serves others first."""

    least = 0

    def __init__(
        self, scheduler: str, fits: int, band: QueueBand, *, most: int, now: float, yields: bool
    ) -> None:
        """Take how many rows the pool `fits`, and whether the server `yields`: lets users go first."""
        super().__init__(scheduler, 0, band, most=most, now=now)
        self.state = "background"
        self.users = self.ours = 0
        """Requests at the last sample."""
        self.kept: int | None = None
        """Rows of ours that may stay, where some are to be given back."""
        self._yields = yields
        self._full = GOOD_USAGE if yields else CAUTIOUS_USAGE
        self._fits = fits
        self._takes = FIRST_SHARE * fits  # what the server's admission takes
        self._spare = self._queue = self._were_running = 0
        self._rise = 0.0  # most users that came between two samples lately
        self._rounds = 0  # samples since users wait
        self._sent_at = now

    def sample(
        self,
        now: float,
        reading: Reading,
        *,
        may_grow: bool = True,  # noqa: ARG002 - the users say it
    ) -> list[Decision | CornerChange]:
        """Use a fresh sample; return what changed."""
        gap_s = self._learn(now, reading)
        total, before = reading.running + reading.queue, self.users
        smaller, larger = sorted((reading.in_flight, self.ours))
        self.ours, self.users, at_most = reading.in_flight, max(0, total - larger), max(0, total - smaller)
        self._rise = max(self.users - before, self._rise * 0.5 ** (gap_s / MINUTE_S))
        slots = reading.max_running or UNKNOWN_ENGINE_WINDOW
        ahead = math.ceil(self._rate * PASS_S) + 1
        self.kept = self._without_stuck(gap_s, reading, slots, ahead)
        room = min(self._free_slots(slots, ahead), self._free_pool(now, reading)) - at_most
        if at_most and reading.queue:  # users may be among those who wait
            room = min(room, reading.in_flight - min(reading.queue, at_most))
        is_calm = now - self._refused_at >= CALM_S
        self.state = "background" if is_calm else "pressure"
        if not is_calm:
            room = min(room, self.window)
        why = f"{self.users} requests of users, #queue-req {reading.queue}, token usage {reading.usage:.2f}"
        if waits := min(reading.queue, self.users):
            room, why = 0, f"{why}: {waits} of the users' wait"
            if self._yields and reading.running >= IN_USE * slots and reading.usage <= GOOD_USAGE:
                self._rounds = 0  # SGLang preempts rows of ours, which may be those that wait
            else:
                if self._rounds or waits > ahead or not self._yields:
                    self.kept = max(0, reading.in_flight - waits * 2**self._rounds)
                self._rounds = min(self._rounds + 1, MOST_ROUNDS)
        else:
            self._rounds = 0
            may_stay = max(0, int(room) + at_most - self.users + self._spare // 2)
            if self.users and not self._yields and reading.in_flight > may_stay:
                self.kept = may_stay
        decisions = self._move(int(room), why)
        if self.users and now - self._sent_at < PACE_S:
            self.window = 0
        else:
            self._sent_at = now
        return [*decisions]

    def _without_stuck(self, gap_s: float, reading: Reading, slots: int, ahead: int) -> int | None:
        """Return how many of ours stay where others are waiting that the server does not take; None: all."""
        stuck, self._queue = min(reading.queue, self._queue), reading.queue
        starts = reading.running > self._were_running
        self._were_running = reading.running
        self._takes *= 2 ** (gap_s / TRUST_S)
        # rows without decoding use no pool, and are in no gauge while they run
        if starts or stuck <= ahead or reading.running >= IN_USE * slots or not reading.usage:
            return None
        self._takes = reading.running
        return max(0, reading.in_flight - stuck)

    def _free_slots(self, slots: int, ahead: int) -> int:
        """Return how many requests may be there by the slots, ours and the users'."""
        if self._yields and not self.users:
            return slots + ahead
        spare = self._rise if self._yields else max(1, LEAST_SPARE * slots, 2 * self._rise)
        self._spare = math.ceil(min(spare, MOST_SPARE * slots))
        return max(1, slots - self._spare)

    def _free_pool(self, now: float, reading: Reading) -> float:
        """Return how many requests may be there by the KV pool, ours and the users'."""
        fits = float(self._fits)
        if self._usage and now - self._began > self._life_s:
            fits = self._running / self._usage
        room = self._full * min(fits, self._takes)
        over = reading.usage / self._full
        return max(1.0, room if over < 1 else min(room, (reading.running + reading.queue) / over))
