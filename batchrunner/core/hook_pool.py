"""A pool of processes that call a job's Python functions: each call has a time limit and bounded memory.

`concurrent.futures` and loky end, or wait for ever, when a process dies, and have no time limit; pebble has
one, but its processes import the user's main module again. Here each thread of a pool has a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import IO, Any

from batchrunner.core.errors import HookLostError, JobError, RowRefusedError
from batchrunner.core.hook_worker import ANSWER_S, HookFacts, HookResult, WorkerSetup
from batchrunner.core.timing import TIMING

log = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Processes unless the job says how many; never more than cores."""
CHUNK_ROWS = 64
"""Rows that a process gets at once, at most."""
_LOOK_S = 0.2
"""Pause between two looks whether a process lives, or a run is stopped."""
_LONGEST_LINE = 2000
Arguments = tuple[Any, ...]
"""Arguments of a call."""


class HookPool:
    """Processes that call the functions of one job. Thread-safe; they start when they are needed."""

    def __init__(self, setup: WorkerSetup, processes: int | None = None) -> None:
        """Take what a worker needs; `processes` is the most of them, by default one for each core."""
        self.setup = setup
        self.most = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        self._threads = ThreadPoolExecutor(self.most, "batchrunner functions")
        self._own = threading.local()  # the process of a thread
        self._processes: list[HookProcess] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: dict[str, list[tuple[Arguments, asyncio.Future[HookResult]]]] = {}
        self._senders: dict[str, set[asyncio.Task[None]]] = {}
        self.facts: dict[str, HookFacts] = {}
        """What is known of the functions, by their places in the job."""

    def open(self) -> None:
        """Load the functions in a first process; raises JobError, one line, where one cannot be called."""
        try:
            self._threads.submit(self._process).result()
        except HookLostError as failure:
            self.close()
            raise JobError(failure.message) from None
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
        size = max(1, min(CHUNK_ROWS, -(-len(rows) // self.most)))
        chunks = [self.submit(where, rows[at : at + size]) for at in range(0, len(rows), size)]
        found: list[HookResult] = []
        try:
            for chunk in chunks:
                while not chunk.done() and not is_stopped():
                    with contextlib.suppress(TimeoutError):
                        chunk.result(_LOOK_S)
                if not chunk.done():
                    break
                found += chunk.result()
        except CancelledError:
            pass
        finally:
            for chunk in chunks:
                chunk.cancel()
        return found

    async def call(self, where: str, *row: Any) -> Any:
        """Call a function with one row; calls that come while the processes are busy go together.

        Raises RowRefusedError where the call fails, HookLostError as `call_many` does.
        """
        answer: asyncio.Future[HookResult] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(where, []).append((row, answer))
        senders = self._senders.setdefault(where, set())
        if len(senders) < self.most:
            sender = asyncio.create_task(self._send_waiting(where))
            senders.add(sender)
            sender.add_done_callback(senders.discard)
        value, error = await answer
        if error is not None:
            raise RowRefusedError(error)
        return value

    async def _send_waiting(self, where: str) -> None:
        """Send calls that wait, in chunks, until there is none."""
        await asyncio.sleep(0)  # calls that come in the same turn of the loop go together
        while waiting := self._waiting.get(where):
            some, self._waiting[where] = waiting[:CHUNK_ROWS], waiting[CHUNK_ROWS:]
            try:
                results = await asyncio.wrap_future(self.submit(where, [row for row, _ in some]))
            except asyncio.CancelledError:
                for _, answer in [*some, *self._waiting.pop(where)]:
                    answer.cancel()
                return
            except Exception as failure:  # noqa: BLE001 - it is told to those who wait
                for _, answer in some:
                    if not answer.done():
                        answer.set_exception(failure)
                continue
            for (_, answer), result in zip(some, results, strict=True):
                if not answer.done():  # else its run was cancelled
                    answer.set_result(result)

    def submit(self, where: str, rows: Sequence[Arguments]) -> Future[list[HookResult]]:
        """Have a process call a function with these rows; the future is cancelled if the pool is closed."""
        try:
            return self._threads.submit(self._results, where, rows)
        except RuntimeError:  # it is closed
            future: Future[list[HookResult]] = Future()
            future.cancel()
            return future

    def close(self) -> None:
        """End the processes, whatever they are at; calls that wait are cancelled."""
        with self._lock:
            self._is_closed = True
            processes = [*self._processes]
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        self._threads.shutdown()
        for process in processes:
            process.end()

    def _results(self, where: str, rows: Sequence[Arguments]) -> list[HookResult]:
        """Return a result for each row, whatever becomes of the process at one of them."""
        results: list[HookResult] = []
        number = [*self.facts].index(where)
        while len(results) < len(rows):
            try:
                results += self._process().call(number, rows[len(results) :])
            except ProcessEndedError as failure:
                if self._is_closed:
                    raise CancelledError from None
                if len(rows) > 1:  # which row was it? each alone tells
                    return results + [self._results(where, [row])[0] for row in rows[len(results) :]]
                results = [HookResult(None, f"{where}: {self.facts[where].name}: {failure}")]
        return results

    def _process(self) -> HookProcess:
        """Return the process of this thread; raises HookLostError where one cannot load the functions."""
        process: HookProcess | None = getattr(self._own, "process", None)
        if process is not None and process.is_fit:
            return process
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if process is not None:
                self._processes.remove(process)
                process.end()
            process = self._own.process = HookProcess(self.setup)
            self._processes.append(process)
        for found in process.facts():
            self.facts.setdefault(found.where, found)
        return process


class ProcessEndedError(Exception):
    """A process ended in a call, or was ended: the message says how."""


class HookProcess:
    """A process; its methods block and are called in one thread, with which it ends."""

    def __init__(self, setup: WorkerSetup, worker: str = "hook_worker", *more: int) -> None:
        """Start the process, which loads the functions meanwhile; `worker` is the module that it runs.

        It gets the descriptors `more` too.
        """
        self._setup = setup
        self.is_fit = True
        """Whether it can take rows."""
        ours, theirs = socket.socketpair()
        paths = [*setup.directories, *map(os.path.abspath, sys.path)]  # "" is the current directory
        code = (
            f"import sys; sys.dont_write_bytecode = True; sys.path[:] = {paths!r}; "
            f"from batchrunner.core.{worker} import main; main{(theirs.fileno(), *more)}"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
                pass_fds=[theirs.fileno(), *more],
                start_new_session=True,  # no Ctrl-C of the terminal; and what it starts ends with it
            )
        self.channel = Connection(ours.detach())
        self._printing = threading.Thread(target=_log_lines, args=(self._process.stdout,), daemon=True)
        self._printing.start()

    def facts(self) -> Sequence[HookFacts]:
        """Return what is known of the functions once they are loaded; raises HookLostError."""
        try:
            found: Sequence[HookFacts] | str = self._ask(self._setup, TIMING.hook_import)
        except ProcessEndedError as failure:
            raise HookLostError(f"{self._setup.names}: cannot be imported: the import {failure}") from None
        if isinstance(found, str):
            self.is_fit = False
            raise HookLostError(found)
        return found

    def call(self, number: int, rows: Sequence[Arguments]) -> list[HookResult]:
        """Return the results of the first rows; raises ProcessEndedError."""
        results, self.is_fit = self._ask((number, rows), self._setup.limit_s, " (limits.python)")
        found: list[HookResult] = results
        return found

    def kill(self) -> None:
        """Kill the process and what it started; a thread that waits for it sees that."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and wait for its end; for its own thread, or when that has ended."""
        self.kill()
        self._process.wait()
        self.channel.close()
        self._printing.join(1.0)  # unless a program that a function started keeps its output open

    def _ask(self, value: Any, longest_s: float, named: str = "") -> Any:
        """Send a value and return the answer; raises ProcessEndedError."""
        ends_at = time.monotonic() + longest_s + ANSWER_S + TIMING.hook_end
        with contextlib.suppress(EOFError, OSError):
            self.channel.send(value)
            while time.monotonic() < ends_at:
                if self.channel.poll(_LOOK_S):
                    return self.channel.recv()
                if self._process.poll() is not None:  # what it started may keep the channel open
                    raise EOFError
            self.is_fit = False
            raise ProcessEndedError(f"took more than {longest_s:g} s{named}")
        self.is_fit = False
        raise ProcessEndedError(self.how_it_ended())

    def how_it_ended(self) -> str:
        """Wait for the end of a process that has closed its connection; return how it ended, in words."""
        try:
            status = self._process.wait(TIMING.hook_end)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        if how == "SIGKILL":
            how = "SIGKILL, which the kernel sends where memory runs out"
        return f"ended its process ({how})"


def _log_lines(output: IO[str]) -> None:
    """Log what a process prints."""
    with output:
        while line := output.readline(_LONGEST_LINE):
            if text := line.rstrip():
                log.info("python: %s", text)
