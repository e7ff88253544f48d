"""How many prompt tokens does the runner's order compute, and how are rows shared out? In virtual time.

Order, queue, routes and windows are the runner's own (`batchrunner.input.order`, `batchrunner.dispatch`); the
schedulers are simulated (`engines/simulation`: SGLang's admission, radix cache and eviction, with the step
times of an 8B model on an H100). Each workload is sent as the runner does it, in the order of its input, and
sorted by prompt; `--speeds 1 0.5` has two replicas, of which one is half as fast. The least that must be
computed is known exactly. No figure here is a measurement of a GPU.
"""

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from math import isqrt
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.console import tell
from batchrunner.core.engine_info import EngineInfo, QueueBand
from batchrunner.core.types import Outcome, Request, RowRef
from batchrunner.dispatch.concurrency.law import tokens_a_row
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import HOLD_S, DispatchQueue, PendingRow
from batchrunner.dispatch.reorder import OutputLengths, PrimeTask, Reorderer, ReuseDistance
from batchrunner.dispatch.route import Route, Routes
from batchrunner.engines.simulation.replica import H100_8B, CostModel, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from batchrunner.input.order import decide, stretches
from batchrunner.input.order_sample import STRETCH_BYTES
from benchmarks.control_simulated import KV_TOKENS, MAX_RUNNING, POLL_S, TICK_S, answer_of
from benchmarks.engine import lognormal
from benchmarks.measure import save
from benchmarks.prompts import (
    Row,
    conversations,
    few_shot,
    groups,
    interleaved,
    least_tokens,
    nested,
    paired,
    shuffled,
    skewed,
    unrelated,
)

SEED = 5
GOAL = 1.05
PASS_TOKENS = 8192
"""Tokens of a prefill pass: SGLang's `--chunked-prefill-size` on such a card."""
BATCH_ROWS = 128
SMALL_POOL = 60_000
BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a workload in one order."""

    workload: str
    rows: int
    kv_tokens: int
    arm: str
    max_running: int = MAX_RUNNING
    speeds: tuple[float, ...] = (1.0,)
    """Those of the replicas."""


WORKLOADS: dict[str, Callable[[random.Random, int], list[Row]]] = {
    "documents, short answers": lambda made, rows: groups(made, rows // 8, 8, 4096, 40, outputs=32),
    "documents, long answers": lambda made, rows: groups(made, rows // 8, 8, 4096, 40, outputs=400),
    "small groups": lambda made, rows: groups(made, rows // 8, 8, 430, 32, outputs=24),
    "small groups, short prompts": lambda made, rows: groups(made, rows // 8, 8, 200, 24, outputs=60),
    "pairs": lambda made, rows: groups(made, rows // 2, 2, 1000, 40, outputs=50),
    "few-shot, labels": lambda made, rows: few_shot(made, rows, 800, 40, outputs=4),
    "few-shot, answers": lambda made, rows: few_shot(made, rows, 800, 40, outputs=200),
    "multi-turn, short answers": lambda made, rows: conversations(made, rows * 2 // 11, 10, 250, outputs=100),
    "multi-turn, long answers": lambda made, rows: conversations(made, rows * 2 // 11, 10, 250, outputs=500),
    "nested": lambda made, rows: nested(made, (20, rows // 160, 8), (500, 1500, 1000, 60), outputs=50),
    "pairs of texts": lambda made, rows: paired(made, isqrt(rows), 400, outputs=40),
    "growing traces": lambda made, rows: conversations(made, rows // 20, 40, 150, outputs=60),
    "long traces": lambda made, rows: conversations(made, rows // 60, 120, 150, outputs=30),
    "skewed prefixes": lambda made, rows: skewed(made, rows, 12, 60, outputs=40),
    "unrelated": lambda made, rows: unrelated(
        (lognormal(made, 220, 350), lognormal(made, 200, 200)) for _ in range(rows)
    ),
}
"""About so many rows. The lengths of the unrelated are ShareGPT's."""


IN_TURN = {"growing traces"}
"""Workloads whose input has each conversation's turns in order; the input of the others is in no order."""


@cache
def input_of(name: str, rows: int) -> list[Row]:
    """Make a workload, in the order of its input."""
    made = random.Random(SEED)
    found = WORKLOADS[name](made, rows)
    return interleaved(made, found) if name in IN_TURN else shuffled(found)


