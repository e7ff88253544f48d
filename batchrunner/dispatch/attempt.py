"""The fate of a row whose attempt failed, decided by one table of rules. Pure: no clock, no event loop.

An attempt sends a row once. `RULES` is the table, and a `FailedAttempt` holds the facts that the rules read.
The rest of this file treats temporary refusals (HTTP status 429, 502 to 504, 401). It weighs the evidence
that the row itself is their cause.

An engine that is down or has no room refuses every row, so its refusals alone are no evidence. A refusal
counts against a row only if the same route has meanwhile answered a request that was sent after the row's
previous refusal. A route may also refuse rows at random, for example a load balancer half of whose servers
are dead. So a row is given up only if chance can hardly explain so many refusals. If no other row is in
flight that could bring evidence, the run sends a *control*: a cheap form of the request that the route
answered last.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec
import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    NoAnswerError,
    PreemptedError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import CHAT_PATH, CLASSIFY_PATH, EMBEDDINGS_PATH, RESPONSES_PATH, Request
from batchrunner.dispatch.route import Route, RouteRecord

MOST_DEATHS = 4
"""Number of engine deaths at which a row that was in flight at each of them is given up. `PoisonRows` (in
queue.py) explains why the row must then be the cause."""


class FailureKind(Enum):
    """The reason why an attempt has no answer."""

    PREEMPTED = auto()
    """batchrunner preempted the row so that the engine can serve its users."""
    INVALID = auto()
    """The row failed batchrunner's own checks, so nothing was sent."""
    REFUSED = auto()
    """The server says that the row is at fault."""
    FAILED = auto()
    """The server failed, possibly because of the row."""
    NO_ANSWER = auto()
    """No answer came in time."""
    BUSY = auto()
    """The server refuses the row for now."""
    DOWN = auto()
    """The server accepts no connection."""
    DIED = auto()
    """The server died while it had the row."""


KINDS: tuple[tuple[type[RequestError], FailureKind], ...] = (
    (PreemptedError, FailureKind.PREEMPTED),
    (EngineDiedError, FailureKind.DIED),
    (EngineDownError, FailureKind.DOWN),
    (EngineBusyError, FailureKind.BUSY),
    (NoAnswerError, FailureKind.NO_ANSWER),
    (AttemptFailedError, FailureKind.FAILED),
)
"""Types of errors with their kinds. The first match counts, so a subclass stands before its base."""

REJECTED = {FailureKind.INVALID, FailureKind.REFUSED}
"""Kinds of failures for which the row is at fault: another attempt at the same server would fail, too."""
FAILED = {FailureKind.FAILED, FailureKind.NO_ANSWER}
"""Kinds of failures for which the row may be at fault. After `limits.max_attempts` such failures the row ends
with an error."""
UNAVAILABLE = {FailureKind.BUSY, FailureKind.DOWN, FailureKind.DIED}
"""Kinds of failures of a server that could not serve the row. The row is not at fault, unless there is
evidence against it."""
REFUSED_FOR_NOW = {FailureKind.BUSY, FailureKind.DOWN}
"""Kinds of temporary refusals. The row is not at fault, unless it is refused repeatedly while other rows are
answered."""
CONGESTED = {FailureKind.BUSY, FailureKind.NO_ANSWER}
"""Kinds of failures that suggest an overloaded server. Each such failure shrinks the windows of its route."""


def kind_of(error: RequestError) -> FailureKind:
    """Return the kind of an error."""
    for error_type, kind in KINDS:
        if isinstance(error, error_type):
            return kind
    return FailureKind.INVALID if error.body is None else FailureKind.REFUSED


class Fate(Enum):
    """The fate of a row after a failed attempt: another attempt, an error, or the end of the run."""

    REQUEUE = auto()
    """The row is sent again at once; the attempt does not count."""
    ASK_ANOTHER = auto()
    """The row is sent at once to another route."""
    RETRY = auto()
    """The row is sent again after a pause."""
    END = auto()
    """The row ends with the error of this attempt."""
    END_REFUSED = auto()
    """The row ends with the error of an earlier refusal, since no other server is available to confirm it."""
    BLAME = auto()
    """The row ends with an error that names the row itself as the cause of the refusals or the engine deaths.
    """
    LOSE_ENGINE = auto()
    """The run ends, because the engine is lost."""


