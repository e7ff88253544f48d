"""Rows from the dispatch queue → the engine → outcomes: a row holds a slot only while it is sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson
from msgspec.structs import replace

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    EngineLostError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.timing import pause_before_retry
from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.bundles import BundleSender
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.feeder import Feeder
from batchrunner.dispatch.load_control import LoadControl
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.progress import AttemptProgress
from batchrunner.dispatch.queue import MOST_DEATHS, Backlog, Slots
from batchrunner.dispatch.reorder import Reorderer
from batchrunner.job.output import RESPONSE
from batchrunner.job.spec import LimitsSpec
from batchrunner.output.events import EventLog

if TYPE_CHECKING:
    from batchrunner.dispatch.checks import AnswerChecker

ACCEPTED_RATIO, ACCEPTED_S = 2.0, 1.0
"""A request in flight for more than 2 times as long as a refusal takes, and over 1 s, counts as accepted."""
MOST_BODY_BYTES = 1 << 16
"""Most bytes of a refusal that a row of a batch file keeps: a stack trace may be in it."""


class Dispatcher:
    """Sends rows as slots become free, until every row has an outcome."""

    def __init__(
        self,
        backlog: Backlog,
        slots: Slots,
        senders: Mapping[str, BundleSender],
        checker: AnswerChecker | None,
        reorderer: Reorderer,
        windows: ConcurrencyLimits,
        load_control: LoadControl,
        progress: AttemptProgress,
        events: EventLog,
        limits: LimitsSpec,
        *,
        by_affinity: bool = False,
    ) -> None:
        """Take a sender for each route, and what checks the answers where they are checked.

        `reorderer`, `windows` and `progress` learn from the answers; `limits` are the job's. With
        `by_affinity` requests carry a key by which a gateway keeps prefix groups together.
        """
        self._backlog = backlog
        self._slots = slots
        self._senders = senders
        self._checker = checker
        self._reorderer = reorderer
        self._windows = windows
        self._load_control = load_control
        self._progress = progress
        self._events = events
        self._limits = limits
        self._by_affinity = by_affinity
        self._in_flight: dict[PendingRow, None] = {}  # the oldest first
        self._refused_since: float | None = None
        """Time since which the engine took no row; None while it takes them, or nobody asks it."""

    async def run(self, feeder: Feeder) -> None:
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
            self._backlog.wake_dispatcher()

    async def _attempt(self, row: PendingRow, route: str) -> None:
        """Send a row once: its answer is stored, or it goes back to the queue, or its error is stored.

        It holds its slot until its outcome is stored, so a slow disk slows us down.
        """
        row.attempts += 1
        sent_at = row.sent_at = time.monotonic()
        row.route = route
        request = row.request._replace(affinity=row.affinity) if self._by_affinity else row.request
        completion: Completion | None = None
        error: RequestError | None = None
        self._in_flight[row] = None
        try:
            completion = await self._senders[route].send(
                request, alone=row.attempts > 1, group=request.affinity if row.group is not None else None
            )
        except RequestError as failure:
            error = failure
        finally:
            del self._in_flight[row]
        now = time.monotonic()
        self._backlog.came_back(row)
        if error is None or isinstance(error, RowRefusedError):
            self._refused_since = None
            self._slots.answered(route)
            row.prefix_ready_at = min(row.prefix_ready_at, now)
            self._learn(row, route, completion, now)
        else:
            error = self._try_again(row, route, error, now)
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

    def _learn(self, row: PendingRow, route: str, completion: Completion | None, now: float) -> None:
        """Tell the windows, the order and the progress of a row that came back; None if it was refused."""
        if completion is None:
            self._windows.ended(route, 0, now)
            return
        output_tokens, cached = completion.output_tokens, completion.cached_tokens
        self._progress.answered(route, output_tokens, completion.retractions)
        self._windows.ended(route, completion.retractions, now)
        own_tokens = 0 if cached is None else max(0, (completion.prompt_tokens or 0) - cached)
        self._windows.row_tokens.add(own_tokens, output_tokens)
        change = self._reorderer.record(row, completion, output_tokens)
        if change is not None:
            self._events.write("lead", **asdict(change))

    def _try_again(self, row: PendingRow, route: str, error: RequestError, now: float) -> RequestError | None:
        """Put a row without an answer back into the queue, or return the error with which it ends.

        Raises EngineLostError where the engine has taken no row for too long.
        """
        if isinstance(error, EngineBusyError):
            cooldown_s = self._slots.cool_down(route, now)
            asyncio.get_running_loop().call_later(cooldown_s, self._backlog.wake_dispatcher)
        if isinstance(error, (EngineBusyError, NoAnswerError)) and not isinstance(error, EngineDownError):
            self._load_control.refused(route, str(error), now)
        row.deaths += isinstance(error, EngineDiedError)
        if row.deaths >= MOST_DEATHS:
            return RowRefusedError(f"the engine died {row.deaths} times while it had this row: {error}")
        if isinstance(error, EngineBusyError):
            self._check_engine(row, error, now)
        row.failures += isinstance(error, AttemptFailedError)
        pause_s = pause_before_retry(
            error,
            tries=row.attempts,
            failures=row.failures,
            max_attempts=self._limits.max_attempts,
            jitter=random.random(),  # noqa: S311 - jitter, not a secret
        )
        if pause_s is None:
            self._try_duplicates(row)
            return error
        self._backlog.retry_after(row, pause_s)
        return None

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
            raise EngineLostError(f"the engine took no row for {waited_s:.0f} s: {error}")

    def _try_duplicates(self, row: PendingRow) -> None:
        """Send the duplicates of a row that was given up, in two halves: they may have better luck.

        One after the other could take days for thousands of them; all at once is too many if the first
        succeeds.
        """
        duplicates, row.duplicates = row.duplicates, []
        for first, *others in filter(None, (duplicates[::2], duplicates[1::2])):
            asked = row.answers.first if row.answers else row.request
            unencoded = None if row.unencoded is None else row.unencoded._replace(ref=first)
            anew = replace(
                row, request=asked._replace(ref=first), unencoded=unencoded, answers=None, duplicates=others,
                followers=[], attempts=0, failures=0, deaths=0,
            )  # fmt: skip
            self._backlog.expect(1)
            self._backlog.add(anew)
        self._backlog.wake_dispatcher()


def _refusal(request: Request, error: RequestError) -> Completion | None:
    """Return an answer without a text, with the server's own error as `response`, for a batch file's line.

    None for another row, and where the server gave no JSON object.
    """
    body = error.body
    if request.kind != "body" or body is None or len(body) > MOST_BODY_BYTES:
        return None
    try:
        found = orjson.loads(body)
        written = orjson.dumps(found).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if not isinstance(found, dict):
        return None
    return Completion([None], [None], [None], None, None, columns={RESPONSE: [written]})  # type: ignore[list-item]
