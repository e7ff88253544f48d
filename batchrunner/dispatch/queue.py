"""Rows between the reader and their outcomes: pending rows, the dispatch queue, and the backlog around it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from batchrunner.core.types import Completion, Outcome, Request, RowRef
from batchrunner.dispatch.attempt import MOST_DEATHS, FailureHistory
from batchrunner.dispatch.route import Route, Routes
from batchrunner.output.counts import Rejected


class AnswerHistory(msgspec.Struct):
    """The earlier answers of a row whose answers are checked, and what its next request needs."""

    first: Request
    """The row's first request, as it was sent."""
    unencoded: Request | None = None
    """The first request before tokenization, if later requests may add a complaint to its chat; else None."""
    rejected: list[Rejected] = []
    """Answers that failed the checks, the oldest first."""
    lengthened: int = 0
    """Number of rejected answers that were truncated and requested again with more tokens."""
    last: Completion | None = None
    """The last answer, which the row keeps if it fails."""


class PrefixGroup(msgspec.Struct, eq=False):
    """Rows with a common prefix. They all go to one route, whose prefix cache holds the prefix."""

    first: PendingRow
    """The first row of the group; if it was sent, its route becomes the route of the group."""
    home: Route | None = None
    """The route of the group; None until it is chosen."""
    to_come: int = 0
    """Number of rows of the group that were read, and that `DispatchQueue` has not assigned to the route
    yet."""


class Turn(msgspec.Struct, eq=False):
    """A request of a multi-turn rollout."""

    outcome: asyncio.Future[Outcome]
    """Future of the request's outcome. It is cancelled if the rollout no longer waits for the outcome."""
    is_first: bool
    """Whether the request is the first of its rollout; later requests are sent before new rows."""


class PendingRow(msgspec.Struct, eq=False):
    """A row that was read and has not ended. A `msgspec.Struct` is created faster than a dataclass."""

    request: Request
    prompt_bytes: int = 0
    """Length of the prompt in bytes (`input.prompt_bytes`), including filler bytes for the tokens of its
    images."""
    duplicates: list[RowRef] = []
    """Rows with the same request, which get this row's answer."""
    group: PrefixGroup | None = None
    """The prefix group, whose route the row prefers; None if any route will do."""

    route: Route | None = None
    """Route of the last attempt."""
    sent_at: float = 0.0
    """Time of the last attempt, in seconds of the monotonic clock."""
    prefix_ready_at: float = float("inf")
    """Time after which the row's prompt has certainly been computed, in seconds of the monotonic clock."""
    attempts: int = 0
    """Number of times that the row was sent."""
    failures: FailureHistory | None = None
    """The row's failed attempts; None if no attempt failed."""
    answers: AnswerHistory | None = None
    """The row's earlier answers; None if answers are not checked, or before the first answer."""
    turn: Turn | None = None
    """The turn of a rollout, if the row is a request of that rollout; None for a row of the input."""

    @property
    def is_wanted(self) -> bool:
        """Whether the outcome of the row is still needed; false if its rollout has been cancelled."""
        return self.turn is None or not self.turn.outcome.done()

    @property
    def deaths(self) -> int:
        """Number of engine deaths while the engine had the row."""
        return 0 if self.failures is None else self.failures.deaths

    @property
    def avoided(self) -> tuple[Route, ...]:
        """Routes that get the row only if all other routes are suspended."""
        return () if self.failures is None else self.failures.avoided

    @property
    def memory_bytes(self) -> int:
        """Bytes of the prompt and its images in memory."""
        request = self.request
        return self.prompt_bytes + request.media_bytes if request.media else self.prompt_bytes


class RowSource(Protocol):
    """Source of the rows of an attempt: files, leases of a joined run, or a program."""

    @property
    def total(self) -> int:
        """Number of rows, including the rows of earlier attempts; an estimate if workers share the run."""

    @property
    def unread(self) -> int:
        """Number of rows still to be read; an estimate if workers share the run."""

    @property
    def is_shared(self) -> bool:
        """Whether other workers of a joined run could process these rows, now or later."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows, a bounded batch at a time; blocks.

        A row that cannot be rendered comes as an Outcome with its error. An empty batch asks the
        feeder to send the rows that were read so far, because the next batch may take a while.
        """

    def stop(self) -> None:
        """Read no more rows. `batches` then ends soon, even if it is waiting for rows."""


