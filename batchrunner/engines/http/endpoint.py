"""An address that takes requests: how many are in flight there, and one timer that ends the late ones."""

import asyncio
import itertools
from typing import Self

from yarl import URL

from batchrunner.engines.http import wire

LONGEST_TICK_S = 1.0


class Deadline:
    """`with deadline:` around an await raises TimeoutError after `seconds`, or up to a tick (≤ 1 s) later.

    It works as `asyncio.timeout` does, but with one timer for all tasks: setting and clearing a timer for
    each takes 4 % of the time that the client spends on a row. A task may hold a deadline once at a time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tick_s = min(LONGEST_TICK_S, seconds / 10)
        self._ends: dict[asyncio.Task[object], float] = {}  # ascending: all tasks have the same time
        self._expired: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def holders(self) -> int:
        """Number of tasks that hold the deadline now."""
        return len(self._ends) + len(self._expired)

    def __enter__(self) -> Self:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._ends[task] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._expire, loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ends.pop(task, None)
        if task in self._expired:
            self._expired.discard(task)
            # someone else may have cancelled the task too: then it stays cancelled
            if task.uncancel() <= 0 and kind is asyncio.CancelledError:
                raise TimeoutError

    def expire(self) -> None:
        """Raise TimeoutError in every task that holds the deadline now."""
        self._end(list(self._ends))

    def _end(self, late: list[asyncio.Task[object]]) -> None:
        for task in late:
            del self._ends[task]
            self._expired.add(task)
            task.cancel()

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._end(list(itertools.takewhile(lambda task: self._ends[task] <= now, self._ends)))
        self._timer = loop.call_later(self._tick_s, self._expire, loop) if self._ends else None


class Endpoint:
    """The address of a server or a gateway; a request there may take `timeout_s` at most."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.paths = {path: URL(url + path) for path in wire.ROW_PATHS}
        self.deadline = Deadline(timeout_s)
        self.answers = 0
        """Requests answered so far, with whatever status."""
        self.closed: str | None = None
        """Why no requests are sent here now; None while they are."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered: rows that wait for a server to restart are not among them."""
        return self.deadline.holders

    def close(self, why: str) -> None:
        """End the requests in flight, so that their rows are sent again, and take no more until `reopen`."""
        self.closed = why
        self.deadline.expire()

    def reopen(self) -> None:
        """Take requests again."""
        self.closed = None
