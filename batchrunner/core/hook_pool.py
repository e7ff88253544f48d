"""A pool of processes that call a job's Python functions: each call has a time limit and bounded memory.

`concurrent.futures` and loky end, or wait for ever, when a process dies, and have no time limit; pebble has
one, but its processes import the user's main module again. Here each thread of a pool has a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from typing import Any

from batchrunner.core.errors import HookLostError, JobError, RowRefusedError
from batchrunner.core.hook_worker import ANSWER_S, HookFacts, HookResult, WorkerSetup
from batchrunner.core.timing import TIMING

log = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Processes unless the job says how many; never more than cores."""
MOST_CHUNK_ROWS, FIRST_CHUNK_ROWS = 512, 8
"""Rows that a process gets at once, at most, and while nothing is known of their time."""
CHUNK_S = 0.05
"""Time that a process should need for the rows that it gets at once, in seconds."""
_LOOK_S = 0.2
"""Pause between two looks whether a process lives, or a run is stopped."""
_LONGEST_LINE, _READ_BYTES = 2000, 1 << 16
Arguments = tuple[Any, ...]
"""Arguments of a call."""


class HookPool:
    """Processes that call the functions of one job. Thread-safe; they start when they are needed."""

    def __init__(self, setup: WorkerSetup, processes: int | None = None) -> None:
        """Take what a worker needs; `processes` is the most of them, by default one for each core."""
        self._setup = setup
        self._most = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        self._threads = ThreadPoolExecutor(self._most, "batchrunner functions")
        self._own = threading.local()  # the process of a thread
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._output = _Output()
        self._row_s: dict[str, float] = {}
        self._gatherers: dict[str, _Gatherer] = {}
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
        known = self._row_s.get(where)
        size = FIRST_CHUNK_ROWS if known is None else int(CHUNK_S / max(known, 1e-7))
        size = max(1, min(size, -(-len(rows) // self._most), MOST_CHUNK_ROWS))
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
        loop = asyncio.get_running_loop()
        gatherer = self._gatherers.get(where)
        if gatherer is None or gatherer.loop is not loop:
            gatherer = self._gatherers[where] = _Gatherer(self, where, loop, self._most)
        value, error = await gatherer.call(row)
        if error is not None:
            raise RowRefusedError(error)
        return value

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
        self._output.close()

    def _results(self, where: str, rows: Sequence[Arguments]) -> list[HookResult]:
        """Return a result for each row, whatever becomes of the process at one of them."""
        began, results = time.monotonic(), list[HookResult]()
        number = [*self.facts].index(where)
        while len(results) < len(rows):
            try:
                results += self._process().call(number, rows[len(results) :])
            except _ProcessEndedError as failure:
                if self._is_closed:
                    raise CancelledError from None
                if len(rows) > 1:  # which row was it? each alone tells
                    return results + [self._results(where, [row])[0] for row in rows[len(results) :]]
                results = [HookResult(None, f"{where}: {self.facts[where].name}: {failure}")]
        row_s = (time.monotonic() - began) / len(rows)
        self._row_s[where] = (self._row_s.get(where, row_s) + row_s) / 2
        return results

    def _process(self) -> _Process:
        """Return the process of this thread; raises HookLostError where one cannot load the functions."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is not None and process.is_fit:
            return process
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if process is not None:
                self._processes.remove(process)
                process.end()
            try:
                process = _Process(self._setup, self._output.descriptor)
            except OSError as failure:
                raise HookLostError(f"{sys.executable}: cannot be started: {failure}") from None
            self._own.process = process
            self._processes.append(process)
        for found in process.facts():
            known = self.facts.setdefault(found.where, found)
            if known.digest != found.digest:
                log.warning("%s changed while the run is at work: rows are made by both versions", found.name)
                self.facts[found.where] = known._replace(digest=found.digest)
        return process


class _Gatherer:
    """Sends calls of an event loop in chunks: while each process has one, further calls wait."""

    def __init__(self, pool: HookPool, where: str, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self.loop = loop
        self._pool = pool
        self._where = where
        self._free = most
        self._is_called = False
        self._waiting: list[tuple[Arguments, asyncio.Future[HookResult]]] = []

    async def call(self, row: Arguments) -> HookResult:
        """Return the result of a call."""
        answer: asyncio.Future[HookResult] = self.loop.create_future()
        self._waiting.append((row, answer))
        if not self._is_called and self._free:
            self._is_called = True
            self.loop.call_soon(self._send)
        return await answer

    def _send(self) -> None:
        self._is_called = False
        while self._waiting and self._free:
            some, self._waiting = self._waiting[:MOST_CHUNK_ROWS], self._waiting[MOST_CHUNK_ROWS:]
            self._free -= 1
            results = asyncio.wrap_future(self._pool.submit(self._where, [row for row, _ in some]))
            results.add_done_callback(functools.partial(self._deliver, [answer for _, answer in some]))

    def _deliver(
        self, answers: Sequence[asyncio.Future[HookResult]], results: asyncio.Future[list[HookResult]]
    ) -> None:
        self._free += 1
        failure = None if results.cancelled() else results.exception()
        for at, answer in enumerate(answers):
            if answer.done():  # its run was cancelled
                continue
            if results.cancelled() or isinstance(failure, (CancelledError, asyncio.CancelledError)):
                answer.cancel()
            elif failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(results.result()[at])
        self._send()


class _ProcessEndedError(Exception):
    """A process ended in a call, or was ended: the message says how."""


class _TooLongError(Exception):
    """A process is silent for too long."""


class _Process:
    """A process; its methods block and are called in one thread, with which it ends."""

    def __init__(self, setup: WorkerSetup, output: int) -> None:
        """Start the process; it loads the functions meanwhile."""
        self._setup = setup
        self.is_fit = True
        """Whether it can take rows."""
        ours, theirs = socket.socketpair()
        paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the current directory
        code = (
            f"import sys; sys.path[:] = {paths!r}; from batchrunner.core.hook_worker import main; "
            f"main({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # no Ctrl-C of the terminal; and what it starts ends with it
            )
        self._channel = Connection(ours.detach())

    def facts(self) -> Sequence[HookFacts]:
        """Return what is known of the functions once they are loaded; raises HookLostError."""
        names = self._setup.names
        try:
            self._send(self._setup.directories)
            self._send(self._setup)
            found = self._received(TIMING.hook_import)
        except _TooLongError:
            raise HookLostError(f"{names}: cannot be imported within {TIMING.hook_import:g} s") from None
        except _ProcessEndedError as failure:
            how = str(failure).removeprefix("ended its process ")
            raise HookLostError(f"{names}: cannot be imported: the import ends its process {how}") from None
        if isinstance(found, str):
            self.is_fit = False
            raise HookLostError(found)
        facts: Sequence[HookFacts] = found[0]
        return facts

    def call(self, number: int, rows: Sequence[Arguments]) -> list[HookResult]:
        """Return the results of the first rows; raises _ProcessEndedError."""
        limit_s = self._setup.limit_s
        try:
            self._send((number, rows))
            results, self.is_fit = self._received(ANSWER_S + limit_s + TIMING.hook_end)
        except _TooLongError:
            raise _ProcessEndedError(f"took more than {limit_s:g} s (limits.python)") from None
        found: list[HookResult] = results
        return found

    def kill(self) -> None:
        """Kill the process and what it started; a thread that waits for it sees that."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and wait for its end; for its own thread, or when that has ended."""
        self.kill()
        self._process.wait()
        self._channel.close()

    def _send(self, value: Any) -> None:
        try:
            self._channel.send(value)
        except OSError:
            raise self._ended() from None

    def _received(self, longest_s: float) -> Any:
        """Return what the process sends; raises _TooLongError, or _ProcessEndedError."""
        ends_at = time.monotonic() + longest_s
        with contextlib.suppress(EOFError, OSError):
            while time.monotonic() < ends_at:
                if self._channel.poll(_LOOK_S):
                    return self._channel.recv()
                if self._exited():  # what it started may keep its end of the channel open
                    raise EOFError
            self.is_fit = False
            raise _TooLongError
        raise self._ended()

    def _exited(self) -> bool:
        """Tell whether it has ended; it is not reaped, so no other process group can have its number."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _ended(self) -> _ProcessEndedError:
        self.is_fit = False
        ends_at = time.monotonic() + TIMING.hook_end
        while not self._exited() and time.monotonic() < ends_at:
            time.sleep(0.005)
        ended_itself = self._exited()
        self.kill()
        status = self._process.wait()
        how = f"exit code {status}" if status >= 0 else f"signal {-status}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(-status).name if status < 0 else how
        if not ended_itself:
            how = "it closed its connection"
        elif how == "SIGKILL":
            how = "SIGKILL, which the kernel sends where memory runs out"
        return _ProcessEndedError(f"ended its process ({how})")


class _Output:
    """A pipe for what the functions print, and the thread that logs its lines."""

    def __init__(self) -> None:
        reading, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=_log_lines, args=(reading,), daemon=True, name="output")
        self._thread.start()

    def close(self) -> None:
        """Log what is left, unless a program that a function started keeps the pipe open."""
        os.close(self.descriptor)
        self._thread.join(1.0)


def _log_lines(reading: int) -> None:
    rest = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while read := pipe.read(_READ_BYTES):
            *lines, rest = (rest + read).split(b"\n")
            if len(rest) > _READ_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                _log_line(line)
    _log_line(rest)


def _log_line(line: bytes) -> None:
    text = line.decode("utf-8", "replace").rstrip()
    if text:
        log.info("python: %s", text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…")
