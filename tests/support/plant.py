"""A scheduler in virtual time, of the simplest kind: it runs what fits and tells its load late."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from batchrunner.dispatch.concurrency.controller import Controller, Decision
from batchrunner.dispatch.concurrency.corners import Reading


@dataclass
class Plant:
    """Runs up to `capacity`, each for about `service_s`; tells its load every `period_s`, `late_s` old."""

    controller: Controller
    capacity: int
    service_s: float
    period_s: float = 0.5
    late_s: float = 0.0
    ends: list[float] = field(default_factory=list)
    waiting: int = 0
    decisions: list[Decision] = field(default_factory=list)
    queues: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seconds: float, *, told: bool = True, step_s: float = 0.05) -> None:
        """Let time pass."""
        luck = random.Random(1)
        now = self.queues[-1][0] if self.queues else 0.0
        end, next_look = now + seconds, now
        past: deque[tuple[float, int, int]] = deque()
        while now < end:
            now += step_s
            while self.ends and self.ends[0] <= now:
                heapq.heappop(self.ends)
                self.controller.ended()
            in_flight = len(self.ends) + self.waiting
            self.waiting += max(0, self.controller.window - in_flight)
            while self.waiting and len(self.ends) < self.capacity:
                self.waiting -= 1
                heapq.heappush(self.ends, now + self.service_s * luck.uniform(0.5, 1.5))
            past.append((now, len(self.ends), self.waiting))
            while len(past) > 1 and past[1][0] <= now - self.late_s:
                past.popleft()
            self.queues.append((now, self.waiting))
            if now >= next_look:
                next_look += self.period_s
                in_flight = len(self.ends) + self.waiting
                rate = self.capacity / self.service_s
                seen = Reading(past[0][1], past[0][2], in_flight, rate)
                moved = self.controller.sample(now, seen) if told else self.controller.tick(now)
                self.decisions += [moved] if moved else []

    def queues_since(self, at: float) -> list[int]:
        """The queue at each step since then."""
        return [queue for now, queue in self.queues if now >= at]
