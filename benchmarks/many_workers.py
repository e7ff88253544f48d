"""What does sharing a run cost, with 1, 10, 100 and 1,000 workers? The real lease code in virtual time.

Each worker runs `runner/join.py`, `runner/leases.py` and the locks of `output/task_lock.py` on a directory in
memory, as a process of a machine of its own: only heartbeats show others that it lives. The workers differ in
speed and start within a minute. Some are killed on the way. Time is virtual, so a run of hours takes minutes.

Counted are the operations on the shared directory that a file server would see: files opened, listed,
renamed, linked, deleted or asked for their size. A listing counts as one operation for each 1,000 names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.core.types import Lease
from batchrunner.job.load import load_job
from batchrunner.output.counts import RowCounts
from batchrunner.output.holder import this_process
from batchrunner.output.parts import write_part
from batchrunner.output.task_lock import FileTaskLock
from batchrunner.runner.control import Control
from batchrunner.runner.join import join
from batchrunner.runner.plan import StartOptions
from batchrunner.runner.prepare import PreparedJob, prepare
from benchmarks.measure import in_fresh_process, save

SEED = 11
WORKERS = (1, 10, 100, 1000)
ROWS_EACH = 2000
"""Rows of the run for each worker."""
ROW_S = 0.3
"""Mean seconds for a row, so that a run takes ten minutes and more; workers differ by a factor of two."""
READ_AHEAD_S = 20.0
"""How long before the end of its rows a worker asks for its next lease."""
START_WITHIN_S = 60.0
"""All workers start within this time."""
KILLED = 0.02
"""Share of the workers that are killed, two at least if there are more than two."""
NAMES_A_LISTING = 1000
GOAL_OPERATIONS, GOAL_TAKEOVER_S = 2.0, 75.0

_real_monotonic = time.monotonic


class VirtualTime:
    """Runs threads and calls one at a time, in the order of virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._main = threading.Semaphore(0)
        self._local = threading.local()

    def call_at(self, when: float, action: Callable[[], object]) -> None:
        """Call `action` at a time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._number), action))

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in a thread, which may sleep."""
        turn = threading.Semaphore(0)

        def body() -> None:
            turn.acquire()
            self._local.turn = turn
            try:
                work()
            finally:
                self._main.release()

        threading.Thread(target=body, daemon=True).start()
        self._resume(turn)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the thread that calls."""
        turn = self._local.turn
        self.call_at(self.now + seconds, lambda: self._resume(turn))
        self._main.release()
        turn.acquire()

    def run(self) -> None:
        """Go on until nothing is left to do."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _resume(self, turn: threading.Semaphore) -> None:
        turn.release()
        self._main.acquire()


TIME = VirtualTime()


class Killed(BaseException):
    """Ends the thread of a worker that was killed."""


class Operations:
    """Counts the operations of each worker below a directory."""

    NAMES = frozenset({"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir"})

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.worker: str | None = None
        """Name of the worker that runs now."""
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.by_minute: Counter[tuple[str, int]] = Counter()
        sys.addaudithook(self._audit)
        self._listdir, self._stat = os.listdir, os.stat

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count also what no audit event tells: names listed, and sizes asked for."""
        os.listdir, os.stat = self._count_listing, self._count_stat  # type: ignore[assignment]
        try:
            yield
        finally:
            os.listdir, os.stat = self._listdir, self._stat

    def add(self, kind: str, path: object, number: int = 1) -> None:
        """Count operations on a path of the run."""
        if self.worker is not None and str(path).startswith(self._root):
            self.counts[self.worker] += number
            self.kinds[kind] += number
            self.by_minute[self.worker, int(TIME.now // 60)] += number

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.NAMES and arguments:
            self.add(event, os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")

    def _count_listing(self, path: Any = ".") -> list[str]:
        names = self._listdir(path)
        self.add("os.listdir", path, 1 + len(names) // NAMES_A_LISTING)
        return names

    def _count_stat(self, path: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int):
            self.add("os.stat", os.fspath(path))
        return self._stat(path, **options)


def simulate(workers: int, seed: int) -> dict[str, Any]:
    """Run so many workers until all rows are done; return what it cost."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        rows = ROWS_EACH * workers
        path = Path(scratch, "input.parquet")
        pq.write_table(pa.table({"id": range(rows)}), path)
        job = load_job(
            {
                "input": {"path": str(path)},
                "prompt": {"user": "{{ id }}"},
                "output": {"path": f"{scratch}/run"},
                "engine": {"kind": "simulated"},
                "order": "input",
            }
        )
        operations = Operations(Path(scratch, "run"))
        run = Run(operations=operations, rows=rows)
        main = prepare(job)
        doomed = set(chance.sample(range(workers), max(2, round(KILLED * workers)) if workers > 2 else 0))
        for number in range(workers):
            name = f"w{number:04d}"
            prepared = dataclasses.replace(main, run_dir=main.run_dir.of_task(name))
            worker = Worker(run, prepared, name, row_s=ROW_S * chance.uniform(0.7, 1.4))
            start_s = chance.uniform(0, START_WITHIN_S)
            TIME.call_at(start_s, worker.start)
            if number in doomed:
                TIME.call_at(start_s + chance.uniform(0.1, 0.9) * ROWS_EACH * ROW_S, worker.kill)
        with operations.counting():
            began = _real_monotonic()
            TIME.run()
        return run.figures() | {"real_s": round(_real_monotonic() - began, 1), "workers": workers}


