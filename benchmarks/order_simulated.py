"""How much of the cache does each order of sending reach, and how far apart should rows be? In virtual time.

The schedulers are simulated (`engines/simulation`: SGLang's admission, radix cache and eviction, with the
step times of an 8B model on an H100), the gate and the admission are the runner's own. Each workload is sent
in the order of its input, sorted by prompt, and sorted with leaders before followers, in three ways: in
windows whose shared beginnings take a share of the KV pool; with every follower so many computed tokens
behind the row that brings its beginning in; and as the runner does it (`batchrunner.input.order` and
`batchrunner.dispatch.reorder`), which sorts only where that pays, and finds its distance itself.
The least that must be computed is known exactly. No figure here is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from math import isqrt
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Request, RowRef
from batchrunner.dispatch.queue import PendingRow
from batchrunner.dispatch.reorder import OutputLengths, PrimeTask, Reorderer, ReuseDistance
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from batchrunner.input.order import STRETCH_BYTES, decide, stretches
from benchmarks.control_simulated import KV_TOKENS, MAX_RUNNING, Fleet, answer_of
from benchmarks.engine import lognormal
from benchmarks.measure import save
from benchmarks.prompts import (
    Parts,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batchrunner.core.types import Outcome

SEED = 5
GOAL = 1.05
SHARES = (0.05, 0.1, 0.2, 0.4)
"""Shares of the KV pool for the prefixes that the rows of a window have in common."""
DISTANCES = (4096, 8192, 16_384, 32_768)
"""Tokens computed between a leader and its followers; a prefill pass computes 8,192 at most."""
WAITING_ROWS = 4096
"""Rows that are held back at most: what a client reads ahead."""
PASS_TOKENS = 8192
"""Tokens of a prefill pass: SGLang's `--chunked-prefill-size` on such a card."""
BATCH_ROWS = 128
SMALL_POOL = 60_000
BYTES_A_TOKEN = 4
ARMS = (
    "runner",
    "input",
    "sorted",
    *(f"windows {share}" for share in SHARES),
    *(f"apart {tokens}" for tokens in DISTANCES),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a workload in one order."""

    workload: str
    rows: int
    kv_tokens: int
    arm: str
    max_running: int = MAX_RUNNING


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


@dataclass(slots=True, eq=False)
class Step:
    """A row of the plan, and the row before it that brings in the longest beginning they share."""

    row: Row
    shared: int
    """Tokens at its beginning that an earlier row has."""
    leader: Step | None
    sent_at: int | None = None
    followers: list[tuple[int, Step]] = field(default_factory=list)
    """With their place in the plan, those that wait for it to be sent."""


def common(one: Parts, other: Parts) -> int:
    """Return how many tokens two prompts have in common at their beginning."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(tokens for (_, tokens), _ in same)


def steps(rows: Iterable[Row]) -> Iterator[Step]:
    """Find each row's leader, from rows in the order of their prompts."""
    path: list[tuple[int, Step]] = []  # up to which token of the last prompt each step brought it in
    last: Parts = ()
    for row in rows:
        shared = common(last, row.parts)
        while path and (path[-2][0] if len(path) > 1 else 0) >= shared:
            path.pop()
        leader = path[-1][1] if path else None
        if leader:
            path[-1] = (min(path[-1][0], shared), leader)
        step = Step(row, shared, leader)
        path.append((row.tokens, step))
        yield step
        last = row.parts


def in_windows(rows: Iterable[Row], tokens: float) -> Iterator[Row]:
    """Send a window's leaders, then who follows them, and so on; its shared beginnings fit in `tokens`."""
    window: dict[Step, int] = {}  # with how many leaders are above each in the window
    held = shared = 0
    for step in steps(rows):
        more = max(0, step.shared - shared)
        shared = step.shared
        if window and (held + more > tokens or len(window) == WAITING_ROWS):
            yield from (each.row for each in sorted(window, key=window.__getitem__))
            window.clear()
            held = more = 0
        held += more
        window[step] = window.get(step.leader, -1) + 1 if step.leader else 0
    yield from (each.row for each in sorted(window, key=window.__getitem__))


def apart(rows: Iterable[Row], tokens: int) -> Iterator[Row]:
    """Send rows in the plan's order, but a follower so many computed tokens after its leader.

    Where nothing else is left to be sent, or too much waits, followers go earlier.
    """
    resting: list[tuple[int, int, Step]] = []  # when it may go, its place in the plan
    ready: list[tuple[int, Step]] = []
    computed = waiting = 0
    plan = enumerate(steps(rows))
    upcoming = next(plan, None)
    while upcoming or waiting:
        forced = upcoming is None or waiting >= WAITING_ROWS
        while resting and (resting[0][0] <= computed or (forced and not ready)):
            heapq.heappush(ready, heapq.heappop(resting)[1:])
        if ready:
            _, step = heapq.heappop(ready)
            waiting -= 1
            computed += max(1, step.row.tokens - step.shared)
            step.sent_at = computed
            for place, follower in step.followers:
                heapq.heappush(resting, (computed + tokens, place, follower))
            step.followers.clear()
            yield step.row
            continue
        assert upcoming
        (place, step), upcoming = upcoming, next(plan, None)
        waiting += 1
        if step.leader is None:
            ready.append((place, step))
        elif step.leader.sent_at is None:
            step.leader.followers.append((place, step))
        else:
            heapq.heappush(resting, (step.leader.sent_at + tokens, place, step))


def ordered(rows: list[Row], arm: str, kv_tokens: int) -> Iterator[Row]:
    """Put rows, which come in the order of the input, into the arm's."""
    match arm.split():
        case ["windows", share]:
            return in_windows(sorted(rows), float(share) * kv_tokens)
        case ["apart", tokens]:
            return apart(sorted(rows), int(tokens))
        case ["sorted"]:
            return iter(sorted(rows))
    return iter(rows)


class AsTheRunner:
    """The runner's own order: a source of rows, which are sent as the reorderer says."""

    is_shared = False

    def __init__(self, rows: list[Row], kv_tokens: int) -> None:
        info = EngineInfo("attach", "simulated", max_total_tokens=kv_tokens, prefill_tokens=PASS_TOKENS)
        self._rows = rows
        self._reorderer = Reorderer(ReuseDistance(info, 1), OutputLengths(), dedupe=True)
        self.unread = self.total = len(rows)
        self._fleet: Fleet | None = None

    def run(self, config: SchedulerConfig) -> Fleet:
        """Let all rows come to their end."""
        fleet = self._fleet = Fleet(self._samples(), len(self._rows), config, ended=self._ended)
        fleet.run()
        return fleet

    def _samples(self) -> Iterator[SimulatedRequest]:
        assert self._fleet
        for batch in self._reorderer.reorder(self):
            primers = [item for item in batch if isinstance(item, PrimeTask)]
            for _, turn in itertools.groupby(sorted(primers, key=lambda p: p.round), key=lambda p: p.round):
                works = [primer.row for primer in turn]
                self._fleet.prime([self._sample(work, 1) for work in works])
                for work in works:
                    work.prefix_ready_at = self._fleet.now
            for item in batch:
                if isinstance(item, PendingRow):
                    item.route, item.sent_at = "r0", self._fleet.now
                    yield self._sample(item, self._rows[item.request.ref.row].outputs)

    def stop(self) -> None:
        """Do nothing: a run in virtual time is never stopped."""

    def batches(self) -> Iterator[list[Request | Outcome]]:
        nothing = pa.RecordBatch.from_pylist([{}])
        self.unread = len(self._rows)
        for first in range(0, len(self._rows), BATCH_ROWS):
            batch = self._rows[first : first + BATCH_ROWS]
            self.unread -= len(batch)
            yield [
                Request(RowRef(row, nothing, 0), "text", text_of(each), {"max_new_tokens": each.outputs})
                for row, each in enumerate(batch, first)
            ]

    def _sample(self, work: PendingRow, outputs: int) -> SimulatedRequest:
        row = self._rows[work.request.ref.row]
        return SimulatedRequest(row.tokens, outputs, outputs, prefix=row.parts, payload=work)

    def _ended(self, sample: SimulatedRequest) -> None:
        assert self._fleet
        work = sample.payload
        work.prefix_ready_at = min(work.prefix_ready_at, self._fleet.now)
        self._reorderer.record(work, answer_of(sample))


def text_of(row: Row) -> str:
    """Make a text of four characters a token, which begins like another's as far as the parts do."""
    return "".join((name * tokens)[: BYTES_A_TOKEN * tokens] for name, tokens in row.parts)


def run(case: Case) -> dict[str, Any]:
    """Let a whole run pass in virtual time."""
    began = time.perf_counter()
    rows = input_of(case.workload, case.rows)
    config = SchedulerConfig(case.max_running, case.kv_tokens)
    if case.arm == "runner":
        fleet = AsTheRunner(planned(rows), case.kv_tokens).run(config)
    else:
        samples = (
            SimulatedRequest(row.tokens, row.outputs, row.outputs, prefix=row.parts)
            for row in ordered(rows, case.arm, case.kv_tokens)
        )
        fleet = Fleet(samples, len(rows), config)
        fleet.run()
    prompt_tokens, least = sum(row.tokens for row in rows), least_tokens(rows)
    return {
        "prompt_tokens": prompt_tokens, "least_tokens": least, "prefilled_tokens": fleet.uncached_tokens,
        "ratio_to_least": round(fleet.uncached_tokens / least, 4),
        "hit_rate": round(1 - fleet.uncached_tokens / prompt_tokens, 4),
        "hit_rate_at_most": round(1 - least / prompt_tokens, 4),
        **fleet.totals(), "took_s": round(time.perf_counter() - began, 1),
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
    parser.add_argument("--arm", action="append", default=[], choices=ARMS)
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[KV_TOKENS, SMALL_POOL])
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cases = [
        Case(name, args.rows, kv, arm)
        for name in args.workload or WORKLOADS
        for kv in args.kv_tokens
        for arm in args.arm or ARMS
    ]
    found = []
    with ProcessPoolExecutor(args.processes) as pool:
        for case, result in zip(cases, pool.map(run, cases), strict=True):
            found.append((case, result))
            print(
                f"  {case.workload}, {case.kv_tokens // 1000}k, {case.arm}: {result['ratio_to_least']} x the "
                f"least, hit rate {result['hit_rate']} of {result['hit_rate_at_most']}, "
                f"{result['virtual_s']:,} s, {result['retractions']} retracted",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    report(found)


if __name__ == "__main__":
    main()
