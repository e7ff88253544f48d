"""Routes: the servers to which a run sends rows, and what the run knows about each of them.

Nothing here reads the clock or runs in the event loop; callers pass the time. Each run has its own routes.
Runs that use one engine at the same time share only `EndedRows`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from batchrunner.core.types import Completion, Request
from batchrunner.dispatch.bundles import BundleSender
from batchrunner.dispatch.sharing import Account

FIRST_COOLDOWN_S = 0.5
"""First pause, in seconds, in which a server that failed a request gets no rows. Each further pause is twice
as long, until the server answers again."""
LONGEST_COOLDOWN_S = 30.0
"""Longest pause, in seconds, of a server that fails requests."""
FIRST_SUSPENSION_S = 30.0
"""First suspension, in seconds: a server that failed rows which other servers answered gets no rows. Each
further suspension is twice as long, until the server answers again."""
LONGEST_SUSPENSION_S = 600.0
"""Longest suspension of a server, in seconds."""


@dataclass(slots=True, eq=False)
class EndedRows:
    """Counts of the rows that ended on a server, over all runs that use the engine."""

    rows: int = 0
    output_tokens: int = 0
    retractions: int = 0
    """How often the engine retracted these rows before they ended."""

    def add(self, answer: Completion | None) -> None:
        """Count a row; `answer` is None if the server refused the row."""
        self.rows += 1
        if answer is not None:
            self.output_tokens += answer.output_tokens
            self.retractions += answer.retractions


@dataclass(slots=True, eq=False)
class RouteRecord:
    """Counts of a server's answers and refusals.

    Only the first attempt of each row counts, and each control: a test request that the server should answer.
    """

    answered: int = 0
    """Number of rows answered at the first attempt, and of answered controls (test requests)."""
    refused: int = 0
    """Number of rows and controls (test requests) that the server refused for now. Each counts once."""
    newest: float = 0.0
    """Time at which the newest answered request was sent, in seconds of the monotonic clock."""
    last: Request | None = None
    """The request that was answered last."""
    has_control: bool = False
    """Whether a control, a test request that the server should answer, is in flight."""

    def record_answer(self, sent_at: float, *, is_counted: bool = True) -> None:
        """Record a reply to a request that was sent at `sent_at`; add it to `answered` if `is_counted`."""
        self.newest = max(self.newest, sent_at)
        self.answered += is_counted

    def record_refusal(self) -> None:
        """Count a temporary refusal."""
        self.refused += 1


@dataclass(slots=True, eq=False)
class Doubt:
    """Evidence that a server is at fault: it failed rows and has answered none since."""

    reason: str
    """The error of the first failed row."""
    contradicted: int = 0
    """Number of failed rows that other servers then answered."""


@dataclass(slots=True, eq=False)
class Route:
    """A server that gets rows of a run."""

    url: str
    ended: EndedRows = field(default_factory=EndedRows)
    window: int = 0
    """Concurrency limit: maximum number of the run's requests in flight. If it shrinks, no request is
    cancelled."""
    in_flight: int = 0
    """Number of the run's requests in flight on the route."""
    speed: float = 1.0
    """Relative speed of the server: a count of the rows that ended on it recently."""
    kept: deque[Any] = field(default_factory=deque)
    """Rows (`PendingRow`) that wait for this server because it has their prefix in its cache."""
    held: deque[Any] = field(default_factory=deque)
    """Rows that moved here from another server, and wait until this server has computed their prefix."""
    promised: int = 0
    """Number of rows that will go to this server: the rows in `kept` and `held`, and rows with the same
    prefixes that are still to be read."""
    record: RouteRecord = field(default_factory=RouteRecord)
    doubt: Doubt | None = None
    """Evidence that the server is at fault, from failed rows; None if it has answered since."""
    sender: BundleSender | None = None
    """Sends rows to this server; None before the first row."""
    cools_until: float = 0.0
    """Time at which the pause after failed requests ends; 0 if the server has answered since."""
    _cooldown_s: float = FIRST_COOLDOWN_S
    _suspension_s: float = 0.0
    """Length of the last suspension (a pause without rows) in seconds; 0 if the server has answered since."""

    @property
    def is_suspended(self) -> bool:
        """Whether the server was suspended for failing rows, and has not answered since."""
        return self._suspension_s > 0

    @property
    def is_in_order(self) -> bool:
        """Whether the server has answered a row, and no failed row has put it in doubt since."""
        return self.record.last is not None and self.doubt is None

    def has_slot(self, now: float) -> bool:
        """Tell whether a slot whose request ended may be used for another request."""
        return self.in_flight <= self.window and self.cools_until <= now

    def cool_down(self, now: float) -> None:
        """Start a pause without new requests, after a failed request.

        Requests that fail together count once: a pause that has begun is not extended.
        """
        if self.cools_until <= now:
            self.cools_until = now + self._cooldown_s
            self._cooldown_s = min(self._cooldown_s * 2, LONGEST_COOLDOWN_S)

    def suspend(self, now: float) -> float | None:
        """Send no rows to the server for a while. Return the seconds, or None if it is already suspended."""
        if self.is_suspended and self.cools_until > now:
            return None
        # An answer sets the length back to 0. The next suspension then lasts for FIRST_SUSPENSION_S.
        self._suspension_s = min(self._suspension_s * 2, LONGEST_SUSPENSION_S) or FIRST_SUSPENSION_S
        self.cools_until = now + self._suspension_s
        return self._suspension_s

    def end_cooldown(self) -> None:
        """End any pause or suspension, after an answer."""
        if self.cools_until:
            self.cools_until, self._cooldown_s, self._suspension_s = 0.0, FIRST_COOLDOWN_S, 0.0