class FailedAttempt(NamedTuple):
    """Facts that decide the fate of a row after a failed attempt."""

    kind: FailureKind
    has_other_route: bool = False
    """Whether there is a route, not suspended, on which the row has not yet had a failure of this kind."""
    is_confirmed: bool = False
    """Whether the row itself is at fault: it had a failure of this kind before, and at least one of the
    routes on which it failed works."""
    was_refused: bool = False
    """Whether a route that works refused the row in an earlier attempt."""
    failures: int = 1
    """Number of failed attempts that may be the row's fault, including this one."""
    max_attempts: int = 5
    """`limits.max_attempts`."""
    deaths: int = 0
    """Number of engine deaths while the engine had the row, including this one."""
    is_culprit: bool = False
    """Whether the row was refused so often, while other rows were answered, that it must be the cause."""
    is_engine_lost: bool = False
    """Whether the engine has accepted no row for longer than `limits.engine_wait`."""


class FateRule(NamedTuple):
    """A line of the table RULES: a fate, and the failed attempts to which it applies."""

    kinds: set[FailureKind]
    applies: Callable[[FailedAttempt], bool]
    fate: Fate


def _always(_: FailedAttempt) -> bool:
    return True


def _another_may_answer(attempt: FailedAttempt) -> bool:
    """Tell whether another server should get the row, because the first server may be at fault instead."""
    return attempt.has_other_route and not attempt.is_confirmed


RULES = (
    FateRule({FailureKind.PREEMPTED}, _always, Fate.REQUEUE),
    FateRule({FailureKind.REFUSED}, _another_may_answer, Fate.ASK_ANOTHER),
    FateRule(REJECTED, _always, Fate.END),
    FateRule(UNAVAILABLE, lambda attempt: attempt.was_refused, Fate.END_REFUSED),
    FateRule({FailureKind.DIED}, lambda attempt: attempt.deaths >= MOST_DEATHS, Fate.BLAME),
    FateRule(REFUSED_FOR_NOW, lambda attempt: attempt.is_culprit, Fate.BLAME),
    FateRule(UNAVAILABLE, lambda attempt: attempt.is_engine_lost, Fate.LOSE_ENGINE),
    FateRule(FAILED, _another_may_answer, Fate.ASK_ANOTHER),
    FateRule(FAILED, lambda attempt: attempt.failures >= attempt.max_attempts, Fate.END),
    FateRule(FAILED | UNAVAILABLE, _always, Fate.RETRY),
)
"""The table of fates after a failed attempt. The first rule that applies decides."""


def fate_of(attempt: FailedAttempt) -> Fate:
    """Return the fate of a row after a failed attempt, by the table RULES."""
    return next(rule.fate for rule in RULES if attempt.kind in rule.kinds and rule.applies(attempt))


def pause_before_retry(error: RequestError, *, attempts: int, jitter: float) -> float:
    """Return the pause, in seconds, before a row is sent again after `attempts` attempts.

    A ceiling doubles with each attempt, up to a maximum. The pause is drawn from the upper half below the
    ceiling ("equal jitter" in Amazon's *Exponential backoff and jitter*, 2015), so that rows refused together
    are not sent again together. `jitter` is uniform in [0, 1). The pause is at least the server's
    Retry-After, but never more than the maximum, so that a server that recovers early gets rows again soon.
    """
    ceiling = min(TIMING.longest_retry, TIMING.first_retry * 2.0 ** min(attempts - 1, 10))
    pause_s = ceiling * (0.5 + 0.5 * jitter)
    if isinstance(error, EngineBusyError) and error.retry_after_s is not None:
        pause_s = max(pause_s, min(error.retry_after_s, TIMING.longest_retry))
    return pause_s