@dataclasses.dataclass
class Run:
    """What the workers of a simulated run share, and what became of it."""

    operations: Operations
    rows: int
    done: Counter[int] = dataclasses.field(default_factory=Counter)
    """How often each row was stored in a part."""
    waits_s: list[float] = dataclasses.field(default_factory=list)
    """How long each lease after a worker's first was waited for, beyond the end of the rows it had."""
    starts_s: list[float] = dataclasses.field(default_factory=list)
    killed_at: dict[str, float] = dataclasses.field(default_factory=dict)
    taken_over_at: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """When each dead worker was replaced, and since when another worker had been waiting for rows."""
    waiting: set[str] = dataclasses.field(default_factory=set)
    """The workers that wait for a lease."""
    waiting_since: float = 0.0
    """Since when at least one worker has been waiting, without a break."""
    last_lease_at: float = 0.0
    """When a lease that nobody had taken before was last taken."""
    lived_s: dict[str, float] = dataclasses.field(default_factory=dict)
    ended_at: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures of a run that has ended."""
        rates = [self.operations.counts[name] / lived for name, lived in self.lived_s.items()]
        takeovers = [
            at - max(self.killed_at[name], self.last_lease_at, since)
            for name, (at, since) in self.taken_over_at.items()
        ]
        peak = max((count for (_, _), count in self.operations.by_minute.items()), default=0) / 60
        return {
            "rows_missing": self.rows - len(self.done),
            "rows_twice": sum(count > 1 for count in self.done.values()),
            "took_s": round(self.ended_at),
            "operations_a_second_mean": round(statistics.fmean(rates), 2),
            "operations_a_second_worst_worker": round(max(rates), 2),
            "operations_a_second_worst_minute": round(peak, 2),
            "start_s_worst": round(max(self.starts_s), 1),
            "lease_wait_s_mean": round(statistics.fmean(self.waits_s), 2) if self.waits_s else None,
            "lease_wait_s_worst": round(max(self.waits_s), 1) if self.waits_s else None,
            "killed": len(self.killed_at),
            "taken_over": len(self.taken_over_at),
            "takeover_s_worst": round(max(takeovers), 1) if takeovers else None,
            "kinds": dict(self.operations.kinds.most_common()),
        }


class VirtualEvent:
    """Stands for the event that stops a reader; waiting lets virtual time pass."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the worker was stopped."""
        return self._is_set

    def set(self) -> None:
        """Stop the worker."""
        self._is_set = True

    def wait(self, seconds: float) -> bool:
        """Sleep, in the worker's thread."""
        self._worker.sleep(seconds)
        return self._is_set


