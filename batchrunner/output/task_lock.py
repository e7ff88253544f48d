"""The lock of a task: at most one process writes a task, also across machines, on NFS and in object stores.

No lock of the file system is used: NFS may not support them, and a crashed host may hold one for ever. The
lock is the file or object `owner`, created exclusively, which names its holder. A holder whose death is
established (`liveness`) is replaced. One that was only stopped or cut off verifies its lock before each
write, finds another name in it, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import TaskHeldError, TaskLockLostError
from batchrunner.output.files import make_directory, sync_directory, using_run
from batchrunner.output.holder import (
    ABANDONED_PID,
    HEARTBEAT,
    HELD_HERE,
    OWNER,
    LockHolder,
    parse_holder,
    this_process,
)
from batchrunner.output.liveness import (
    DEAD_AFTER_S,
    LOOK_S,
    POLL_S,
    SHORT_POLL_S,
    LivenessMonitor,
    look_at_files,
    read_bytes,
)
from batchrunner.output.run_dir import RunDir

if TYPE_CHECKING:
    from batchrunner.output.objects import RunObjects

log = logging.getLogger(__name__)

HEARTBEAT_S, STORE_HEARTBEAT_S = 5.0, 15.0
"""Seconds between two heartbeats, of a file or an object; the latter are 240 requests an hour."""
TRUSTED_S = 45.0
"""Seconds after a heartbeat in a store during which the lock is held for sure, less than DEAD_AFTER_S."""


DIRECTORY_TRIES = 100
"""How often a task's directory is created anew where other processes delete it meanwhile."""


class TaskLock:
    """The lock of a task directory, before and while this process holds it."""

    beat_s = HEARTBEAT_S
    """Seconds between two heartbeats."""

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
        self._me = me or this_process()
        self._clock, self._sleep = clock, sleep
        self._beats = 0
        self.is_abandoned = False
        """Whether `release` will leave the lock to a process that recovers the task."""
        self.replaced: LockHolder | None = None
        """The holder before, until what it left is recovered; None on a disk, where everybody sees that."""

    @property
    def token(self) -> str:
        """Random name of this holder; the names of its files contain it."""
        return self._me.token

    def acquire(self, dead_owner: bytes | None = None) -> None:
        """Become the holder; waits for up to DEAD_AFTER_S where the holder is on another machine.

        `dead_owner` is the content of `owner` where its holder is already known to be dead.
        Raises TaskHeldError where a running process holds the lock, OSError where nothing can be written.
        """
        HELD_HERE.add(self.token)  # before any thread of this process can see our name
        while not self._take():
            dead = self._wait_until_dead() if dead_owner is None else dead_owner
            if self._replace(dead):
                break
            dead_owner = None

    def _take(self) -> bool:
        """Become the holder if there is none. Raises OSError."""
        try:
            file = self._create_owner()
        except FileExistsError:
            return False
        try:
            try:
                os.write(file, orjson.dumps(asdict(self._me)))
                os.fsync(file)
            finally:
                os.close(file)
            sync_directory(self._directory)
            self.beat()
        except OSError:
            self.release()  # otherwise our name would stay, and this process runs
            raise
        return True

    def _create_owner(self) -> int:
        """Create `owner` and return its descriptor; raises FileExistsError, or another OSError."""
        for _ in range(DIRECTORY_TRIES):
            # Another process that gives up its lock may delete the directory, which is empty until then.
            with contextlib.suppress(FileNotFoundError):
                make_directory(self._directory)
                return os.open(self._owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._owner))

    def _replace(self, dead_owner: bytes) -> bool:
        """Remove the `owner` of a dead holder by a rename, which succeeds for one of several processes.

        A process that comes late may rename the `owner` of a new holder: it puts that file back.
        """
        aside = self._owner.with_name(f"{OWNER}-{self.token}")
        with contextlib.suppress(FileNotFoundError):
            self._owner.rename(aside)
            if read_bytes(aside) != dead_owner:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._owner)
            aside.unlink()
        return False

    def _monitor(self) -> LivenessMonitor:
        return LivenessMonitor(lambda: look_at_files(self._directory), self._me, clock=self._clock)

    def _wait_until_dead(self) -> bytes:
        """Return the content of `owner` once its holder is dead; raises TaskHeldError if it runs."""
        monitor, has_warned = self._monitor(), False
        while (runs := monitor.poll()) is not False:
            if runs:
                raise TaskHeldError(
                    f"{self._directory}: {monitor.holder or 'another process'} is writing this run",
                    hint="wait for it or use another path",
                )
            if monitor.holder and not has_warned:
                has_warned = True
                log.warning(
                    "%s: waiting %.0f s to see whether %s still lives",
                    self._directory, DEAD_AFTER_S, monitor.holder,
                )  # fmt: skip
            self._sleep(POLL_S)
        return monitor.owner_content

    def beat(self) -> None:
        """Increase the counter in `heartbeat`. Raises OSError."""
        self._beats += 1
        _overwrite(self._directory / HEARTBEAT, f"{self.token} {self._beats:012d}".encode(), os.O_CREAT)

    def verify(self) -> None:
        """Raise TaskLockLostError where another process holds the lock, OSError where that is unreadable."""
        for _ in range(3):
            holder = parse_holder(read_bytes(self._owner, strict=True))
            if holder is not None and holder.token == self.token:
                return
            if not self._directory.parent.exists():  # the disk is gone, and nobody has taken the lock
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._owner))
            self._sleep(SHORT_POLL_S)  # a late `_replace` of another process restores our name
        self._lost(read_bytes(self._owner))

    def _lost(self, owner: bytes) -> None:
        winner = parse_holder(owner) or "another process"
        raise TaskLockLostError(f"{self._directory}: {winner} took this task over: what is stored is kept")

    def abandon(self) -> None:
        """Make `release` keep `owner`, marked as dead: another process is to recover the task."""
        self.is_abandoned = True

    def release(self) -> None:
        """Give the lock up, so that the next attempt need not wait; errors are ignored."""
        with contextlib.suppress(OSError, TaskLockLostError):
            self.verify()
            if self.is_abandoned:  # in place, because the disk may be full
                name = orjson.dumps(asdict(replace(self._me, pid=ABANDONED_PID)))
                _overwrite(self._owner, name.ljust(self._owner.stat().st_size))
            else:
                (self._directory / HEARTBEAT).unlink(missing_ok=True)
                self._owner.unlink(missing_ok=True)
        HELD_HERE.discard(self.token)  # not earlier: another thread would take the lock meanwhile


