"""One process that runs a job's functions, as the thread sees it that feeds it."""

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from batchrunner.core.hooks.child import BEGUN, ENDED, EXPIRED, SHARED_BYTES, TOO_LONG
from batchrunner.core.hooks.functions import HookFacts, HookResult, HookSetup
from batchrunner.core.hooks.output import HookOutput
from batchrunner.core.timing import TIMING

_TICK_S = 0.2
"""Pause between two looks at the call that a silent process is at, in seconds."""
_END_LOOK_S = 0.005
"""Pause between two looks whether a silent process has ended, in seconds."""


class HookStartError(Exception):
    """The functions cannot be loaded; the message is one line for the user."""


class RunEnd(NamedTuple):
    """What came of some rows: the first results, and why there are no more."""

    results: list[HookResult]
    unsent: int = 0
    """Calls after these that ended well, whose results were lost with the process."""
    fault: str | None = None
    """How the call after those ended the process; None where no call did."""


class HookProcess:
    """A process; its methods block and are called in one thread, with which it ends."""

    def __init__(self, setup: HookSetup, output: HookOutput) -> None:
        """Start the process; it loads the functions meanwhile."""
        self._setup = setup
        ours, theirs = socket.socketpair()
        shared = os.memfd_create("batchrunner")
        os.truncate(shared, SHARED_BYTES)
        paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is the current directory
        code = (
            f"import sys; sys.path[:] = {paths!r}; from batchrunner.core.hooks.child import main; "
            f"main({theirs.fileno()}, {shared})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=output.descriptor,
                pass_fds=(theirs.fileno(), shared),
                start_new_session=True,  # no Ctrl-C of the terminal; and what it starts ends with it
            )
        self._shared = mmap.mmap(shared, SHARED_BYTES)
        self._numbers = memoryview(self._shared).cast("Q")
        os.close(shared)
        self._channel = Connection(ours.detach())

    def facts(self) -> list[HookFacts]:
        """Return what is known of the functions once they are loaded; raises HookStartError."""
        names = ", ".join(function.name for function in self._setup.functions)
        found: object = None
        with contextlib.suppress(OSError, EOFError):
            self._channel.send_bytes(pickle.dumps(self._setup))
            ends_at = time.monotonic() + TIMING.hook_import
            while not self._channel.poll(_TICK_S) and self.is_alive:
                if time.monotonic() > ends_at:
                    raise HookStartError(f"{names}: cannot be imported within {TIMING.hook_import:g} s")
            found = _received(self._channel) if self._channel.poll() else None
        if isinstance(found, str):
            raise HookStartError(found)
        if not isinstance(found, list):
            raise HookStartError(f"{names}: cannot be imported: the import ends its process ({self._end()})")
        return found

    def run(self, number: int, rows: Sequence[tuple[Any, ...]]) -> RunEnd:
        """Call function `number` of the setup with these rows, as far as the process lives."""
        results: list[HookResult] = []
        before = self._numbers[BEGUN]
        watch = _CallWatch(self._numbers, self._setup.limit_s)
        with contextlib.suppress(OSError, EOFError):
            self._channel.send_bytes(pickle.dumps((number, rows), pickle.HIGHEST_PROTOCOL))
            while len(results) < len(rows):
                if self._channel.poll(_TICK_S):
                    piece, is_fit = _received(self._channel)
                    results += (
                        HookResult(*pickle.loads(result))  # noqa: S301 - as `_received`
                        for result in piece
                    )
                    if not is_fit:
                        self.kill()
                        return RunEnd(results)
                elif watch.is_over():
                    self.kill()
                    unsent = self._numbers[ENDED] - before - len(results)
                    return RunEnd(
                        results, unsent, f"took more than {self._setup.limit_s:g} s (limits.python)"
                    )
                elif watch.is_late:
                    os.kill(self._process.pid, TOO_LONG)
                elif not self.is_alive:  # what it started may keep its connection open
                    break
            else:
                return RunEnd(results)
        end = self._end()
        begun, ended = self._numbers[BEGUN] - before, self._numbers[ENDED] - before
        if begun == ended:
            return RunEnd(results)
        return RunEnd(results, ended - len(results), f"ended its process ({end})")

    @property
    def is_alive(self) -> bool:
        """Whether it can take rows."""
        if self._process.returncode is not None:
            return False
        with contextlib.suppress(ChildProcessError):  # not reaped: then no other group can have its number
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def kill(self) -> None:
        """End the process, and what it started."""
        self.interrupt()
        self._process.wait()
        self._channel.close()

    def interrupt(self) -> None:
        """End the process from another thread; whatever waits for it sees that."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> str:
        """Wait for the end of a process that is silent; return how it ended."""
        ends_at = time.monotonic() + TIMING.hook_end
        while self.is_alive and time.monotonic() < ends_at:
            time.sleep(_END_LOOK_S)
        ended_itself = not self.is_alive
        self.kill()
        if not ended_itself:
            return "it closed its connection"
        status = self._process.returncode
        if status >= 0:
            return f"exit code {status}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            return f"{name}, which the kernel sends where memory runs out" if name == "SIGKILL" else name
        return f"signal {-status}"


def _received(channel: Connection) -> Any:
    """Return what the process sent: plain Python, by the functions that this run's own job names."""
    return pickle.loads(channel.recv_bytes())  # noqa: S301


class _CallWatch:
    """Sees how long a process has been at one call; time in which this process was stopped does not count."""

    def __init__(self, numbers: memoryview, limit_s: float) -> None:
        self._numbers = numbers
        self._limit_s = limit_s
        self._call = -1
        self._waited_s = 0.0
        self._looked_at = time.monotonic()
        self.is_late = False
        """Whether the call takes too long and is to be told so."""

    def is_over(self) -> bool:
        """Look once; tell whether the call goes on although it was told to end."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, 2 * _TICK_S), now
        call = self._numbers[BEGUN]
        if call != self._call or call == self._numbers[ENDED]:
            self._call, self._waited_s, self.is_late = call, 0.0, False
            return False
        self._waited_s += passed_s
        self.is_late = self._waited_s >= self._limit_s
        if self.is_late:
            self._numbers[EXPIRED] = call
        return self._waited_s >= self._limit_s + TIMING.hook_end
