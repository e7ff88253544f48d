"""A worker process for a job's Python functions, as seen by the run that starts, calls and kills it.

Process pools of other libraries do not fit. `concurrent.futures` and loky have no time limit, and break or
hang when a process dies. Pebble has a time limit, but its processes import the user's main module again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from batchrunner.core.errors import HookLostError
from batchrunner.core.hook_protocol import FLUSH_S, Channel, HookFacts, HookResult, WorkerSetup
from batchrunner.core.timing import TIMING

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two checks whether a process is alive and whether its run has been stopped."""
_LONGEST_LINE = 2000
"""Maximum length in characters of a log line; a longer printed line is split."""
Arguments = tuple[Any, ...]
"""Arguments of one call of a job's Python function."""


class ProcessEndedError(Exception):
    """A worker process ended, or was killed, during a call. The message says how."""


class HookProcess:
    """A worker process for Python functions. One thread owns it and calls its methods, which block.

    The process ends with that thread.
    """

    def __init__(self, setup: WorkerSetup, step_descriptor: int | None = None) -> None:
        """Start the process. It loads the functions once `facts` has sent it the setup.

        `step_descriptor` is the file descriptor of memory in which the process records the running step of a
        rollout (STEP_BYTES). A process with such memory runs multi-turn rollouts, a process without it plain
        calls.
        """
        self._setup = setup
        self.is_fit = True
        """Whether the process can take rows. It cannot after it died, timed out or ran out of memory."""
        our_end, its_end = socket.socketpair()
        # `sys.path` may have "" for the current directory, so the paths are made absolute.
        paths = [*setup.directories, *map(os.path.abspath, sys.path)]
        # `dont_write_bytecode` keeps .pyc files away from the user's modules.
        code = (
            f"import sys; sys.dont_write_bytecode = True; sys.path[:] = {paths!r}; "
            f"from batchrunner.core.hook_worker import main; main({its_end.fileno()}, {step_descriptor})"
        )
        shared = [its_end.fileno()] if step_descriptor is None else [its_end.fileno(), step_descriptor]
        with its_end:
            self._process = subprocess.Popen(
                # -u: what functions print appears at once. -P: Python adds no directory to `sys.path`.
                [sys.executable, "-u", "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
                pass_fds=shared,
                # In a session of its own, the process gets no Ctrl-C from the terminal, and `kill` also ends
                # programs that a function has started.
                start_new_session=True,
            )
        self.channel = Channel(our_end)
        self._printing = threading.Thread(target=_log_lines, args=(self._process.stdout,), daemon=True)
        self._printing.start()

    def facts(self) -> Sequence[HookFacts]:
        """Wait until the functions are loaded; return their properties.

        Raises HookLostError if the functions cannot be loaded.
        """
        try:
            (reply,) = self._request(self._setup, limit_s=TIMING.hook_import)
        except ProcessEndedError as failure:
            raise HookLostError(f"{self._setup.names}: cannot be imported: the import {failure}") from None
        if isinstance(reply, str):  # A text says why a function cannot be loaded.
            self.is_fit = False
            raise HookLostError(reply)
        facts: Sequence[HookFacts] = reply
        return facts

    def call(self, number: int, rows: Sequence[Arguments]) -> list[HookResult]:
        """Call function `number` (its index in `facts`) with each row, and return the results in order.

        After FLUSH_S the process stops early, and returns only the results of the first rows. Raises
        ProcessEndedError if the process ends, or if the call exceeds its time limit.
        """
        limit_s = self._setup.limit_s
        results, self.is_fit = self._request(number, rows, limit_s=limit_s, limit_name=" (limits.python)")
        checked: list[HookResult] = results
        return checked

    def kill(self) -> None:
        """Kill the process and its child processes. A call that waits for the process then fails."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and wait for its end.

        Only the thread that owns the process may call this; after that thread has ended, any thread may.
        """
        self.kill()
        self._process.wait()
        self.channel.close()
        # A program that a function started may keep the output open, so do not wait for longer.
        self._printing.join(1.0)

    def has_ended(self) -> bool:
        """Tell whether the process has ended. Its child processes may still keep the channel open."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """Wait for the end of a process that has closed its channel; return in words how it ended."""
        try:
            status = self._process.wait(TIMING.hook_end)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        if how == "SIGKILL":
            how = "SIGKILL, which the kernel sends when memory runs out"
        return f"ended its process ({how})"

    def _request(self, *values: Any, limit_s: float, limit_name: str = "") -> tuple[Any, ...]:
        """Send values and return the reply.

        Raises ProcessEndedError if the process ends, or does not reply within `limit_s`. `limit_name` is the
        name of the limit in the message.
        """
        # The worker itself ends a call after `limit_s`. Before, it may have spent FLUSH_S on other rows.
        ends_at = time.monotonic() + limit_s + FLUSH_S + TIMING.hook_end
        # EOFError and OSError mean that the process has closed its end of the channel.
        with contextlib.suppress(EOFError, OSError):
            self.channel.send(*values)
            while time.monotonic() < ends_at:
                if self.channel.can_receive(POLL_S):
                    return self.channel.receive()
                if self.has_ended():  # A child process may keep the channel open. Then no EOFError comes.
                    raise EOFError
            self.is_fit = False
            raise ProcessEndedError(f"took more than {limit_s:g} s{limit_name}")
        self.is_fit = False
        raise ProcessEndedError(self.how_it_ended())


def _log_lines(output: IO[str]) -> None:
    with output:
        while line := output.readline(_LONGEST_LINE):
            if text := line.rstrip():
                log.info("python: %s", text)
