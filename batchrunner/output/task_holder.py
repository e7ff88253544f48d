"""Which process holds a task directory, and whether it still runs.

The file `owner` names the holder, the file `heartbeat` holds a counter that the holder increases every few
seconds. A process on the same machine is looked up in /proc. One on another machine counts as dead when its
counter has stood still for DEAD_AFTER_S of the observer's clock: no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from batchrunner.core.files import read_regular
from batchrunner.core.timing import TIMING
from batchrunner.output.run_dir import OWNER, RunDir
from batchrunner.output.stores.store import LOCAL

HEARTBEAT = "heartbeat"
"""Name of the file in the task directory with the counter."""
DEAD_AFTER_S = 75.0
"""Seconds without a heartbeat after which a holder counts as dead; NFS may show an old file for 60 s."""
UNNAMED_AFTER_S = 5.0
"""Seconds after which an `owner` without a whole name counts as left by a process that died writing it."""
POLL_S = 1.0
"""Pause between two polls of another task's holder."""
SHORT_POLL_S = 0.2
"""Pause where a change is expected at once."""
ABANDONED_PID = 0
"""Process ID in `owner` of a task that its holder gave up without finishing it."""
FRESH_S = 15.0
"""Seconds after its last heartbeat during which a holder on another machine is known to run."""
_ENDED_STATES = {"Z", "X", "x"}
"""States in /proc/PID/stat of a process that has ended: a zombie, or about to be removed."""
SILENT_S = 300.0
"""Age from which a sample says nothing of a task elsewhere: it ended, or its clock is wrong. A sample
that is older although the task runs here is from an earlier attempt."""


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

    def __str__(self) -> str:
        """Name it for a person."""
        return f"batchrun with pid {self.pid} on {self.host}"

    def is_dead(self, observer: LockHolder) -> bool | None:
        """Return whether the process has ended; None where the process `observer` cannot tell."""
        if self.pid == ABANDONED_PID:
            return True
        if (self.host, self.machine) != (observer.host, observer.machine) or not self.boot:
            return None
        if self.boot != observer.boot:
            return True if self.machine else None
        if self.namespace != observer.namespace:
            return None
        return _start_time(self.pid) != self.started


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


class LivenessMonitor:
    """Observes a task's holder from outside; for one on another machine that takes up to DEAD_AFTER_S."""

    def __init__(
        self, directory: Path, me: LockHolder | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`directory` is the task directory, `me` the observing process."""
        self._owner, self._heartbeat = directory / OWNER, directory / HEARTBEAT
        self._me = me or this_process()
        self._clock = clock
        self._last_seen = (b"", b"")
        self._changed_at = clock()
        self._has_beaten = False  # since the first poll
        self.owner_content = b""
        """Content of `owner` at the last poll."""

    @property
    def holder(self) -> LockHolder | None:
        """The holder at the last poll; None where there was none, or no whole name."""
        return parse_holder(self.owner_content)

    fresh_s = FRESH_S
    """Seconds after its last heartbeat during which a holder on another machine is known to run."""

    def poll(self) -> bool | None:
        """Read the files again and return whether the holder runs; None while that is not known yet.

        A holder that released the task, or whose name is not whole after UNNAMED_AFTER_S, does not run.
        """
        before, now = self._last_seen, self._clock()
        self._last_seen = self._look()
        self.owner_content = self._last_seen[0]
        if self._last_seen != before:
            self._has_beaten = bool(before[0] and self.owner_content)  # a new `owner` is no heartbeat
            self._changed_at = now
        dead = self._has_ended(self.holder) if self.holder else None
        if dead is not None:
            return not dead
        if now - self._changed_at > (DEAD_AFTER_S if self.holder else UNNAMED_AFTER_S):
            return False
        # between its last heartbeat and the time when it counts as dead nobody knows
        return True if self._has_beaten and now - self._changed_at <= self.fresh_s else None

    def _has_ended(self, holder: LockHolder) -> bool | None:
        return holder.is_dead(self._me)

    def _look(self) -> tuple[bytes, bytes]:
        """Return the content of `owner`, and what changes with each heartbeat."""
        return read_bytes(self._owner), read_bytes(self._heartbeat)


def read_holder(directory: Path) -> LockHolder | None:
    """Return the process that `owner` of a task directory names; None where it names none."""
    return parse_holder(read_bytes(directory / OWNER))


def is_held(directory: Path) -> bool | None:
    """Return whether a running process holds a task directory; None where only its heartbeat can tell."""
    holder = read_holder(directory)
    if holder is None:
        return False
    dead = holder.is_dead(this_process())
    return None if dead is None else not dead


def holders_of(
    tasks: Sequence[tuple[RunDir, dict[str, Any] | None]], *, watch: bool = True
) -> list[str | None]:
    """Return the process that holds each task, or None; a task comes with the newest sample of its event log.

    A process on another machine runs if it has just written a sample. Where the sample is old, or its clock
    is another one, the heartbeat tells: those of all such tasks are watched for TIMING.other_heartbeat. Such
    tasks count as ended without `watch`, and in the copy of a run in an object store, which has no heartbeat.
    """
    held = [is_held(run_dir.task_directory) for run_dir, _ in tasks]
    unknown = {
        at: tasks[at][0].task_directory
        for at, (_, sample) in enumerate(tasks)
        if held[at] is None and sample and not is_recent(sample)
    }
    watched = {at: path for at, path in unknown.items() if watch and tasks[at][0].store is LOCAL}
    before = {at: read_bytes(path / HEARTBEAT) for at, path in watched.items()}
    if watched:
        time.sleep(TIMING.other_heartbeat)
    for at, path in unknown.items():
        held[at] = at in watched and read_bytes(path / HEARTBEAT) != before[at]
    return [
        None if holds is False else str(read_holder(run_dir.task_directory))
        for holds, (run_dir, _) in zip(held, tasks, strict=True)
    ]


def is_recent(sample: dict[str, Any]) -> bool:
    """Return whether a sample is of the last minutes, by this machine's clock."""
    return bool(abs(time.time() - sample["time"]) < SILENT_S)


def parse_holder(content: bytes) -> LockHolder | None:
    """Return the holder that an `owner` file names; None where the content is no whole name."""
    try:
        return LockHolder(**orjson.loads(content))
    except (ValueError, TypeError):
        return None


def read_bytes(path: Path, *, strict: bool = False) -> bytes:
    """Return a file's content, b"" where it does not exist; with `strict` raise any other OSError."""
    try:
        return read_regular(path)
    except OSError as failure:
        if strict and not isinstance(failure, FileNotFoundError):
            raise
        return b""


def _start_time(pid: int) -> str:
    """Return the start time of a process that runs, "" where there is none (field 22 of /proc/PID/stat).

    A process that has ended stays in /proc as a zombie until its parent asks for its exit status, which the
    first process of a container may never do. Where only its main thread has ended, the others still run.
    """
    try:
        # after the name in brackets: field 3 is the state, field 20 the number of threads
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads, started = fields[0], int(fields[17]), fields[19]
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
