"""State of one server in the client: its requests in flight, its model, its hangs and its deaths."""

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
"""Description of a server's model: the fields in MODEL_FIELDS (guard.py) that the server reports."""
ModelQuestion = Callable[[], Awaitable[Model]]
"""Function that asks a server for its model. Raises EngineDownError if the server does not answer."""


class SentRequest(NamedTuple):
    """A request that was sent and is not answered yet."""

    sent_at: float
    """Time at which the request was sent, in seconds of the monotonic clock."""
    rids: tuple[str, ...] = ()
    """Ids by which SGLang can abort the request, one for each row; empty if it cannot be aborted."""


@dataclass(slots=True, eq=False)
class Liveness:
    """State of a server: whether it answers, and when it last died."""

    is_dead: bool = False
    """Whether the server did not answer when it was last asked."""
    died_at: float = -math.inf
    """Time of the server's last death, in seconds of the monotonic clock; minus infinity before the first."""
    question: asyncio.Future[bool] | None = None
    """Request in flight that asks whether the server answers; None if there is none. All rows whose
    connections broke together share its result."""

    def record(self, *, alive: bool) -> None:
        """Record whether the server is alive now. The time of death is that of the first failed check."""
        if not alive and not self.is_dead:
            self.died_at = time.monotonic()
        self.is_dead = not alive

    def forget_question(self, _: asyncio.Future[bool]) -> None:
        """Forget the answered request, so that the next caller sends a new one."""
        self.question = None


@dataclass(slots=True, eq=False)
class ModelWatch:
    """Asks one server, again and again, whether it still serves the run's model."""

    ask: ModelQuestion
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a request for the server's model is in flight, so that the next one waits."""
    next_question: asyncio.Task[BatchrunError | EngineDownError | None] | None = None
    """The next request for the server's model, if it is not sent yet. The task's result is an error, or None
    if the server serves the run's model."""


class HangPause(NamedTuple):
    """A pause in which a server that hangs gets no rows."""

    why: str
    """Reason of the pause, in words for the user."""
    until: float
    """Latest end of the pause, in seconds of the monotonic clock."""
    progress: object
    """The server's progress (`hang_detector.progress_of`) when the hang was noticed."""

    def is_over(self, now: float, progress: object) -> bool:
        """Tell whether the pause is over at the time `now`.

        It ends at `until`, or as soon as the server's `progress` has changed, because the server then works
        again.
        """
        return now > self.until or bool(progress and progress != self.progress)


@dataclass(slots=True, eq=False)
class Endpoint:
    """The client's state of one server."""

    url: str
    hang_detector: HangDetector
    address: str = ""
    """URL to which the server's requests are sent: `url`, or the URL of a gateway."""
    liveness: Liveness = field(default_factory=Liveness)
    arguments: Mapping[str, Any] | None = None
    """The server's `/server_info` at the start of the run; None if the server did not answer then."""
    served_model_name: str | None = None
    """Name under which the server serves the model, as of the start of the run; None if unknown."""
    watch: ModelWatch | None = None
    """Checks which model the server serves; None before the run's model is known."""
    doubts: int = 0
    """Number of times since the last check of the model that another server may have taken the address."""
    senders: dict[str, PostSender] = field(default_factory=dict)
    """Senders of POST requests, by path."""
    requests: dict[asyncio.Task[Any], SentRequest] = field(default_factory=dict)
    """Requests in flight, by the asyncio task that waits for each; the oldest first."""
    answers: int = 0
    """Number of requests answered so far, with any status."""
    proxy_limit: ProxyLimit = field(default_factory=ProxyLimit)
    """Time limit of a proxy between this machine and the server, once it has been learned."""
    is_listed: bool = True
    """Whether the gateway lists the server, and uses it if rows go through the gateway. Always true without a
    gateway."""
    hang_pause: HangPause | None = None
    """Pause in which the server gets no rows; None if the server does not hang."""
    why_closed: str | None = None
    """Reason why the server gets no requests now: it hangs, or its gateway does not list it. None if it gets
    requests. It follows from `is_listed` and `hang_pause`, but is stored because every request reads it."""

    def __post_init__(self) -> None:
        self.address = self.address or self.url

    @property
    def in_flight(self) -> int:
        """Number of requests sent and not answered. Rows that wait for the server to restart do not count."""
        return len(self.requests)

    def doubt(self) -> None:
        """Record that the server was away: another server may have its address now."""
        if self.watch is not None:
            self.doubts += 1

    def check_for_hang(self, loads: Sequence[SchedulerLoad]) -> Hang | None:
        """Record a poll of the loads of all servers; return this server's hang, or None if there is none."""
        own_loads = [load for load in loads if load.server == self.url]
        return self.hang_detector.poll(
            time.monotonic(), own_loads, in_flight=self.in_flight, answers=self.answers
        )

    def pause(self, hang_pause: HangPause) -> None:
        """Send the server no more requests, and cancel those in flight so that their rows are sent again."""
        self.hang_pause = hang_pause
        self._update_why_closed()
        self.end_requests(sent_before=math.inf)

    def resume(self) -> None:
        """Send rows again to a server that was paused because it hung."""
        self.hang_pause = None
        self._update_why_closed()

    def set_listed(self, *, is_listed: bool) -> None:
        """Record whether the gateway lists the server. Requests in flight are not cancelled."""
        self.is_listed = is_listed
        self._update_why_closed()

    def _update_why_closed(self) -> None:
        if not self.is_listed:
            self.why_closed = f"the gateway sends no rows to {self.url} now"
        elif self.hang_pause is not None:
            self.why_closed = self.hang_pause.why
        else:
            self.why_closed = None

    def end_requests(self, *, sent_before: float) -> None:
        """Cancel and remove the requests that were sent before a time (monotonic clock).

        The task of each request raises the request's error (`HttpEngine._ended_error`).
        """
        tasks = [task for task, request in self.requests.items() if request.sent_at < sent_before]
        for task in tasks:
            # A missing entry tells the task that the cancellation did not come from its caller.
            del self.requests[task]
            task.cancel()
