"""Sets the concurrency limit of a run on a scheduler that serves its users first. No I/O.

All requests that run or wait at the scheduler belong to its users, except the rows of this run. A fresh load
sample sets the window W, the maximum number of this run's requests in flight at the scheduler:

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

Rows of this run are preempted in three cases:

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
"""Token usage up to which the KV pool is filled if the server does not let users go first."""
LEAST_SPARE = 1 / 8
"""Minimum fraction of the slots that stays free on a server that does not let users go first."""
MOST_SPARE = 3 / 8
"""Maximum fraction of the slots that stays free for users on any server."""
FIRST_SHARE = 0.6
"""Number of rows sent at first, as a fraction of those that fit the KV pool. SGLang's admission reserves more
room for new rows than for running ones."""
PACE_S = 0.25
"""Seconds between two rounds of sending while users are there. After each round, users wait for a prefill
pass."""
TRUST_S = 30.0
"""Doubling time, in seconds, of the number of requests that the server is expected to admit. The number was
lowered when requests waited although slots were free."""
PASS_S = 0.05
"""Assumed duration of a forward pass, in seconds."""
MOST_ROUNDS = 10
"""While users wait, the number of preempted rows doubles at each load sample. This is the maximum number of
doublings."""


class BackgroundController(Controller):
    """Controls the concurrency limit of one scheduler that serves its users before this run."""

    least = 0

    def __init__(
        self, scheduler: str, fits: int, band: QueueBand, *, most: int, now: float, yields: bool
    ) -> None:
        """Start with a limit of 0; `fits` is the number of rows that fit the KV pool.

        `yields` tells whether the server gives requests of users priority over requests of this run.
        """
        super().__init__(scheduler, 0, band, most=most, now=now)
        self.state = "background"
        self.users = 0
        """Number of requests that certainly were the users', at the last load sample."""
        self.ours = 0
        """Number of this run's requests in flight, at the last load sample."""
        self.kept: int | None = None
        """Number of this run's rows that may stay in flight; None if none is to be cancelled."""
        self._yields = yields
        self._full = GOOD_USAGE if yields else CAUTIOUS_USAGE
        self._fits = fits
        self._admits = FIRST_SHARE * fits
        """Number of requests that the server's admission is expected to accept."""
        self._spare = 0
        """Number of slots that stay free for users."""
        self._last_queue = self._last_running = 0
        """Gauges of the last load sample."""
        self._rise = 0.0
        """Largest recent rise of the number of users between two load samples."""
        self._rounds = 0
        """Number of consecutive load samples in which users waited."""
        self._sent_at = now
        """Time of the last round of sending."""

    def sample(
        self,
        now: float,
        reading: Reading,
        *,
        may_grow: bool = True,  # noqa: ARG002 - only the users limit the window
    ) -> list[Decision | CornerChange]:
        """Process a fresh load sample by the formulas in the module's docstring; return the changes.

        `kept` is set if rows of this run are to be cancelled.
        """
        gap_s = self._learn(now, reading)
        most_users = self._count_users(gap_s, reading)
        slots = reading.max_running or UNKNOWN_ENGINE_WINDOW
        # About this many rows end within a forward pass. As many requests may wait for their slots.
        ahead = math.ceil(self._rate * PASS_S) + 1
        self.kept = self._kept_without_stuck(gap_s, reading, slots, ahead)
        # This run gets what slots and KV pool allow, less all requests that may be the users'.
        allowed = min(self._allowed_by_slots(slots, ahead), self._allowed_by_pool(now, reading))
        new_limit = int(allowed - most_users)
        # Users may wait in the queue. This run must not take the slots that they need.
        if most_users and reading.queue:
            new_limit = min(new_limit, reading.in_flight - min(reading.queue, most_users))
        self.state = "background"
        if now - self._refused_at < CALM_S:  # after a refusal the limit does not grow for a while
            self.state = "pressure"
            new_limit = min(new_limit, self.window)
        reason = (
            f"{self.users} requests of users, #queue-req {reading.queue}, token usage {reading.usage:.2f}"
        )
        waiting_users = min(reading.queue, self.users)
        if waiting_users:
            new_limit = 0
            reason = f"{reason}: {waiting_users} requests of users wait"
            self._make_room(reading, waiting_users, slots, ahead)
        else:
            self._rounds = 0
            self._keep_spare_slots(reading, new_limit + most_users)
        decisions = self._move(new_limit, reason)
        if self.users and now - self._sent_at < PACE_S:
            self.window = 0  # nothing is sent until the next round is due
        else:
            self._sent_at = now
        return [*decisions]

    def _count_users(self, gap_s: float, reading: Reading) -> int:
        """Update the number of requests that are certainly the users', and its recent rise.

        Return the maximum number of requests that may be theirs.
        """
        total, users_before = reading.running + reading.queue, self.users
        # The gauges were read between the last two samples. This run's requests were then between these
        # counts.
        fewest_ours, most_ours = sorted((reading.in_flight, self.ours))
        self.ours = reading.in_flight
        self.users = max(0, total - most_ours)
        self._rise = max(self.users - users_before, self._rise * 0.5 ** (gap_s / MINUTE_S))
        return max(0, total - fewest_ours)

    def _make_room(self, reading: Reading, waiting_users: int, slots: int, ahead: int) -> None:
        """Choose how many rows of this run may stay in flight while users wait.

        `slots` is the maximum number of running requests. `ahead` is the number of rows that end within a
        forward pass.
        """
        if self._yields and reading.running >= IN_USE * slots and reading.usage <= GOOD_USAGE:
            # If all slots are taken, SGLang itself preempts this run's rows for users. The waiting requests
            # may be these rows, so no further row is cancelled.
            self._rounds = 0
            return
        # A server that gives users priority starts a few waiting ones in its next pass by itself. Otherwise
        # rows are cancelled, twice as many at each further sample with waiting users.
        if self._rounds or waiting_users > ahead or not self._yields:
            self.kept = max(0, reading.in_flight - waiting_users * 2**self._rounds)
        self._rounds = min(self._rounds + 1, MOST_ROUNDS)

    def _keep_spare_slots(self, reading: Reading, allowed: int) -> None:
        """Cancel rows of this run if too few slots are free, before any user has to wait.

        `allowed` is the number of requests, of the users and this run, that leaves all spare slots free. A
        server that gives users priority needs no spare slots.
        """
        # With this many rows, half of the spare slots remain free.
        may_stay = max(0, allowed - self.users + self._spare // 2)
        if self.users and not self._yields and reading.in_flight > may_stay:
            self.kept = may_stay

    def _kept_without_stuck(self, gap_s: float, reading: Reading, slots: int, ahead: int) -> int | None:
        """Return how many rows may stay in flight if waiting requests are stuck; None if none are.

        Requests are stuck if they wait from one sample to the next, although slots are free and no request
        starts: the server's admission does not accept them.
        """
        stuck = min(reading.queue, self._last_queue)
        has_started = reading.running > self._last_running
        self._last_queue, self._last_running = reading.queue, reading.running
        # `_admits` also limits the window (see `_allowed_by_pool`). It grows little by little, until requests
        # are stuck again.
        self._admits *= 2 ** (gap_s / TRUST_S)
        # Up to `ahead` waiting requests may just wait for the next pass, so they are not stuck. A task
        # without decoding (token usage 0) cannot be stuck: its rows use no KV pool.
        if has_started or stuck <= ahead or reading.running >= IN_USE * slots or not reading.usage:
            return None
        # The server accepts no more requests than it runs now.
        self._admits = reading.running
        return max(0, reading.in_flight - stuck)

    def _allowed_by_slots(self, slots: int, ahead: int) -> int:
        """Return the number of requests, of the users and of this run, that the slots allow.

        `slots` is the maximum number of running requests. `ahead` is the number of rows that end within a
        forward pass.
        """
        if self._yields and not self.users:
            # A server that lets users go first preempts rows of this run for a user who comes, so no slot
            # stays free. `ahead` rows wait for the slots of rows that end in the next pass.
            return slots + ahead
        # Slots that stay free for as many users as came recently between two samples (`_rise`). On a server
        # that does not let users go first, a user without a free slot would have to wait, so more stay free.
        wanted_spare = self._rise
        if not self._yields:
            wanted_spare = max(1, LEAST_SPARE * slots, 2 * self._rise)
        self._spare = math.ceil(min(wanted_spare, MOST_SPARE * slots))
        return max(1, slots - self._spare)

    def _allowed_by_pool(self, now: float, reading: Reading) -> float:
        """Return the number of requests, of the users and of this run, that the KV pool allows.

        Token usage is to stay below `_full`.
        """
        # At first, expected lengths tell how many requests fill the pool.
        fits = float(self._fits)
        # The means are used once they cover the whole running time of a row.
        if self._usage and now - self._began > self._life_s:
            fits = self._running / self._usage
        room = self._full * min(fits, self._admits)
        overuse = reading.usage / self._full
        if overuse >= 1:  # The pool is too full now: shrink the present number of requests in proportion.
            room = min(room, (reading.running + reading.queue) / overuse)
        return max(1.0, room)
