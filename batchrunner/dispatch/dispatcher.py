"""Requests → engine → outcomes: every row is tried until it ends, and holds a place only while it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from batchrunner.core.backoff import pause_before_retry
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
from batchrunner.core.types import Outcome
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.poison_rows import MOST_DEATHS, PoisonRows
from batchrunner.dispatch.prefix_order.reorder import Primer
from batchrunner.dispatch.queue import DispatchQueue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from batchrunner.core.types import Completion, Request
    from batchrunner.dispatch.prefix_order.reorder import Reorderer
    from batchrunner.dispatch.slots import Slots
    from batchrunner.dispatch.source import Source
    from batchrunner.engines.base import Engine

READ_AHEAD_ROWS, READ_AHEAD_BYTES = 512, 64 << 20
"""Rows that wait for a place, and the bytes of their prompts; the reader goes on when there is less."""
SLICE_BYTES = 4 << 20
"""Of prompts that are made ready together: the tokens of a text take many times its size."""
PRIME_S = 30.0
"""A primer saves a prefill pass or two: it is not waited for longer."""
REFUSALS, REFUSED_S = 2.0, 1.0
"""A row that is on its way for so many times as long as one that came back, and for so long, was taken."""
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long rows and the engine are put up with."""

    max_attempts: int
    engine_wait_s: float


class Listener(Protocol):
    """Who learns how the routes take the rows."""

    def answered(self, route: str, work: PendingRow, completion: Completion | None) -> None:
        """Take note of a row that the engine brought to its end; one that it refused has no completion."""

    def refused(self, route: str, what: str) -> None:
        """Take note of a route that took no more, or let a row wait too long."""


