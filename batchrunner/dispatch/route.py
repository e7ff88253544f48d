"""Routes: the servers to which a run sends rows, with the state that it keeps for each server.

Nothing here reads the clock or runs in the event loop; callers pass the time.

A route also keeps the sender of its rows, which only the dispatcher calls. Each run has its own routes. Runs
that use one engine at the same time share only `EndedRows`.
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
"""First cooldown of a route that fails requests, in seconds. Each further cooldown is twice as long, until
the route answers again."""
LONGEST_COOLDOWN_S = 30.0
"""Longest cooldown of a route that fails requests, in seconds."""
FIRST_SUSPENSION_S = 30.0
"""First suspension, in seconds, in which a route gets no rows. Each further suspension is twice as long,
until the route answers again."""
LONGEST_SUSPENSION_S = 600.0
"""Longest suspension, in seconds, in which a route gets no rows."""


@dataclass(slots=True, eq=False)
class EndedRows:
    """Rows that ended on a route, in all runs that use the engine."""

    rows: int = 0
    output_tokens: int = 0
    retractions: int = 0
    """Number of times that the engine retracted the rows before they ended."""

    def add(self, answer: Completion | None) -> None:
        """Count a row; `answer` is None if the server refused the row."""
        self.rows += 1
        if answer is not None:
            self.output_tokens += answer.output_tokens
            self.retractions += answer.retractions


@dataclass(slots=True, eq=False)
class RouteRecord:
    """Counts of a route's answers and refusals.

    An answer counts if it replies to the first attempt of a row or to a control (see attempt.py). A refusal
    counts once for each row and once for each control.
    """

    answered: int = 0
    """Number of answers to the first attempt of a row or to a control."""
    refused: int = 0
    """Number of temporary refusals. A row or a control counts at most once."""
    newest: float = 0.0
    """Time at which the newest answered request was sent, in seconds of the monotonic clock."""
    last: Request | None = None
    """The request that was answered last."""
    has_control: bool = False
    """Whether a control is in flight."""

    def record_answer(self, sent_at: float, *, is_counted: bool = True) -> None:
        """Record a reply to a request that was sent at `sent_at`; add it to `answered` if `is_counted`."""
        self.newest = max(self.newest, sent_at)
        self.answered += is_counted

    def record_refusal(self) -> None:
        """Count a temporary refusal."""
        self.refused += 1


@dataclass(slots=True, eq=False)
class Doubt:
    """Evidence against a route that has failed rows since its last answer."""

    reason: str
    """The error of the first row that failed on the route."""
    contradicted: int = 0
    """Number of rows that failed on the route and that other routes then answered."""


@dataclass(slots=True, eq=False)
class Route:
    """A server that gets rows of a run."""

    url: str
    ended: EndedRows = field(default_factory=EndedRows)
    window: int = 0
    """Concurrency limit of the route. If it shrinks, no request in flight is cancelled."""
    in_flight: int = 0
    """Number of the run's requests in flight on the route."""
    speed: float = 1.0
    """Speed of the route relative to the others: a count of the rows that ended on it recently."""
    kept: deque[Any] = field(default_factory=deque)
    """Rows (`PendingRow`) that wait for this route because their prefix is cached there."""
    held: deque[Any] = field(default_factory=deque)
    """Rows that moved here from another route, and wait until this route has computed their prefix."""
    promised: int = 0
    """Number of rows that this route is going to send: the rows in `kept` and `held`, and those rows of its
    prefix groups that have not reached the queue yet."""
    record: RouteRecord = field(default_factory=RouteRecord)
    doubt: Doubt | None = None
    """Evidence against the route from rows that failed since its last answer; None without such rows."""
    sender: BundleSender | None = None
    """Sender of the route's rows; None before the first row."""
    cools_until: float = 0.0
    """End of the cooldown or suspension; 0 if none has begun since the route's last answer."""
    _cooldown_s: float = FIRST_COOLDOWN_S
    _suspension_s: float = 0.0
    """Length of the last suspension, in seconds; 0 if the route has answered since."""

    @property
    def is_suspended(self) -> bool:
        """Whether the route was suspended and has not answered since."""
        return self._suspension_s > 0

    @property
    def is_in_order(self) -> bool:
        """Whether the route has answered a row, and nothing has put it in doubt since then."""
        return self.record.last is not None and self.doubt is None

    def has_slot(self, now: float) -> bool:
        """Tell whether the holder of a slot may use it for another request."""
        return self.in_flight <= self.window and self.cools_until <= now

    def cool_down(self, now: float) -> None:
        """Start the cooldown, after a failed request.

        Requests that fail together count once: a cooldown that has begun is not extended.
        """
        if self.cools_until <= now:
            self.cools_until = now + self._cooldown_s
            self._cooldown_s = min(self._cooldown_s * 2, LONGEST_COOLDOWN_S)

    def suspend(self, now: float) -> float | None:
        """Suspend the route; return the length in seconds, or None if it is already suspended."""
        if self.is_suspended and self.cools_until > now:
            return None
        # An answer sets the length back to 0. The next suspension then lasts for FIRST_SUSPENSION_S.
        self._suspension_s = min(self._suspension_s * 2, LONGEST_SUSPENSION_S) or FIRST_SUSPENSION_S
        self.cools_until = now + self._suspension_s
        return self._suspension_s

    def end_cooldown(self) -> None:
        """End cooldown and suspension, after an answer."""
        if self.cools_until:
            self.cools_until, self._cooldown_s, self._suspension_s = 0.0, FIRST_COOLDOWN_S, 0.0


