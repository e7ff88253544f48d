"""Rows between the reader and their outcomes: what is known of each, the dispatch queue, and the slots."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from batchrunner.core.errors import RequestError
from batchrunner.core.types import Completion, Outcome, Request, RowRef
from batchrunner.output.counts import Rejected


class AnswerHistory(msgspec.Struct):
    """The answers of a row whose answers are checked."""

    first: Request
    """Its first request, as it was sent."""
    rejected: list[Rejected] = []
    """Answers that were not good."""
    lengthened: int = 0
    """Those of them that were cut, and asked for with more tokens."""
    last: Completion | None = None
    """The last answer, which the row keeps if it fails."""


class Tally(msgspec.Struct):
    """What a route had answered and refused when it refused a row first, and how it refused the row since."""

    answered: int
    refused: int
    times: int = 0
    """Refusals of the row that count."""


class Refusals(msgspec.Struct):
    """How a row was refused for now; see `dispatch.blame`."""

    last: float
    """Time of the last refusal; before one, that at which the row was sent."""
    times: int = 1
    """The first refusal, and those after it that count."""
    tallies: dict[Any, Tally] = {}
    """By the RouteRecord of each route."""


class PendingRow(msgspec.Struct, eq=False):
    """A row that was read and has not ended; a `msgspec.Struct`, which is made faster than a dataclass.

    A row *follows* another one, its `leader`, where both begin with the same bytes: the engine computes the
    shared prefix with the leader, and the follower finds it in the prefix cache.
    """

    request: Request
    prefix: bytes = b""
    """The prompt as bytes (`input.prompt_bytes`); dropped once no later row is compared with it."""
    prompt_bytes: int = 0
    """Length of `prefix`: where the prompt has images, it has bytes for their tokens."""
    template: int = 0
    """CRC-32 of the prompt's first 256 bytes: rows with the same template or system prompt share it."""
    duplicates: list[RowRef] = []
    """Rows with the same request, which get this row's answer."""

    leader: PendingRow | None = None
    shared_bytes: int = 0
    """Length of the prefix that the row shares with its leader."""
    followers: list[PendingRow] = []
    new_tokens: float = 0.0
    """Prompt tokens (estimated) that the engine computes if the shared prefix is cached."""
    sent_clock: float = 0.0
    """Sum of `new_tokens` over all rows sent so far, this one included."""
    used_clock: float = 0.0
    """The same, when the row or one of its followers was sent last."""
    longest_output: float = 0.0
    """Expected output tokens of the row or of its longest follower; 0 where lengths do not matter."""
    group: PendingRow | None = None
    """First row of the prefix group, whose home the row prefers; None if any route will do."""
    home: str | None = None
    """Route of the group that it begins; None until it is chosen."""
    to_come: int = 0
    """Rows of the group that it begins which are not in the queue yet, as far as they were counted."""

    route: str | None = None
    """Route of the last attempt."""
    sent_at: float = 0.0
    """Time of the last attempt, in seconds of the monotonic clock."""
    prefix_ready_at: float = float("inf")
    """Time from which on the row's prompt is known to be computed, in seconds of the same clock."""
    attempts: int = 0
    failures: int = 0
    """Attempts that ended with an error which may be the row's own fault."""
    deaths: int = 0
    """Engine deaths during its attempts."""
    refused_by: tuple[str, ...] = ()
    """Routes whose servers said that the row is at fault: another one is asked too."""
    refusal: RequestError | None = None
    """What the last one of them said."""
    failed_on: tuple[str, ...] = ()
    """Routes on which an attempt failed, by the row or by the server: another one is tried too."""
    refusals: Refusals | None = None
    """How the engine refused it for now; None if it never did."""
    unencoded: Request | None = None
    """The request before it was tokenised, where it may be asked for again in other words."""
    answers: AnswerHistory | None = None
    """Its answers, where they are checked."""
    ask: asyncio.Future[Outcome] | None = None
    """Gets the outcome of a rollout's request, unless nobody waits for it any more; None for a row itself."""
    is_turn: bool = False
    """Whether its rollout has asked before: it goes before new rows."""

    @property
    def avoids(self) -> tuple[str, ...]:
        """Routes that get the row only where there is no other one."""
        return (*self.refused_by, *self.failed_on)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the prompt and its images in memory."""
        request = self.request
        return self.prompt_bytes + request.media_bytes if request.media else self.prompt_bytes


class RowSource(Protocol):
    """Where the rows of an attempt come from: files, leases, or a program."""

    @property
    def total(self) -> int:
        """Number of rows, those that earlier attempts ended included; with leases an estimate."""

    @property
    def unread(self) -> int:
        """Number of rows still to be read; with leases an estimate."""

    @property
    def is_shared(self) -> bool:
        """Whether other tasks could do these rows, now or later."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read and render rows, a bounded batch at a time; blocks.

        A row that cannot be rendered comes as an Outcome with its error. An empty batch asks to send what was
        read so far: the next batch may take a while.
        """

    def stop(self) -> None:
        """Read no more rows: `batches` ends soon, also while it waits."""


class ResultSink(Protocol):
    """Where the outcomes of rows go: to the disk, or to a program."""

    async def put(self, outcome: Outcome) -> None:
        """Count and store an outcome; waits while the disk or the program is behind. Raises StorageError."""


FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S = 0.5, 30.0
"""Cooldown of a route that fails requests, in seconds: it doubles until the route answers again."""
FIRST_SUSPENSION_S, LONGEST_SUSPENSION_S = 30.0, 600.0
"""How long a suspended route gets no rows, in seconds: it doubles until the route answers again."""


@dataclass(slots=True)
class _RouteSlots:
    window: int = 0
    in_flight: int = 0
    cools_until: float = 0.0
    cooldown_s: float = FIRST_COOLDOWN_S
    suspension_s: float = 0.0
    """Length of the last suspension; 0 if the route has answered since."""

    @property
    def is_suspended(self) -> bool:
        return self.suspension_s > 0


class Slots:
    """At most `window` requests on each route; a smaller window cancels none, it waits for their ends."""

    def __init__(self, windows: Mapping[str, int]) -> None:
        """`windows` gives the slots of each route, 1 at least."""
        self._routes = defaultdict[str, _RouteSlots](_RouteSlots)  # more may come
        for route, window in windows.items():
            self.resize(route, window)
        self.in_flight = 0
        """Requests in flight on all routes."""
        self.speeds: Mapping[str, float] = {}
        """How fast the routes are beside each other; those that it lacks count as 1."""

    @property
    def window(self) -> int:
        """Slots of all routes."""
        return sum(slots.window for slots in self._routes.values())

    @property
    def by_route(self) -> dict[str, int]:
        """Requests in flight on each route."""
        return {route: slots.in_flight for route, slots in self._routes.items()}

    def in_flight_on(self, route: str) -> int:
        """Return the number of requests in flight on a route."""
        return self._routes[route].in_flight

    def least_used(self, kept: Mapping[str, int]) -> str:
        """Return the route with the fewest requests for its speed, with those that are `kept` for it.

        One that refused requests, and has answered none since, is the last choice.
        """

        def use(route: str) -> tuple[bool, float]:
            slots = self._routes[route]
            return slots.cools_until > 0, (slots.in_flight + kept[route]) / self.speeds.get(route, 1.0)

        return min(self._routes, key=use)

    def take(self, now: float, wants: Callable[[str], bool] = lambda _: True) -> str | None:
        """Take a slot on the route with the most free slots of those that want one; None if none is free.

        A route in its cooldown is left out, even where all routes are: then nothing is taken before the first
        cooldown ends.
        """
        best, most_free = None, 0
        for route, slots in self._routes.items():
            free = slots.window - slots.in_flight
            if free > most_free and slots.cools_until <= now and wants(route):
                best, most_free = route, free
        if best is not None:
            self._routes[best].in_flight += 1
            self.in_flight += 1
        return best

    def may_reuse(self, route: str, now: float) -> bool:
        """Tell whether the holder of a slot may use it for another request."""
        slots = self._routes[route]
        return slots.in_flight <= slots.window and slots.cools_until <= now

    def release(self, route: str) -> None:
        """Free a slot."""
        self._routes[route].in_flight -= 1
        self.in_flight -= 1

    def resize(self, route: str, window: int) -> None:
        """Change the number of slots of a route."""
        self._routes[route].window = window

    def cool_down(self, route: str, now: float) -> float:
        """Start the cooldown of a route that failed a request; return the seconds that are left of it.

        Without it a route that fails at once always has the most free slots and would draw all rows.
        Requests that fail together count once: a cooldown that has begun is not made longer. The only route
        there is has no cooldown: there each row has its own pause.
        """
        slots = self._routes[route]
        if len(self._routes) > 1 and slots.cools_until <= now:
            slots.cools_until = now + slots.cooldown_s
            slots.cooldown_s = min(slots.cooldown_s * 2, LONGEST_COOLDOWN_S)
        return max(0.0, slots.cools_until - now)

    def answered(self, route: str) -> None:
        """Record an answer of a route, which ends its cooldown."""
        slots = self._routes[route]
        if slots.cools_until:
            slots.cools_until, slots.cooldown_s, slots.suspension_s = 0.0, FIRST_COOLDOWN_S, 0.0

    def suspend(self, route: str, now: float) -> float | None:
        """Give a route no rows for a while; return its seconds, None where the route is suspended already."""
        slots = self._routes[route]
        if slots.is_suspended and slots.cools_until > now:
            return None
        slots.suspension_s = min(slots.suspension_s * 2, LONGEST_SUSPENSION_S) or FIRST_SUSPENSION_S
        slots.cools_until = now + slots.suspension_s
        return slots.suspension_s

    def is_suspended(self, route: str) -> bool:
        """Tell whether a route was suspended, and has not answered since."""
        return self._routes[route].is_suspended

    def has_others(self, than: Collection[str]) -> bool:
        """Tell whether there are routes beside these that are not suspended."""
        return not all(slots.is_suspended or route in than for route, slots in self._routes.items())

    def may_have(self, route: str, avoided_by_row: Collection[str]) -> bool:
        """Tell whether a route may have a row that avoids some: one of these only where there is no other."""
        return route not in avoided_by_row or not self.has_others(avoided_by_row)


FEWER = 16
"""Factor by which each further death reduces the suspects in flight at once."""
MOST_DEATHS = 4
"""Engine deaths after which a row is given up: at the last one it was the only suspect in flight."""


class PoisonRows:
    """Rows that were in flight when the engine died or hung, and are not now: one may be the reason. Pure.

    Thousands of rows are in flight at a death, and nearly all are harmless. They are sent again a few at a
    time, beside rows that are not suspected, so that the next death leaves fewer suspects: after one death
    1/16 of the window is in flight at once, after two 1/256, from three on one row alone. A row that is in
    flight at a fourth death was the only suspect of its degree, and is given up.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._waiting: defaultdict[int, deque[PendingRow]] = defaultdict(deque)
        self._in_flight: Counter[int] = Counter()

    def add(self, row: PendingRow) -> None:
        """Add a row that has seen deaths."""
        self._waiting[row.deaths].append(row)

    def next(self, route: str) -> deque[PendingRow] | None:
        """Return the suspects of which the first may be sent to a route now; None if none may."""
        if not self._waiting:  # asked for every row, and nearly always so
            return None
        for deaths, rows in sorted(self._waiting.items(), reverse=True):
            most = 1 if deaths >= MOST_DEATHS - 1 else max(1, self._slots.window // FEWER**deaths)
            if rows and self._in_flight[deaths] < most and self._slots.may_have(route, rows[0].avoids):
                return rows
        return None

    def take(self, suspects: deque[PendingRow]) -> PendingRow:
        """Take the first of some suspects, which counts as in flight from now on."""
        row = suspects.popleft()
        self._in_flight[row.deaths] += 1
        return row

    def came_back(self, row: PendingRow) -> None:
        """Record that a suspect is no longer in flight."""
        self._in_flight[row.deaths] -= 1


READ_AHEAD_ROWS, READ_AHEAD_BYTES = 512, 64 << 20
"""Length of the dispatch queue, in rows and in bytes of their prompts, above which the feeder pauses;
then rows that are kept for a route are for every route."""


MOST_MEDIA_BYTES = 128 << 20
"""Bytes of the files of rows in flight above which no more rows with files are sent. The body of a request
takes as much again, and a third more."""


class DispatchQueue:
    """Rows that wait for a slot, in order. Pure: no clock, no loop.

    A prefix group goes to the route with the least to do, counting the rows of its groups that are still to
    come, and its rows wait for that route. A row that failed on one route waits for another one.

    A route with little else to do takes rows of another route: an idle replica costs more than the cache
    saves. But the prefixes of the groups that it takes are computed again. So it takes whole groups, and
    only while it has less than half of the other's rows, in flight or kept for it, and those that are kept
    would wait until a quarter of those in flight have ended.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._any_route: deque[PendingRow] = deque()
        self._turns: deque[PendingRow] = deque()  # of rollouts, before those
        self._kept = defaultdict[str, deque[PendingRow]](deque, {route: deque() for route in slots.by_route})
        self._promised: Counter[str] = Counter()  # rows that are kept, or still to come
        self._avoiding = defaultdict[tuple[str, ...], deque[PendingRow]](deque)  # by the routes they avoid
        self._count = 0  # read for every row, however many routes there are
        self._bytes = 0

    def __len__(self) -> int:
        """Count all rows."""
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether it has so many rows, or bytes of their prompts, that no more should be read."""
        return self._count >= READ_AHEAD_ROWS or self._bytes >= READ_AHEAD_BYTES

    def add(self, row: PendingRow, *, first: bool = False) -> None:
        """Add a row behind all others, or before them."""
        rows = self._turns if row.is_turn else self._any_route
        if row.refused_by or row.failed_on:
            rows = self._avoiding[row.avoids]
        (rows.appendleft if first else rows.append)(row)
        self._count += 1
        self._bytes += row.memory_bytes

    def has_for(self, route: str) -> bool:
        """Tell whether `take` may return a row for a route.

        Where all rows turn out to be kept for other routes, this is wrong once.
        """
        in_flight = self._slots.in_flight_on(route)
        rows = self._any_route or self._turns or self._kept[route] or self._to_relieve(in_flight)
        return bool(rows or (self._avoiding and self._avoiding_others(route)))

    def take(self, route: str) -> PendingRow | None:
        """Take the next row for a route whose slot is already counted; None if the route should wait."""
        row = self._next(route)
        if row is not None:
            self._count -= 1
            self._bytes -= row.memory_bytes
        return row

    def _next(self, route: str) -> PendingRow | None:
        if kept := self._kept[route]:
            self._promised[route] -= 1
            return kept.popleft()
        if self._avoiding and (avoiding := self._avoiding_others(route)):
            return avoiding.popleft()
        while rows := self._turns or self._any_route:
            row = rows.popleft()
            if row.group is None:
                return row
            home = self.home_of(row.group)
            if row.group.to_come:
                row.group.to_come -= 1
                self._promised[home] -= 1
            if home == route:
                return row
            self._keep(row, home)
        other = self._to_relieve(self._slots.in_flight_on(route) - 1)
        return self._relieve(other, route) if other else None

    def home_of(self, group: PendingRow) -> str:
        """Return the route of a prefix group, which is chosen when it is asked for first."""
        if group.home is None:
            group.home = group.route or self._slots.least_used(self._promised)
            self._promised[group.home] += group.to_come
        return group.home

    def _keep(self, row: PendingRow, route: str) -> None:
        self._kept[route].append(row)
        self._promised[route] += 1

    def _to_relieve(self, in_flight: int) -> str | None:
        """Return another route whose kept rows a route with so many in flight may take."""
        other, kept = max(self._kept.items(), key=lambda item: len(item[1]))
        if not kept or self._count >= READ_AHEAD_ROWS or self._slots.is_suspended(other):
            return other if kept else None
        theirs = self._slots.in_flight_on(other)
        return other if 2 * in_flight < theirs + len(kept) and 4 * len(kept) >= theirs else None

    def _relieve(self, other: str, route: str) -> PendingRow:
        """Take half of the rows that are kept for another route: whole groups, new ones and large ones first.

        They stay in order, one of each group in turn: two in one pass would both compute the prefix.
        """
        kept, taken, left = self._kept[other], deque[PendingRow](), deque[PendingRow]()
        rows_of = Counter(row.group for row in kept if row.group is not None)
        moving = Counter[PendingRow]()
        for group in sorted(rows_of, key=lambda group: (group.route is not None, -rows_of[group])):
            moving[group] = min(rows_of[group], (len(kept) + 1) // 2 - moving.total())
            if moving[group] == rows_of[group]:
                group.home = route
                self._promised[other] -= group.to_come
                self._promised[route] += group.to_come
        for row in reversed(kept):
            assert row.group is not None
            is_moved = moving[row.group] > 0
            moving[row.group] -= is_moved
            (taken if is_moved else left).appendleft(row)
        self._kept[other] = left
        self._promised[other] -= len(taken)
        first = taken.popleft()
        for row in taken:
            self._keep(row, route)
        return first

    def _avoiding_others(self, route: str) -> deque[PendingRow]:
        """Return rows that avoid other routes, or all of them, so that this route may take them."""
        for avoided, rows in self._avoiding.items():
            if rows and self._slots.may_have(route, avoided):
                return rows
        return deque()


class Backlog:
    """Rows in the dispatch queue, rows that wait for another attempt, and suspects of engine deaths.

    Its feeder waits for room in it, its dispatcher for rows to send.
    """

    def __init__(self, slots: Slots, results: ResultSink, to_come: Callable[[], int]) -> None:
        """Build an empty backlog; `to_come` tells how many rows, about, were not added yet."""
        self._slots = slots
        self._results = results
        self._to_come = to_come
        self._queue = DispatchQueue(slots)
        self._poison = PoisonRows(slots)
        self._media_bytes = 0  # of rows in flight
        self.waiting = 0
        """Rows that wait for another attempt and hold no slot."""
        self._unended = 0
        self._all_read = False
        self.is_stopping = False
        """Whether no row is sent any more."""
        self._sendable = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def unsent(self) -> int:
        """Rows that are still to be sent and not in flight; an estimate where leases are taken.

        At least those in the queue: a rollout may ask for many answers at once.
        """
        if self.is_stopping:
            return 0
        to_come = 0 if self._all_read else self._to_come()
        return max(self.ready, to_come + self._unended - self._slots.in_flight)

    @property
    def ready(self) -> int:
        """Rows in the dispatch queue."""
        return len(self._queue)

    @property
    def is_over(self) -> bool:
        """Whether the dispatcher has nothing left to send."""
        return self.is_stopping or (self._all_read and self._unended == 0)

    def stop(self) -> None:
        """Send no row any more."""
        self.is_stopping = True
        self.wake()

    def finish_reading(self) -> None:
        """Record that no more rows will come."""
        self._all_read = True
        self.wake()

    def expect(self, rows: int) -> None:
        """Count rows that will be added or ended."""
        self._unended += rows

    def add(self, row: PendingRow) -> None:
        """Put a row into the dispatch queue, behind all others."""
        self._queue.add(row)

    def retry_after(self, row: PendingRow, pause_s: float) -> None:
        """Put a row back after a pause, unless the run is stopping."""
        if not self.is_stopping:
            self.waiting += 1
            asyncio.get_running_loop().call_later(pause_s, self._retry, row)

    def home_of(self, group: PendingRow) -> str:
        """Return the route of a prefix group."""
        return self._queue.home_of(group)

    def has_for(self, route: str) -> bool:
        """Tell whether `take` may return a row for a route."""
        if self._media_bytes >= MOST_MEDIA_BYTES:
            return False
        return self._queue.has_for(route) or self._poison.next(route) is not None

    def take(self, route: str) -> PendingRow | None:
        """Take the next row for a route; suspects of engine deaths come first."""
        if self.is_stopping or self._media_bytes >= MOST_MEDIA_BYTES:
            return None
        while True:
            suspects = self._poison.next(route)
            row = self._queue.take(route) if suspects is None else self._poison.take(suspects)
            if row is None or row.ask is None or not row.ask.done():
                break
            if row.deaths:  # nobody waits for its answer any more
                self._poison.came_back(row)
        if not self._queue.is_full:
            self._room.set()
        if row is not None and row.request.media:
            self._media_bytes += row.request.media_bytes
        return row

    def came_back(self, row: PendingRow) -> None:
        """Record that an attempt of a row is over."""
        if row.request.media:
            self._media_bytes -= row.request.media_bytes
        if row.deaths:
            self._poison.came_back(row)

    async def end(self, row: PendingRow, outcome: Outcome) -> None:
        """Store the outcome of a row, and the same for its duplicates. Raises StorageError.

        That of a rollout's request goes to the rollout.
        """
        if row.ask is not None:
            if not row.ask.done():
                row.ask.set_result(outcome)
            return
        await self._results.put(outcome)
        if row.request.media:  # other rows may refer to this one for long
            row.request = row.request._replace(media=())
            row.unencoded = row.answers = None
        for ref in row.duplicates:
            await self._results.put(outcome._replace(ref=ref, latency_s=None, attempts=0))
        self._unended -= 1
        if self._unended == 0:
            self.wake()

    def wake(self) -> None:
        """Let dispatcher and feeder look again: there may be rows to send, free slots, or room."""
        self._sendable.set()
        self._room.set()

    async def wait_for_rows(self) -> None:
        """Wait until the dispatcher should look again."""
        self._sendable.clear()
        await self._sendable.wait()

    async def wait_for_room(self, most: int = READ_AHEAD_ROWS, coming: Callable[[], int] = lambda: 0) -> None:
        """Wait until the feeder should read on: fewer than `most` rows are there or `coming`.

        It pauses too while as many rows wait for another attempt as there are slots: an engine that takes
        nothing must not fill the memory with waiting rows.
        """
        while not self.is_stopping and (
            self._queue.is_full
            or len(self._queue) + coming() >= most
            or self.waiting >= max(self._slots.window, READ_AHEAD_ROWS)
        ):
            self._room.clear()
            await self._room.wait()

    def _retry(self, row: PendingRow) -> None:
        self.waiting -= 1
        if row.deaths:
            self._poison.add(row)
        else:
            self._queue.add(row, first=True)
        self.wake()