class RouteTally(msgspec.Struct):
    """The counts that a route had when it first refused a row, and its later refusals of this row."""

    answered: int
    """Requests that the route had answered when it first refused the row."""
    refused: int
    """Refusals by the route before it first refused the row."""
    refusals: int = 0
    """Number of refusals of this row, after the first one, that came while the route answered other requests.
    """


class Refusals(msgspec.Struct):
    """Temporary refusals of a row (429, 502 to 504, 401)."""

    last: float
    """Time of the last refusal in seconds of the monotonic clock; initially the time when the refused attempt
    was sent."""
    total: int = 0
    """Number of all refusals."""
    count: int = 1
    """Number of refusals that count as evidence against the row: the first, and later ones while the route
    answered other requests."""
    answers_others: bool = False
    """Whether the route answered other requests between the last two refusals of the row."""
    by_route: dict[RouteRecord, RouteTally] = {}
    """Counts of each route that refused the row."""

    def record(self, record: RouteRecord, now: float) -> None:
        """Record a refusal by a route.

        If it is the route's first refusal of this row, the record of the route counts it too.
        """
        self.total += 1
        # The route answers other requests if it answered one that was sent after the row's last refusal.
        self.answers_others = record.newest >= self.last
        self.last = now
        tally = self.by_route.get(record)
        if tally is None:
            # A first refusal by a route is no evidence against the row, because the route may just have gone
            # down.
            self.by_route[record] = RouteTally(answered=record.answered, refused=record.refused)
            record.record_refusal()
        elif self.answers_others:
            # The route refuses this row again although it answers others: this is evidence against the row.
            tally.refusals += 1
            self.count += 1


BY_CHANCE = 1e-6
"""A row is given up only if the probability of so many refusals by chance is lower than this."""


class RefusalCause(Enum):
    """The cause of a row's temporary refusals, as far as it is known."""

    ROW = auto()
    """The row itself is the cause."""
    OPEN = auto()
    """The cause is unknown. Later refusals, or answers to other rows, will show it."""
    NEEDS_CONTROL = auto()
    """The cause is unknown, and no other row in flight could show it. So a control request must be sent."""


def cause_of(
    refusals: Refusals, record: RouteRecord, *, others_in_flight: bool, max_attempts: int
) -> RefusalCause:
    """Return the cause of a row's temporary refusals, as far as it is known.

    `record` is the record of the route that refused the row last. If the cause is not known otherwise, a
    control shows it: a request that this route should answer.
    """
    if is_culprit(refusals, max_attempts):
        return RefusalCause.ROW
    if refusals.total == 1:  # One refusal is no evidence, because the engine may just have had no room.
        return RefusalCause.OPEN
    if record.has_control or (refusals.answers_others and others_in_flight):
        return RefusalCause.OPEN  # Replies to the control, or to the other rows, will show the cause.
    return RefusalCause.NEEDS_CONTROL


def is_culprit(refusals: Refusals, max_attempts: int) -> bool:
    """Tell whether a refused row is itself the cause of its refusals.

    The row is the cause if chance can hardly explain its refusals. The chance of each refusal is the rate at
    which the route has refused requests since it first refused the row.
    """
    chance = 1.0
    for record, tally in refusals.by_route.items():
        refused = record.refused - tally.refused
        answered = record.answered - tally.answered
        # Adding one answer keeps the rate below 1, even if the route has not answered anything.
        refusal_rate = refused / (answered + refused + 1)
        chance *= refusal_rate**tally.refusals
    return refusals.count >= max_attempts and chance < BY_CHANCE


