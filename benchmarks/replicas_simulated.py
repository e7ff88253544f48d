"""How are rows shared out among replicas, directly and behind a gateway? In virtual time.

Order, queue, slots and windows are the runner's own; the schedulers are simulated (`engines/simulation`, with
the step times of an 8B model on an H100). `direct` is what the runner does: each replica is a route.
`gateway` is one route, behind which a prefix group goes where the fewest requests were when it came, as `smg
--policy manual --assignment-mode min_load` does by routing keys. No figure is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pyarrow as pa

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.types import Outcome, Request, RowRef
from batchrunner.dispatch.concurrency.law import tokens_a_row
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import DispatchQueue, PendingRow, Slots
from batchrunner.dispatch.reorder import OutputLengths, PrimeTask, Reorderer, ReuseDistance
from batchrunner.engines.simulation.replica import H100_8B, CostModel, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from benchmarks.control_simulated import POLL_S, TICK_S, answer_of
from benchmarks.order_simulated import BATCH_ROWS, PASS_TOKENS, planned, text_of
from benchmarks.prompts import Row, conversations, groups, least_tokens, nested, shuffled, skewed

SEED = 5
GATEWAY = "gateway"
LIMITS = ((60_000, 256), (440_000, 2048))
"""Tokens of a replica's KV pool, and the requests that it runs at once."""
SPEEDS = ((1.0, 1.0), (1.0, 0.5))
WORKLOADS: dict[str, Callable[[random.Random], list[Row]]] = {
    "120 prefixes x 8": lambda made: groups(made, 120, 8, 430, 32, outputs=16),
    "1,200 prefixes x 8": lambda made: groups(made, 1200, 8, 430, 32, outputs=16),
    "40 documents x 64": lambda made: groups(made, 40, 64, 2000, 40, outputs=50),
    "pairs": lambda made: groups(made, 2000, 2, 1000, 40, outputs=50),
    "skewed prefixes": lambda made: skewed(made, 4000, 12, 60, outputs=40),
    "conversations": lambda made: conversations(made, 300, 10, 250, outputs=50),
    "nested": lambda made: nested(made, (20, 20, 8), (500, 1500, 1000, 60), outputs=50),
}


