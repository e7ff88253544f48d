"""The process that holds a task (a worker's share of a run), as the file or object `owner` names it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from zlib import crc32

import orjson

OWNER = "owner"
"""Name, without its directory, of the file or object that says which process holds a worker's lock."""
HEARTBEAT = "heartbeat"
"""File with a counter, which the process that holds a worker's lock increments to show that it runs."""
ABANDONED_PID = 0
"""Process ID in `owner` if the process gave up its work before it was done."""
HELD_HERE: set[str] = set()
"""Tokens (`LockHolder.token`) of the locks that this process holds."""
_ENDED_STATES = {"Z", "X", "x"}
"""States in /proc/PID/stat of a process that has ended: zombie and dead."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Identity of a process, by which processes on any machine can tell whether it runs."""

    host: str
    machine: str
    """Content of /etc/machine-id; "" if it cannot be read."""
    boot: str
    """The kernel's ID of the boot during which the process runs; "" if it cannot be read."""
    namespace: str
    """The kernel's ID of the PID namespace of `pid`; "" if it cannot be read."""
    pid: int
    started: str
    """Start time of the process in kernel ticks; distinguishes it from others that had the same ID."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random hexadecimal name of the process, a part of the names of its journals and temporary files."""
    beats: int = 0
    """Number of heartbeats so far, if the lock is in an object store; else 0."""
    is_clean: bool = False
    """Whether the process had written all its rows when it released its lock.

    Used only in an object store.
    """

    @property
    def machine_key(self) -> str:
        """Key of the machine in eight hexadecimal digits: two processes on one machine have the same key."""
        return f"{crc32(f'{self.host} {self.machine}'.encode()):08x}"

    def __str__(self) -> str:
        """Return the name of the process for messages."""
        return f"batchrun with pid {self.pid} on {self.host}"

    def is_dead(self, observer: LockHolder) -> bool | None:
        """Tell whether the process has ended; None if `observer`, the process that asks, cannot know.

        This very process counts as dead if HELD_HERE lacks its token: it has given up the lock, but could not
        release it.
        """
        if self.pid == ABANDONED_PID:
            return True
        if (self.host, self.machine) != (observer.host, observer.machine) or not self.boot:
            return None  # The process may run on another machine.
        if self.boot != observer.boot:
            # The machine has restarted since then. If its ID is unknown, it may be another machine of the
            # same name.
            return True if self.machine else None
        if self.namespace != observer.namespace:
            return None  # `pid` belongs to another container, so it cannot be looked up here.
        # With another start time, `pid` now belongs to another process, and this one has ended.
        is_other_process = _start_time(self.pid) != self.started
        return is_other_process or (self.pid == os.getpid() and self.token not in HELD_HERE)


def this_process() -> LockHolder:
    """Return the identity of the current process, with a new token."""
    # The default of the field `token` is a new random name.
    return LockHolder(
        host=socket.gethostname(),
        machine=_text("/etc/machine-id"),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        started=_start_time(os.getpid()),
    )


def parse_holder(content: bytes) -> LockHolder | None:
    """Return the process that the content of `owner` names; None if the content is incomplete."""
    try:
        values = orjson.loads(content)
        return LockHolder(**{field.name: values[field.name] for field in fields(LockHolder)})
    except (ValueError, TypeError, KeyError):
        return None


def _start_time(pid: int) -> str:
    """Return the start time of a running process (field 22 of /proc/PID/stat); "" if it does not run.

    A process that has ended stays in /proc as a zombie until its parent reads its exit status, which the
    first process of a container may never do. A process whose main thread has ended looks like a zombie too,
    but runs as long as it has other threads.
    """
    try:
        # The name in brackets is followed by field 3, the state. Field 20 has the threads, field 22 the start
        # time.
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads, start_time = stat[0], int(stat[17]), stat[19]
    except (OSError, IndexError, ValueError):
        return ""
    return "" if state in _ENDED_STATES and threads <= 1 else start_time


def _text(path: str) -> str:
    """Return the content of a file; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _link(path: str) -> str:
    """Return the target of a symbolic link; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return str(Path(path).readlink())
    return ""
