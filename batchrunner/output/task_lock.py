"""The lock of a task directory: at most one process writes a task, also across machines and on NFS.

No lock of the file system is used: NFS may not support them, and a crashed host may hold one for ever. The
lock is the file `owner`, created exclusively, which names its holder. A holder whose death is established
(`task_holder`) is replaced. One that was only stopped or cut off checks `owner` before each write, finds
another name in it, and ends.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import orjson

from batchrunner.core.errors import TaskHeldError, TaskLockLostError
from batchrunner.output.files import sync_directory
from batchrunner.output.run_dir import OWNER
from batchrunner.output.task_holder import (
    ABANDONED_PID,
    DEAD_AFTER_S,
    HEARTBEAT,
    POLL_S,
    SHORT_POLL_S,
    LivenessMonitor,
    LockHolder,
    parse_holder,
    read_bytes,
    this_process,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a holder."""


class TaskLock:
    """The lock of one task directory, before and while this process holds it."""

    def __init__(
        self,
        directory: Path,
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._owner = directory / OWNER
        self._heartbeat = directory / HEARTBEAT
        self._me = me or this_process()
        self._clock, self._sleep = clock, sleep
        self._beats = 0
        self.is_abandoned = False
        """Whether `release` will leave the lock to a process that recovers the task."""
        self.replaced_unclean = False
        """Whether a write of the holder before may still be under way."""

    @property
    def token(self) -> str:
        """Random name of this holder; the names of its files contain it."""
        return self._me.token

    beat_s = HEARTBEAT_S
    """Seconds between two heartbeats."""

    def acquire(self, dead_owner: bytes | None = None) -> None:
        """Become the holder; waits for up to DEAD_AFTER_S where the holder is on another machine.

        `dead_owner` is the content of `owner` where its holder is already known to be dead.
        Raises TaskHeldError where a running process holds the lock, OSError where nothing can be written.
        """
        while True:
            try:
                file = os.open(self._owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                self._remove_owner(self._wait_until_dead() if dead_owner is None else dead_owner)
                dead_owner = None
                continue
            try:
                self._write_owner(file)
                self.beat()
            except OSError:
                self.release()  # otherwise our name would stay, and this process runs
                raise
            return

    def beat(self) -> None:
        """Increase the counter in `heartbeat`. Raises OSError."""
        self._beats += 1
        _overwrite(self._heartbeat, f"{self._me.token} {self._beats:012d}".encode(), os.O_CREAT)

    def verify(self) -> None:
        """Raise TaskLockLostError where another process holds the lock, OSError where that is unreadable."""
        for _ in range(3):
            holder = parse_holder(read_bytes(self._owner, strict=True))
            if holder is not None and holder.token == self._me.token:
                return
            if not self._directory.parent.exists():  # the disk is gone, and nobody has taken the lock
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._owner))
            self._sleep(SHORT_POLL_S)  # a late `_remove_owner` of another process restores our name
        winner = parse_holder(read_bytes(self._owner)) or "another process"
        raise TaskLockLostError(f"{self._directory}: {winner} took this task over: what is on disk is kept")

    def note_recovered(self) -> None:
        """Note that earlier holders have left nothing to recover. Raises OSError."""

    def abandon(self) -> None:
        """Make `release` keep `owner`, marked as dead: another process is to recover the task."""
        self.is_abandoned = True

    def release(self) -> None:
        """Give the lock up, so that the next attempt need not wait; errors are ignored."""
        with contextlib.suppress(OSError, TaskLockLostError):
            self.verify()
            if self.is_abandoned:
                self._mark_abandoned()
                return
            self._heartbeat.unlink(missing_ok=True)
            self._owner.unlink(missing_ok=True)

    def _mark_abandoned(self) -> None:
        """Overwrite the process ID in `owner`, in place because the disk may be full."""
        name = orjson.dumps(asdict(replace(self._me, pid=ABANDONED_PID)))
        _overwrite(self._owner, name.ljust(self._owner.stat().st_size))

    def _write_owner(self, file: int) -> None:
        try:
            os.write(file, orjson.dumps(asdict(self._me)))
            os.fsync(file)
        finally:
            os.close(file)
        sync_directory(self._directory)

    def _wait_until_dead(self) -> bytes:
        """Return the content of `owner` once its holder is dead; raises TaskHeldError if it runs."""
        monitor, has_warned = LivenessMonitor(self._directory, self._me, clock=self._clock), False
        while (runs := monitor.poll()) is not False:
            if runs:
                raise TaskHeldError(
                    f"{self._directory}: {monitor.holder or 'another process'} is writing this run",
                    hint="wait for it or use another path",
                    mark=";",
                )
            if monitor.holder and not has_warned:
                has_warned = True
                log.warning(
                    "%s: waiting %.0f s to see whether %s still lives",
                    self._directory, DEAD_AFTER_S, monitor.holder,
                )  # fmt: skip
            self._sleep(POLL_S)
        return monitor.owner_content

    def _remove_owner(self, dead_owner: bytes) -> None:
        """Remove the `owner` of a dead holder by a rename, which succeeds for one of several processes.

        A process that comes late may rename the `owner` of a new holder: it puts that file back.
        """
        aside = self._owner.with_name(f"{OWNER}-{self._me.token}")
        try:
            self._owner.rename(aside)
        except FileNotFoundError:
            return
        if read_bytes(aside) != dead_owner:
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._owner)
        aside.unlink()


def _overwrite(path: Path, content: bytes, flags: int = 0) -> None:
    """Write at the beginning of a file, in place and durably; follows no symbolic link. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644)
    try:
        os.pwrite(file, content, 0)
        os.fsync(file)
    finally:
        os.close(file)
