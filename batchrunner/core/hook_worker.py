"""A process that calls a job's Python functions: it gets rows on a socket, and sends back what came of them.

It runs in a session of its own, without the job's engine, and is started by `hook_pool`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from batchrunner.core.processes import STOP_SIGNALS

ROLLOUT = "prompt.rollout"
"""Place in a job of the asynchronous function that `core.rollout_worker` runs."""
ANSWER_S = 1.0
"""Time after which the results of some rows are sent without waiting for those of the others."""
_NOT_OWN = (str(Path(__file__).parent.parent), *{*sysconfig.get_paths().values(), "<frozen"})
"""Beginnings of the paths of files that are not the user's own."""
_LONGEST_ERROR = 500
_PR_SET_PDEATHSIG = 1


class HookResult(NamedTuple):
    """What one call came to: a value, or the error of its row."""

    value: Any
    error: str | None = None


class HookFacts(NamedTuple):
    """What is known of a function once it is loaded."""

    where: str
    """Its place in the job, such as `prompt.python`."""
    name: str
    """Its name in messages, `module:function`."""
    columns: tuple[tuple[str, Any], ...] = ()
    """Columns that it makes, with their kinds."""
    takes_row: bool = False
    """Whether it is called with the answer and the row, not with the answer only."""
    reads: tuple[str, ...] | None = None
    """Columns of a row that it reads, where the annotation of its argument says so."""


class HookLoadError(Exception):
    """A function that cannot be called; the message is one line for the user."""


class UnusableValueError(Exception):
    """A function returned what cannot be used; the message follows the function's place in the job."""


class WorkerSetup(NamedTuple):
    """What a worker needs."""

    load: Callable[[], tuple[Sequence[HookFacts], Sequence[Callable[..., Any]]]]
    """Returns what is known of the functions, and the functions, which may raise UnusableValueError; raises
    HookLoadError."""
    names: str
    """Names of the functions, for messages."""
    directories: tuple[str, ...]
    """Where modules are looked up before the paths of the run's process, in order."""
    limit_s: float
    """Time of one call, in seconds."""
    memory_bytes: int
    """Memory that the process may take beyond what it has when its modules are imported."""


class CallTooLongError(BaseException):
    """Raised in a call that takes too long; no `except Exception` catches it."""


Functions = tuple[WorkerSetup, Sequence[HookFacts], Sequence[Callable[..., Any]]]


def load(channel: Connection) -> Functions | None:
    """Load the functions that the other end names, and tell it what is known of them; None on an error."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux: then it ends when it next reads
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # when its pool's thread ends
    _leave_stop_signals_to_the_run()
    faulthandler.enable()
    try:
        setup: WorkerSetup = channel.recv()
        facts, functions = setup.load()
    except HookLoadError as failure:
        channel.send(str(failure))
        return None
    _limit_memory(setup.memory_bytes)
    channel.send(facts)
    return setup, facts, functions


def main(descriptor: int) -> None:
    """Load the functions, and call them until the other end closes."""
    channel = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        signal.signal(signal.SIGALRM, _end_call)
        loaded = load(channel)
        if loaded is None:
            return
        setup, facts, functions = loaded
        is_fit = True
        while is_fit:
            number, rows = channel.recv()
            results, is_fit = _call_all(functions[number], facts[number].where, rows, setup.limit_s)
            channel.send((results, is_fit))


def _call_all(
    function: Callable[..., Any], where: str, rows: Sequence[tuple[Any, ...]], limit_s: float
) -> tuple[list[HookResult], bool]:
    """Return the results of the first rows, and whether the process is fit for others."""
    results: list[HookResult] = []
    process, ends_at = os.getpid(), time.monotonic() + ANSWER_S
    is_fit = True
    for row in rows:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                result = HookResult(function(*row))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if os.getpid() != process:  # forked by the function: its results are nobody's
                    os._exit(0)
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything, SystemExit too
            is_fit = not isinstance(failure, (CallTooLongError, MemoryError))  # it may hold a lock still
            result = HookResult(None, failure_text(where, failure, limit_s))
        results.append(result)
        if not is_fit or time.monotonic() > ends_at:
            break
    return results, is_fit


def failure_text(where: str, failure: BaseException, limit_s: float = 0.0) -> str:
    """Return an exception of a function as the error of its row: place, file and line, class, message."""
    if isinstance(failure, UnusableValueError):
        return f"{where}: {failure}"
    frames = traceback.extract_tb(failure.__traceback__)
    while isinstance(failure, BaseExceptionGroup):  # of asyncio.TaskGroup: its first one says why
        failure = failure.exceptions[0]
        frames += traceback.extract_tb(failure.__traceback__)
    file = ""
    line: int | None = None
    for frame in frames:
        if not frame.filename.startswith(_NOT_OWN):
            file, line = frame.filename, frame.lineno
    if isinstance(failure, SyntaxError):
        file, line = failure.filename or "", failure.lineno
    place = f"{where}: {Path(file).name}:{line}: " if file else f"{where}: "
    if isinstance(failure, CallTooLongError):
        return f"{place}took more than {limit_s:g} s (limits.python)"
    said = " ".join(traceback.format_exception_only(failure)[-1].split())
    more = " (limits.python_memory_gb)" if isinstance(failure, MemoryError) else ""
    return f"{place}{said}"[:_LONGEST_ERROR] + more


def _end_call(*_: object) -> None:
    raise CallTooLongError


def _leave_stop_signals_to_the_run() -> None:
    """Ignore signals that stop the run, but not in processes that a function starts."""

    def in_child() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # multiprocessing ends its processes with SIGTERM

    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited
    os.register_at_fork(after_in_child=in_child)


def _limit_memory(more_bytes: int) -> None:
    """Let this process take so much more memory than it has now; then a call gets a MemoryError."""
    with contextlib.suppress(OSError, OverflowError, ValueError):
        sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        most = (int(sizes["VmData"].split()[0]) << 10) + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
