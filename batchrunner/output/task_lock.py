"""Locks by which at most one process writes a worker's results, also across machines and in object stores.

A task is one worker's share of a run. Its lock is the file or object `owner`, which is created exclusively
and names the process that holds it. Locks of the file system are not used: NFS may lack them, and a crashed
host may hold one for ever.

A dead holder is replaced (see `liveness`), and so is one that was suspended or disconnected for long. If such
a holder wakes up, it verifies the lock before its next write or deletion, finds another name in `owner`, and
ends.

On a file system, the lock needs renames and writes in place. In an object store, it needs conditional writes.
So there are two classes, which share only the wait for a dead holder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import (
    BatchrunError,
    InputError,
    OutputError,
    ResumeError,
    StorageError,
    TaskLockLostError,
)
from batchrunner.core.processes import repeating
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
    HEARTBEAT_S,
    LOOK_S,
    SHORT_POLL_S,
    STORE_HEARTBEAT_S,
    LivenessMonitor,
    look_at_files,
    read_bytes,
    wait_until_dead,
)
from batchrunner.output.run_dir import RunDir

if TYPE_CHECKING:
    from batchrunner.output.beacons import Beacon
    from batchrunner.output.objects import RunObjects

TRUSTED_S = 45.0
"""Seconds for which a process may trust its lock in an object store after a heartbeat.

