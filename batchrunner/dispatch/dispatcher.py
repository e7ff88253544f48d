"""Sends a row for each free slot of the engine's servers. Stores its answer, or sends it again.

`attempt.py` decides whether a row without an answer is sent again or ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import EngineBusyError, EngineLostError, PreemptedError, RequestError, hidden
from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.attempt import (
    CONGESTED,
    FAILED,
    REFUSED_FOR_NOW,
    REJECTED,
    UNAVAILABLE,
    FailedAttempt,
    FailureHistory,
    FailureKind,
    Fate,
    RefusalCause,
    cause_of,
    control_for,
    fate_of,
    kind_of,
    pause_before_retry,
)
from batchrunner.dispatch.bundles import BundleSender, BundleSenders
from batchrunner.dispatch.load_control import LoadControl
from batchrunner.dispatch.queue import Backlog, PendingRow
from batchrunner.dispatch.reorder import Reorderer
from batchrunner.dispatch.route import Doubt, Route, Routes
from batchrunner.job.output import RESPONSE
from batchrunner.job.spec import LimitsSpec
from batchrunner.output.events import EventLog

if TYPE_CHECKING:
    from batchrunner.dispatch.checks import AnswerChecker
    from batchrunner.dispatch.feeder import Feeder
    from batchrunner.dispatch.rollouts import Rollouts

log = logging.getLogger(__name__)

ACCEPTED_S = 1.0
"""Only a request that has been in flight for this many seconds counts as accepted by the engine."""
ACCEPTED_RATIO = 2.0
"""The engine must also have had the request for this many times as long as its last refusal took."""
MOST_CONTRADICTED = 3
"""A server gets no rows for a while (is suspended) after it failed this many rows that other servers then
answered."""
MOST_BODY_BYTES = 1 << 16
"""Maximum size, in bytes, of a server's error body that is stored with a row of a batch file. A larger body,
for example with a stack trace, is dropped."""


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    """Sends rows as the servers have free slots, until every row has an answer or an error."""

    backlog: Backlog
    routes: Routes
    senders: BundleSenders
    checker: AnswerChecker | None
    """Checks the answers; None if answers are not checked."""
    reorderer: Reorderer
    load_control: LoadControl
    events: EventLog
    limits: LimitsSpec
    _in_flight: dict[PendingRow, None] = field(default_factory=dict, init=False)
    """Rows in flight, the oldest first."""
    _refused_since: float | None = field(default=None, init=False)
    """When the engine began to refuse every row; None if it accepts rows, or if none are sent."""

    async def run(self, feeder: Feeder | Rollouts) -> None:
        """Send all rows that `feeder` adds to the queue of rows (the backlog).

        Raises EngineLostError, StorageError, or an error of the feeder. After an error or a cancellation, the
        requests in flight are cancelled. The next start of the run sends their rows again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(feeder.run())
                while not self.backlog.is_over:
                    route = self.routes.acquire_slot(time.monotonic(), self.backlog.has_for)
                    if route is None:
                        await self.backlog.wait_for_rows()
                    else:
                        # `row` is None if `has_for` was wrong. Then `_use_slot` only frees the slot.
                        row = self.backlog.take(route)
                        group.create_task(self._use_slot(row, route))
                # Wait for the requests in flight, because their answers are still to be stored.
                while self.routes.in_flight:
                    await self.backlog.wait_for_rows()
                feeding.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for route in self.routes:
                if route.sender is not None:
                    await route.sender.close()

    async def _use_slot(self, row: PendingRow | None, route: Route) -> None:
        """Send one row after the other in a slot. An asyncio task for each row would cost more."""
        try:
            while row is not None:
                await self._attempt(row, route)
                row = self.backlog.take(route) if route.has_slot(time.monotonic()) else None
        finally:
            self.routes.release_slot(route)
            self.backlog.wake()

    async def _attempt(self, row: PendingRow, route: Route) -> None:
        """Send a row once. Then store its answer or error, or put it back into the queue.

        The row holds its slot until its answer is stored, so that a slow disk slows down the sending.
        """
        row.attempts += 1
        row.route = route
        sent_at = row.sent_at = time.monotonic()
        completion: Completion | None
        try:
            self._in_flight[row] = None
            if self.checker is not None:
                row.request = self.checker.to_send(row.request)
            # A retry is sent alone, because the row may be why its last bundle failed.
            is_alone = row.attempts > 1 or (
                row.group is not None and self.load_control.concurrency.info.prefix_rows_alone
            )
            completion = await self._sender_of(route).send(row.request, alone=is_alone)
        except RequestError as failure:
            completion, error = None, failure
        finally:
            del self._in_flight[row]
        now = time.monotonic()
        self.backlog.end_attempt(row)

        message: str | None = None
        if completion is not None:
            self._record_answer(row, route, completion, now)
            if self.checker is not None:
                completion, message, next_request = await self.checker.check(row, completion)
                if next_request is not None:  # A next request means that the answer was rejected.
                    row.request = next_request
                    self.backlog.retry_after(row, 0.0)
                    return
        else:
            last_error = await self._handle_failure(row, route, error, now)
            if last_error is None:  # None means that the row will be sent again.
                return
            message = str(last_error)
            completion = (
                self.checker.last_answer(row) if self.checker else _server_error(row.request, last_error)
            )
        outcome = Outcome(
            ref=row.request.ref,
            completion=completion,
            error=message,
            latency_s=now - sent_at,
            attempts=row.attempts,
        )
        await self.backlog.end(row, outcome)
        # Nothing was sent while the outcome waited to be stored. The engine did not refuse any row in this
        # time.
        self._refused_since = None

    def _record_answer(self, row: PendingRow, route: Route, completion: Completion, now: float) -> None:
        """Count an answer. Its server (the route) is no longer suspected of failing good rows."""
        route.doubt = None
        if row.failures is not None:
            # The row failed on other servers before. This answer shows that those servers were at fault.
            for other in {*row.failures.avoided}:
                self._contradict(other, now)
        self._record_reply(row, route, completion, now)
        route.record.last = row.request
        change = self.reorderer.record(row, completion)
        if change is not None:
            self.events.write("lead", **asdict(change))

    def _record_reply(self, row: PendingRow, route: Route, completion: Completion | None, now: float) -> None:
        """Record that a server replied to a row: with an answer, or with a refusal of that row."""
        self._refused_since = None
        route.end_cooldown()
        route.record.record_answer(row.sent_at, is_counted=row.attempts == 1)
        route.ended.add(completion)
        if self.routes.account is not None:
            self.routes.account.add(completion, seconds=now - row.sent_at)
        # The prompt is certainly computed by now, so rows with the same prefix find it in the cache.
        row.prefix_ready_at = min(row.prefix_ready_at, now)

    def _contradict(self, route: Route, now: float) -> None:
        """Record that another server answered a row that failed on `route`.

        After a few such rows, send no rows to `route` for a while.
        """
        doubt = route.doubt
        if doubt is None:
            return
        doubt.contradicted += 1
        if doubt.contradicted < MOST_CONTRADICTED:
            return
        suspension_s = route.suspend(now)
        if suspension_s is not None:  # None if the route was suspended already
            message = "%s gets no rows for %g s: other replicas answer rows that fail on it (%s)"
            log.warning(message, route.url, suspension_s, doubt.reason)
            self.events.write("route_out", route=route.url, seconds=suspension_s, why=doubt.reason)

    async def _handle_failure(
        self, row: PendingRow, route: Route, error: RequestError, now: float
    ) -> RequestError | None:
        """Decide whether a row without an answer is sent again, or ends with an error.

        Return the row's final error, or None if the row is sent again. Raises EngineLostError if the engine
        has accepted no row for too long.
        """
        kind = kind_of(error)
        history = row.failures = row.failures or FailureHistory()
        if kind in FAILED or kind in UNAVAILABLE:
            self._relieve(route, kind, error, now)
        cause = RefusalCause.OPEN
        if kind in REFUSED_FOR_NOW and not history.was_refused:
            cause = await self._investigate_refusal(row, route, history, now)
        # `_investigate_refusal` must run before this check. Its control request may show that the engine
        # accepts rows.
        self._record_acceptance(kind, error, now)
        fate = fate_of(self._failed_attempt(row, route, kind=kind, cause=cause, now=now))
        history.add(kind, fate, route, error)
        match fate:
            case Fate.END:
                if kind in REJECTED:  # The server works, because it has examined the row.
                    self._record_reply(row, route, None, now)
                return error
            case Fate.END_REFUSED:
                return history.refusal
            case Fate.BLAME:
                return history.blame(kind, error)
            case Fate.LOSE_ENGINE:
                raise self._engine_lost(row, error, now)
            case Fate.REQUEUE | Fate.ASK_ANOTHER | Fate.RETRY:
                self._requeue(row, route, fate, error)
        return None

    def _requeue(self, row: PendingRow, route: Route, fate: Fate, error: RequestError) -> None:
        """Send a row again: at once if preempted or meant for another server, otherwise after a pause."""
        pause_s = 0.0
        if isinstance(error, PreemptedError):
            row.attempts -= 1  # A preempted attempt does not count: the row is not at fault.
            self.load_control.concurrency.count_returned(error.tokens)
        elif fate is Fate.ASK_ANOTHER:
            route.doubt = route.doubt or Doubt(str(error))
        else:
            jitter = random.random()  # noqa: S311 - jitter, not a secret
            pause_s = pause_before_retry(error, attempts=row.attempts, jitter=jitter)
        self.backlog.retry_after(row, pause_s)

    async def _investigate_refusal(
        self, row: PendingRow, route: Route, history: FailureHistory, now: float
    ) -> RefusalCause:
        """Record that a server refused a row for now. Return the cause as far as it is known.

        If the cause is unknown otherwise, send a control: a simple request that the server should answer.
        """
        refusals = history.record_refusal(route.record, sent_at=row.sent_at, now=now)
        cause = cause_of(
            refusals,
            route.record,
            others_in_flight=bool(self._in_flight),
            max_attempts=self.limits.max_attempts,
        )
        # A run that is stopping sends nothing more, so no control request either.
        if cause is RefusalCause.NEEDS_CONTROL and not self.backlog.is_over:
            await self._send_control(row, route)
        return cause

    def _record_acceptance(self, kind: FailureKind, error: RequestError, now: float) -> None:
        """Record since when the engine accepts no row.

        If the engine died, the time starts now, because the engine accepted rows until then. An engine that
        replies to a row with an error of that row accepts rows.
        """
        if kind not in UNAVAILABLE:
            if error.body is not None:
                self._refused_since = None
        elif self._refused_since is None or kind is FailureKind.DIED:
            self._refused_since = now

    def _failed_attempt(
        self, row: PendingRow, route: Route, *, kind: FailureKind, cause: RefusalCause, now: float
    ) -> FailedAttempt:
        """Collect the facts that decide whether a row without an answer is sent again."""
        history = row.failures
        assert history is not None
        failed_before = bool(history.failed_routes(kind))
        failed_routes = history.failed_routes_with(kind, route)
        # Servers that are down fail good rows too. So failures on several servers are evidence against the
        # row only if one of the servers works.
        return FailedAttempt(
            kind,
            has_other_route=self.routes.has_others(failed_routes),
            is_confirmed=failed_before and any(failed.is_in_order for failed in failed_routes),
            was_refused=history.was_refused,
            failures=history.failures + 1,
            max_attempts=self.limits.max_attempts,
            deaths=history.deaths + (kind is FailureKind.DIED),
            is_culprit=cause is RefusalCause.ROW,
            is_engine_lost=self._is_engine_lost(row, now),
        )

    def _relieve(self, route: Route, kind: FailureKind, error: RequestError, now: float) -> None:
        """Pause a server on which a row failed. If it is overloaded, lower its concurrency limit."""
        cooldown_s = self.routes.cool_down(route, now)
        asyncio.get_running_loop().call_later(cooldown_s, self.backlog.wake)
        if kind in CONGESTED:
            self.load_control.narrow(route.url, str(error), now)

    async def _send_control(self, row: PendingRow, route: Route) -> None:
        """Send a control request in the slot of a refused row.

        A control is a simple request that the server should answer. If it does, the row causes the refusals,
        not the server.
        """
        record = route.record
        record.has_control = True
        self._in_flight[row] = None
        sent_at = time.monotonic()
        try:
            await self._sender_of(route).send(control_for(record, row.request), alone=True)
        except RequestError as failure:
            # Without a body, no reply has refused the control, so the error does not show that the server
            # works. EngineBusyError means that the server refused the control for now, like the row.
            if failure.body is None or isinstance(failure, EngineBusyError):
                record.record_refusal()
                return
            # Any other error comes from a server that works, so it counts as an answer below.
        finally:
            record.has_control = False
            del self._in_flight[row]
        record.record_answer(sent_at)
        self._refused_since = None
        route.end_cooldown()

    def _is_engine_lost(self, row: PendingRow, now: float) -> bool:
        """Tell whether the engine has accepted no row for `limits.engine_wait` seconds.

        `row` is the row that was refused last. The engine is not lost if a request has been in flight for
        much longer than a refusal takes, because such a request was probably accepted.
        """
        if self._refused_since is None:
            return False
        # Refusals come quickly. A request that is in flight for much longer than the last refusal took was
        # accepted.
        oldest = next(iter(self._in_flight), row)
        refusal_s = now - row.sent_at
        is_accepted = now - oldest.sent_at > max(ACCEPTED_RATIO * refusal_s, ACCEPTED_S)
        return not is_accepted and now - self._refused_since > self.limits.engine_wait

    def _engine_lost(self, row: PendingRow, error: RequestError, now: float) -> EngineLostError:
        waited_s = now - (self._refused_since or now)
        return EngineLostError(
            f"the engine accepted no row for {waited_s:.0f} s (row {row.request.ref.row} "
            f"and {self.backlog.waiting} more wait): {error}"
        )

    def _sender_of(self, route: Route) -> BundleSender:
        """Return the object that sends rows to a server. Create it before the first row."""
        if route.sender is None:
            route.sender = self.senders.sender_to(route.url)
        return route.sender


def _server_error(request: Request, error: RequestError) -> Completion | None:
    """Return a server's error as a completion without text, for a row of an OpenAI batch file.

    Return None for any other row, or if the error's body is too long or is not a JSON object.
    """
    body = error.body
    if request.kind != "body" or body is None or len(body) > MOST_BODY_BYTES:
        return None
    try:
        content = orjson.loads(body)
        response = hidden(orjson.dumps(content).decode())
        orjson.loads(response)  # Hiding a password may have broken the JSON.
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if not isinstance(content, dict):
        return None
    return Completion(
        texts=[None],  # type: ignore[list-item]
        finish_reasons=[None],
        completion_tokens=[None],
        prompt_tokens=None,
        cached_tokens=None,
        columns={RESPONSE: [response]},
    )
