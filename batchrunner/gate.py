"""The in-flight window: an async gate that can be resized while it is held."""

from __future__ import annotations

import asyncio
from collections import deque


class Gate:
    """At most `window` holders at once, first come, first served.

    A smaller window takes nothing back: it lets holders go until the number fits.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def window(self) -> int:
        """How many may hold the gate at once."""
        return self._window

    @property
    def in_flight(self) -> int:
        """How many hold it now."""
        return self._in_flight

    async def acquire(self) -> None:
        """Wait for a free place and take it."""
        if self._in_flight < self._window and not self._waiting:
            self._in_flight += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the place was given in the same moment: hand it on
            raise

    def release(self) -> None:
        """Give a place back."""
        self._in_flight -= 1
        self._admit()

    def resize(self, window: int) -> None:
        """Change the window; waiting holders enter at once where it grew."""
        if window < 1:
            raise ValueError(f"a window holds at least one request (got {window})")
        self._window = window
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._in_flight < self._window:
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)