class Worker:
    """A worker of a simulated run: its reader is a thread, its writer and heartbeat are calls."""

    PART_S = 120.0

    def __init__(self, run: Run, prepared: PreparedJob, name: str, *, row_s: float) -> None:
        self.run, self.prepared, self.name, self.row_s = run, prepared, name, row_s
        self.is_dead = self.is_over = False
        self.counts = RowCounts()
        me = dataclasses.replace(this_process(), host=name, machine=f"machine of {name}")
        self.lock = FileTaskLock(prepared.run_dir.task_directory, me, clock=time.monotonic, sleep=TIME.sleep)
        self.spans: list[tuple[float, float, list[int]]] = []
        """Begin and end of the work on each lease, and its rows."""
        self.stored: Counter[int] = Counter()
        """How many rows of each of `spans` are stored."""
        self.parts = 0
        self.started_at = 0.0

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Count operations for this worker."""
        before, self.run.operations.worker = self.run.operations.worker, self.name
        try:
            yield
        finally:
            self.run.operations.worker = before

    def sleep(self, seconds: float) -> None:
        """Sleep in the worker's thread; ends the thread if the worker is killed meanwhile."""
        self.run.operations.worker = None
        TIME.sleep(seconds)
        if self.is_dead:
            raise Killed
        self.run.operations.worker = self.name
        self._count()

    def start(self) -> None:
        """Start the process."""
        TIME.start(self._work)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if not self.is_over:
            self.is_dead = True
            self.run.killed_at[self.name] = TIME.now
            self.run.lived_s[self.name] = TIME.now - self.started_at

    def write(self, event: str, **values: Any) -> None:
        """Note an event of the worker, in the place of its event log."""
        if event == "takeover":
            self.run.taken_over_at[values["task"]] = TIME.now, self.run.waiting_since
        if event == "lease" and not values["turn"]:
            self.run.last_lease_at = TIME.now

    def _work(self) -> None:
        self.started_at = TIME.now
        control = Control()
        control.sleep = self.sleep  # type: ignore[method-assign]
        with contextlib.suppress(Killed), self.acting():
            self.prepared.run_dir.task_directory.mkdir(parents=True)
            self.lock.acquire()
            self._beat()
            self.rows, _, _ = join(
                self.prepared,
                StartOptions(join=True),
                control,
                lock=self.lock,
                counts=self.counts,
                events=self,  # type: ignore[arg-type]
            )
            self.rows._stopped = VirtualEvent(self)  # type: ignore[assignment]  # noqa: SLF001 - sleeps in virtual time
            TIME.call_at(TIME.now + self.PART_S, self._store)
            self._read()
            self._count()
            self._commit()
            self.is_over = True
            self.rows.give_back()
            self.lock.release()
            self.run.lived_s[self.name] = TIME.now - self.started_at
            self.run.ended_at = max(self.run.ended_at, TIME.now)
        self.run.operations.worker = None

    def _read(self) -> None:
        lease = self.rows.take(wait=True)
        self.run.starts_s.append(TIME.now - self.started_at)
        busy_until = TIME.now
        while lease is not None:
            begin = max(TIME.now, busy_until)
            busy_until = begin + len(lease.rows) * self.row_s
            self.spans.append((begin, busy_until, list(lease.rows)))
            self.sleep(max(0.0, busy_until - READ_AHEAD_S - TIME.now))
            lease = self.rows.take(wait=False) or self._wait_for_lease()
            if lease is not None:
                self.run.waits_s.append(max(0.0, TIME.now - busy_until))
        self.sleep(max(0.0, busy_until - TIME.now))

    def _wait_for_lease(self) -> Lease | None:
        """Wait for a lease, and let the run know that this worker waits."""
        run = self.run
        run.waiting_since = run.waiting_since if run.waiting else TIME.now
        run.waiting.add(self.name)
        try:
            return self.rows.take(wait=True)
        finally:
            run.waiting.remove(self.name)

    def _beat(self) -> None:
        if not (self.is_dead or self.is_over):
            with self.acting():
                self.lock.beat()
            TIME.call_at(TIME.now + self.lock.beat_s, self._beat)

    def _store(self) -> None:
        if not (self.is_dead or self.is_over):
            with self.acting():
                self._count()
                self._commit()
            TIME.call_at(TIME.now + self.PART_S, self._store)

    def _count(self) -> None:
        self.counts.ok = sum(map(self._finished, self.spans))

    def _finished(self, span: tuple[float, float, list[int]]) -> int:
        begin, end, rows = span
        share = min(1.0, max(0.0, (TIME.now - begin) / (end - begin)))
        return round(share * len(rows))

    def _commit(self) -> None:
        new: list[int] = []
        for number, span in enumerate(self.spans):
            finished = self._finished(span)
            new += span[2][self.stored[number] : finished]
            self.stored[number] = finished
        if new:
            self.run.done.update(new)
            self.run.operations.worker = None  # parts cost the same however many workers there are
            self._write_part(new)
            self.run.operations.worker = self.name
            self.rows.committed(BitMap64(new))

    def _write_part(self, rows: list[int]) -> None:
        columns = {
            "row": rows,
            "error": pa.nulls(len(rows), pa.string()),
            "attempts": [1] * len(rows),
            "finish_reason": ["stop"] * len(rows),
            "prompt_tokens": rows,
            "cached_tokens": rows,
            "completion_tokens": rows,
        }
        self.prepared.run_dir.parts.mkdir(exist_ok=True)
        write_part(self.prepared.run_dir, self.parts, [pa.table(columns)], self.lock)
        self.parts += 1


def main() -> None:
    """Simulate a run of one size in this process, or of all sizes in fresh processes; save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--one", action="store_true", help="print the figures of the first size as JSON")
    args = parser.parse_args()
    if args.one:
        threading.stack_size(256 << 10)
        time.monotonic = lambda: TIME.now
        print(orjson.dumps(simulate(args.workers[0], args.seed)).decode())
        return
    module = "benchmarks.many_workers"
    runs = [
        in_fresh_process(module, "--one", "--workers", str(workers), "--seed", str(args.seed), timeout_s=3600)
        for workers in args.workers
    ]
    is_met = all(
        not run["rows_missing"]
        and not run["rows_twice"]
        and run["operations_a_second_worst_worker"] <= GOAL_OPERATIONS
        and (run["takeover_s_worst"] or 0.0) <= GOAL_TAKEOVER_S
        for run in runs
    )
    lines = [
        f"{run['workers']:5} workers: {run['operations_a_second_mean']:6} operations/s a worker (worst "
        f"{run['operations_a_second_worst_worker']}), takeover {run['takeover_s_worst']} s at most, "
        f"a lease waits {run['lease_wait_s_mean']} s ({run['lease_wait_s_worst']} at most), "
        f"{run['rows_twice']} rows twice, {run['rows_missing']} missing"
        for run in runs
    ]
    save("many_workers", "\n".join(lines), {"goal_met": is_met, "runs": runs}, ("batchrunner", "pyarrow"))


if __name__ == "__main__":
    main()