class ResultSink(Protocol):
    """Sink of the outcomes of rows: the disk, or a program."""

    async def put(self, outcome: Outcome) -> None:
        """Count and store an outcome; waits while the disk or the program is behind. Raises StorageError."""


FEWER = 16
"""Rows that were in flight at an engine death may fill only a part of the window. With each death that such
rows have seen, this part is divided by this number."""


class PoisonRows:
    """Suspects: rows that were in flight when the engine died or hung, and that wait for a retry. Pure.

    Thousands of rows are in flight at a death, and nearly all are harmless. They are sent again a few at a
    time, beside rows that are not suspected, so that the next death leaves fewer suspects. Rows that have
    seen one death may fill 1/16 of the window at once, and rows that have seen two may fill 1/256. Of the
    rows that have seen three, only one is in flight at a time. If the engine dies again, that row is given
    up.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._waiting: defaultdict[int, deque[PendingRow]] = defaultdict(deque)
        self._in_flight: Counter[int] = Counter()

    def add(self, row: PendingRow) -> None:
        """Add a row that was in flight at one or more deaths."""
        self._waiting[row.deaths].append(row)

    def next(self, route: Route) -> deque[PendingRow] | None:
        """Return a queue of suspects whose first row may be sent to a route now; None if there is none.

        A suspect is a row that was in flight at an engine death.
        """
        if not self._waiting:  # The common case comes first, because this method is called for each row.
            return None
        # The worst suspects come first. A suspect that would be given up at the next death is sent alone.
        for deaths, rows in sorted(self._waiting.items(), reverse=True):
            # The more deaths its rows have seen, the fewer rows of a queue may be in flight at once.
            limit = 1 if deaths >= MOST_DEATHS - 1 else max(1, self._routes.window // FEWER**deaths)
            if rows and self._in_flight[deaths] < limit and self._routes.may_get(route, rows[0].avoided):
                return rows
        return None

    def take(self, suspects: deque[PendingRow]) -> PendingRow:
        """Take the first of these suspected rows. The row counts as in flight from now on."""
        row = suspects.popleft()
        self._in_flight[row.deaths] += 1
        return row

    def leave_flight(self, row: PendingRow) -> None:
        """Record that a suspect is no longer in flight."""
        self._in_flight[row.deaths] -= 1


HOLD_S = 0.1
"""Seconds for which the moved rows of a prefix group are held. It is the time of two short prefill passes of
an engine with little to do: the one that runs, and the one that computes the prefix."""
READ_AHEAD_ROWS = 512
"""Number of rows in the dispatch queue at which the feeder pauses. While the queue is that full, any route
may take rows that are kept for another route."""
READ_AHEAD_BYTES = 64 << 20
"""Bytes of the prompts in the dispatch queue at which the feeder pauses."""


MOST_MEDIA_BYTES = 128 << 20
"""Total bytes of the files of the rows in flight at which no more rows are sent. A request body holds each
file once more, and a third larger (base64)."""


class DispatchQueue:
    """Rows that wait for a slot, in order. Pure: no clock, no loop.

    A prefix group goes to the route with the least to do, and its rows wait for that route. The pending rows
    of a route's groups count as its work. A row that failed on one route waits for another one.

    A route with little to do takes half of the rows that are kept for the busiest route, because an idle
    replica costs more than the cache saves. But the prefixes of these rows must be computed again. So the
    route takes whole groups if possible, and only under three conditions:

    - its requests in flight fill less than three quarters of its window;
    - they are fewer than half of the rows that the busiest route has, in flight or kept;
    - the rows kept for the busiest route are at least a quarter of its requests in flight.

    The conditions do not count if the busiest route is suspended, or if the queue is full.

    Of each group that moves, one row is sent at once. The others are held for HOLD_S, so that they use the
    prefix which that row has computed.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._for_any_route: deque[PendingRow] = deque()
        """Rows that failed on no route, in the order of sending."""
        self._turns: deque[PendingRow] = deque()
        """Later requests of rollouts that failed on no route; they are sent before `_for_any_route`."""
        self._avoiding = defaultdict[tuple[Route, ...], deque[PendingRow]](deque)
        """Rows that have failed on routes, by the routes that they avoid."""
        self._count = 0
        """Number of all rows in the queue. Summing over the routes for each row would be slow."""
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of rows in the queue."""
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether the queue has so many rows, or bytes of prompts, that no more rows should be read."""
        return self._count >= READ_AHEAD_ROWS or self._bytes >= READ_AHEAD_BYTES

    def add(self, row: PendingRow, *, first: bool = False) -> None:
        """Add a row behind all other rows of its kind, or before them if `first` is true.

        The kinds are later requests of rollouts, rows that avoid the same routes, and all other rows.
        """
        is_later_turn = row.turn is not None and not row.turn.is_first
        rows = self._turns if is_later_turn else self._for_any_route
        if avoided := row.avoided:  # The row failed on these routes.
            rows = self._avoiding[avoided]
        if first:
            rows.appendleft(row)
        else:
            rows.append(row)
        self._count += 1
        self._bytes += row.memory_bytes

    def has_for(self, route: Route) -> bool:
        """Tell whether `take` may return a row for a route.

        True may turn out to be wrong: `take` may find that all rows belong to other routes. It then keeps the
        rows for these routes.
        """
        return bool(
            self._for_any_route
            or self._turns
            or route.kept
            or self._route_to_relieve(route, route.in_flight)
            or (self._avoiding and self._avoiding_others(route))
        )

    def take(self, route: Route) -> PendingRow | None:
        """Take the next row for a route; None if the route should wait.

        The caller has already counted the row's slot in `in_flight` of the route.
        """
        row = self._next(route)
        if row is not None:
            self._count -= 1
            self._bytes -= row.memory_bytes
        return row

    def _next(self, route: Route) -> PendingRow | None:
        """Return the next row for a route, or None: a kept row, one that avoids other routes, or any row.

        Rows whose prefix group belongs to another route are kept for that route.
        """
        if route.kept:
            route.promised -= 1  # A kept row is promised to its route until the route takes it.
            row: PendingRow = route.kept.popleft()
            return row
        if self._avoiding and (avoiding := self._avoiding_others(route)):
            return avoiding.popleft()
        while rows := self._turns or self._for_any_route:
            row = rows.popleft()
            if row.group is None:
                return row
            home = self.home_of(row.group)
            # The row was promised as one to come. If it is kept below, it is promised again.
            if row.group.to_come:
                row.group.to_come -= 1
                home.promised -= 1
            if home is route:
                return row
            _keep(row, home)
        # No row is left, except rows that are kept for other routes. This route may take some of them over.
        # The slot of the row that it asks for is already counted in `in_flight`.
        busiest = self._route_to_relieve(route, route.in_flight - 1)
        return _relieve(busiest, route) if busiest else None

    def release(self, route: Route) -> None:
        """Let a route send the rows that were held until it had computed their prefixes."""
        route.kept.extend(route.held)
        route.held.clear()

    def home_of(self, group: PrefixGroup) -> Route:
        """Return the route of a prefix group; the first call chooses it."""
        if group.home is None:
            # If the first row of the group was sent already, its route has the prefix in its cache.
            group.home = group.first.route or self._routes.least_used()
            group.home.promised += group.to_come
        return group.home

    def _route_to_relieve(self, route: Route, in_flight: int) -> Route | None:
        """Return the route with the most kept rows if `route` may take some of them, else None.

        A kept row waits for the route that has its prefix in the cache. `route` asks for a row, and has
        `in_flight` requests in flight without that row.
        """
        busiest = max(self._routes, key=lambda other: len(other.kept))
        kept_rows = len(busiest.kept)
        if not kept_rows or route.held:  # Held rows are rows that the route has just taken from another one.
            return None
        # A suspended route cannot send its kept rows itself, so another route may take them.
        if busiest.is_suspended:
            return busiest
        if self._count >= READ_AHEAD_ROWS:
            # The queue is full, so no more rows are read, and the asking route would get none.
            return busiest
        # If the asking route has enough to do itself, it takes none.
        if 2 * in_flight >= busiest.in_flight + kept_rows or 4 * in_flight >= 3 * route.window:
            return None
        if 4 * kept_rows < busiest.in_flight:  # The busiest route will need its kept rows soon.
            return None
        return busiest

    def _avoiding_others(self, route: Route) -> deque[PendingRow]:
        """Return pending rows that avoid other routes and may go to this route; empty if there are none."""
        for avoided, rows in self._avoiding.items():
            if rows and self._routes.may_get(route, avoided):
                return rows
        return deque()