def _overwrite(path: Path, content: bytes, flags: int = 0) -> None:
    """Write at the beginning of a file, in place and durably; follows no symbolic link. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644)
    try:
        os.pwrite(file, content, 0)
        os.fsync(file)
    finally:
        os.close(file)


def _clock_that_never_sleeps() -> float:
    """Return seconds since the boot, those included in which the machine slept (`time.monotonic` stops)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StoreTaskLock(TaskLock):
    """The lock of a task in an object store: an object `owner` that its holder rewrites at every heartbeat.

    It is created with `If-None-Match`, and rewritten with `If-Match` on the last e_tag. So of several
    processes one succeeds, and one that was replaced notices it at its next heartbeat.
    """

    beat_s = STORE_HEARTBEAT_S

    def __init__(
        self,
        objects: RunObjects,
        name: str,
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = _clock_that_never_sleeps,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`name` is that of the object."""
        super().__init__(Path(name).parent, me, clock=clock, sleep=sleep)
        self._objects = objects
        self._name = name
        self._e_tag: str | None = None
        self._beaten_at = 0.0
        self._turn = threading.Lock()  # the thread of the heartbeat, and those that verify

    def _take(self) -> bool:
        asked_at = self._clock()
        self._e_tag = self._objects.create(self._name, orjson.dumps(asdict(self._me)))
        self._beaten_at = asked_at
        return self._e_tag is not None

    def _replace(self, dead_owner: bytes) -> bool:
        """Become the holder in place of a dead one, unless another process does."""
        found = self._objects.read(self._name)
        if found is None or found[0] != dead_owner:
            return False
        self._e_tag = found[1]
        self._write(self._me)
        self.replaced = parse_holder(dead_owner)
        return self._e_tag is not None

    def _monitor(self) -> LivenessMonitor:
        return LivenessMonitor(
            lambda: self._objects.look(self._name), self._me, clock=self._clock, pause_s=LOOK_S
        )

    def beat(self) -> None:
        """Rewrite the object; `verify` tells where another process holds the lock. Raises OSError."""
        with self._turn:
            self._me = replace(self._me, beats=self._me.beats + 1)
            self._write(self._me)

    def _write(self, holder: LockHolder) -> None:
        if self._e_tag is not None:
            asked_at = self._clock()
            self._e_tag = self._objects.swap(self._name, orjson.dumps(asdict(holder)), self._e_tag)
            self._beaten_at = asked_at

    def verify(self) -> None:
        """Raise TaskLockLostError where another process holds the lock, OSError where the store fails."""
        if self._clock() - self._beaten_at > TRUSTED_S:
            self.beat()
        if self._e_tag is None:
            self._lost(self._objects.look(self._name)[0])

    def release(self) -> None:
        """Mark the object as given up, so that the next attempt need not wait; errors are ignored.

        Whom this one replaced without recovering the task stands in it again.
        """
        with self._turn, contextlib.suppress(OSError):
            left = self.replaced or replace(self._me, is_clean=not self.is_abandoned)
            self._write(replace(left, pid=ABANDONED_PID))
        self._e_tag = None
        HELD_HERE.discard(self.token)


@contextlib.contextmanager
def hold_task(
    run_dir: RunDir,
    sleep: Callable[[float], None] = time.sleep,
    *,
    directory: Path | None = None,
    dead_owner: bytes | None = None,
) -> Iterator[TaskLock]:
    """Hold the lock of `directory`, the task's own by default, with a thread that writes the heartbeat.

    `sleep` is called between polls of a holder on another machine; it may raise to end the wait.
    `dead_owner` is as for `TaskLock.acquire`.
    Raises TaskHeldError where a running process holds the lock, OutputError where nothing can be written.
    Directories that were created for the lock and stayed empty are deleted at the end.
    """
    directory = directory or run_dir.task_directory
    created = [p for p in (directory, *directory.parents) if not p.exists()]
    objects = run_dir.store.objects
    lock = (
        TaskLock(directory, sleep=sleep)
        if objects is None
        else StoreTaskLock(objects, (directory / OWNER).relative_to(run_dir.path).as_posix(), sleep=sleep)
    )
    with using_run(f"output.path {run_dir.name}"):
        if objects is not None:
            make_directory(directory)
        lock.acquire(dead_owner)
        try:
            if directory == run_dir.task_directory:  # its holder before may have written until now
                run_dir.store.bring_results([run_dir.task])
        except OSError:
            lock.release()
            raise
    ended = threading.Event()
    beating = threading.Thread(target=_keep_beating, args=(lock, ended), name="heartbeat", daemon=True)
    beating.start()
    try:
        yield lock
    finally:
        ended.set()
        beating.join()
        lock.release()
        for path in created:
            with contextlib.suppress(OSError):  # it holds files
                path.rmdir()


def _keep_beating(lock: TaskLock, ended: threading.Event) -> None:
    while not ended.wait(lock.beat_s):
        with contextlib.suppress(OSError):  # a full disk still overwrites these few bytes in place
            lock.beat()