class Routes:
    """The routes of a run; a route is added when its server is first seen."""

    def __init__(self, account: Account | None = None) -> None:
        """Start without routes. Pass no `account` if no other run can use the engine."""
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
        """Return the route to a server.

        If there is none, create it, with `ended` as its counts of ended rows.
        """
        route = self._by_url.get(url)
        if route is None:
            route = self._by_url[url] = Route(url, ended or EndedRows())
        return route

    @property
    def window(self) -> int:
        """Sum of the windows of all routes."""
        return sum(route.window for route in self)

    def least_used(self) -> Route:
        """Return the route with the fewest requests, in flight or promised, in relation to its speed.

        A route that started a cooldown and has not answered since is the last choice.
        """

        def use(route: Route) -> tuple[bool, float]:
            return route.cools_until > 0, (route.in_flight + route.promised) / route.speed

        return min(self, key=use)

    def acquire_slot(self, now: float, wants: Callable[[Route], bool] = lambda _: True) -> Route | None:
        """Take a slot on the route with the most free slots; None if no slot is free.

        Only routes for which `wants` is true count. A route in a cooldown gives no slot. If all routes are in
        a cooldown, nothing is sent until the first cooldown ends.
        """
        best, most_free = None, 0
        for route in self:
            free = route.window - route.in_flight
            if free > most_free and route.cools_until <= now and wants(route):
                best, most_free = route, free
        if best is not None:
            best.in_flight += 1
            self.in_flight += 1
        return best

    def release_slot(self, route: Route) -> None:
        """Free a slot."""
        route.in_flight -= 1
        self.in_flight -= 1

    def cool_down(self, route: Route, now: float) -> float:
        """Start the cooldown of a route that failed a request; return its remaining seconds.

        Without a cooldown, a route that fails every request at once would always have the most free slots and
        get all rows. A route that is the only one has no cooldown, since each row has its own pause there.
        """
        if len(self._by_url) > 1:
            route.cool_down(now)
        return max(0.0, route.cools_until - now)

    def has_others(self, than: Collection[Route]) -> bool:
        """Tell whether there is a route that is not in `than` and not suspended."""
        return not all(route.is_suspended or route in than for route in self)

    def may_get(self, route: Route, avoided: Collection[Route]) -> bool:
        """Tell whether a route may get a row; an avoided route gets it only if all others are suspended."""
        return route not in avoided or not self.has_others(avoided)