class FailureHistory(msgspec.Struct):
    """The failed attempts of a row."""

    failures: int = 0
    """Number of failed attempts that may be the row's fault. An attempt after which another route was asked
    does not count."""
    deaths: int = 0
    """Number of engine deaths while the engine had the row."""
    refused_by: tuple[Route, ...] = ()
    """Routes whose servers refused the row as faulty, before another route was asked."""
    refusal: RequestError | None = None
    """The error of the last refusal by a route in `refused_by`."""
    failed_on: tuple[Route, ...] = ()
    """Routes on which an attempt ended with a failure of the kinds FAILED."""
    refusals: Refusals | None = None
    """Temporary refusals of the row; None if there were none."""

    @property
    def avoided(self) -> tuple[Route, ...]:
        """Routes that get the row only if all other routes are suspended."""
        return (*self.refused_by, *self.failed_on)

    @property
    def was_refused(self) -> bool:
        """Whether a route that works has refused the row."""
        return any(route.is_in_order for route in self.refused_by)

    def failed_routes(self, kind: FailureKind) -> tuple[Route, ...]:
        """Return the routes on which the row failed.

        If `kind` is not in FAILED, return the routes that refused the row as faulty.
        """
        return self.failed_on if kind in FAILED else self.refused_by

    def failed_routes_with(self, kind: FailureKind, route: Route) -> tuple[Route, ...]:
        """Return `failed_routes(kind)` and the `route` on which the row has failed now."""
        routes = self.failed_routes(kind)
        return routes if route in routes else (*routes, route)

    def record_refusal(self, record: RouteRecord, *, sent_at: float, now: float) -> Refusals:
        """Record a temporary refusal of an attempt, which was sent at `sent_at`; return the row's refusals.

        `record` is that of the route that refused the row.
        """
        if self.refusals is None:
            self.refusals = Refusals(last=sent_at)
        self.refusals.record(record, now)
        return self.refusals

    def add(self, kind: FailureKind, fate: Fate, route: Route, error: RequestError) -> None:
        """Record a failed attempt and the fate that the table RULES gave the row."""
        if kind is FailureKind.DIED:
            self.deaths += 1
        elif kind in FAILED:
            self.failed_on = self.failed_routes_with(kind, route)
            # If another route answers the row, this route is at fault, and the attempt does not count.
            if fate is not Fate.ASK_ANOTHER:
                self.failures += 1
        elif fate is Fate.ASK_ANOTHER:
            # The server refused the row as faulty, and another server is asked for a second opinion.
            self.refused_by = self.failed_routes_with(kind, route)
            self.refusal = error

    def blame(self, kind: FailureKind, error: RequestError) -> RowRefusedError:
        """Return the error for a row that itself made the engine die or refuse it."""
        if kind is FailureKind.DIED:
            return RowRefusedError(f"the engine died {self.deaths} times while it had this row: {error}")
        count = self.refusals.count if self.refusals else 0
        blame = RowRefusedError(f"refused {count} times while other rows were answered: {error}")
        blame.body = error.body
        return blame


FEW_TOKENS = {"max_new_tokens": 8, "temperature": 0}
"""Sampling parameters of a control request. It asks for several tokens, because a single token may have no
text yet, and an empty text would not count as an answer."""
_SHORT_CHAT = [{"role": "user", "content": "1"}]
"""Messages of a control request to the chat endpoint: the cheapest possible chat."""
_PROMPTS: dict[str, tuple[str, Any]] = {
    CHAT_PATH: ("messages", _SHORT_CHAT),
    **dict.fromkeys((EMBEDDINGS_PATH, CLASSIFY_PATH, RESPONSES_PATH), ("input", "1")),
}
"""For each endpoint, the prompt field of a control request's body and its value. Other endpoints have a field
`prompt`."""


def control_for(record: RouteRecord, refused: Request) -> Request:
    """Return a control: a cheap request that the route should answer, although it refused `refused`.

    It is made from the request that the route answered last, or from the refused one if there is none.
    """
    request = record.last or refused
    prompt: Any = request.prompt
    if request.kind == "body":
        name, content = _PROMPTS.get(prompt.path, ("prompt", "1"))
        prompt = prompt._replace(content=orjson.dumps({name: content, "max_tokens": 8}))
    elif record.last is None:  # The refused request may be expensive, so its prompt is shortened.
        prompt = _SHORT_CHAT if request.kind == "messages" else prompt[:1]
        request = request._replace(
            continues=False,
            tools=None,
            media=(),
            items=request.items[:1],
            item_ids=request.item_ids[:1],
        )
    return request._replace(prompt=prompt, sampling=FEW_TOKENS, asks=None)