def _keep(row: PendingRow, route: Route) -> None:
    """Keep a row for a route, behind the rows that are kept already."""
    route.kept.append(row)
    route.promised += 1


def _hold(row: PendingRow, route: Route) -> None:
    """Hold a row for a route until `DispatchQueue.release`."""
    route.held.append(row)
    route.promised += 1


def _relieve(busiest: Route, route: Route) -> PendingRow:
    """Move half of the rows that are kept for one route to another; return the first of these rows.

    Groups move whole, except the last one. Groups whose first row was not sent yet move first, and larger
    groups before smaller ones. If two rows of a group were in the same prefill pass, both would compute the
    prefix. So one row of each group may be sent at once, and the others are held, unless the route has the
    prefix in its cache.
    """
    kept_rows = Counter[PrefixGroup](row.group for row in busiest.kept)  # number of kept rows, by group
    # Some of these rows may have been moved away from `route` before. It still has their prefix in its cache.
    cached_groups = {group for group in kept_rows if group.home is route}
    # Take one group after another, until half of the rows are taken.
    rows_to_move = Counter[PrefixGroup]()  # number of rows to move, by group
    half = (len(busiest.kept) + 1) // 2
    for group in sorted(kept_rows, key=lambda group: (group.first.route is not None, -kept_rows[group])):
        rows_to_move[group] = min(kept_rows[group], half - rows_to_move.total())
        if rows_to_move[group] == kept_rows[group]:
            # The group moves as a whole, so its rows that are still to come go to the other route, too.
            group.home = route
            busiest.promised -= group.to_come
            route.promised += group.to_come
    moved, remaining = deque[PendingRow](), deque[PendingRow]()
    for row in reversed(busiest.kept):  # If a group is divided between the routes, its last rows move.
        if rows_to_move[row.group] > 0:
            rows_to_move[row.group] -= 1
            moved.appendleft(row)
        else:
            remaining.appendleft(row)
    busiest.kept = remaining
    busiest.promised -= len(moved)

    # Send one row of each group whose prefix is not cached, and hold its other rows until it is.
    awaited_groups = set[PrefixGroup | None]()  # groups whose prefix this route is about to compute
    to_send = list[PendingRow]()
    for row in moved:
        if row.group in awaited_groups:
            _hold(row, route)
            continue
        to_send.append(row)
        if row.group not in cached_groups:
            awaited_groups.add(row.group)
    first, *others = to_send
    for row in others:
        _keep(row, route)
    return first


