"""Servers that serve users and a run in the background, in virtual time: what users notice of the run."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from batchrunner.core.engine_info import EngineInfo, QueueBand
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.concurrency.law import tokens_a_row
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.route import Route, Routes
from batchrunner.engines.simulation.replica import H100_8B, Replica
from batchrunner.engines.simulation.scheduler import (
    Scheduler,
    SchedulerConfig,
    SimulatedRequest,
    StepResult,
)

TICK_S = 0.01
USER, OURS = "user", "ours"


class SharedScheduler(Scheduler):
    """SGLang's scheduler with aborts and, where they are on, two priorities and their preemption."""

    def __init__(self, config: SchedulerConfig, *, priorities: bool) -> None:
        super().__init__(config)
        self.priorities = priorities
        self.sent_at: dict[SimulatedRequest, int] = {}
        self.first_token_passes: list[int] = []
        """Passes from each user's request to its first token."""
        self.gaps: list[int] = []
        """Passes between two tokens of a user's request, one for each decode pass with users in it."""
        self._prefills_since = 1

    @property
    def passes(self) -> int:
        return self.prefill_passes + self.decode_passes

    def submit(self, sample: SimulatedRequest) -> None:
        super().submit(sample)
        if sample.payload == USER:
            self.sent_at[sample] = self.passes
            if self.priorities:
                self.waiting.pop()
                users = sum(each.payload == USER for each in self.waiting)
                self.waiting.insert(users, sample)

    def abort(self, sample: SimulatedRequest) -> bool:
        """Drop a request; tell whether it was there, and in no prefill."""
        if sample in self.waiting:
            self.waiting.remove(sample)
        elif sample in self.decoding:
            self.pool.release(sample, self._leave(sample), keep=True)
        else:
            return False
        self._is_full = False
        return True

    def step(self, limit: int = sys.maxsize) -> StepResult | None:
        if self.priorities:
            self._preempt()
        users = sum(sample.payload == USER for sample in self.decoding)
        result = super().step(limit)
        if result is not None and result.kind == "prefill":
            self._prefills_since += 1
            for sample in [s for s in self.sent_at if s.outputs or s in self.decoding]:
                self.first_token_passes.append(self.passes - self.sent_at.pop(sample))
        elif result is not None:
            self.gaps += [self._prefills_since] * (users > 0) + [1] * (users > 0) * (result.steps - 1)
            self._prefills_since = 1
        return result

    def _preempt(self) -> None:
        self._is_full = False
        users = sum(sample.payload == USER for sample in self.waiting)
        free = self.config.max_running - self.running
        ours = [sample for sample in self.decoding if sample.payload == OURS]
        for sample in ours[::-1][: max(0, users - free)]:
            self.pool.release(sample, self._leave(sample), keep=False)
            sample.retractions += 1
            self.waiting.append(sample)
            self._is_full = False


@dataclass
class SharedEngine:
    """Servers with users in bursts, and a run that never ends in what these leave."""

    bursts: list[float]
    """For each server how many users come in a second of a burst, which lasts 5 s of 20 s; 0 for none."""
    priorities: bool
    ours: bool = True
    """Whether there is a run."""
    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(128, 100_000))
    user_tokens: tuple[int, int] = (200, 100)
    """Tokens of a user's prompt and answer."""
    lost: int = 0
    """Rows that were preempted."""
    ended: int = 0

    def __post_init__(self) -> None:
        self._luck = random.Random(1)
        self.replicas = {
            f"r{i}": Replica(self.config, H100_8B, f"r{i}", f"r{i}") for i in range(len(self.bursts))
        }
        for replica in self.replicas.values():
            replica.scheduler = SharedScheduler(self.config, priorities=self.priorities)
        info = EngineInfo(
            kind="attach", model="simulated", routes=tuple(self.replicas), yields=self.priorities
        )
        self.limits = ConcurrencyLimits(info, QueueBand(100, 2000), tokens_a_row(200, 200), most=sys.maxsize)
        self.limits.begin([replica.load for replica in self.replicas.values()], 0.0, unsent=1_000_000)
        self.routes = Routes()
        self._resize()
        self.sent: dict[str, dict[SimulatedRequest, None]] = {route: {} for route in self.replicas}
        self.running: list[tuple[int, int]] = []
        """Users and rows of ours that run, at each poll."""

    def schedulers(self) -> list[SharedScheduler]:
        return [r.scheduler for r in self.replicas.values() if isinstance(r.scheduler, SharedScheduler)]

    def run(self, seconds: float) -> SharedEngine:
        """Let time pass."""
        next_poll = 0.0
        for tick in range(round(seconds / TICK_S)):
            now = tick * TICK_S
            for (route, replica), rate in zip(self.replicas.items(), self.bursts, strict=True):
                for end in replica.advance(now):
                    if end.sample in self.sent[route]:
                        self._came_back(self.routes[route], end.sample)
                        self.ended += 1
                        self.routes[route].ended.add(None)
                if now % 20 < 5 and self._luck.random() < rate * TICK_S:
                    replica.scheduler.submit(SimulatedRequest(*self.user_tokens, payload=USER))
            if self.ours:
                self._send(now)
            if now >= next_poll:
                next_poll += TIMING.background_poll
                self._poll(now)
        return self

    def _send(self, now: float) -> None:
        while (route := self.routes.acquire_slot(now)) is not None:
            sample = SimulatedRequest(200, self._luck.randint(50, 300), 300, payload=OURS)
            self.sent[route.url][sample] = None
            self.replicas[route.url].scheduler.submit(sample)

    def _came_back(self, route: Route, sample: SimulatedRequest) -> None:
        del self.sent[route.url][sample]
        self.routes.release_slot(route)

    def _resize(self) -> None:
        for limit in self.limits.routes:
            self.routes.open(limit.url, limit.ended).window = self.limits.window_of(limit)

    def _poll(self, now: float) -> None:
        loads = [replica.load for replica in self.replicas.values()]
        for limit in self.limits.routes:
            limit.in_flight = self.routes[limit.url].in_flight
        self.limits.observe(loads, now, unsent=1_000_000)
        self._resize()
        for limit, kept in self.limits.routes_to_relieve():
            scheduler = self.replicas[limit.url].scheduler
            assert isinstance(scheduler, SharedScheduler)
            for sample in [*self.sent[limit.url]][kept:]:
                if scheduler.abort(sample):
                    self.lost += 1
                    self._came_back(self.routes[limit.url], sample)
        for scheduler in self.schedulers():
            users = sum(sample.payload == USER for sample in scheduler.decoding)
            self.running.append((users, scheduler.running - users))


def p99(values: list[int]) -> int:
    return sorted(values)[int(0.99 * len(values))]