class Routes:
    """The servers of a run; each is added when it is first seen."""

    def __init__(self, account: Account | None = None) -> None:
        """Start without servers. Pass no `account` if no other run can use the engine."""
        self._by_url: dict[str, Route] = {}
        self.account = account
        """Account that pays for the rows of the run; None if no other run can use the engine."""
        self.in_flight = 0
        """Requests in flight on all routes."""

    def __iter__(self) -> Iterator[Route]:
        """Iterate over the routes, the oldest first."""
        return iter(self._by_url.values())

    def __getitem__(self, url: str) -> Route:
        """Return the route to a server; raises KeyError if there is none."""
        return self._by_url[url]

    def open(self, url: str, ended: EndedRows | None = None) -> Route:
        """Return the route to a server; create it if there is none.

        A new route uses `ended` as its counts of ended rows.
        """
        route = self._by_url.get(url)
        if route is None:
            route = self._by_url[url] = Route(url, ended or EndedRows())
        return route

    @property
    def window(self) -> int:
        """Sum of the concurrency limits of all servers."""
        return sum(route.window for route in self)

    def least_used(self) -> Route:
        """Return the server with the fewest requests, in flight or promised, in relation to its speed.

        A server that failed a request, and has not answered since, is the last choice.
        """

        def use(route: Route) -> tuple[bool, float]:
            return route.cools_until > 0, (route.in_flight + route.promised) / route.speed

        return min(self, key=use)

    def acquire_slot(self, now: float, wants: Callable[[Route], bool] = lambda _: True) -> Route | None:
        """Take a slot on the server with the most free slots; None if no slot is free.

        Only servers for which `wants` is true count. A server that failed a request gives no slot until its
        pause ends. After that, and until it answers again, it is the last choice: otherwise a server that is
        gone for good would get the last row of a run again and again.
        """
        best, best_rank = None, (False, 0)
        for route in self:
            free = route.window - route.in_flight
            rank = not route.cools_until, free
            if free > 0 and rank > best_rank and route.cools_until <= now and wants(route):
                best, best_rank = route, rank
        if best is not None:
            best.in_flight += 1
            self.in_flight += 1
        return best

    def release_slot(self, route: Route) -> None:
        """Free a slot."""
        route.in_flight -= 1
        self.in_flight -= 1

    def cool_down(self, route: Route, now: float) -> float:
        """Start the pause of a server that failed a request; return its remaining seconds.

        Without a pause, a server that fails every request at once would always have the most free slots, and
        would get all rows. A single server has no such pause: there each failed row has its own.
        """
        if len(self._by_url) > 1:
            route.cool_down(now)
        return max(0.0, route.cools_until - now)

    def has_others(self, than: Collection[Route]) -> bool:
        """Tell whether there is a server that is not in `than` and not suspended."""
        return not all(route.is_suspended or route in than for route in self)

    def may_get(self, route: Route, avoided: Collection[Route]) -> bool:
        """Tell whether a server may get a row. An avoided one gets it only if all others are suspended."""
        return route not in avoided or not self.has_others(avoided)