class Backlog:
    """Rows in the dispatch queue, rows that wait for another attempt, and suspects of engine deaths.

    The feeder waits for room in the backlog, and the dispatcher waits for rows to send.
    """

    def __init__(self, routes: Routes, results: ResultSink, to_come: Callable[[], int]) -> None:
        """Build an empty backlog; `to_come` estimates the number of rows that have not been added yet."""
        self._routes = routes
        self._results = results
        self._to_come = to_come
        self._queue = DispatchQueue(routes)
        self._poison = PoisonRows(routes)
        self._media_bytes = 0  # total size of the media files of the rows in flight
        self._releasing = set[Route]()  # routes whose held rows are released after a pause
        self.waiting = 0
        """Number of rows that wait for another attempt and hold no slot."""
        self._unended = 0  # rows that were read and have no outcome yet
        self._all_read = False
        self.is_stopping = False
        """Whether no row is sent any more."""
        self._sendable = asyncio.Event()
        """Set when rows may have become sendable; the dispatcher waits for it."""
        self._room = asyncio.Event()
        """Set when there may be room in the dispatch queue; the feeder waits for it if the queue is full."""

    @property
    def unsent(self) -> int:
        """Number of remaining rows that are not in flight; an estimate if the worker shares its run.

        A row whose function sends many requests at once (a rollout) counts once, but each of its requests in
        flight is subtracted. The difference may therefore be too small. So the result is at least the number
        of rows in the queue.
        """
        if self.is_stopping:
            return 0
        # Count rows that are still to come, and rows without an outcome that are not in flight.
        to_come = 0 if self._all_read else self._to_come()
        return max(self.ready, to_come + self._unended - self._routes.in_flight)

    @property
    def ready(self) -> int:
        """Number of rows in the dispatch queue."""
        return len(self._queue)

    @property
    def is_over(self) -> bool:
        """Whether the dispatcher has nothing left to send."""
        return self.is_stopping or (self._all_read and self._unended == 0)

    def stop(self) -> None:
        """Stop sending rows."""
        self.is_stopping = True
        self.wake()

    def finish_reading(self) -> None:
        """Record that no more rows will come."""
        self._all_read = True
        self.wake()

    def expect(self, rows: int) -> None:
        """Count rows that will soon be added to the backlog, or end without being sent."""
        self._unended += rows

    def add(self, row: PendingRow) -> None:
        """Put a row into the dispatch queue, behind all others."""
        self._queue.add(row)

    def retry_after(self, row: PendingRow, pause_s: float) -> None:
        """Put a row back after a pause, unless the run is stopping."""
        if not self.is_stopping:
            self.waiting += 1
            asyncio.get_running_loop().call_later(pause_s, self._retry, row)

    def home_of(self, group: PrefixGroup) -> Route:
        """Return the route of a prefix group."""
        return self._queue.home_of(group)

    def has_for(self, route: Route) -> bool:
        """Tell whether `take` may return a row for a route."""
        if self._media_bytes >= MOST_MEDIA_BYTES:
            return False
        return self._queue.has_for(route) or self._poison.next(route) is not None

    def take(self, route: Route) -> PendingRow | None:
        """Take the next row for a route; suspects of engine deaths come first.

        Return None if no row may be sent now: the run stops, the media files in flight take too much memory,
        or no row is ready for the route.
        """
        if self.is_stopping or self._media_bytes >= MOST_MEDIA_BYTES:
            return None
        while True:
            suspects = self._poison.next(route)
            row = self._queue.take(route) if suspects is None else self._poison.take(suspects)
            if row is None or row.is_wanted:
                break
            # The row's rollout has ended, so the row is dropped. If it is a suspect of engine deaths, it was
            # counted as in flight above.
            if row.deaths:
                self._poison.leave_flight(row)
        if route.held and route not in self._releasing:  # `take` has moved rows from another route.
            self._releasing.add(route)
            asyncio.get_running_loop().call_later(HOLD_S, self._release_held, route)
        if not self._queue.is_full:
            self._room.set()
        if row is not None and row.request.media:
            self._media_bytes += row.request.media_bytes
        return row

    def end_attempt(self, row: PendingRow) -> None:
        """Record that an attempt of a row is over."""
        if row.request.media:
            self._media_bytes -= row.request.media_bytes
        if row.failures is not None and row.failures.deaths:
            self._poison.leave_flight(row)

    async def end(self, row: PendingRow, outcome: Outcome) -> None:
        """Store the outcome of a row, and the same for its duplicates. Raises StorageError.

        The outcome of a rollout's request goes to the rollout instead.
        """
        if row.turn is not None:
            # The row is a request of a rollout, which may have been cancelled meanwhile.
            if row.is_wanted:
                row.turn.outcome.set_result(outcome)
            return
        await self._results.put(outcome)
        if row.request.media:
            # Free the memory of the media files, since other rows may refer to this row for long. `answers`
            # has the row's first request, and so the same files.
            row.request = row.request._replace(media=())
            row.answers = None
        for ref in row.duplicates:  # They were never sent.
            await self._results.put(outcome._replace(ref=ref, latency_s=None, attempts=0))
        self._unended -= 1
        if self._unended == 0:  # The dispatcher may have nothing left to wait for.
            self.wake()

    def wake(self) -> None:
        """Wake the dispatcher and the feeder: there may be rows to send, free slots, or room for rows."""
        self._sendable.set()
        self._room.set()

    async def wait_for_rows(self) -> None:
        """Wait until `wake` is called: there may be rows to send, or free slots."""
        self._sendable.clear()
        await self._sendable.wait()

    async def wait_for_room(self, may_read: Callable[[], bool] = lambda: True) -> None:
        """Wait until the queue has room and `may_read` returns true, or until the run is stopping.

        The feeder also pauses while as many rows wait for another attempt as there are slots (at least
        READ_AHEAD_ROWS). Otherwise an engine that accepts no rows would fill the memory with waiting rows.
        """
        while not self.is_stopping and (
            self._queue.is_full or self.waiting >= max(self._routes.window, READ_AHEAD_ROWS) or not may_read()
        ):
            self._room.clear()
            await self._room.wait()

    def _release_held(self, route: Route) -> None:
        """Let a route send the rows that were held until it had computed their prefixes."""
        self._releasing.remove(route)
        self._queue.release(route)
        self.wake()

    def _retry(self, row: PendingRow) -> None:
        """Put a row back into the queue, before all other rows; a suspect of engine deaths waits apart."""
        self.waiting -= 1
        if row.deaths:
            self._poison.add(row)
        else:
            self._queue.add(row, first=True)
        self.wake()
