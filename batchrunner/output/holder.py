"""Which process holds a task, by the file or object `owner`, and whether it has ended, where it ran here."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path

import orjson

OWNER = "owner"
"""Name of the file in a task directory, or of the object, that names the task's holder."""
HEARTBEAT = "heartbeat"
"""Name of the file in a task directory with a counter that the holder increases."""
ABANDONED_PID = 0
"""Process ID in `owner` of a task that its holder gave up without finishing it."""
HELD_HERE: set[str] = set()
"""Tokens of the locks that this process holds."""
_ENDED_STATES = {"Z", "X", "x"}
"""States in /proc/PID/stat of a process that has ended: a zombie, or about to be removed."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A process, described so that processes on this and other machines can tell whether it runs."""

    host: str
    machine: str
    """/etc/machine-id. Like `boot` and `namespace` it is "" where it cannot be read."""
    boot: str
    """The kernel's ID of the machine's current boot."""
    namespace: str
    """The kernel's ID of the namespace that the process ID belongs to."""
    pid: int
    started: str
    """Start time of the process in kernel ticks: process IDs are reused."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random name of this holder, part of the names of its files."""
    beats: int = 0
    """Heartbeats, where the lock is an object, which has no file `heartbeat`."""
    is_clean: bool = False
    """Whether an object's holder gave the task up when all that it had was written."""

    def __str__(self) -> str:
        """Name it for a person."""
        return f"batchrun with pid {self.pid} on {self.host}"

    def is_dead(self, observer: LockHolder) -> bool | None:
        """Return whether the process has ended; None where the process `observer` cannot tell.

        This process counts as dead under the token of a lock that it could not release.
        """
        if self.pid == ABANDONED_PID:
            return True
        if (self.host, self.machine) != (observer.host, observer.machine) or not self.boot:
            return None
        if self.boot != observer.boot:
            return True if self.machine else None
        if self.namespace != observer.namespace:
            return None
        started = _start_time(self.pid)
        return started != self.started or (self.pid == os.getpid() and self.token not in HELD_HERE)


def this_process() -> LockHolder:
    """Describe the current process, with a new token."""
    return LockHolder(
        host=socket.gethostname(),
        machine=_text("/etc/machine-id"),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        started=_start_time(os.getpid()),
    )


def parse_holder(content: bytes) -> LockHolder | None:
    """Return the holder that `owner` names; None where the content is no whole name."""
    try:
        found = orjson.loads(content)
        return LockHolder(**{each.name: found[each.name] for each in fields(LockHolder)})
    except (ValueError, TypeError, KeyError):
        return None


def _start_time(pid: int) -> str:
    """Return the start time of a process that runs, "" where there is none (field 22 of /proc/PID/stat).

    A process that has ended stays in /proc as a zombie until its parent asks for its exit status, which the
    first process of a container may never do. Where only its main thread has ended, the others still run.
    """
    try:
        # after the name in brackets: field 3 is the state, field 20 the number of threads
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads, started = stat[0], int(stat[17]), stat[19]
    except (OSError, IndexError, ValueError):
        return ""
    return "" if state in _ENDED_STATES and threads <= 1 else started


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(path).readlink())
    return ""