def planned(rows: list[Row]) -> list[Row]:
    """Put rows in the order in which the runner reads them: sorted where it finds that this pays."""
    count = len(rows)
    ends = [*range(BATCH_ROWS, count, BATCH_ROWS), count]
    sample = [
        _cut(text_of(rows[row]).encode() for row in stretch)
        for stretch in stretches(BitMap64(range(count)), ends)
    ]
    return sorted(rows) if decide(sample, count).order == "prefix" else rows


def _cut(prompts: Iterator[bytes]) -> list[bytes]:
    """Return the prompts of a stretch, which ends after STRETCH_BYTES."""
    found: list[bytes] = []
    while sum(map(len, found)) < STRETCH_BYTES and (batch := list(itertools.islice(prompts, BATCH_ROWS))):
        found += batch
    return found


def text_of(row: Row) -> str:
    """Make a text of four characters a token, which begins like another's as far as the parts do."""
    return "".join((name * tokens)[: BYTES_A_TOKEN * tokens] for name, tokens in row.parts)


class Run:
    """A run on replicas: a source of rows for the runner's order, and what sends them."""

    is_shared = False

    def __init__(
        self,
        rows: list[Row],
        config: SchedulerConfig,
        speeds: tuple[float, ...] = (1.0,),
        *,
        reorders: bool = True,
    ) -> None:
        self._rows = rows
        self.unread = self.total = len(rows)
        self.replicas = {
            route: Replica(config, CostModel(*(part / speed for part in H100_8B)), route, route)
            for route, speed in ((f"r{number}", speed) for number, speed in enumerate(speeds))
        }
        info = EngineInfo(
            "attach", "simulated", max_total_tokens=config.max_total_tokens * len(speeds),
            prefill_tokens=PASS_TOKENS, routes=tuple(self.replicas),
        )  # fmt: skip
        self._limits = ConcurrencyLimits(
            info, QueueBand(100, 2000), tokens_a_row(max(row.outputs for row in rows)), most=1 << 30,
            prompt_tokens=least_tokens(rows) / len(rows),
        )  # fmt: skip
        self._limits.begin(self._loads(), 0.0, unsent=len(rows))
        self._routes = Routes()
        self._resize()
        self._queue = DispatchQueue(self._routes)
        distance = ReuseDistance(info, len(speeds)) if reorders else None
        lengths = OutputLengths() if reorders else None
        self._order = Reorderer(distance, lengths, dedupe=True, caches=len(speeds))
        self._items = self._order.reorder(self)
        self._is_read = False
        self._release_at: dict[Route, float] = {}
        self._primes: set[SimulatedRequest] = set()
        self.now, self.uncached_tokens, self.ended = 0.0, 0, Counter[str]()

    def run(self) -> None:
        """Let all rows come to their end."""
        next_poll = 0.0
        while self.ended.total() < len(self._rows):
            self._tick()
            self._send()
            if self.now >= next_poll:
                next_poll += POLL_S
                self._poll()

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

    def _loads(self) -> list[Any]:
        return [replica.load for replica in self.replicas.values()]

    def _poll(self) -> None:
        unsent = self.unread + self._order.held + len(self._queue)
        for limit in self._limits.routes:
            limit.in_flight = self._routes[limit.url].in_flight
        self._limits.observe(self._loads(), self.now, unsent=unsent)
        self._resize()

    def _resize(self) -> None:
        for limit in self._limits.routes:
            route = self._routes.open(limit.url, limit.ended)
            route.window, route.speed = self._limits.window_of(limit), limit.recent

    def _tick(self) -> None:
        self.now += TICK_S
        for route, replica in self.replicas.items():
            for end in replica.advance(self.now):
                self.uncached_tokens += end.sample.prompt_tokens - end.sample.cached_tokens
                if end.sample in self._primes:
                    self._primes.remove(end.sample)
                else:
                    self._ended(end.sample, route)

    def _ended(self, sample: SimulatedRequest, route: str) -> None:
        row, answer = sample.payload, answer_of(sample)
        row.prefix_ready_at = min(row.prefix_ready_at, self.now)
        self.ended[route] += 1
        self._order.record(row, answer)
        self._routes.release_slot(self._routes[route])
        self._routes[route].ended.add(answer)

    def _submit(self, row: PendingRow, route: str, outputs: int) -> SimulatedRequest:
        made = self._rows[row.request.ref.row]
        sample = SimulatedRequest(made.tokens, outputs, outputs, prefix=made.parts, payload=row)
        self.replicas[route].scheduler.submit(sample)
        return sample

    def _prime(self, tasks: list[PrimeTask]) -> None:
        for _, turn in itertools.groupby(sorted(tasks, key=attrgetter("round")), key=attrgetter("round")):
            some = [*turn]
            for task in some:
                group = None if task.on_every_replica else task.row.group
                for route in (self._queue.home_of(group).url,) if group else self.replicas:
                    self._primes.add(self._submit(task.row, route, 1))
            while self._primes:
                self._tick()
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
        for held_by, release_at in [*self._release_at.items()]:
            if release_at <= self.now:
                del self._release_at[held_by]
                self._queue.release(held_by)
        while (route := self._routes.acquire_slot(self.now, self._queue.has_for)) is not None:
            row = self._queue.take(route)
            if route.held:
                self._release_at.setdefault(route, self.now + HOLD_S)
            if row is None:
                self._routes.release_slot(route)
                continue
            row.attempts, row.route, row.sent_at = 1, route, self.now
            self._submit(row, route.url, self._rows[row.request.ref.row].outputs)
            self._feed()


