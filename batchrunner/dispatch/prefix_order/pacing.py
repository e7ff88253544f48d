"""When a row may follow the one that brings its beginning in. Pure: its clock is tokens of prefill."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchrunner.dispatch.pending_row import PendingRow
    from batchrunner.dispatch.prefix_order.distance import ReuseDistance

MOST_HELD, MOST_HELD_BYTES = 1024, 32 << 20
"""Rows that wait for their beginning while others can still come, and the bytes of their prompts."""


class Turn(NamedTuple):
    """A row whose turn it is."""

    work: PendingRow
    is_early: bool
    """Whether there was nothing else to send until its beginning is computed."""


class FollowerRelease:
    """Rows that wait for their turn: leaders in order, followers until their leader is far enough ahead."""

    def __init__(self, lead: ReuseDistance | None) -> None:
        """Without a `lead` all go as they come."""
        self._lead = lead
        self._leaders: deque[PendingRow] = deque()
        self._leaders_bytes = 0
        self._following_bytes = 0
        self._following: list[tuple[float, int, PendingRow]] = []  # a heap: since when, which was first, who
        self._due: list[tuple[int, int, PendingRow]] = []  # a heap: the longest beginning first
        self._serial = count()

    def __len__(self) -> int:
        """Count those that wait."""
        return len(self._leaders) + len(self._following) + len(self._due)

    def add(self, leaders: Iterable[PendingRow]) -> None:
        """Add rows that wait for no other; their followers come with them."""
        for work in leaders:
            self._leaders.append(work)
            self._leaders_bytes += work.size

    def follow(self, leader: PendingRow) -> None:
        """Let the followers of a row that has gone wait: first those that others follow, or are long."""
        for work in sorted(leader.children, key=lambda work: (not work.children, -work.longest)):
            heapq.heappush(self._following, (leader.clock, next(self._serial), work))
            self._following_bytes += work.size
        leader.children = []

    def take(self, *, last: bool) -> Turn | None:
        """Take the next row; None where all that wait should wait on, unless no others come (`last`).

        Of those whose time has come the one with the longest beginning goes. Below a common one many fall due
        together, and have followers in turn: in the order of their times all of them would go first, and what
        they brought in would be evicted before their followers came.
        """
        self._look()
        is_early = False
        if self._due and not (last and self._is_near_end()):
            work = heapq.heappop(self._due)[2]
        elif self._leaders:
            work = self._leaders.popleft()
            self._leaders_bytes -= work.size
        elif self._due:
            work = heapq.heappop(self._due)[2]
        elif self._following and (last or self._holds_most()):
            work, is_early = self._next_follower()[1], True
        else:
            return None
        if self._lead is not None:
            self._lead.goes(work)
            self.follow(work)
        return Turn(work, is_early)

    def _holds_most(self) -> bool:
        return len(self._following) > MOST_HELD or self._following_bytes > MOST_HELD_BYTES

    def _next_follower(self) -> tuple[int, PendingRow]:
        _, serial, work = heapq.heappop(self._following)
        self._following_bytes -= work.size
        return serial, work

    def _is_near_end(self) -> bool:
        """Tell whether the last leaders should go now: then others' followers are left to go behind them."""
        if self._lead is None or not self._leaders:
            return False
        return self._leaders_bytes / self._lead.bytes_a_token <= 2 * self._lead.tokens

    def _look(self) -> None:
        """Find those whose time has come."""
        while self._following and self._lead is not None:
            parent = self._following[0][2].parent
            assert parent is not None
            if not self._lead.is_ahead(parent):
                return
            serial, work = self._next_follower()
            heapq.heappush(self._due, (-work.shared, serial, work))