class Run:
    """A run on several replicas: a source of rows for the runner's own order, and what sends them."""

    is_shared = False

    def __init__(
        self, rows: list[Row], speeds: tuple[float, ...], config: SchedulerConfig, side: str
    ) -> None:
        names = [f"r{number}" for number in range(len(speeds))]
        routes = (GATEWAY,) if side == GATEWAY else tuple(names)
        self._rows = rows
        self.unread = self.total = len(rows)
        self._replicas = {
            name: Replica(config, CostModel(*(part / speed for part in H100_8B)), name, name)
            for name, speed in zip(names, speeds, strict=True)
        }
        info = EngineInfo(
            "attach", "simulated", max_total_tokens=config.max_total_tokens * len(names),
            prefill_tokens=PASS_TOKENS, routes=routes,
        )  # fmt: skip
        self._routes = routes
        row_tokens = tokens_a_row(max(row.outputs for row in rows))
        self._limits = ConcurrencyLimits(
            info, QueueBand(100, 2000), row_tokens, most=1 << 30, prompt_tokens=least_tokens(rows) / len(rows)
        )
        self._limits.begin(self._loads(), 0.0, unsent=len(rows))
        self._slots = Slots(self._limits.windows)
        self._queue = DispatchQueue(self._slots)
        distance = ReuseDistance(info, len(names))
        self._order = Reorderer(distance, OutputLengths(), dedupe=True, caches=len(names))
        self._items = self._order.reorder(self)
        self._is_read = False
        self._home: dict[object, str] = {}  # behind the gateway
        self._in_flight = Counter(dict.fromkeys(names, 0))
        self._primes: set[SimulatedRequest] = set()
        self.now, self.uncached_tokens, self.ended = 0.0, 0, Counter[str]()

    def run(self) -> dict[str, Any]:
        """Let all rows come to their end; say what they came to."""
        next_poll = 0.0
        while self.ended.total() < len(self._rows):
            self.now += TICK_S
            self._collect()
            self._send()
            if self.now >= next_poll:
                next_poll += POLL_S
                unsent = self.unread + self._order.held + len(self._queue)
                self._limits.observe(self._loads(), self._slots.by_route, self.now, unsent=unsent)
                self._slots.speeds = self._limits.speeds
                for route, window in self._limits.windows.items():
                    self._slots.resize(route, window)
        ratio = self.uncached_tokens / least_tokens(self._rows)
        return {"to_least": round(ratio, 3), "seconds": round(self.now, 1), "rows": [*self.ended.values()]}

    def batches(self) -> Iterator[list[Request | Outcome]]:
        """Read the rows."""
        nothing = pa.RecordBatch.from_pylist([{}])
        for first in range(0, len(self._rows), BATCH_ROWS):
            batch = self._rows[first : first + BATCH_ROWS]
            self.unread -= len(batch)
            yield [
                Request(RowRef(row, nothing, 0), "text", text_of(each), {"max_new_tokens": each.outputs})
                for row, each in enumerate(batch, first)
            ]

    def stop(self) -> None:
        """Do nothing: a run in virtual time is never stopped."""

    def _loads(self) -> list[SchedulerLoad]:
        loads = [replica.load for replica in self._replicas.values()]
        return (
            loads if len(self._replicas) == len(self._routes) else [replace(x, route=GATEWAY) for x in loads]
        )

    def _submit(self, row: PendingRow, route: str, *, prime: object = None) -> None:
        if route == GATEWAY:
            key = prime or row.group or row
            route = self._home.setdefault(key, min(self._in_flight, key=self._in_flight.__getitem__))
        self._in_flight[route] += 1
        made = self._rows[row.request.ref.row]
        outputs = 1 if prime else made.outputs
        sample = SimulatedRequest(made.tokens, outputs, outputs, prefix=made.parts, payload=row)
        if prime:
            self._primes.add(sample)
        self._replicas[route].scheduler.submit(sample)

    def _prime(self, tasks: list[PrimeTask]) -> None:
        for _, turn in itertools.groupby(sorted(tasks, key=attrgetter("round")), key=attrgetter("round")):
            some = [*turn]
            for task in some:
                group = task.row.group
                if task.on_every_replica or group is None:
                    for copy in range(len(self._replicas)):
                        self._submit(task.row, self._routes[copy % len(self._routes)], prime=(task.row, copy))
                else:
                    self._submit(task.row, self._queue.home_of(group), prime=group)
            while self._primes:
                self.now += TICK_S
                self._collect()
            for task in some:
                task.row.prefix_ready_at = self.now

    def _feed(self) -> None:
        while not self._is_read and not self._queue.is_full:
            piece = next(self._items, None)
            self._is_read = piece is None
            self._prime([item for item in piece or () if isinstance(item, PrimeTask)])
            for item in piece or ():
                if isinstance(item, PendingRow):
                    self._queue.add(item)

    def _send(self) -> None:
        self._feed()
        while (route := self._slots.take(self.now, self._queue.has_for)) is not None:
            row = self._queue.take(route)
            if row is None:
                self._slots.release(route)
                continue
            row.attempts, row.route, row.sent_at = 1, route, self.now
            self._submit(row, route)
            self._feed()

    def _collect(self) -> None:
        for name, replica in self._replicas.items():
            for _, sample in replica.advance(self.now):
                self.uncached_tokens += sample.prompt_tokens - sample.cached_tokens
                self._in_flight[name] -= 1
                if sample in self._primes:
                    self._primes.remove(sample)
                    continue
                row, answer = sample.payload, answer_of(sample)
                row.prefix_ready_at = min(row.prefix_ready_at, self.now)
                self.ended[name] += 1
                self._order.record(row, answer)
                self._slots.release(row.route)
                self._limits.ended(row.route, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", action="append", default=[], choices=WORKLOADS)
    chosen = parser.parse_args().workload or WORKLOADS
    for name in chosen:
        rows = planned(shuffled(WORKLOADS[name](random.Random(SEED))))
        for (pool, running), speeds, side in itertools.product(LIMITS, SPEEDS, ("direct", GATEWAY)):
            found = Run(rows, speeds, SchedulerConfig(running, pool), side).run()
            print(f"{name}, {pool // 1000}k, {speeds}, {side}: {found}", flush=True)


if __name__ == "__main__":
    main()
