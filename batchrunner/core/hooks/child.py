"""The process that runs a job's functions: it gets rows on a socket, and sends back what the calls came to.

Which row it is at stands in memory that it shares with the process that started it. So that process knows
which row is at fault when this one dies.
"""

import contextlib
import ctypes
import faulthandler
import mmap
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from batchrunner.core.hooks.functions import HookResult, HookSetup
from batchrunner.core.hooks.loading import HookLoadError, LoadedFunction, failure_text, load, place_of
from batchrunner.core.processes import STOP_SIGNALS

BEGUN, ENDED, EXPIRED = range(3)
"""Numbers in the shared memory: calls that began and that ended, and the call that takes too long."""
SHARED_BYTES = 3 * 8
TOO_LONG = signal.SIGUSR2
"""Signal that ends the call which takes too long."""
MOST_BYTES = 64 << 20
"""Most bytes of what one call returns."""
PIECE_BYTES, PIECE_S = 4 << 20, 0.1
"""Results are sent when they have so many bytes, or after so many seconds."""
_PR_SET_PDEATHSIG = 1


class CallTooLongError(BaseException):
    """Raised in a call that takes too long; no `except Exception` catches it."""


class HookServer:
    """Calls the functions of a job with one row after another."""

    def __init__(
        self, channel: Connection, shared: memoryview, functions: Sequence[LoadedFunction], limit_s: float
    ) -> None:
        self._channel = channel
        self._shared = shared
        self._functions = functions
        self._limit_s = limit_s
        self._is_calling = False
        self._process = os.getpid()
        signal.signal(TOO_LONG, self._on_too_long)

    def serve(self) -> None:
        """Answer lists of rows until nobody asks any more, or a call has left this process unfit."""
        is_fit = True
        while is_fit:
            number, rows = pickle.loads(self._channel.recv_bytes())  # noqa: S301 - of the process that started this one
            is_fit = self._run(self._functions[number], rows)

    def _run(self, function: LoadedFunction, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Call a function with each row and send the results in pieces; return whether all are sent."""
        piece: list[bytes] = []
        size, sent_at = 0, time.monotonic()
        for at, row in enumerate(rows):
            result, is_fit = self._call(function, row)
            piece.append(result)
            size += len(result)
            is_last = not is_fit or at == len(rows) - 1
            if is_last or size > PIECE_BYTES or time.monotonic() - sent_at > PIECE_S:
                self._channel.send_bytes(pickle.dumps((piece, is_fit)))
                piece, size, sent_at = [], 0, time.monotonic()
            if not is_fit:
                return False
        return True

    def _call(self, function: LoadedFunction, row: tuple[Any, ...]) -> tuple[bytes, bool]:
        """Return the pickled result of a call, and whether the process is fit for another one."""
        where = function.facts.where
        is_fit = True
        self._shared[BEGUN] += 1
        try:
            try:
                self._is_calling = True
                value = function.call(*row)
                result = HookResult(self._converted(function, value))
            finally:
                self._is_calling = False
                self._end_if_forked()
        except CallTooLongError as failure:
            at = place_of(failure)
            result = HookResult(None, f"{where}: {at}took more than {self._limit_s:g} s (limits.python)")
            is_fit = False  # what it held, such as a lock, may be held still
        except MemoryError as failure:
            result = HookResult(None, failure_text(where, failure) + " (limits.python_memory_gb)")
            is_fit = False
        except HookValueError as failure:
            result = HookResult(None, f"{where}: {failure}")
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything, SystemExit too
            result = HookResult(None, failure_text(where, failure))
        content = pickle.dumps(tuple(result), pickle.HIGHEST_PROTOCOL)
        if len(content) > MOST_BYTES:
            error = f"{where}: {function.facts.name} returned more than {MOST_BYTES >> 20} MiB"
            content = pickle.dumps((None, error))
        self._shared[ENDED] += 1
        return content, is_fit

    def _end_if_forked(self) -> None:
        """End a process that the function forked, and that came back from it: its answers are nobody's."""
        if os.getpid() != self._process:
            os._exit(0)

    def _converted(self, function: LoadedFunction, value: Any) -> Any:
        try:
            return function.conversion.convert(value)
        except ValueError as failure:
            raise HookValueError(f"{function.facts.name}: {failure}") from None

    def _on_too_long(self, number: int, frame: FrameType | None) -> None:
        """End the running call, if it is the one that takes too long."""
        del number, frame
        if self._is_calling and self._shared[EXPIRED] == self._shared[BEGUN]:
            raise CallTooLongError


class HookValueError(Exception):
    """A function returned what cannot be used."""


def main(channel_descriptor: int, shared_descriptor: int) -> None:
    """Load the functions, tell what is known of them, and run them until the other end closes."""
    _live_no_longer_than_parent()
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_take_signals)
    channel = Connection(channel_descriptor)
    shared = memoryview(mmap.mmap(shared_descriptor, SHARED_BYTES)).cast("Q")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        setup: HookSetup = pickle.loads(channel.recv_bytes())  # noqa: S301 - as above
        _be_killed_first()
        faulthandler.enable()
        sys.path[:0] = setup.directories
        sys.dont_write_bytecode = True  # a file that is changed twice in a second is read twice
        try:
            functions = load(setup.functions, setup.directories)
        except HookLoadError as failure:
            channel.send_bytes(pickle.dumps(str(failure)))
            return
        _limit_memory(setup.memory_bytes)
        channel.send_bytes(pickle.dumps([function.facts for function in functions]))
        HookServer(channel, shared, functions, setup.limit_s).serve()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, programs that a function starts do not inherit it."""


def _hold_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _take_signals() -> None:
    """Let a process that a function forks end by SIGTERM, with which `multiprocessing` ends its processes."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _release_signals()


def _live_no_longer_than_parent() -> None:
    """Have this process killed when the thread that started it ends, even by SIGKILL."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux: then it ends when it next reads
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _be_killed_first() -> None:
    """Let the kernel choose this process where memory runs out, not the run or its engine."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")


def _limit_memory(more_bytes: int) -> None:
    """Let this process take so much more memory than it has now; then a call gets a MemoryError."""
    with contextlib.suppress(OSError, OverflowError, ValueError), open("/proc/self/status") as file:  # noqa: PTH123
        sizes = dict(line.split(":", 1) for line in file)
        now = int(sizes["VmData"].split()[0]) << 10
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = now + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
