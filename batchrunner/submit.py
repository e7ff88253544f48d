"""Requests → engine → outcomes: every row is tried until it ends, and holds a place only while it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrunner.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineLostError,
    RequestError,
    RowRefusedError,
)
from batchrunner.records import Outcome, Request
from batchrunner.retry import pause_before_retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from batchrunner.engines.base import Engine
    from batchrunner.gate import Gate

READ_AHEAD_ROWS = 512
"""Rendered rows that wait for a place; the reader goes on when there are fewer."""


@dataclass(slots=True)
class _Work:
    """A row on its way, and what it has been through."""

    request: Request
    tries: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long rows and the engine are put up with."""

    max_attempts: int
    engine_wait_s: float


class Submitter:
    """Streams rows to an engine through a gate.

    While as many rows wait for another try as the window is wide, no fresh row is read: an engine that
    takes nothing cannot fill the memory with waiting rows.
    """

    def __init__(
        self, engine: Engine, gate: Gate, patience: Patience, deliver: Callable[[Outcome], Awaitable[None]]
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._patience = patience
        self._deliver = deliver
        self._ready: deque[_Work] = deque()
        self._resting = 0
        self._unended = 0  # rows read from the input that have not come to an end
        self._exhausted = False
        self._stopping = False
        self._wake_dispatch = asyncio.Event()
        self._wake_reader = asyncio.Event()
        self._answered_at = time.monotonic()

    @property
    def resting(self) -> int:
        """Rows that wait for another try, holding no place."""
        return self._resting

    def stop(self) -> None:
        """Send no row any more; `run` returns when those in flight have ended."""
        self._stopping = True
        self._notify()

    async def run(self, batches: Iterator[list[Request | Outcome]]) -> None:
        """Send everything that `batches` holds; it is read in a thread.

        Raises EngineLostError, StorageError, or what `batches` raises; then, or when cancelled, the rows
        in flight are cancelled, and a later run sends them again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(batches))
                while await self._has_rows():
                    await self._gate.acquire()
                    if (work := self._next()) is not None:
                        group.create_task(self._fly(work))
                    else:  # a stop, or others took what was there
                        self._gate.release()
                reader.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _read(self, batches: Iterator[list[Request | Outcome]]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while not self._stopping:
                batch = await asyncio.to_thread(next, batches, None)
                if batch is None:
                    break
                for item in batch:
                    if isinstance(item, Outcome):  # the row failed before it could be sent
                        await self._deliver(item)
                    else:
                        self._ready.append(_Work(item))
                        self._unended += 1
                self._wake_dispatch.set()
                while not self._wants_rows():
                    self._wake_reader.clear()
                    await self._wake_reader.wait()
        self._exhausted = True
        self._notify()

    def _wants_rows(self) -> bool:
        enough = len(self._ready) >= READ_AHEAD_ROWS or self._resting >= max(
            self._gate.window, READ_AHEAD_ROWS
        )
        return self._stopping or not enough

    async def _has_rows(self) -> bool:
        """Wait for a row to send; false when there is none any more."""
        while not self._ready or self._stopping:
            if self._stopping or (self._exhausted and self._unended == 0):
                return False
            self._wake_dispatch.clear()
            await self._wake_dispatch.wait()
        return True

    def _next(self) -> _Work | None:
        if not self._ready or self._stopping:
            return None
        work = self._ready.popleft()
        if len(self._ready) < READ_AHEAD_ROWS:
            self._wake_reader.set()
        return work

    async def _fly(self, work: _Work | None) -> None:
        """Send a row, then the next ones in the same place: a task a row would cost more than the row."""
        try:
            while work is not None:
                await self._try(work)
                work = self._next() if self._gate.in_flight <= self._gate.window else None
        finally:
            self._gate.release()

    async def _try(self, work: _Work) -> None:
        """Send a row once. Its place is kept until it is delivered, so that a slow disk slows us down."""
        work.tries += 1
        sent_at = time.monotonic()
        completion, error = None, None
        try:
            completion = await self._engine.generate(work.request)
        except RequestError as failure:
            error = failure
        now = time.monotonic()
        if error is None or isinstance(error, RowRefusedError):
            self._answered_at = now
        elif self._rests(work, error, now):
            return
        message = None if error is None else str(error)
        await self._deliver(Outcome(work.request.ref, completion, message, now - sent_at, work.tries))
        self._unended -= 1
        if self._unended == 0:
            self._notify()

    def _rests(self, work: _Work, error: RequestError, now: float) -> bool:
        """Put the row aside for another try, if it gets one."""
        waited_s = now - self._answered_at
        if (
            isinstance(error, EngineBusyError)
            and self._gate.in_flight == 1  # we are the last
            and waited_s > self._patience.engine_wait_s
        ):
            raise EngineLostError(f"the engine took no row for {waited_s:.0f} s: {error}")
        work.failures += isinstance(error, AttemptFailedError)
        pause_s = pause_before_retry(
            error,
            tries=work.tries,
            failures=work.failures,
            max_attempts=self._patience.max_attempts,
            luck=random.random(),  # noqa: S311 - jitter, not a secret
        )
        if pause_s is None:
            return False
        if not self._stopping:
            self._resting += 1
            asyncio.get_running_loop().call_later(pause_s, self._back, work)
        return True

    def _back(self, work: _Work) -> None:
        self._resting -= 1
        self._ready.appendleft(work)
        self._notify()

    def _notify(self) -> None:
        self._wake_dispatch.set()
        self._wake_reader.set()
