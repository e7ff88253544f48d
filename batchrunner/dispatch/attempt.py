"""Decides what happens to a row without an answer, by one table of rules. No clock, no event loop.

An attempt sends a row once. `RULES` is the table, and a `FailedAttempt` holds the facts that the rules read.
The rest of this file decides whether a row itself is the cause of its temporary refusals (HTTP status 429,
502 to 504, 401).

An engine that is down or has no room refuses every row, so its refusals alone are no evidence. A refusal
counts against a row only if the same server has meanwhile answered a request that was sent after the row's
previous refusal. A server may also refuse rows at random, for example a load balancer half of whose servers
are dead. So a row is given up only if chance can hardly explain so many refusals. If no other row is in
flight that could bring evidence, the run sends a *control*: a cheap form of the request that the server
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
    UnreachedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import CHAT_PATH, CLASSIFY_PATH, EMBEDDINGS_PATH, RESPONSES_PATH, Request
from batchrunner.dispatch.route import Route, RouteRecord

MOST_DEATHS = 4
"""A row is given up if it was in flight at this many deaths of the engine. `PoisonRows` (in queue.py)
explains why it must then be the cause."""


class FailureKind(Enum):
    """The reason why an attempt has no answer."""

    PREEMPTED = auto()
    """batchrunner cancelled the request so that the engine can serve its users."""
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
    UNREACHED = auto()
    """A gateway could not send the row to any server."""
    DIED = auto()
    """The server died while it had the row."""


KINDS: tuple[tuple[type[RequestError], FailureKind], ...] = (
    (PreemptedError, FailureKind.PREEMPTED),
    (EngineDiedError, FailureKind.DIED),
    (UnreachedError, FailureKind.UNREACHED),
    (EngineDownError, FailureKind.DOWN),
    (EngineBusyError, FailureKind.BUSY),
    (NoAnswerError, FailureKind.NO_ANSWER),
    (AttemptFailedError, FailureKind.FAILED),
)
"""Types of errors, and their kinds. The first match counts, so a subclass stands before its base class."""

REJECTED = {FailureKind.INVALID, FailureKind.REFUSED}
"""Kinds of failures for which the row is at fault: another attempt at the same server would fail, too."""
FAILED = {FailureKind.FAILED, FailureKind.NO_ANSWER}
"""Kinds of failures for which the row may be at fault. After `limits.max_attempts` such failures the row ends
with an error."""
UNAVAILABLE = {FailureKind.BUSY, FailureKind.DOWN, FailureKind.UNREACHED, FailureKind.DIED}
"""Kinds of failures of a server that could not serve the row. The row is at fault only if there is evidence
against it."""
REFUSED_FOR_NOW = {FailureKind.BUSY, FailureKind.DOWN}
"""Kinds of temporary refusals. The row is at fault only if it is refused repeatedly while others are
answered."""
CONGESTED = {FailureKind.BUSY, FailureKind.NO_ANSWER}
"""Kinds of failures that suggest an overloaded server. Each such failure lowers the server's concurrency
limit."""


def kind_of(error: RequestError) -> FailureKind:
    """Return the kind of failure that an error stands for."""
    for error_type, kind in KINDS:
        if isinstance(error, error_type):
            return kind
    return FailureKind.INVALID if error.body is None else FailureKind.REFUSED


class Fate(Enum):
    """What happens to a row after a failed attempt: another attempt, an error, or the end of the run."""

    REQUEUE = auto()
    """The row is sent again at once; the attempt does not count."""
    ASK_ANOTHER = auto()
    """The row is sent at once to another server."""
    RETRY = auto()
    """The row is sent again after a pause."""
    END = auto()
    """The row ends with the error of this attempt."""
    END_REFUSED = auto()
    """The row ends with the error of an earlier refusal. No other server is available to confirm it."""
    BLAME = auto()
    """The row ends with an error: the row itself made the engine refuse it or die."""
    LOSE_ENGINE = auto()
    """The run ends, because the engine is lost."""


class FailedAttempt(NamedTuple):
    """Facts that decide what happens to a row after a failed attempt."""

    kind: FailureKind
    has_other_route: bool = False
    """Whether there is a server, not suspended, on which the row had no failure of this kind."""
    is_confirmed: bool = False
    """Whether the row is certainly at fault: it failed in this way before, on at least one server that works.
    """
    was_refused: bool = False
    """Whether a server that works refused the row in an earlier attempt."""
    failures: int = 1
    """Number of attempts that may have failed because of the row, including this one."""
    max_attempts: int = 5
    deaths: int = 0
    """Number of times that the engine died while it had the row, including this one."""
    is_culprit: bool = False
    """Whether the row was refused so often, while other rows were answered, that it must be the cause."""
    is_engine_lost: bool = False
    """Whether the engine has accepted no row for longer than `limits.engine_wait`."""


class FateRule(NamedTuple):
    """A line of the table RULES: what happens to a row, and after which failed attempts."""

    kinds: set[FailureKind]
    applies: Callable[[FailedAttempt], bool]
    fate: Fate


def _always(_: FailedAttempt) -> bool:
    return True


def _another_may_answer(attempt: FailedAttempt) -> bool:
    """Tell whether another server should get the row, because the first one may be at fault."""
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
"""What happens after a failed attempt: the first rule that applies decides."""


def fate_of(attempt: FailedAttempt) -> Fate:
    """Return what happens to a row after a failed attempt, by the table RULES."""
    return next(rule.fate for rule in RULES if attempt.kind in rule.kinds and rule.applies(attempt))


def pause_before_retry(error: RequestError, *, attempts: int, jitter: float) -> float:
    """Return the pause, in seconds, before a row is sent again after `attempts` attempts.

    An upper bound doubles with each attempt, up to a maximum. `jitter`, uniform in [0, 1), chooses a pause
    between half of it and all of it, so that rows refused together are not sent again together ("equal
    jitter" in Amazon's *Exponential backoff and jitter*, 2015). The pause is at least the server's
    Retry-After, but never more than the maximum.
    """
    ceiling = min(TIMING.longest_retry, TIMING.first_retry * 2.0 ** min(attempts - 1, 10))
    pause_s = ceiling * (0.5 + 0.5 * jitter)
    if isinstance(error, EngineBusyError) and error.retry_after_s is not None:
        pause_s = max(pause_s, min(error.retry_after_s, TIMING.longest_retry))
    return pause_s


class RouteTally(msgspec.Struct):
    """A server's counts when it first refused a row, and its later refusals of this row."""

    answered: int
    """Number of requests that the server had answered before it first refused the row."""
    refused: int
    """Number of requests that the server had refused before it first refused the row."""
    refusals: int = 0
    """Number of later refusals of this row while the server answered other requests."""


class Refusals(msgspec.Struct):
    """Temporary refusals of a row (HTTP status 429, 502 to 504, 401)."""

    last: float
    """Time of the last refusal, in seconds of the monotonic clock. Initially the time at which the refused
    request was sent."""
    total: int = 0
    count: int = 1
    """Number of refusals that count as evidence against the row: the first one, and later ones while the
    server answered other requests."""
    answers_others: bool = False
    """Whether the server answered other requests between the last two refusals of the row."""
    by_route: dict[RouteRecord, RouteTally] = {}
    """Counts of each server that refused the row."""

    def record(self, record: RouteRecord, now: float) -> None:
        """Record a refusal by a server.

        `record` counts only the server's first refusal of this row.
        """
        self.total += 1
        # The server answers other requests if it answered one that was sent after the row's last refusal.
        self.answers_others = record.newest >= self.last
        self.last = now
        tally = self.by_route.get(record)
        if tally is None:
            # A server's first refusal is no evidence against the row, because the server may just have gone
            # down.
            self.by_route[record] = RouteTally(answered=record.answered, refused=record.refused)
            record.record_refusal()
        elif self.answers_others:
            # The server refuses this row again although it answers others. This is evidence against the row.
            tally.refusals += 1
            self.count += 1


BY_CHANCE = 1e-6
"""A row is given up only if the probability of so many refusals by chance is lower than this."""


class RefusalCause(Enum):
    """Why a row was refused for now, as far as it is known."""

    ROW = auto()
    OPEN = auto()
    """The cause is unknown. Later refusals, or answers to other rows, will show it."""
    NEEDS_CONTROL = auto()
    """The cause is unknown, and no other row in flight could show it. So a control is needed: a test request
    that the server should answer."""


def cause_of(
    refusals: Refusals, record: RouteRecord, *, others_in_flight: bool, max_attempts: int
) -> RefusalCause:
    """Return why a row was refused for now, as far as it is known.

    `record` has the counts of the server that refused the row last. If nothing else shows the cause, a
    control does: a test request that this server should answer.
    """
    if is_culprit(refusals, max_attempts):
        return RefusalCause.ROW
    if refusals.total == 1:  # one refusal is no evidence: the engine may just be full
        return RefusalCause.OPEN
    if record.has_control or (refusals.answers_others and others_in_flight):
        return RefusalCause.OPEN  # other replies will show the cause
    return RefusalCause.NEEDS_CONTROL


def is_culprit(refusals: Refusals, max_attempts: int) -> bool:
    """Tell whether a refused row is itself the cause of its refusals.

    It is if chance can hardly explain the refusals. The probability of each refusal is the fraction of
    requests that the server has refused since it first refused the row.
    """
    chance = 1.0
    for record, tally in refusals.by_route.items():
        refused = record.refused - tally.refused
        answered = record.answered - tally.answered
        # Adding one answer keeps the rate below 1, even if the server has not answered anything.
        refusal_rate = refused / (answered + refused + 1)
        chance *= refusal_rate**tally.refusals
    return refusals.count >= max_attempts and chance < BY_CHANCE


class FailureHistory(msgspec.Struct):
    """The failed attempts of a row."""

    failures: int = 0
    """Number of failed attempts that may be the row's fault. An attempt does not count if the row was sent to
    another server after it."""
    deaths: int = 0
    """Number of times that the engine died while it had the row."""
    refused_by: tuple[Route, ...] = ()
    """Servers that refused the row as faulty, before another server was asked."""
    refusal: RequestError | None = None
    """The error of the last server that refused the row as faulty."""
    failed_on: tuple[Route, ...] = ()
    """Servers that failed to answer the row, or did not answer in time."""
    refusals: Refusals | None = None
    """Temporary refusals of the row; None if there were none."""

    @property
    def avoided(self) -> tuple[Route, ...]:
        """Servers that get the row only if all others are suspended."""
        return (*self.refused_by, *self.failed_on)

    @property
    def was_refused(self) -> bool:
        """Whether a server that works has refused the row."""
        return any(route.is_in_order for route in self.refused_by)

    def failed_routes(self, kind: FailureKind) -> tuple[Route, ...]:
        """Return the servers on which the row failed in this way.

        If `kind` is not in FAILED, return the servers that refused the row as faulty.
        """
        return self.failed_on if kind in FAILED else self.refused_by

    def failed_routes_with(self, kind: FailureKind, route: Route) -> tuple[Route, ...]:
        """Return the servers on which the row failed in this way, including `route`."""
        routes = self.failed_routes(kind)
        return routes if route in routes else (*routes, route)

    def record_refusal(self, record: RouteRecord, *, sent_at: float, now: float) -> Refusals:
        """Record that a server refused the row for now; return all such refusals.

        `record` has the counts of this server.
        """
        if self.refusals is None:
            self.refusals = Refusals(last=sent_at)
        self.refusals.record(record, now)
        return self.refusals

    def add(self, kind: FailureKind, fate: Fate, route: Route, error: RequestError) -> None:
        """Record a failed attempt, and what happens to the row after it."""
        if kind is FailureKind.DIED:
            self.deaths += 1
        elif kind in FAILED:
            self.failed_on = self.failed_routes_with(kind, route)
            # If another server answers the row, this server is at fault, and the attempt does not count.
            if fate is not Fate.ASK_ANOTHER:
                self.failures += 1
        elif fate is Fate.ASK_ANOTHER:
            # The server refused the row as faulty. Another server is asked for a second opinion.
            self.refused_by = self.failed_routes_with(kind, route)
            self.refusal = error

    def blame(self, kind: FailureKind, error: RequestError) -> RowRefusedError:
        """Return the error of a row that made the engine die or refuse it."""
        if kind is FailureKind.DIED:
            return RowRefusedError(f"the engine died {self.deaths} times while it had this row: {error}")
        count = self.refusals.count if self.refusals else 0
        blame = RowRefusedError(f"refused {count} times while other rows were answered: {error}")
        blame.body = error.body
        return blame


FEW_TOKENS = {"max_new_tokens": 8, "temperature": 0}
"""Sampling parameters of a control request, which tests whether a server answers. A single token may have no
text yet, and an empty text would not count as an answer."""
_SHORT_CHAT = [{"role": "user", "content": "1"}]
"""Messages of a control (test) request to the chat endpoint: the cheapest possible chat."""
_PROMPTS: dict[str, tuple[str, Any]] = {
    CHAT_PATH: ("messages", _SHORT_CHAT),
    **dict.fromkeys((EMBEDDINGS_PATH, CLASSIFY_PATH, RESPONSES_PATH), ("input", "1")),
}
"""The prompt field and its value in a control (test) request, by endpoint. Other endpoints use `prompt`."""


def control_for(record: RouteRecord, refused: Request) -> Request:
    """Return a cheap test request (a control) to a server that refused the request `refused`.

    It is made from the request that the server answered last, or from the refused one if there is none.
    """
    request = record.last or refused
    prompt: Any = request.prompt
    if request.kind == "body":
        # A request of a batch file keeps only its endpoint. Its body becomes a short one.
        name, content = _PROMPTS.get(prompt.path, ("prompt", "1"))
        prompt = prompt._replace(content=orjson.dumps({name: content, "max_tokens": 8}))
    elif record.last is None:  # the refused request may be expensive, so it is shortened
        prompt = _SHORT_CHAT if request.kind == "messages" else prompt[:1]
        request = request._replace(
            continues=False,
            tools=None,
            media=(),
            items=request.items[:1],
            item_ids=request.item_ids[:1],
        )
    return request._replace(prompt=prompt, sampling=FEW_TOKENS, asks=None)
