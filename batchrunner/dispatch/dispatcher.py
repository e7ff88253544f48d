"""Rows from the dispatch queue → the engine → outcomes: a row holds a slot only while it is sent."""

import asyncio
import time
from collections.abc import Mapping

from batchrunner.core.errors import (
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.types import Completion, Outcome
from batchrunner.dispatch.bundles.sender import BundleSender
from batchrunner.dispatch.checks.examiner import AnswerExaminer
from batchrunner.dispatch.feedback import Feedback
from batchrunner.dispatch.feeder import Feeder
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.poison_rows import MOST_DEATHS
from batchrunner.dispatch.queue import Backlog
from batchrunner.dispatch.refused_bodies import refused_answer
from batchrunner.dispatch.retries import Retries
from batchrunner.dispatch.slots import Slots


class Dispatcher:
    """Sends rows as slots become free, until every row has an outcome."""

    def __init__(
        self,
        backlog: Backlog,
        slots: Slots,
        senders: Mapping[str, BundleSender],
        retries: Retries,
        feedback: Feedback,
        examiner: AnswerExaminer | None = None,
        *,
        by_affinity: bool = False,
    ) -> None:
        """Take a sender for each route, and what examines the answers where they are checked.

        With `by_affinity` requests carry a key by which a gateway keeps prefix groups together.
        """
        self._backlog = backlog
        self._slots = slots
        self._senders = senders
        self._retries = retries
        self._feedback = feedback
        self._examiner = examiner
        self._by_affinity = by_affinity
        self._in_flight: dict[PendingRow, None] = {}  # the oldest first

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
        """Send a row once. It holds its slot until its outcome is stored, so a slow disk slows us down."""
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
            self._retries.accepted()
            self._slots.answered(route)
            row.prefix_ready_at = min(row.prefix_ready_at, now)
            self._feedback.answered(row, route, completion, now)
        else:
            error = self._failed(row, route, error, now)
            if error is None:
                return
        message = None
        if error is not None:
            message, completion = str(error), self._kept(row, error)
        elif self._examiner is not None and completion is not None:
            completion, message, again = await self._examiner.examine(row, completion)
            if again is not None:
                row.request = again
                self._backlog.retry_after(row, 0.0)
                return
        await self._backlog.end(
            row, Outcome(row.request.ref, completion, message, now - sent_at, row.attempts)
        )
        self._retries.accepted()  # while it waited to be stored, nobody asked the engine

    def _kept(self, row: PendingRow, error: RequestError) -> Completion | None:
        """Return what a row that failed with an error keeps: its last answer, or that which refused it."""
        if self._examiner is not None:
            return self._examiner.last_answer(row)
        return refused_answer(row.request, error)

    def _failed(self, row: PendingRow, route: str, error: RequestError, now: float) -> RequestError | None:
        """Decide what becomes of a row without an answer: None if it is sent again, else its error."""
        if isinstance(error, EngineBusyError):
            cooldown_s = self._slots.cool_down(route, now)
            asyncio.get_running_loop().call_later(cooldown_s, self._backlog.wake_dispatcher)
        if isinstance(error, (EngineBusyError, NoAnswerError)) and not isinstance(error, EngineDownError):
            self._feedback.refused(route, str(error), now)
        row.deaths += isinstance(error, EngineDiedError)
        if row.deaths >= MOST_DEATHS:
            return RowRefusedError(f"the engine died {row.deaths} times while it had this row: {error}")
        oldest = next(iter(self._in_flight), row)
        if self._retries.retry(row, error, now, oldest.sent_at):
            return None
        self._retries.try_duplicates(row)
        return error
