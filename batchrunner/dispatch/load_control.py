"""Polls the engine's load four times a second, and adapts how many requests are kept in flight.

Each change of a concurrency limit (window) is written to the event log, with its reason.
"""

import asyncio
import bisect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.concurrency.law import CornerChange, Decision
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import Backlog
from batchrunner.dispatch.route import Routes
from batchrunner.dispatch.sharing import Account, Claim, divide
from batchrunner.engines.base import Engine
from batchrunner.output.events import EventLog
from batchrunner.tuning.signals import Corner

log = logging.getLogger(__name__)


SPARE = 8
"""A run gets this many more slots than it has rows ready to send, for rows that become ready soon. Other runs
of the same engine cannot use these slots."""


@dataclass(slots=True, eq=False)
class SendingRun:
    """A run that sends rows to an engine."""

    routes: Routes
    backlog: Backlog
    events: EventLog
    rank: str = ""
    """Runs of an account get its slots in the order of their ranks; with equal ranks, in the order in which
    they begin."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadControl:
    """Polls the engine's load while rows are sent, and adapts the concurrency limits of its servers.

    Runs that use the engine at the same time share one LoadControl and its limits.
    """

    _engine: Engine
    concurrency: ConcurrencyLimits
    _runs: list[SendingRun] = field(default_factory=list)
    """Runs that send rows now, in the order of their ranks."""
    _poll: asyncio.Task[tuple[Sequence[SchedulerLoad], float]] | None = None
    """The current or last poll of the load. All runs wait for this one task. None before the first poll."""

    @property
    def in_use(self) -> bool:
        """Whether any run sends rows."""
        return bool(self._runs)

    @property
    def _is_for_one_run(self) -> bool:
        """Whether only one run can use the engine, so that no slots need to be divided."""
        return len(self._runs) == 1 and self._runs[0].routes.account is None

    def join(self, run: SendingRun) -> None:
        """Add a run. It gets its share of the slots as the other runs free them."""
        in_flight = Counter[Account]()
        for other in self._runs:
            in_flight[_account_of(other)] += other.routes.in_flight
        # An account groups the runs of one owner. If this is its only run, the account begins at the lowest
        # virtual time of the others (see sharing.py), so that it has no advantage over them.
        if in_flight and _account_of(run) not in in_flight:
            _account_of(run).begin_beside(in_flight)
        bisect.insort(self._runs, run, key=lambda run: run.rank)
        # No limit has changed, but the slots are divided among more runs now.
        self._apply(())

    def leave(self, run: SendingRun) -> None:
        """Remove a run that has ended; the other runs get its slots."""
        self._runs.remove(run)
        if self._runs:
            # The limits have not changed, but fewer runs share them.
            self._apply(())
        elif self._poll is not None:  # No run waits for the poll any more.
            self._poll.cancel()

    async def run(self, polled: Callable[[Sequence[SchedulerLoad], float], None]) -> None:
        """Poll the load until cancelled. Adapt the concurrency limits after each poll, then call `polled`.

        `polled` gets the loads of the schedulers (empty if unknown) and the time, in seconds of the monotonic
        clock. If it raises an error, polling ends. Runs that share the engine also share the polls.
        """
        while True:
            if self._poll is None or self._poll.done():
                usual_s = TIMING.background_poll if self.concurrency.is_background else TIMING.load_poll
                pause_s = 0.0 if self._poll is None else usual_s  # The first poll comes at once.
                self._poll = asyncio.ensure_future(self._sample(pause_s))
            # The shield keeps the poll for the other runs if this run is cancelled.
            polled(*await asyncio.shield(self._poll))

    async def _sample(self, pause_s: float) -> tuple[Sequence[SchedulerLoad], float]:
        """Poll the load after a pause, and adapt the concurrency limits. Return the loads and their time."""
        await asyncio.sleep(pause_s)
        loads = await self._engine.loads()
        now = time.monotonic()
        for limit in self.concurrency.routes:
            limit.in_flight = sum(run.routes.open(limit.url, limit.ended).in_flight for run in self._runs)
        unsent = sum(run.backlog.unsent for run in self._runs)
        self._apply(self.concurrency.observe(loads, now, unsent=unsent))
        # A background run yields to the engine's users, so its requests in flight may have to be cancelled.
        for limit, allowed in self.concurrency.routes_to_relieve():
            self._engine.preempt(limit.url, allowed)
        return loads, now

    def narrow(self, url: str, why: str, now: float) -> None:
        """Lower the concurrency limits of a server that refused a request or did not answer in time."""
        self._apply(self.concurrency.backpressure(url, why, now))

    def _apply(self, changes: Iterable[Decision | CornerChange]) -> None:
        """Divide each server's slots among the runs, and write `changes` to their event logs.

        All runs together never have more requests in flight than the server's concurrency limit.
        """
        changes = [*changes]
        unsent = [run.backlog.unsent for run in self._runs]
        # A run gets slots for rows that are ready, and SPARE slots for rows that become ready soon.
        ready = [min(run.backlog.unsent, run.backlog.ready + SPARE) for run in self._runs]
        for limit in self.concurrency.routes:
            window = self.concurrency.window_of(limit)
            # Each run has a route of its own to this server.
            routes = [run.routes.open(limit.url, limit.ended) for run in self._runs]
            free_slots = max(0, window - sum(route.in_flight for route in routes))
            if self._is_for_one_run:
                (route,) = routes
                route.window, route.speed = window, limit.recent
                continue
            claims = [
                Claim(
                    account=_account_of(run),
                    in_flight=route.in_flight,
                    ready=ready_rows,
                    unsent=unsent_rows,
                )
                for run, route, ready_rows, unsent_rows in zip(self._runs, routes, ready, unsent, strict=True)
            ]
            shares = divide(window, claims, routes=len(self.concurrency.routes))
            for route, share in zip(routes, shares, strict=True):
                # A run gets more slots only as other runs free them: a smaller window cancels no request.
                granted = min(share, route.in_flight + free_slots)
                free_slots -= max(0, granted - route.in_flight)
                route.window, route.speed = granted, limit.recent
        for run in self._runs:
            write_changes(run.events, changes)
            run.backlog.wake()


def _account_of(run: SendingRun) -> Account:
    """Return the account of a run on an engine that several runs may use."""
    account = run.routes.account
    assert account is not None
    return account


def write_changes(events: EventLog, changes: Iterable[Decision | CornerChange]) -> None:
    """Write changes of concurrency limits (windows) and of load states (corners) to the event log.

    The load state `held` means that the server queues requests although it has room. The user is told.
    """
    for change in changes:
        events.write("window" if isinstance(change, Decision) else "corner", **asdict(change))
        if isinstance(change, CornerChange) and change.corner == Corner.HELD:
            log.info("%s: the server holds back: %s", change.scheduler, change.reason)
