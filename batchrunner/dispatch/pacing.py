"""Releases a follower once its leader is a reuse distance ahead. Pure: the clock counts prefill tokens."""

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from batchrunner.dispatch.distance import ReuseDistance
from batchrunner.dispatch.pending_row import PendingRow

MOST_HELD_ROWS, MOST_HELD_BYTES = 1024, 32 << 20
"""Followers held back while more rows can come, and the bytes of their prompts."""


class Released(NamedTuple):
    """A row that may be sent now."""

    row: PendingRow
    is_early: bool
    """Whether its leader is not far enough ahead, but nothing else was left to send."""


class FollowerRelease:
    """Rows not sent yet: leaders in order, and followers until their leader is far enough ahead."""

    def __init__(self, distance: ReuseDistance | None) -> None:
        """Without a `distance` all rows go as they come."""
        self._distance = distance
        self._leaders: deque[PendingRow] = deque()
        self._leaders_bytes = 0
        self._held: list[tuple[float, int, PendingRow]] = []  # a heap: leader's clock, serial, follower
        self._held_bytes = 0
        self._due: list[tuple[int, int, PendingRow]] = []  # a heap: the longest shared prefix first
        self._serial = count()

    def __len__(self) -> int:
        """Count the rows that were not sent yet."""
        return len(self._leaders) + len(self._held) + len(self._due)

    def add(self, leaders: Iterable[PendingRow]) -> None:
        """Add rows that follow no other; their followers come with them."""
        for row in leaders:
            self._leaders.append(row)
            self._leaders_bytes += row.prompt_bytes

    def hold_followers(self, leader: PendingRow) -> None:
        """Hold back the followers of a sent row; those with followers or long outputs go first."""
        if not leader.followers:
            return
        for row in sorted(leader.followers, key=lambda row: (not row.followers, -row.longest_output)):
            heapq.heappush(self._held, (leader.sent_clock, next(self._serial), row))
            self._held_bytes += row.memory_bytes
        leader.followers = []

    def take(self, *, last: bool) -> Released | None:
        """Take the next row; None if all should wait on. With `last` no more rows come: then none waits.

        Of the followers that are due, the one with the longest shared prefix goes first. Below a common
        prefix many fall due together and have followers in turn: in the order of their times all of them
        would go first, and their prefixes would be evicted before their own followers came.
        """
        self._find_due()
        is_early = False
        if self._due and not (last and self._is_near_end()):
            row = heapq.heappop(self._due)[2]
        elif self._leaders:
            row = self._leaders.popleft()
            self._leaders_bytes -= row.prompt_bytes
        elif self._due:
            row = heapq.heappop(self._due)[2]
        elif self._held and (last or self._holds_most()):
            row, is_early = self._next_held()[1], True
        else:
            return None
        if self._distance is not None:
            self._distance.mark_sent(row)
            self.hold_followers(row)
        return Released(row, is_early)

    def _holds_most(self) -> bool:
        return len(self._held) > MOST_HELD_ROWS or self._held_bytes > MOST_HELD_BYTES

    def _next_held(self) -> tuple[int, PendingRow]:
        _, serial, row = heapq.heappop(self._held)
        self._held_bytes -= row.memory_bytes
        return serial, row

    def _is_near_end(self) -> bool:
        """Tell whether the last leaders should go now, so that other rows are left to follow behind them.

        Until then followers wait up to three distances: where the prefix would be evicted, none waits longer.
        """
        if self._distance is None or not self._leaders or not self._distance.has_room:
            return False
        return self._leaders_bytes / self._distance.bytes_a_token <= 2 * self._distance.tokens

    def _find_due(self) -> None:
        while self._held and self._distance is not None:
            leader = self._held[0][2].leader
            assert leader is not None
            if not self._distance.is_reached(leader):
                return
            serial, row = self._next_held()
            heapq.heappush(self._due, (-row.shared_bytes, serial, row))
