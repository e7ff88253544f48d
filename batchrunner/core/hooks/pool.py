"""A pool of processes that run a job's Python functions: in batches, with a time limit and bounded memory.

The standard library's pools end, or wait for ever, when one of their processes dies, and have no time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from typing import Any

from batchrunner.core.errors import HookLostError, JobError, RowRefusedError
from batchrunner.core.hooks.functions import HookFacts, HookResult, HookSetup
from batchrunner.core.hooks.output import HookOutput
from batchrunner.core.hooks.process import HookProcess, HookStartError

log = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Processes unless the job says how many; never more than cores."""
MOST_CHUNK_ROWS = 512
"""Rows that a process gets at once."""
CHUNK_S = 0.05
"""Time that a process should need for the rows that it gets at once, in seconds."""
_FIRST_CHUNK_ROWS = 8
_STOP_LOOK_S = 0.2
_MOST_STARTS = 3
"""Starts of a process without one result, after which its first row counts as the cause."""
Arguments = tuple[Any, ...]
"""Arguments of a call."""


@dataclass(slots=True)
class _Chunk:
    """Rows for one process, and what becomes of them."""

    number: int
    """Index of the function."""
    rows: Sequence[Arguments]
    results: Future[list[HookResult]] = field(default_factory=Future)


class HookPool:
    """Processes that run the functions of one job. Thread-safe; they start when they are needed."""

    def __init__(self, setup: HookSetup, processes: int | None = None) -> None:
        """Take the functions of a job; `processes` is the most of them, by default one for each core."""
        self._setup = setup
        self._most = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        self._output = HookOutput()
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._starting = threading.Lock()
        self._gatherers: dict[str, _Gatherer] = {}
        self._numbers = {function.where: n for n, function in enumerate(setup.functions)}
        self._digests: dict[str, str] = {}
        self.facts: dict[str, HookFacts] = {}
        """What is known of the functions, by their places in the job."""

    def open(self) -> None:
        """Load the functions in a first process; raises JobError, one line, where one cannot be called."""
        worker = self._new_worker()
        self._workers.append(worker)
        try:
            self.facts = {facts.where: facts for facts in worker.opened.result()}
        except HookStartError as failure:
            self.close()
            raise JobError(str(failure)) from None
        except BaseException:
            self.close()
            raise

    def call_many(
        self, where: str, rows: Sequence[Arguments], is_stopped: Callable[[], object] = lambda: False
    ) -> list[HookResult]:
        """Call a function with each row; blocks. Returns the results in order.

        Once `is_stopped`, which may raise, returns true, the last results may be missing. Raises
        HookLostError where the functions can be loaded no more.
        """
        number = self._numbers[where]
        size = self._chunk_rows(number, len(rows))
        chunks = [_Chunk(number, rows[at : at + size]) for at in range(0, len(rows), size)]
        self._hand_out(chunks)
        found: list[HookResult] = []
        try:
            for chunk in chunks:
                results = _result_of(chunk, is_stopped)
                if results is None:
                    break
                found += results
        finally:
            for chunk in chunks:
                chunk.results.cancel()
        return found

    async def call(self, where: str, *row: Any) -> Any:
        """Call a function with one row; calls that come while the processes are busy go together.

        Raises RowRefusedError where the call fails, HookLostError as `call_many` does.
        """
        loop = asyncio.get_running_loop()
        gatherer = self._gatherers.get(where)
        if gatherer is None or gatherer.loop is not loop:
            gatherer = self._gatherers[where] = _Gatherer(loop, self._most, self._submit_gathered, where)
        value, error = await gatherer.call(row)
        if error is not None:
            raise RowRefusedError(error)
        return value

    def close(self) -> None:
        """End the processes, whatever they are at; calls that wait are cancelled."""
        with self._starting:
            workers, self._workers, self._most = self._workers, [], 0
        for worker in workers:
            worker.stop()
        for _ in workers:
            self._chunks.put(None)
        for worker in workers:
            worker.join()
        with contextlib.suppress(queue.Empty):
            while True:
                chunk = self._chunks.get_nowait()
                if chunk is not None:
                    chunk.results.cancel()
        self._output.close()

    def _submit_gathered(self, where: str, rows: Sequence[Arguments]) -> Future[list[HookResult]]:
        chunk = _Chunk(self._numbers[where], rows)
        self._hand_out([chunk])
        return chunk.results

    def _hand_out(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            self._chunks.put(chunk)
        with self._starting:
            idle = sum(not worker.is_busy for worker in self._workers)
            wanted = min(self._chunks.qsize() - idle, self._most - len(self._workers))
            for _ in range(wanted):
                self._workers.append(self._new_worker())
            if not self._most:
                for chunk in chunks:
                    chunk.results.cancel()

    def _new_worker(self) -> _Worker:
        return _Worker(self._setup, self._output, self._chunks, self._digests)

    def _chunk_rows(self, number: int, rows: int) -> int:
        """Return how many rows a process gets at once: for CHUNK_S, and such that all processes have some."""
        known = [worker.row_s[number] for worker in list(self._workers) if number in worker.row_s]
        size = int(CHUNK_S / max(min(known), 1e-7)) if known else _FIRST_CHUNK_ROWS
        share = -(-rows // max(self._most, 1))
        return max(1, min(size, share, MOST_CHUNK_ROWS))


class _Worker:
    """A thread with a process, which takes chunks from a queue."""

    def __init__(
        self,
        setup: HookSetup,
        output: HookOutput,
        chunks: queue.SimpleQueue[_Chunk | None],
        digests: dict[str, str],
    ) -> None:
        """Start the thread; `digests` are those of the functions, which all workers share."""
        self._setup = setup
        self._output = output
        self._chunks = chunks
        self._process: HookProcess | None = None
        self._stopped = False
        self._digests = digests
        self.is_busy = True
        self.row_s: dict[int, float] = {}
        """Seconds of a row, by the index of the function."""
        self.opened: Future[list[HookFacts]] = Future()
        """The facts that the first process found."""
        # a daemon: a function that hangs does not keep the program alive
        self._thread = threading.Thread(target=self._work, name="batchrunner functions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no further chunk, and end the process; `join` waits for that."""
        self._stopped = True
        if self._process is not None:
            self._process.interrupt()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _work(self) -> None:
        try:
            self.opened.set_result(self._start())
        except BaseException as failure:  # noqa: BLE001 - who waits for it must not wait for ever
            self.opened.set_exception(failure)
        self.is_busy = False
        try:
            while (chunk := self._chunks.get()) is not None and not self._stopped:
                self.is_busy = True
                self._take(chunk)
                self.is_busy = False
        finally:
            if self._process is not None:
                self._process.kill()

    def _take(self, chunk: _Chunk) -> None:
        if not chunk.results.set_running_or_notify_cancel():
            return
        try:
            chunk.results.set_result(self._results(chunk.number, chunk.rows))
        except HookStartError as failure:
            chunk.results.set_exception(HookLostError(str(failure), hint="run the same command again"))
        except BaseException as failure:  # noqa: BLE001 - who waits for it must not wait for ever
            chunk.results.set_exception(failure)

    def _results(self, number: int, rows: Sequence[Arguments]) -> list[HookResult]:
        """Return a result for each row, whatever becomes of the process at one of them."""
        function = self._setup.functions[number]
        results: list[HookResult] = []
        starts = 0
        while len(results) < len(rows):
            if self._stopped:
                raise CancelledError
            if self._process is None or not self._process.is_alive:
                self._start()
                starts += 1
            assert self._process is not None
            began = time.monotonic()
            end = self._process.run(number, rows[len(results) :])
            self._learn(number, time.monotonic() - began, len(end.results))
            if end.results or end.fault:
                starts = 0
            results += end.results
            fault = end.fault
            if fault is None and starts >= _MOST_STARTS:
                fault = "ended its process"
            if fault is not None and not self._stopped:
                results += self._results(number, rows[len(results) : len(results) + end.unsent])
                results.append(HookResult(None, f"{function.where}: {function.name}: {fault}"))
        return results

    def _learn(self, number: int, took_s: float, rows: int) -> None:
        if rows:
            row_s = took_s / rows
            self.row_s[number] = (self.row_s.get(number, row_s) + row_s) / 2

    def _start(self) -> list[HookFacts]:
        """Start a process and return what it knows of the functions; raises HookStartError."""
        if self._process is not None:
            self._process.kill()
        try:
            self._process = HookProcess(self._setup, self._output)
        except OSError as failure:
            raise HookStartError(f"{sys.executable}: cannot be started: {failure}") from None
        if self._stopped:
            raise CancelledError
        facts = self._process.facts()
        for found in facts:
            if self._digests.setdefault(found.where, found.digest) != found.digest:
                log.warning("%s changed while the run is at work: rows are made by both versions", found.name)
                self._digests[found.where] = found.digest
        return facts


class _Gatherer:
    """Gathers calls of an event loop: while as many batches as processes are on their way, calls wait."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        most: int,
        submit: Callable[[str, Sequence[Arguments]], Future[list[HookResult]]],
        where: str,
    ) -> None:
        self.loop = loop
        self._most = most
        self._submit = submit
        self._where = where
        self._waiting: list[tuple[Arguments, asyncio.Future[HookResult]]] = []
        self._on_the_way = 0
        self._is_called = False

    async def call(self, row: Arguments) -> HookResult:
        """Return what a call came to."""
        answer: asyncio.Future[HookResult] = self.loop.create_future()
        self._waiting.append((row, answer))
        if not self._is_called:
            self._is_called = True
            self.loop.call_soon(self._send)
        return await answer

    def _send(self) -> None:
        self._is_called = False
        while self._waiting and self._on_the_way < self._most:
            some, self._waiting = self._waiting[:MOST_CHUNK_ROWS], self._waiting[MOST_CHUNK_ROWS:]
            self._on_the_way += 1
            results = self._submit(self._where, [row for row, _ in some])
            results.add_done_callback(_InLoop(self.loop, self._deliver, [answer for _, answer in some]))

    def _deliver(
        self, answers: Sequence[asyncio.Future[HookResult]], results: Future[list[HookResult]]
    ) -> None:
        self._on_the_way -= 1
        for at, answer in enumerate(answers):
            if answer.done():  # its run was cancelled
                continue
            failure = None if results.cancelled() else results.exception()
            if results.cancelled() or isinstance(failure, CancelledError):
                answer.cancel()
            elif failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(results.result()[at])
        self._send()


@dataclass(frozen=True, slots=True)
class _InLoop:
    """Passes results on in an event loop, unless that has ended."""

    loop: asyncio.AbstractEventLoop
    deliver: Callable[[Sequence[asyncio.Future[HookResult]], Future[list[HookResult]]], None]
    answers: Sequence[asyncio.Future[HookResult]]

    def __call__(self, results: Future[list[HookResult]]) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.deliver, self.answers, results)


def _result_of(chunk: _Chunk, is_stopped: Callable[[], object]) -> list[HookResult] | None:
    """Wait for the results of a chunk; None where the run is stopped before."""
    while True:
        try:
            return chunk.results.result(_STOP_LOOK_S)
        except NotYetError:
            if is_stopped():
                return None
        except CancelledError:
            return None
