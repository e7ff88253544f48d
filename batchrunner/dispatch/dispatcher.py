"""Rows from their source → the queue (`Feeder`) → the engine → outcomes (`Dispatcher`).

The feeder reads in a thread, reorders and tokenises. A row holds a slot only while it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    EngineLostError,
    GivenBackError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
    hidden,
)
from batchrunner.core.retry import pause_before_retry
from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.blame import RouteRecord, is_why
from batchrunner.dispatch.bundles import BundleSender
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.load_control import LoadControl
from batchrunner.dispatch.queue import MOST_DEATHS, Backlog, PendingRow, ResultSink, RowSource, Slots
from batchrunner.dispatch.reorder import PrimeTask, Reorderer
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.engines.base import Engine
from batchrunner.job.output import RESPONSE
from batchrunner.job.spec import LimitsSpec
from batchrunner.output.events import EventLog

if TYPE_CHECKING:
    from batchrunner.dispatch.checks import AnswerChecker
    from batchrunner.dispatch.rollouts import Rollouts

log = logging.getLogger(__name__)

LONGEST_PRIMING_S = 30.0
"""Longest wait for a round of primes, in seconds: they save a prefill pass or two."""
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}


@dataclass(slots=True)
class Feeder:
    """Fills the backlog and pauses while it is full. Rows pass through its parts in this order."""

    _source: RowSource
    _reorderer: Reorderer
    _tokenizer: RowTokenizer
    _backlog: Backlog
    _results: ResultSink
    _engine: Engine
    _routes: Sequence[str]
    """Routes of the engine, on which shared prefixes are computed first."""
    keeps_prompts: bool
    """Whether rows keep their prompts as they were before they were tokenised."""
    primes: bool
    """Whether shared prefixes are computed first: not where the engine serves others."""

    async def run(self) -> None:
        """Read until the source ends or the run stops; raises what reading raises, and StorageError."""
        items = self._reorderer.reorder(self._source)
        with contextlib.suppress(asyncio.CancelledError):
            while not self._backlog.is_over:
                batch = await asyncio.to_thread(next, items, None)
                if batch is None:
                    break
                await self._take(batch)
        self._backlog.finish_reading()

    async def _take(self, batch: list[PendingRow | PrimeTask | Outcome]) -> None:
        rows = [item for item in batch if isinstance(item, PendingRow)]
        self._backlog.expect(len(rows))
        for item in batch:
            if isinstance(item, Outcome):  # the row could not be rendered
                await self._results.put(item)
        if self.primes:
            await self._prime([item for item in batch if isinstance(item, PrimeTask)])
        requests = await self._tokenizer.tokenize([row.request for row in rows])
        for row, request in zip(rows, requests, strict=True):
            if isinstance(request, Outcome):  # it cannot be tokenised, or is too long
                await self._backlog.end(row, request)
            else:
                if self.keeps_prompts:
                    row.unencoded = row.request._replace(media=request.media)
                row.request = request
                self._backlog.add(row)
        self._backlog.wake()
        await self._backlog.wait_for_room()

    async def _prime(self, tasks: Sequence[PrimeTask]) -> None:
        """Compute prefixes on an empty engine, round by round, by rows with one output token.

        Errors are ignored, since the rows themselves will show them.
        """
        by_round = attrgetter("round")
        for _, group in groupby(sorted(tasks, key=by_round), key=by_round):
            some = list(group)
            probes = [task.row.request._replace(sampling=ONE_TOKEN, asks=None) for task in some]
            sent = [
                self._engine.generate(probe, route)
                for task, probe in zip(some, await self._tokenizer.tokenize(probes), strict=True)
                if not isinstance(probe, Outcome)
                for route in self._caches_for(task)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PRIMING_S):
                    await asyncio.gather(*sent, return_exceptions=True)
            for task in some:
                task.row.prefix_ready_at = time.monotonic()

    def _caches_for(self, task: PrimeTask) -> Iterator[str]:
        """Yield the route of each cache that needs the prefix."""
        group, routes = task.row.group, self._routes
        if task.on_every_replica or group is None:
            for copy in range(max(self._reorderer.caches, len(routes))):
                yield routes[copy % len(routes)]
            return
        yield self._backlog.home_of(group)


ACCEPTED_RATIO, ACCEPTED_S = 2.0, 1.0
"""A request in flight for more than 2 times as long as a refusal takes, and over 1 s, counts as accepted."""
MOST_CONTRADICTED = 3
"""Rows that others answer after which a route is suspended that fails all."""
MOST_BODY_BYTES = 1 << 16
"""Most bytes of a refusal that a row of a batch file keeps: a stack trace may be in it."""


@dataclass(slots=True)
class Doubt:
    """What speaks against a route that has failed rows since it last answered one."""

    why: str
    """What it said of a row."""
    contradicted: int = 0
    """Rows that it failed, and that others answered."""


@dataclass(slots=True)
class Dispatcher:
    """Sends rows as slots become free, until every row has an outcome."""

    _backlog: Backlog
    _slots: Slots
    _senders: Mapping[str, BundleSender]
    """What sends the rows of each route."""
    _checker: AnswerChecker | None
    """What checks the answers, where they are checked."""
    _reorderer: Reorderer
    _concurrency: ConcurrencyLimits
    """It learns from the answers, as the reorderer does."""
    _load_control: LoadControl
    _events: EventLog
    _limits: LimitsSpec
    """The job's."""
    _in_flight: dict[PendingRow, None] = field(default_factory=dict)
    """Rows in flight, the oldest first."""
    _refused_since: float | None = None
    """Time since which the engine took no row; None while it takes them, or nobody asks it."""
    _doubts: dict[str, Doubt] = field(default_factory=dict)
    """By route."""
    _records: defaultdict[str, RouteRecord] = field(default_factory=lambda: defaultdict(RouteRecord))
    """What each route has answered and refused."""

    async def run(self, feeder: Feeder | Rollouts) -> None:
        """Send all rows that the feeder brings.

        Raises EngineLostError, StorageError, or what reading raises. Then, or when cancelled, the requests in
        flight are cancelled; a later attempt sends their rows again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(feeder.run())
                while not self._backlog.is_over:
                    route = self._slots.take(time.monotonic(), self._backlog.has_for)
                    if route is None:
                        await self._backlog.wait_for_rows()
                    else:
                        group.create_task(self._use_slot(self._backlog.take(route), route))
                while self._slots.in_flight:  # what rollouts have asked is stored
                    await self._backlog.wait_for_rows()
                feeding.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for sender in self._senders.values():
                await sender.close()

    async def _use_slot(self, row: PendingRow | None, route: str) -> None:
        """Send a row, then further ones in the same slot: a task for each would cost more than the row."""
        try:
            while row is not None:
                await self._attempt(row, route)
                reuse = self._slots.may_reuse(route, time.monotonic())
                row = self._backlog.take(route) if reuse else None
        finally:
            self._slots.release(route)
            self._backlog.wake()

    async def _attempt(self, row: PendingRow, route: str) -> None:
        """Send a row once: its answer is stored, or it goes back to the queue, or its error is stored.

        It holds its slot until its outcome is stored, so a slow disk slows us down.
        """
        row.attempts += 1
        sent_at = row.sent_at = time.monotonic()
        row.route = route
        record = self._records[route]
        request = row.request
        completion: Completion | None = None
        error: RequestError | None = None
        self._in_flight[row] = None
        try:
            completion = await self._senders[route].send(request, alone=row.attempts > 1)
        except RequestError as failure:
            error = failure
        finally:
            del self._in_flight[row]
        now = time.monotonic()
        self._backlog.came_back(row)
        if error is None or isinstance(error, RowRefusedError):
            if error is not None and self._ask_another(row, route, error):
                return
            if self._doubts and error is None:
                self._settle_doubts(row, route, now)
            self._refused_since = None
            self._slots.answered(route)
            record.newest = max(record.newest, sent_at)
            record.answered += row.attempts == 1
            if error is None:
                record.last = request
            row.prefix_ready_at = min(row.prefix_ready_at, now)
            self._learn(row, route, completion)
        else:
            error = await self._try_again(row, route, error, now)
            if error is None:
                return
        message = None
        if error is not None:
            completion = self._checker.last_answer(row) if self._checker else _refusal(row.request, error)
            message = str(error)
        elif self._checker is not None and completion is not None:
            completion, message, again = await self._checker.check(row, completion)
            if again is not None:
                row.request = again
                self._backlog.retry_after(row, 0.0)
                return
        await self._backlog.end(
            row, Outcome(row.request.ref, completion, message, now - sent_at, row.attempts)
        )
        self._refused_since = None  # while it waited to be stored, nobody asked the engine

    def _learn(self, row: PendingRow, route: str, completion: Completion | None) -> None:
        """Tell the windows and the order of a row that came back; without an answer if it was refused."""
        self._concurrency.ended(route, completion)
        change = self._reorderer.record(row, completion) if completion is not None else None
        if change is not None:
            self._events.write("lead", **asdict(change))

    def _ask_another(self, row: PendingRow, route: str, error: RowRefusedError | AttemptFailedError) -> bool:
        """Send a row that failed on a route to another one, where that is open; tell whether it is done.

        Two failures count against the row if one of the servers answers rows, and so do those of all servers.
        """
        is_refusal = isinstance(error, RowRefusedError)
        if is_refusal and error.body is None:  # we refused it ourselves
            return False
        before = row.refused_by if is_refusal else row.failed_on
        routes = before if route in before else (*before, route)
        counts = bool(before) and self._is_in_order(routes)
        if not is_refusal:
            row.failed_on = routes
        if counts or not self._slots.has_others(routes):
            return False
        if is_refusal:
            row.refused_by, row.refusal = routes, error
        self._doubts.setdefault(route, Doubt(str(error)))
        self._backlog.retry_after(row, 0.0)
        return True

    def _is_in_order(self, routes: Collection[str]) -> bool:
        """Tell whether one of some routes has answered a row, and is not in doubt since."""
        return any(self._records[route].last and route not in self._doubts for route in routes)

    def _settle_doubts(self, row: PendingRow, route: str, now: float) -> None:
        """Learn from an answer: its route is in order; suspend those that fail what others answer."""
        self._doubts.pop(route, None)
        for other in self._doubts.keys() & {*row.avoids}:
            doubt = self._doubts[other]
            doubt.contradicted += 1
            if doubt.contradicted < MOST_CONTRADICTED:
                continue
            suspension_s = self._slots.suspend(other, now)
            if suspension_s is not None:
                message = "%s gets no rows for %g s: others answer the rows that fail there (%s)"
                log.warning(message, other, suspension_s, doubt.why)
                self._events.write("route_out", route=other, seconds=suspension_s, why=doubt.why)

    async def _try_again(
        self, row: PendingRow, route: str, error: RequestError, now: float
    ) -> RequestError | None:
        """Put a row without an answer back into the queue, or return the error with which it ends.

        Raises EngineLostError where the engine has taken no row for too long.
        """
        if isinstance(error, GivenBackError):
            row.attempts -= 1
            self._concurrency.gave_back(error.tokens)
            self._backlog.retry_after(row, 0.0)
            return None
        cooldown_s = self._slots.cool_down(route, now)
        asyncio.get_running_loop().call_later(cooldown_s, self._backlog.wake)
        if isinstance(error, EngineBusyError) and self._is_in_order(row.refused_by):
            return row.refusal  # no other one can be asked now
        if isinstance(error, (EngineBusyError, NoAnswerError)) and not isinstance(error, EngineDownError):
            self._load_control.refused(route, str(error), now)
        if isinstance(error, EngineBusyError):
            blame = await self._blame(row, route, error, now)
            if blame is not None:
                return blame
            self._check_engine(row, error, now)
        elif isinstance(error, AttemptFailedError):
            if self._ask_another(row, route, error):
                return None
            row.failures += 1
        pause_s = pause_before_retry(
            error,
            tries=row.attempts,
            failures=row.failures,
            max_attempts=self._limits.max_attempts,
            jitter=random.random(),  # noqa: S311 - jitter, not a secret
        )
        if pause_s is None:
            return error
        self._backlog.retry_after(row, pause_s)
        return None

    async def _blame(
        self, row: PendingRow, route: str, error: EngineBusyError, now: float
    ) -> RowRefusedError | None:
        """Return the error of a row that is itself why the engine died or refuses it, else None."""
        if isinstance(error, EngineDiedError):
            row.deaths += 1
            if row.deaths < MOST_DEATHS:
                return None
            return RowRefusedError(f"the engine died {row.deaths} times while it had this row: {error}")
        if not await self._is_why(row, route, now):
            return None
        times = row.refusals.times if row.refusals else 0
        blame = RowRefusedError(f"refused {times} times while others were answered: {error}")
        blame.body = error.body
        return blame

    async def _is_why(self, row: PendingRow, route: str, now: float) -> bool:
        """Tell whether a row that was refused for now is itself the reason; send a control if that is open.

        One that is refused once may have met an engine without room.
        """
        record, is_new = self._records[route], row.refusals is None
        answers = record.count(row, now)
        if is_why(row, self._limits.max_attempts):
            return True
        if is_new or (answers and self._in_flight) or record.has_control or self._backlog.is_over:
            return False
        record.has_control = True
        self._in_flight[row] = None  # the control has its slot
        sent_at = time.monotonic()
        try:
            await self._senders[route].send(record.control_for(row.request), alone=True)
        except RequestError as failure:
            if failure.body is None or isinstance(failure, EngineBusyError):
                record.refused += 1
                return False  # any other reply shows that the engine works
        finally:
            record.has_control = False
            del self._in_flight[row]
        record.newest = max(record.newest, sent_at)
        record.answered += 1
        self._refused_since = None
        self._slots.answered(route)
        return False

    def _check_engine(self, row: PendingRow, error: EngineBusyError, now: float) -> None:
        """Raise EngineLostError if the engine took no row for `limits.engine_wait` seconds.

        An old request in flight was accepted: its answer is waited for.
        """
        if self._refused_since is None or isinstance(error, EngineDiedError):  # until now it took rows
            self._refused_since = now
        waited_s = now - self._refused_since
        oldest = next(iter(self._in_flight), row)
        took_one = now - oldest.sent_at > max(ACCEPTED_RATIO * (now - row.sent_at), ACCEPTED_S)
        if not took_one and waited_s > self._limits.engine_wait:
            raise EngineLostError(
                f"the engine took no row for {waited_s:.0f} s (row {row.request.ref.row} "
                f"and {self._backlog.waiting} more): {error}"
            )


def _refusal(request: Request, error: RequestError) -> Completion | None:
    """Return an answer without a text, with the server's own error as `response`, for a batch file's line.

    None for another row, and where the server gave no JSON object.
    """
    body = error.body
    if request.kind != "body" or body is None or len(body) > MOST_BODY_BYTES:
        return None
    try:
        found = orjson.loads(body)
        written = hidden(orjson.dumps(found).decode())
        orjson.loads(written)  # hiding a password may have cut the JSON
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if not isinstance(found, dict):
        return None
    return Completion([None], [None], [None], None, None, columns={RESPONSE: [written]})  # type: ignore[list-item]
