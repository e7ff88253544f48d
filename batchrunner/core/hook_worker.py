"""The program of a worker process, which calls a job's Python functions for `hook_process`."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.hook_protocol import (
    FLUSH_S,
    CallTooLongError,
    Channel,
    HookFacts,
    HookLoadError,
    HookResult,
    WorkerSetup,
    failure_text,
)
from batchrunner.core.processes import STOP_SIGNALS
from batchrunner.core.rollout_worker import run_rollouts

_PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: the signal that this process gets when the thread that started it ends."""


def main(descriptor: int, step_descriptor: int | None) -> None:
    """Load the functions, and call them until the run closes its end of the socket.

    `descriptor` is this process's end of the socket. `step_descriptor` is the file descriptor of memory
    shared with the run. With it, the worker runs multi-turn rollouts, otherwise plain calls.
    """
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _prepare_process()
        setup: WorkerSetup
        (setup,) = channel.receive()
        try:
            facts, functions = setup.load()
        except HookLoadError as failure:
            # The run expects properties of the functions. A text instead says why there are none.
            channel.send(str(failure))
            return
        _limit_memory(setup.memory_bytes)  # Memory that the imports took does not count for the limit.
        channel.send(facts)
        if step_descriptor is None:
            _answer_calls(channel, setup.limit_s, facts, functions)
            return
        run_rollouts(channel, step_descriptor, facts, functions)


def _prepare_process() -> None:
    # The kernel kills this process when the thread that owns it ends. Without prctl, its next read of the
    # channel fails.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _leave_stop_signals_to_the_run()
    faulthandler.enable()


def _answer_calls(
    channel: Channel,
    limit_s: float,
    facts: Sequence[HookFacts],
    functions: Sequence[Callable[..., Any]],
) -> None:
    """Receive messages with rows, call functions with these rows, and send back the results.

    Each message names one of the `functions` by its index. Returns once this process cannot take more rows.
    """
    signal.signal(signal.SIGALRM, _raise_call_too_long)
    is_fit = True
    while is_fit:
        number, rows = channel.receive()
        results, is_fit = _call_all(functions[number], facts[number].where, rows, limit_s)
        channel.send(results, is_fit)


def _call_all(
    function: Callable[..., Any], place: str, rows: Sequence[tuple[Any, ...]], limit_s: float
) -> tuple[list[HookResult], bool]:
    """Call the function with each row; return the results, and whether this process can take more rows.

    The calls end early after FLUSH_S, or once the process cannot take more rows. Then only the first rows
    have results.
    """
    results: list[HookResult] = []
    process, flush_at = os.getpid(), time.monotonic() + FLUSH_S
    is_fit = True
    for row in rows:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                result = HookResult(function(*row))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if os.getpid() != process:  # The function forked, and this is the child process.
                    os._exit(0)
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything, SystemExit too
            # An interrupted function may still hold a lock, so a later call could hang.
            is_fit = not isinstance(failure, (CallTooLongError, MemoryError))
            result = HookResult(None, failure_text(place, failure, limit_s))
        results.append(result)
        if not is_fit or time.monotonic() > flush_at:
            break
    return results, is_fit


def _raise_call_too_long(*_: object) -> None:
    raise CallTooLongError


def _leave_stop_signals_to_the_run() -> None:
    """Ignore the signals that stop a run, except in child processes that the user's functions start."""

    def restore_in_child() -> None:
        for number in STOP_SIGNALS:
            # multiprocessing ends its child processes by SIGTERM, so they must not ignore it.
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        # SIG_IGN would be inherited by programs that a function starts. An empty handler is not.
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=restore_in_child)


def _limit_memory(extra_bytes: int) -> None:
    """Limit the data memory of this process to its present size plus `extra_bytes`.

    An allocation beyond the limit raises MemoryError. If the limit cannot be set, there is none.
    """
    with contextlib.suppress(OSError, OverflowError, ValueError):
        sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        limit = (int(sizes["VmData"].split()[0]) << 10) + extra_bytes  # VmData is in KiB.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
