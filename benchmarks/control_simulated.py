"""Does the controller hold many GPUs at their best? The runner's own routes and limits, in virtual time.

The schedulers are simulated (`engines/simulation`: SGLang's admission, retraction and gauges, with the
step times of an 8B model on an H100); routes, limits and controllers are the very code that runs
against real servers. 1, 8 and 64 replicas; several workloads; gauges told 0.1 to 4 s late, 5 % of the polls
lost. Each is compared with fixed windows per replica. No figure here is a measurement of a GPU.
"""

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from batchrunner.core.engine_info import EngineInfo, QueueBand, SchedulerLoad
from batchrunner.core.types import Completion
from batchrunner.dispatch.concurrency.law import TYPICAL_PROMPT_TOKENS, tokens_a_row
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.route import Routes
from batchrunner.engines.simulation.replica import H100_8B, CostModel, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from benchmarks.engine import lognormal
from benchmarks.measure import save

SEED = 5
GOAL = 0.98
TICK_S = 0.05
"""A row's successor is on its way for half of this on average."""
POLL_S = 0.25
LOST_POLLS = 0.05
ROWS_SEEN = 256
"""Rows whose prompts are known before the run, as from the sample that the order is decided by."""
MAX_RUNNING, KV_TOKENS = 4096, 440_000
"""Limits on an 80 GB card: SGLang's own, and the tokens that 8B parameters in bf16 leave room for at 0.83."""
WINDOWS = (256, 1024, 4096, 1_000_000)
MOST_REPLICAS_IN_FULL, IN_LARGE = 8, 3
"""Larger fleets run the first three workloads only, with half of the rows each."""
WORKLOADS = {
    "chat": 1.0,
    "short/short": 3.0,
    "short/long": 0.3,
    "long/short": 0.3,
    "heavy tail": 1.0,
    "drifting": 1.0,
    "KV-starved": 0.3,
}
"""With the rows of each, as a share of `--rows`: some minutes for all."""
IN_BRIEF = 0.1
"""The same jobs with so few of their rows: 15 to 120 s, most of it start and tail. They have no goal."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    workload: str
    replicas: int
    rows: int
    window: int | None
    """A fixed one per replica, or None for the controller."""
    late_s: float
    brief: bool = False


def rows_of(case: Case) -> Iterator[tuple[int, int, int, bool]]:
    """Make prompt tokens, output tokens, max_new_tokens and ignore_eos of each row."""
    made = random.Random(SEED)
    for index in range(case.rows):
        match case.workload:
            case "chat":  # ShareGPT's lengths
                yield lognormal(made, 220, 350), lognormal(made, 200, 200), 1024, False
            case "short/short":
                yield 64, made.randint(16, 48), 64, False
            case "short/long":
                yield 64, made.randint(600, 1000), 1024, False
            case "long/short":
                yield 3000, made.randint(16, 64), 64, False
            case "heavy tail":
                yield 200, 4000 if made.random() < 0.01 else made.randint(40, 120), 4096, False
            case "drifting":
                yield 200, made.randint(40, 80) * (1 if index < case.rows / 2 else 5), 512, False
            case "KV-starved":
                yield 500, made.randint(500, 1000), 1000, False
            case name:
                raise ValueError(name)


def run(case: Case) -> dict[str, Any]:
    """Let a whole run pass in virtual time."""
    began = time.perf_counter()
    samples = (SimulatedRequest(*row) for row in rows_of(case))
    config = SchedulerConfig(MAX_RUNNING, KV_TOKENS)
    first = list(islice(rows_of(case), ROWS_SEEN))
    most = first[0][2]  # the job's, the same for all rows
    fleet = Fleet(
        samples, case.rows, config, case.replicas,
        window=case.window, late_s=case.late_s, max_new_tokens=most,
        prompt_tokens=sum(row[0] for row in first) / len(first),
    )  # fmt: skip
    fleet.run()
    return {**fleet.totals(), "took_s": round(time.perf_counter() - began, 1)}


class Fleet:
    """Replicas, and the routes and limits that fill them as the submitter and its feedback loop would."""

    def __init__(
        self,
        samples: Iterator[SimulatedRequest],
        rows: int,
        config: SchedulerConfig,
        replicas: int = 1,
        *,
        window: int | None = None,
        late_s: float = 0.0,
        max_new_tokens: int | None = None,
        prompt_tokens: float | None = None,
        cost: CostModel = H100_8B,
    ) -> None:
        """`window` is a fixed one per replica; gauges are told `late_s` late; `max_new_tokens` is the job's,
        `prompt_tokens` what is known of its prompts before the first is sent; a pass has a `cost`.
        """
        self._samples = samples
        self._count = rows
        self._late_s = late_s
        self._luck = random.Random(SEED + 1)
        routes = tuple(f"r{i}" for i in range(replicas))
        self.replicas = {route: Replica(config, cost, route, route) for route in routes}
        fixed = None if window is None else window * replicas
        info = EngineInfo(kind="attach", model="simulated", routes=routes)
        self._limits = ConcurrencyLimits(
            info,
            QueueBand(100, 2000),
            tokens_a_row(max_new_tokens, prompt_tokens),
            most=sys.maxsize,
            fixed=fixed,
            prompt_tokens=prompt_tokens or TYPICAL_PROMPT_TOKENS,
        )
        self._limits.begin([replica.load for replica in self.replicas.values()], 0.0, unsent=rows)
        self._routes = Routes()
        self._resize()
        self._told: dict[str, deque[SchedulerLoad]] = {route: deque() for route in routes}
        self._waiting: SimulatedRequest | None = None
        self._sent = 0
        self._next_poll = 0.0
        self.now, self.ended, self.tokens = 0.0, 0, 0
        self.looks = self.empty = 0
        """Looks at replicas that had begun, and those of them whose queue was empty."""

    def run(self) -> None:
        """Let all rows come to their end."""
        self._waiting = next(self._samples, None)
        while self.ended < self._count:
            self._tick()

    def totals(self) -> dict[str, Any]:
        """Say what the run came to."""
        schedulers = [replica.scheduler for replica in self.replicas.values()]
        return {
            "tokens_per_s": round(self.tokens / self.now, 1),
            "virtual_s": round(self.now, 1),
            "empty_queue_share": round(self.empty / self.looks, 4) if self.looks else None,
            "passes": sum(s.prefill_passes + s.decode_passes for s in schedulers),
            "retractions": sum(s.retractions for s in schedulers),
        }

    def _tick(self) -> None:
        self.now += TICK_S
        self._collect()
        self._send()
        if self.now >= self._next_poll:
            self._next_poll += POLL_S
            self._poll()

    def _collect(self) -> None:
        for route, replica in self.replicas.items():
            for end in replica.advance(self.now):
                self.ended += 1
                self.tokens += end.sample.outputs
                self._routes.release_slot(self._routes[route])
                self._routes[route].ended.add(answer_of(end.sample))

    def _send(self) -> None:
        while self._waiting is not None and (route := self._routes.acquire_slot(self.now)) is not None:
            self.replicas[route.url].scheduler.submit(self._waiting)
            self._waiting = next(self._samples, None)
            self._sent += 1

    def _resize(self) -> None:
        for limit in self._limits.routes:
            self._routes.open(limit.url, limit.ended).window = self._limits.window_of(limit)

    def _poll(self) -> None:
        signals = []
        for route, replica in self.replicas.items():
            past = self._told[route]
            past.append(replica.load)
            while len(past) > max(1, self._late_s / POLL_S):
                past.popleft()
            if self._luck.random() >= LOST_POLLS:
                signals.append(past[0])
        unsent = self._count - self._sent
        for limit in self._limits.routes:
            limit.in_flight = self._routes[limit.url].in_flight
        self._limits.observe(signals, self.now, unsent=unsent)
        self._resize()
        if unsent:
            queues = [
                replica.scheduler.queue
                for route, replica in self.replicas.items()
                if self._limits.schedulers[route].controller.state != "start"
            ]
            self.looks += len(queues)
            self.empty += queues.count(0)


def answer_of(sample: SimulatedRequest) -> Completion:
    """Return what the runner learns of a sample that has ended."""
    return Completion(
        [], [], [sample.outputs], sample.prompt_tokens, sample.cached_tokens, sample.retractions
    )


def grid(rows: int, replicas: list[int], late: list[float]) -> list[Case]:
    """Make the cases: each workload with each window, and with the controller at each staleness."""
    cases = []
    for count in replicas:
        in_full = count <= MOST_REPLICAS_IN_FULL
        for name in WORKLOADS if in_full else [*WORKLOADS][:IN_LARGE]:
            for scale in (1.0, IN_BRIEF) if in_full else (0.5,):
                mine, brief = round(rows * WORKLOADS[name] * scale) * count, scale == IN_BRIEF
                cases += [Case(name, count, mine, None, late_s, brief) for late_s in late]
                cases += [Case(name, count, mine, window, 0.0, brief) for window in WINDOWS]
    return cases


def table_of(found: list[tuple[Case, dict[str, Any]]]) -> list[dict[str, Any]]:
    table = []
    for case, result in found:
        same = [
            other["tokens_per_s"] for c, other in found
            if (c.workload, c.replicas, c.rows) == (case.workload, case.replicas, case.rows)
            and c.window is not None
        ]  # fmt: skip
        ratio = round(result["tokens_per_s"] / max(same), 4) if case.window is None and same else None
        table.append({**asdict(case), **result, "ratio_to_best_fixed": ratio})
    return table


def report(found: list[tuple[Case, dict[str, Any]]], took_s: float) -> None:
    table = table_of(found)
    controlled = [row for row in table if row["window"] is None]
    long = [row for row in controlled if not row["brief"]]
    worst = min(row["ratio_to_best_fixed"] for row in long)
    brief = min((row["ratio_to_best_fixed"] for row in controlled if row["brief"]), default=None)
    line = (
        f"control in virtual time: {len(long)} cases, {sum(row['rows'] for row in table):,} rows in "
        f"{took_s:.0f} s; worst {worst:.3f} x the best fixed window (goal {GOAL}), {brief} "
        f"on runs of 15 to 120 s"
    )
    figures = {
        "simulated": "no figure here is a measurement of a GPU",
        "goal": {"ratio_at_least": GOAL, "met": worst >= GOAL}, "took_s": round(took_s, 1),
        "max_running": MAX_RUNNING, "kv_tokens": KV_TOKENS, "cases": table,
    }  # fmt: skip
    save("control_simulated", line, figures, ("batchrunner",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000, help="rows a replica, of the chat workload")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--late", type=float, nargs="+", default=[0.1, 1.0, 4.0], metavar="SECONDS")
    parser.add_argument("--workload", action="append", default=[], choices=list(WORKLOADS))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cases = grid(args.rows, args.replicas, args.late)
    cases = [case for case in cases if case.workload in (args.workload or WORKLOADS)]
    began = time.perf_counter()
    with ProcessPoolExecutor(args.processes) as pool:
        found = list(zip(cases, pool.map(run, cases), strict=True))
    report(found, time.perf_counter() - began)


if __name__ == "__main__":
    main()