Other processes take the lock over only after a longer silence: 59 s for a worker that holds leases
(`silence_s`), otherwise DEAD_AFTER_S.
"""
DIRECTORY_TRIES = 100
"""Maximum number of tries to create `owner` while other processes delete its directory."""


class TaskLock(ABC):
    """Lock of a task (one worker's share of a run), which this process acquires, holds and releases."""

    beat_s: float
    """Seconds between two heartbeats."""

    def __init__(
        self,
        place: str,
        me: LockHolder | None,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        """Prepare the lock; `acquire` then acquires it.

        `place` names the lock in messages. `me` is this process, by default with a new random token.
        """
        self._place = place
        self._me = me or this_process()
        self._clock, self._sleep = clock, sleep
        self.is_abandoned = False
        """Whether `release` records that the work is not done. The next process then recovers its results."""
        self.predecessor: LockHolder | None = None
        """Dead process that held the lock before, until its journals and part files are recovered.

        It is always None on a file system, where recovery does not depend on the holder's name.
        """
        self.beacon: Beacon | None = None
        """File that shows at each heartbeat that this worker runs.

        None unless several workers share the run.
        """

    @property
    def token(self) -> str:
        """Random name of this process, a part of the names of its files."""
        return self._me.token

    @property
    def holder(self) -> LockHolder:
        """Identity of this process, which the lock names while this process holds it."""
        return self._me

    def acquire(self, dead_owner: bytes | None = None) -> None:
        """Acquire the lock; wait up to DEAD_AFTER_S for a heartbeat if it is held on another machine.

        `dead_owner` is the content of `owner` if its holder is already known to be dead. Raises TaskHeldError
        if a running process holds the lock, and OSError if nothing can be written.
        """
        # The token is registered before `owner` has our name. Otherwise another thread of this process would
        # consider this process dead (`LockHolder.is_dead`).
        HELD_HERE.add(self.token)
        while not self._create():
            if dead_owner is None:
                monitor = self._monitor()
                wait_until_dead({self._place: monitor}, self._sleep)
                dead_owner = monitor.owner_content
            if self._replace(dead_owner):
                break
            # Another process may have acquired the lock, so look at its holder again.
            dead_owner = None

    def abandon(self) -> None:
        """Make `release` record that the work is not done, so that the next process recovers its results."""
        self.is_abandoned = True

    def forget_predecessor(self) -> None:
        """Forget the dead process that held the lock before.

        Its journals and part files have been recovered or discarded.
        """
        self.predecessor = None

    def _raise_lost(self, owner: bytes) -> None:
        """Raise TaskLockLostError; `owner` has the name of the new holder."""
        winner = parse_holder(owner) or "another process"
        raise TaskLockLostError(f"{self._place}: {winner} took this task over; stored rows are kept")

    @abstractmethod
    def _create(self) -> bool:
        """Create `owner` with the name of this process; return False if it exists.

        Raises OSError if it cannot be written.
        """

    @abstractmethod
    def _replace(self, dead_owner: bytes) -> bool:
        """Replace a dead holder's name in `owner` by that of this process, and return True.

        The result is False if `owner` was only removed, or if another process was faster. The caller then
        calls `_create` again.
        """

    @abstractmethod
    def _monitor(self) -> LivenessMonitor:
        """Return a monitor that tells whether the process that holds the lock is running."""

    @abstractmethod
    def beat(self) -> None:
        """Write a heartbeat, which shows that this process runs. Raises OSError if it cannot be written."""

    @abstractmethod
    def verify(self) -> None:
        """Raise TaskLockLostError if another process holds the lock, OSError if `owner` cannot be read."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock, so that the next attempt need not wait. Ignore errors."""


class FileTaskLock(TaskLock):
    """Lock on a file system: a file `owner`, and a file `heartbeat` beside it."""

    beat_s = HEARTBEAT_S

    def __init__(
        self,
        directory: Path,
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare the lock of the worker with this directory; `acquire` then acquires it."""
        super().__init__(str(directory), me, clock=clock, sleep=sleep)
        self._directory = directory
        self._owner = directory / OWNER
        self._beats = 0

    def _create(self) -> bool:
        """Create the file `owner` with the name of this process; return False if it exists.

        Raises OSError if it cannot be written.
        """
        for _ in range(DIRECTORY_TRIES):
            # Another process may delete the directory at any time: when it releases its lock and the
            # directory is empty, or when it discards the run.
            with contextlib.suppress(FileNotFoundError):
                make_directory(self._directory)
                try:
                    file = os.open(self._owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                except FileExistsError:
                    return False
                self._write_name(file)
                return True
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._owner))

    def _write_name(self, file: int) -> None:
        """Write the name of this process to `owner` and close it; `file` is its descriptor.

        If this fails, `owner` is deleted again. Raises OSError.
        """
        try:
            try:
                os.write(file, orjson.dumps(asdict(self._me)))
                os.fsync(file)
            finally:
                os.close(file)
            sync_directory(self._directory)
            self.beat()  # The first heartbeat is written at once, not after the first pause.
        except FileNotFoundError:  # The directory and `owner` were deleted, so there is no lock to release.
            raise
        except OSError:
            self.release()  # A running process must not be named in `owner` if it does not work on the run.
            raise

    def _replace(self, dead_owner: bytes) -> bool:
        """Remove a dead holder's `owner` by a rename, which succeeds for one process only.

        The result is always False, because this process does not hold the lock yet: processes then compete to
        create `owner` again. A slow process may rename the `owner` of a new holder by mistake. It notices
        this by the file's content, and restores the file.
        """
        aside = self._owner.with_name(f"{OWNER}-{self.token}")
        with contextlib.suppress(FileNotFoundError):
            self._owner.rename(aside)
            if read_bytes(aside) != dead_owner:
                # If a third process has created `owner` meanwhile, it holds the lock now. The holder whose
                # file was renamed notices this at its next `verify`.
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._owner)
            aside.unlink()
        return False

    def _monitor(self) -> LivenessMonitor:
        return LivenessMonitor(lambda: look_at_files(self._directory), self._me, clock=self._clock)

    def beat(self) -> None:
        """Increment the counter in the file `heartbeat`. Raises OSError if it cannot be written."""
        self._beats += 1
        _overwrite(self._directory / HEARTBEAT, f"{self.token} {self._beats:012d}".encode(), os.O_CREAT)
        if self.beacon is not None:
            self.beacon.beat()

    def verify(self) -> None:
        """Check that `owner` still names this process.

        Raises TaskLockLostError if it names another process, and OSError if it cannot be read.
        """
        # A slow process may have renamed our `owner` by mistake (`_replace`). It restores the file at once,
        # so a few tries are enough.
        for _ in range(3):
            holder = parse_holder(read_bytes(self._owner, strict=True))
            if holder is not None and holder.token == self.token:
                return
            # If the parent directory is missing too, the disk is probably not mounted, and the lock may be
            # intact.
            if not self._directory.parent.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._owner))
            self._sleep(SHORT_POLL_S)
        self._raise_lost(read_bytes(self._owner))

    def release(self) -> None:
        """Delete `owner`, or record in it that the work is not done. Ignore errors."""
        with contextlib.suppress(OSError, TaskLockLostError):
            self.verify()
            if self.is_abandoned:
                # The file is overwritten in place, because a full disk has no room for a new one. The new
                # content is padded to the length of the old content.
                content = orjson.dumps(asdict(replace(self._me, pid=ABANDONED_PID)))
                _overwrite(self._owner, content.ljust(self._owner.stat().st_size))
            else:
                (self._directory / HEARTBEAT).unlink(missing_ok=True)
                self._owner.unlink(missing_ok=True)
        # The token is removed last. Once it is missing, other threads of this process consider this holder
        # dead.
        HELD_HERE.discard(self.token)


def _overwrite(path: Path, content: bytes, flags: int = 0) -> None:
    """Write at the beginning of a file, in place, and sync it to disk.

    Raises OSError if the file is a symbolic link, or cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644)
    try:
        os.pwrite(file, content, 0)
        os.fsync(file)
    finally:
        os.close(file)


def _clock_that_never_sleeps() -> float:
    """Return the seconds since boot, including the time for which the machine was suspended.

    `time.monotonic` leaves that time out, so a machine that wakes up would trust an old heartbeat.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StoreTaskLock(TaskLock):
    """Lock in an object store: an object `owner`, which its holder rewrites at every heartbeat.

    The object is created with `If-None-Match`, and rewritten with `If-Match` and the ETag of the last write.
    So only one of several processes succeeds, and a holder that was replaced notices it at its next
    heartbeat.
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
        """Prepare the lock; `name` is the name of the object `owner`, relative to the run's URI."""
        super().__init__(name.rpartition("/")[0], me, clock=clock, sleep=sleep)
        self._objects = objects
        self._name = name
        self._e_tag: str | None = None
        """ETag of the `owner` that this process wrote last; None if another process holds the lock."""
        self._beaten_at = 0.0
        """Time just before the last write was requested, by `clock`.

        The store applied the write at this time or later, so TRUSTED_S is counted from here to be safe.
        """
        # The heartbeat and `verify` write `owner` in different threads.
        self._writing = threading.Lock()

    def _create(self) -> bool:
        asked_at = self._clock()
        self._e_tag = self._objects.create(self._name, orjson.dumps(asdict(self._me)))
        self._beaten_at = asked_at
        return self._e_tag is not None

    def _replace(self, dead_owner: bytes) -> bool:
        """Write the name of this process into `owner`, in place of a dead holder's name.

        The result is False if another process was faster.
        """
        content, e_tag = self._objects.read(self._name) or (None, None)
        if content != dead_owner:
            return False
        # `_write` only replaces an object with this ETag. Otherwise it sets `_e_tag` to None.
        self._e_tag = e_tag
        self._write(self._me)
        self.predecessor = parse_holder(dead_owner)
        return self._e_tag is not None

    def _monitor(self) -> LivenessMonitor:
        return LivenessMonitor(
            lambda: self._objects.look(self._name), self._me, clock=self._clock, pause_s=LOOK_S
        )

    def beat(self) -> None:
        """Rewrite the object `owner` with a higher counter, unless another process has taken the lock over.

        This shows that the process runs. Raises OSError if the store does not answer.
        """
        with self._writing:
            self._me = replace(self._me, beats=self._me.beats + 1)
            self._write(self._me)
            is_ours = self._e_tag is not None
        if self.beacon is not None and is_ours:
            self.beacon.beat()

    def _write(self, holder: LockHolder) -> None:
        """Write the name of a process into `owner`, unless another process has taken the lock over.

        In that case, `_e_tag` is None afterwards. Raises OSError if the store does not answer.
        """
        if self._e_tag is not None:
            asked_at = self._clock()
            self._e_tag = self._objects.swap(self._name, orjson.dumps(asdict(holder)), self._e_tag)
            self._beaten_at = asked_at

    def verify(self) -> None:
        """Check the lock by a heartbeat, unless the last one is younger than TRUSTED_S.

        Raises TaskLockLostError if another process holds the lock, and OSError if the store does not answer.
        """
        if self._clock() - self._beaten_at > TRUSTED_S:
            self.beat()
        if self._e_tag is None:
            self._raise_lost(self._objects.look(self._name)[0])

    def release(self) -> None:
        """Record in the object `owner` that the work is not done. Ignore errors.

        If this process has not recovered the results of the process before it, the object names that process
        again.
        """
        with self._writing, contextlib.suppress(OSError):
            holder = self.predecessor or replace(self._me, is_clean=not self.is_abandoned)
            self._write(replace(holder, pid=ABANDONED_PID))
        self._e_tag = None  # Without an ETag, a late heartbeat writes nothing.
        HELD_HERE.discard(self.token)


@contextlib.contextmanager
def hold_task(
    run_dir: RunDir,
    sleep: Callable[[float], None] = time.sleep,
    *,
    directory: Path | None = None,
    dead_owner: bytes | None = None,
) -> Iterator[TaskLock]:
    """Hold the lock of `directory` (by default this worker's) during the block, and write heartbeats.

    `sleep` is called while another machine's process is watched; it may raise an exception to end the wait.
    `dead_owner` is explained in `TaskLock.acquire`. Directories that were created for the lock and are still
    empty are deleted at the end. Raises TaskHeldError if a running process holds the lock, and OutputError if
    nothing can be written.

    If another process took the lock meanwhile, an error of the block becomes TaskLockLostError: that process
    may have deleted files that the block needs.
    """
    directory = directory or run_dir.task_directory
    new_directories = [path for path in (directory, *directory.parents) if not path.exists()]
    objects = run_dir.store.objects
    lock: TaskLock
    if objects is None:
        lock = FileTaskLock(directory, sleep=sleep)
    else:
        name = (directory / OWNER).relative_to(run_dir.path).as_posix()
        lock = StoreTaskLock(objects, name, sleep=sleep)
    with using_run(f"output.path {run_dir.name}"):
        if objects is not None:
            make_directory(directory)
        lock.acquire(dead_owner)

    def beat() -> None:
        # After an error, the next heartbeat tries again. `verify` reports a lost lock.
        with contextlib.suppress(OSError):
            lock.beat()

    try:
        with repeating(beat, lock.beat_s, thread="heartbeat"):
            # Other directories, such as that of `batchrun tune`, have no results.
            if directory == run_dir.task_directory:
                with using_run(f"output.path {run_dir.name}"):
                    # Another process may have published results of this worker since the local copy was
                    # updated.
                    run_dir.store.bring_results([run_dir.task])
            yield lock
    except TaskLockLostError:
        # It is a StorageError too, and says already that the lock was lost.
        raise
    except (InputError, OutputError, ResumeError, StorageError) as failure:
        _raise_if_lost(lock, failure)
        raise
    finally:
        lock.release()
        for path in new_directories:
            with contextlib.suppress(OSError):  # A directory with files is kept.
                path.rmdir()


def _raise_if_lost(lock: TaskLock, failure: BatchrunError) -> None:
    """Raise TaskLockLostError, caused by `failure`, if another process holds the lock now."""
    try:
        lock.verify()
    except TaskLockLostError as lost:
        lost.report = failure.report
        raise lost from failure
    except (OSError, StorageError):
        # It is unknown who holds the lock, so the caller raises `failure`.
        pass
