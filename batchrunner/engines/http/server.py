"""One server as the client sees it: requests in flight, model, hang, death."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import BatchrunError, EngineDownError
from batchrunner.engines.hang_detector import Hang, HangDetector
from batchrunner.engines.http.proxies import ProxyLimit
from batchrunner.engines.http.wire import PostSender

Model = Mapping[str, str]
"""Description of a server's model: the MODEL_FIELDS (guard.py) that the server reports."""
ModelQuestion = Callable[[], Awaitable[Model]]
"""Asks a server for its model; raises EngineDownError without an answer."""


class SentRequest(NamedTuple):
    """A request that is sent and not answered."""

    sent_at: float
    """Time in seconds of the monotonic clock."""
    rids: tuple[str, ...] = ()
    """Request ids by which SGLang aborts it, one for each row; empty if it cannot be aborted."""


@dataclass(slots=True, eq=False)
class Liveness:
    """Whether a server answers, and when it died."""

    is_dead: bool = False
    """Whether it did not answer when last asked."""
    died_at: float = -math.inf
    """Time of its last death, in seconds of the monotonic clock."""
    question: asyncio.Future[bool] | None = None
    """Liveness question in flight, shared by all rows that were cut off together; None if there is none."""

    def record(self, *, alive: bool) -> None:
        """Record whether the server is alive now."""
        if not alive and not self.is_dead:
            self.died_at = time.monotonic()
        self.is_dead = not alive

    def forget_question(self, _: asyncio.Future[bool]) -> None:
        """Forget the answered question, so that the next caller asks a new one."""
        self.question = None


@dataclass(slots=True, eq=False)
class ModelWatch:
    """Questions to one server for its model."""

    ask: ModelQuestion
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_question: asyncio.Task[BatchrunError | EngineDownError | None] | None = None
    """The next question, not sent yet; its result is the error, or None for the run's model."""


class HangPause(NamedTuple):
    """A pause of a server that hangs: it gets no rows."""

    why: str
    until: float
    """End of the pause at the latest, in seconds of the monotonic clock."""
    progress: object
    """Its progress (`hang_detector.progress_of`) when the hang was noticed."""

    def is_over(self, now: float, progress: object) -> bool:
        """Tell whether the pause is over: its time has passed, or the server has made progress."""
        return now > self.until or bool(progress and progress != self.progress)


@dataclass(slots=True, eq=False)
class Endpoint:
    """A server, and the client's state for it."""

    url: str
    hangs: HangDetector
    address: str = ""
    """Where its requests go; `url` where nothing else is said."""
    liveness: Liveness = field(default_factory=Liveness)
    arguments: Mapping[str, Any] | None = None
    """Its arguments at the start of the run; None where it did not answer then."""
    watch: ModelWatch | None = None
    """None before the run's model is known."""
    doubts: int = 0
    """Signs since the last confirmation of its model that another server may be at its address."""
    senders: dict[str, PostSender] = field(default_factory=dict)
    """Senders of POST requests, by path."""
    requests: dict[asyncio.Task[Any], SentRequest] = field(default_factory=dict)
    """Requests in flight, by the asyncio task that waits for each; the oldest first."""
    answers: int = 0
    """Requests answered so far, with whatever status."""
    proxy_limit: ProxyLimit = field(default_factory=ProxyLimit)
    is_listed: bool = True
    """Whether its gateway lists it; always true without a gateway."""
    hang_pause: HangPause | None = None
    """None while it does not hang."""
    closed: str | None = None
    """Reason why it gets no requests now, by the two fields above; None while it gets them."""

    def __post_init__(self) -> None:
        """Send requests to the server itself, unless they go through a gateway."""
        self.address = self.address or self.url

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered: rows that wait for a server to restart are not among them."""
        return len(self.requests)

    def doubt(self) -> None:
        """Record that another server may be at its address by now: it was away."""
        if self.watch is not None:
            self.doubts += 1

    def hang_among(self, loads: Sequence[SchedulerLoad]) -> Hang | None:
        """Return the silence if the server hangs; `loads` are the last poll's, of all servers."""
        own_loads = [load for load in loads if load.server == self.url]
        return self.hangs.poll(time.monotonic(), own_loads, in_flight=self.in_flight, answers=self.answers)

    def pause(self, hang_pause: HangPause) -> None:
        """Send no more requests, and cancel those in flight, so that their rows are sent again."""
        self.hang_pause = hang_pause
        self._update_closed()
        self.end_requests(math.inf)

    def resume(self) -> None:
        """End the pause of a hang."""
        self.hang_pause = None
        self._update_closed()

    def set_listed(self, *, is_listed: bool) -> None:
        """Record whether its gateway lists it; requests in flight end either way."""
        self.is_listed = is_listed
        self._update_closed()

    def _update_closed(self) -> None:
        if not self.is_listed:
            self.closed = f"the gateway sends no rows to {self.url} now"
        else:
            self.closed = None if self.hang_pause is None else self.hang_pause.why

    def end_requests(self, sent_before: float) -> None:
        """Cancel the requests that were sent before a time, and remove them from `requests`."""
        late = [task for task, request in self.requests.items() if request.sent_at < sent_before]
        for task in late:
            del self.requests[task]
            task.cancel()