class Dispatcher:
    """Streams rows to an engine through a gate.

    While as many rows wait for another try as the window is wide, no fresh row is read: an engine that
    takes nothing cannot fill the memory with waiting rows.
    """

    def __init__(
        self,
        engine: Engine,
        ready: Callable[[list[Request]], Awaitable[list[Request | Outcome]]],
        arranger: Reorderer,
        gate: Slots,
        patience: RetryPolicy,
        deliver: Callable[[Outcome], Awaitable[None]],
        listener: Listener,
        *,
        keyed: bool = False,
    ) -> None:
        """`ready` makes rendered rows what is sent; with `keyed` a gateway is told what belongs together."""
        self._keyed = keyed
        self._engine = engine
        self._arranger = arranger
        self._gate = gate
        self._patience = patience
        self._deliver = deliver
        self._listener = listener
        self._make_ready = ready
        self._ready = DispatchQueue(tuple(gate.by_route), gate.on, READ_AHEAD_ROWS)
        self._ready_bytes = 0
        self._suspects: PoisonRows[PendingRow] = PoisonRows()
        self._resting = 0
        self._source: Source | None = None
        self._unended = 0  # rows in order that have not come to an end
        self._exhausted = False
        self._stopping = False
        self._wake_dispatch = asyncio.Event()
        self._wake_reader = asyncio.Event()
        self._on_way: dict[PendingRow, None] = {}  # the oldest first
        self._refused_since: float | None = None

    @property
    def resting(self) -> int:
        """Rows that wait for another try, holding no place."""
        return self._resting

    @property
    def unfinished(self) -> int:
        """Rows that were read and have not come to an end."""
        return self._unended + self._arranger.held

    @property
    def unsent(self) -> int:
        """Rows that are to be sent and not in flight: those that wait for another try among them."""
        if self._stopping:
            return 0
        unread = 0 if self._source is None or self._exhausted else self._source.unread
        return max(0, unread + self.unfinished - self._gate.in_flight)

    def wake(self) -> None:
        """Look again: a window has grown."""
        self._wake_dispatch.set()

    def stop(self) -> None:
        """Send no row any more; `run` returns when those in flight have ended."""
        self._stopping = True
        self._notify()

    async def run(self, source: Source) -> None:
        """Send all rows of a source, which is read in a thread.

        Raises EngineLostError, StorageError, or what reading raises; then, or when cancelled, the rows
        in flight are cancelled, and a later run sends them again.
        """
        self._source = source
        try:
            async with asyncio.TaskGroup() as group:
                arranged = self._arranger.arrange(
                    source.batches(), lambda: source.unread, is_shared=source.is_shared
                )
                reader = group.create_task(self._read(arranged))
                while not self._over():
                    route = self._gate.take(time.monotonic(), self._has_for)
                    if route is not None:
                        group.create_task(self._fly(self._next(route), route))
                        continue
                    self._wake_dispatch.clear()
                    await self._wake_dispatch.wait()
                reader.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _read(self, batches: Iterator[list[PendingRow | Primer | Outcome]]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while not self._stopping:
                batch = await asyncio.to_thread(next, batches, None)
                if batch is None:
                    break
                await self._take(batch)
        self._exhausted = True
        self._notify()

    async def _take(self, batch: list[PendingRow | Primer | Outcome]) -> None:
        """Have rows ready to be sent, and wait when no more are wanted."""
        works = [item for item in batch if isinstance(item, PendingRow)]
        self._unended += len(works)
        for item in batch:
            if isinstance(item, Outcome):  # the row failed before it could be sent
                await self._deliver(item)
        await self._prime([item for item in batch if isinstance(item, Primer)])
        for some in _slices(works):
            found = await self._make_ready([work.request for work in some])
            for work, request in zip(some, found, strict=True):
                if isinstance(request, Outcome):
                    await self._end(work, request)
                else:
                    work.request = request
                    self._wait(work)
            self._wake_dispatch.set()
            while not self._wants_rows():
                self._wake_reader.clear()
                await self._wake_reader.wait()

    def _wait(self, work: PendingRow, *, first: bool = False) -> None:
        """Let a row wait for a place, behind all others or before them."""
        (self._ready.add_first if first else self._ready.add)(work)
        self._ready_bytes += work.size

    async def _end(self, work: PendingRow, outcome: Outcome) -> None:
        """Deliver what became of a row, and of those that are exactly like it and share it."""
        await self._deliver(outcome)
        for twin in work.twins:
            await self._deliver(outcome._replace(ref=twin, latency_s=None, attempts=0))
        self._unended -= 1
        if self._unended == 0:
            self._notify()

    async def _prime(self, primers: Sequence[Primer]) -> None:
        """Have beginnings computed for every cache; what goes wrong goes wrong again with the rows."""
        turn = attrgetter("round")
        for _, group in groupby(sorted(primers, key=turn), key=turn):
            some = list(group)
            probes = [primer.work.request._replace(sampling=ONE_TOKEN) for primer in some]
            sent = [
                self._engine.generate(probe._replace(affinity=key), route)
                for primer, probe in zip(some, await self._make_ready(probes), strict=True)
                if not isinstance(probe, Outcome)
                for key, route in self._places_of(primer)
            ]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRIME_S):
                    await asyncio.gather(*sent, return_exceptions=True)
            for primer in some:
                primer.work.computed_at = time.monotonic()

    def _places_of(self, primer: Primer) -> Iterator[tuple[str, str]]:
        """Yield the keys and routes that lead to the caches which need a beginning."""
        work, routes = primer.work, list(self._gate.by_route)
        if primer.everywhere or work.family is None:
            for copy in range(max(self._arranger.caches, len(routes))):
                yield f"{work.request.ref.row}.primer.{copy}", routes[copy % len(routes)]
            return
        if work.family.route is None:
            work.family.route = routes[work.request.ref.row % len(routes)]
        yield work.affinity, work.family.route

    def _wants_rows(self) -> bool:
        rests = self._resting >= max(self._gate.window, READ_AHEAD_ROWS)
        return self._stopping or not (rests or self._is_ahead())

    def _is_ahead(self) -> bool:
        return len(self._ready) >= READ_AHEAD_ROWS or self._ready_bytes >= READ_AHEAD_BYTES

    def _over(self) -> bool:
        return self._stopping or (self._exhausted and self._unended == 0)

    def _has_for(self, route: str) -> bool:
        return self._ready.has_for(route) or self._suspects.degree(self._gate.window) is not None

    def _next(self, route: str) -> PendingRow | None:
        if self._stopping:
            return None
        degree = self._suspects.degree(self._gate.window)
        if degree is not None:
            return self._suspects.take(degree)
        work = self._ready.take(route)
        if work is not None:
            self._ready_bytes -= work.size
        if not self._is_ahead():
            self._wake_reader.set()
        return work

    async def _fly(self, work: PendingRow | None, route: str) -> None:
        """Send a row, then the next ones in the same place: a task a row would cost more than the row."""
        try:
            while work is not None:
                await self._try(work, route)
                work = self._next(route) if self._gate.keeps(route, time.monotonic()) else None
        finally:
            self._gate.release(route)
            self._wake_dispatch.set()

    async def _try(self, work: PendingRow, route: str) -> None:
        """Send a row once. Its place is kept until it is delivered, so that a slow disk slows us down."""
        work.tries += 1
        sent_at, work.route = time.monotonic(), route
        work.sent_at = sent_at
        completion, error = None, None
        request = work.request._replace(affinity=work.affinity) if self._keyed else work.request
        self._on_way[work] = None
        try:
            completion = await self._engine.generate(request, route)
        except RequestError as failure:
            error = failure
        finally:
            del self._on_way[work]
        now = time.monotonic()
        if work.deaths:
            self._suspects.landed(work.deaths)
        if error is None or isinstance(error, RowRefusedError):
            self._refused_since = None
            self._gate.answered(route)
            work.computed_at = min(work.computed_at, now)
            self._listener.answered(route, work, completion)
        else:
            self._refused(route, error, now)
            work.deaths += isinstance(error, EngineDiedError)
            if work.deaths >= MOST_DEATHS:
                error = RowRefusedError(f"the engine died {work.deaths} times while it had this row: {error}")
            elif self._rests(work, error, now):
                return
            else:
                self._send_twins(work)
        message = None if error is None else str(error)
        await self._end(work, Outcome(work.request.ref, completion, message, now - sent_at, work.tries))

    def _refused(self, route: str, error: RequestError, now: float) -> None:
        """Leave a route that took nothing alone for a while, and say so."""
        if isinstance(error, EngineBusyError):
            asyncio.get_running_loop().call_later(self._gate.rest(route, now), self._wake_dispatch.set)
        if isinstance(error, (EngineBusyError, NoAnswerError)) and not isinstance(error, EngineDownError):
            self._listener.refused(route, str(error))

    def _rests(self, work: PendingRow, error: RequestError, now: float) -> bool:
        """Put the row aside for another try, if it gets one."""
        if isinstance(error, EngineBusyError):
            self._wait_for_engine(work, error, now)
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

    def _send_twins(self, work: PendingRow) -> None:
        """Have rows like one that was given up tried themselves, in two halves: its bad luck is not theirs.

        One after the other thousands could take days, and all at once is too many if the next one succeeds.
        """
        twins, work.twins = work.twins, []
        for first, *others in filter(None, (twins[::2], twins[1::2])):
            request = work.request._replace(ref=first)
            twin = replace(work, request=request, twins=others, children=[], tries=0, failures=0, deaths=0)
            self._unended += 1
            self._wait(twin)
        self._notify()

    def _wait_for_engine(self, work: PendingRow, error: EngineBusyError, now: float) -> None:
        """Raise EngineLostError where the engine has taken no row for longer than it is waited for.

        A row that is on its way for longer than refusals take was taken, and is waited for.
        """
        if self._refused_since is None or isinstance(error, EngineDiedError):  # until now it had taken rows
            self._refused_since = now
        waited_s = now - self._refused_since
        oldest = next(iter(self._on_way), work)
        is_taken = now - oldest.sent_at > max(REFUSALS * (now - work.sent_at), REFUSED_S)
        if not is_taken and waited_s > self._patience.engine_wait_s:
            raise EngineLostError(f"the engine took no row for {waited_s:.0f} s: {error}")

    def _back(self, work: PendingRow) -> None:
        self._resting -= 1
        if work.deaths:
            self._suspects.add(work, work.deaths)
        else:
            self._wait(work, first=True)
        self._notify()

    def _notify(self) -> None:
        self._wake_dispatch.set()
        self._wake_reader.set()


def _slices(works: Sequence[PendingRow]) -> Iterator[list[PendingRow]]:
    """Part rows into as many as have so many bytes, one row at least."""
    some: list[PendingRow] = []
    size = 0
    for work in works:
        if some and size + work.size > SLICE_BYTES:
            yield some
            some, size = [], 0
        some.append(work)
        size += work.size
    if some:
        yield some