ORDERS: dict[str, Callable[[list[Row]], list[Row]]] = {"runner": planned, "input": list, "sorted": sorted}


def run(case: Case) -> dict[str, Any]:
    """Let a whole run pass in virtual time."""
    rows = input_of(case.workload, case.rows)
    config = SchedulerConfig(case.max_running, case.kv_tokens)
    made = Run(ORDERS[case.arm](rows), config, case.speeds, reorders=case.arm == "runner")
    made.run()
    prompt_tokens, least = sum(row.tokens for row in rows), least_tokens(rows)
    return {
        "prompt_tokens": prompt_tokens, "least_tokens": least, "prefilled_tokens": made.uncached_tokens,
        "ratio_to_least": round(made.uncached_tokens / least, 4),
        "hit_rate": round(1 - made.uncached_tokens / prompt_tokens, 4),
        "hit_rate_at_most": round(1 - least / prompt_tokens, 4), "virtual_s": round(made.now, 1),
        "retractions": sum(replica.scheduler.retractions for replica in made.replicas.values()),
        "rows_of_replicas": [*made.ended.values()],
    }  # fmt: skip


def report(found: list[tuple[Case, dict[str, Any]]]) -> None:
    table = [{**asdict(case), **result} for case, result in found]
    worst = {
        (arm, kv): max(row["ratio_to_least"] for row in table if (row["arm"], row["kv_tokens"]) == (arm, kv))
        for arm, kv in dict.fromkeys((row["arm"], row["kv_tokens"]) for row in table)
    }
    told = "; ".join(f"{arm} {ratio:.2f} at {kv // 1000}k" for (arm, kv), ratio in worst.items())
    line = f"order in virtual time: prefilled tokens of the worst workload x the least possible: {told}"
    figures = {
        "simulated": "no figure here is a measurement of a GPU",
        "goal": {"ratio_to_least_at_most": GOAL}, "cases": table,
    }  # fmt: skip
    save("order_simulated", line, figures, ("batchrunner",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of each workload, about")
    parser.add_argument("--workload", action="append", default=[], choices=WORKLOADS)
    parser.add_argument("--arm", action="append", default=[], choices=ORDERS)
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[KV_TOKENS, SMALL_POOL])
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0], help="of the replicas")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cases = [
        Case(name, args.rows, kv, arm, speeds=tuple(args.speeds))
        for name in args.workload or WORKLOADS
        for kv in args.kv_tokens
        for arm in args.arm or ORDERS
    ]
    found = []
    with ProcessPoolExecutor(args.processes) as pool:
        for case, result in zip(cases, pool.map(run, cases), strict=True):
            found.append((case, result))
            tell(
                f"  {case.workload}, {case.kv_tokens // 1000}k, {case.arm}: {result['ratio_to_least']} x the "
                f"least, hit rate {result['hit_rate']} of {result['hit_rate_at_most']}, "
                f"{result['virtual_s']:,} s, {result['retractions']} retracted"
            )
    report(found)


if __name__ == "__main__":
    main()
