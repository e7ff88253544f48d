"""A pool of worker processes that call a job's Python functions, with a time limit and bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from batchrunner.core.errors import HookLostError, JobError, RowRefusedError
from batchrunner.core.hook_process import POLL_S, Arguments, HookProcess, ProcessEndedError
from batchrunner.core.hook_protocol import HookFacts, HookResult, WorkerSetup

MOST_PROCESSES = 8
"""Default maximum number of processes. With fewer CPU cores, the default is one process per core."""
CHUNK_ROWS = 64
"""Maximum number of rows that are sent to a process in one message."""


class HookPool:
    """Processes that call the Python functions of one job. Thread-safe.

    Each thread of the pool has one process, which starts with the thread's first call.
    """

    def __init__(self, setup: WorkerSetup, processes: int | None = None) -> None:
        """Prepare a pool of at most `processes` processes; by default one per core, up to MOST_PROCESSES."""
        self.setup = setup
        self.most_processes = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        self._threads = ThreadPoolExecutor(self.most_processes, "batchrunner functions")
        self._local = threading.local()
        """Each thread of the pool keeps its process here, as the attribute `process`."""
        self._processes: list[HookProcess] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: dict[str, list[tuple[Arguments, asyncio.Future[HookResult]]]] = {}
        """Calls of `call` that no process has got yet, by job field: the arguments, and the future result."""
        self._senders: dict[str, set[asyncio.Task[None]]] = {}
        """Running tasks of `_send_waiting`, by job field."""
        self.facts: dict[str, HookFacts] = {}
        """Properties of the functions, by job field, such as `prompt.python`."""

    def open(self) -> None:
        """Start the first process, which loads the functions; raise JobError if one cannot be called."""
        try:
            self._threads.submit(self._process).result()
        except HookLostError as failure:
            self.close()
            raise JobError(failure.message) from None
        except BaseException:
            self.close()
            raise

    def call_many(
        self, place: str, rows: Sequence[Arguments], is_stopped: Callable[[], object] = lambda: False
    ) -> list[HookResult]:
        """Call the function of the job field `place` with each row, and return the results in order. Blocks.

        `is_stopped` is polled during the calls. Once it returns true, the results of the last rows may be
        missing; it may also raise. Raises HookLostError if the functions can no longer be loaded.
        """
        # Divide the rows evenly among the processes; `-(-a // b)` rounds up.
        chunk_rows = max(1, min(CHUNK_ROWS, -(-len(rows) // self.most_processes)))
        chunks = [
            self._submit(place, rows[start : start + chunk_rows]) for start in range(0, len(rows), chunk_rows)
        ]
        results: list[HookResult] = []
        try:
            for chunk in chunks:
                while not chunk.done() and not is_stopped():
                    with contextlib.suppress(TimeoutError):
                        chunk.result(POLL_S)
                if not chunk.done():
                    break
                results += chunk.result()
        except CancelledError:
            pass  # The pool was closed. Return the results so far.
        finally:
            for chunk in chunks:
                chunk.cancel()
        return results

    async def call(self, place: str, *row: Any) -> Any:
        """Call the function of the job field `place` with one row, and return its result.

        Calls that wait at the same time are sent to a process together. Raises RowRefusedError if the call
        fails, and HookLostError if the functions can no longer be loaded.
        """
        result: asyncio.Future[HookResult] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place, []).append((row, result))
        # There is at most one sender per process. It sends waiting calls until none is left.
        senders = self._senders.setdefault(place, set())
        if len(senders) < self.most_processes:
            sender = asyncio.create_task(self._send_waiting(place))
            senders.add(sender)
            sender.add_done_callback(senders.discard)
        value, error = await result
        if error is not None:
            raise RowRefusedError(error)
        return value

    def close(self) -> None:
        """Kill the processes, and cancel the calls that wait."""
        with self._lock:
            self._is_closed = True
            processes = [*self._processes]
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # This also ends the wait of the pool's thread for an answer.
        # The threads must end first, because `process.close` must not run beside them.
        self._threads.shutdown()
        for process in processes:
            process.close()

    async def _send_waiting(self, place: str) -> None:
        """Send the waiting calls of one function, in chunks, until none is left."""
        # All calls of this iteration of the event loop can join the first chunk.
        await asyncio.sleep(0)
        while waiting := self._waiting.get(place):
            chunk, self._waiting[place] = waiting[:CHUNK_ROWS], waiting[CHUNK_ROWS:]
            try:
                results = await asyncio.wrap_future(self._submit(place, [row for row, _ in chunk]))
            except asyncio.CancelledError:  # The pool was closed, so no call gets a result any more.
                for _, result in [*chunk, *self._waiting.pop(place)]:
                    result.cancel()
                return
            except Exception as failure:  # noqa: BLE001 - the waiting calls raise it
                for _, result in chunk:
                    if not result.done():
                        result.set_exception(failure)
                continue
            for (_, result), value in zip(chunk, results, strict=True):
                if not result.done():  # The caller may have been cancelled, and then its future is done.
                    result.set_result(value)

    def _submit(self, place: str, rows: Sequence[Arguments]) -> Future[list[HookResult]]:
        """Submit rows to the function of `place`; return the future of the results.

        If the pool is closed, the future is cancelled.
        """
        try:
            return self._threads.submit(self._results, place, rows)
        except RuntimeError:  # A closed ThreadPoolExecutor accepts no work.
            future: Future[list[HookResult]] = Future()
            future.cancel()
            return future

    def _results(self, place: str, rows: Sequence[Arguments]) -> list[HookResult]:
        """Call the function of `place` with each row, in this thread's process, and return the results.

        A row that ends the process gets an error as its result, and a new process takes the other rows.
        """
        results: list[HookResult] = []
        number = [*self.facts].index(place)  # A worker process knows a function by its index in `facts`.
        # After FLUSH_S, a call returns the results of only the first rows.
        while len(results) < len(rows):
            try:
                results += self._process().call(number, rows[len(results) :])
            except ProcessEndedError as failure:
                if self._is_closed:
                    raise CancelledError from None
                if len(rows) > 1:
                    # One of the remaining rows ended the process. Send each row alone to find out which.
                    return results + [self._results(place, [row])[0] for row in rows[len(results) :]]
                results = [HookResult(None, f"{place}: {self.facts[place].name}: {failure}")]
        return results

    def _process(self) -> HookProcess:
        """Return this thread's process. Start a new one if there is none that can take rows.

        Raises HookLostError if a new process cannot load the functions.
        """
        process: HookProcess | None = getattr(self._local, "process", None)
        if process is not None and process.is_fit:
            return process
        with self._lock:
            # `close`, in another thread, only kills the processes that it finds in `_processes`.
            if self._is_closed:
                raise CancelledError
            if process is not None:
                self._processes.remove(process)
                process.close()
            process = self._local.process = HookProcess(self.setup)
            self._processes.append(process)
        # All processes load the same functions, so the properties from the first process are kept.
        for facts in process.facts():
            self.facts.setdefault(facts.where, facts)
        return process
