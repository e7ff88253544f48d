"""One writer for each task directory: who it is, whether it lives, and how the next one takes over.

No lock of the file system is used: NFS may lack them, and a host that crashes may never let go. The holder is
named in `owner`, a file that is created exclusively. Whether it lives is told on its own machine by its
process; on another one by a counter in `heartbeat`, which it moves on every few seconds: when that has stood
still for a minute of the *observer's* clock, the holder is dead. No two clocks are compared.

A holder that was taken for dead and is not (it was stopped, or cut off) finds another's name in `owner`
before its next write, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from batchrunner.core.errors import HeldError, OutputError, StorageError
from batchrunner.output.run_dir import make_directory, sync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchrunner.output.run_dir import RunDir

log = logging.getLogger(__name__)

BEAT_S = 5.0
DEAD_AFTER_S = 75.0
"""A counter that stood still for so long is a dead holder's: NFS shows a file's old state for up to 60 s."""
LOOK_S = 1.0
SHORTLY_S = 0.2
HALF_WRITTEN_S = 5.0
"""So long a name may be missing in `owner`: its writer is between two system calls, or died there."""
NOBODY = 0
"""The process ID in the name of a task that was left."""


class TaskLockLostError(StorageError):
    """Another process took this task over."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, so that others can tell whether it lives."""

    host: str
    machine: str
    boot: str
    namespace: str
    """The kernel's own names of the machine, of its present boot and of the process IDs' namespace."""
    pid: int
    started: str
    """When the process started, in the kernel's ticks: a process ID is used again."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    rows: int = 0
    """Of the input as it found it, by which shares are told; 0 where it is not about them."""

    def __str__(self) -> str:
        """Name it for a person."""
        return f"batchrun with pid {self.pid} on {self.host}"

    def is_dead(self, seen_from: Holder) -> bool | None:
        """Tell whether it has ended, as far as can be told from a process; None where it cannot be told."""
        if self.pid == NOBODY:
            return True
        if (self.host, self.machine) != (seen_from.host, seen_from.machine) or not self.boot:
            return None
        if self.boot != seen_from.boot:
            return True if self.machine else None
        if self.namespace != seen_from.namespace:
            return None
        return _started(self.pid) != self.started


def this_process() -> Holder:
    """Describe the process that we are."""
    return Holder(
        host=socket.gethostname(),
        machine=_text("/etc/machine-id"),
        boot=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        started=_started(os.getpid()),
    )


class HolderWatch:
    """Tells from outside whether a task's holder lives; across machines that takes time."""

    def __init__(
        self, directory: Path, me: Holder | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owner, self._heartbeat = directory / "owner", directory / "heartbeat"
        self._me = me or this_process()
        self._clock = clock
        self._signs = (b"", b"")
        self._since = clock()
        self._moved = False  # while we looked
        self.named = b""
        """What `owner` held when it was looked at last."""

    @property
    def holder(self) -> Holder | None:
        """Who was named in it."""
        return _holder_in(self.named)

    def look(self) -> bool | None:
        """Tell whether the holder lives; None while that cannot be told yet.

        One that let go, or has no whole name after some seconds, does not.
        """
        before, now = self._signs, self._clock()
        self._signs = (_content(self._owner), _content(self._heartbeat))
        self.named = self._signs[0]
        if self._signs != before:
            self._moved = bool(before[0] and self.named)  # it was there all the time
            self._since = now
        dead = self.holder.is_dead(self._me) if self.holder else None
        if dead is not None:
            return not dead
        if now - self._since > (DEAD_AFTER_S if self.holder else HALF_WRITTEN_S):
            return False
        return True if self._moved else None


class TaskLock:
    """A task directory that is ours, or is to become so."""

    def __init__(
        self,
        directory: Path,
        me: Holder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = directory
        self._owner = directory / "owner"
        self._heartbeat = directory / "heartbeat"
        self._me = me or this_process()
        self._clock, self._sleep = clock, sleep
        self._beats = 0
        self.is_left = False

    @property
    def token(self) -> str:
        """What tells our files from those of who had this task before."""
        return self._me.token

    def holder(self) -> Holder | None:
        """Return who is named in `owner`; None where there is no such file, or no name in it."""
        return _holder_in(_content(self._owner))

    def is_held(self) -> bool | None:
        """Tell whether a living process holds it; None where only its heartbeat could tell, with time."""
        holder = self.holder()
        if holder is None:
            return False
        dead = holder.is_dead(self._me)
        return None if dead is None else not dead

    def take(self, of_the_dead: bytes | None = None) -> None:
        """Become the holder, which after one on another machine may take a minute.

        `of_the_dead` is what `owner` holds of somebody whose end was seen before: nothing, perhaps.
        Raises HeldError where another one lives, OSError where nothing can be written.
        """
        while True:
            try:
                file = os.open(self._owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                self._steal(self._wait_for_its_end() if of_the_dead is None else of_the_dead)
                of_the_dead = None
                continue
            try:
                self._sign(file)
                self.beat()
            except OSError:
                self.release()  # our name would stay, and we live
                raise
            return

    def beat(self) -> None:
        """Show that we live."""
        self._beats += 1
        file = os.open(self._heartbeat, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.pwrite(file, f"{self._me.token} {self._beats:012d}".encode(), 0)
            os.fsync(file)
        finally:
            os.close(file)

    def verify(self) -> None:
        """Raise ClaimLostError where somebody else has taken over, OSError where that cannot be read."""
        for _ in range(3):
            holder = _holder_in(_content(self._owner, needed=True))
            if holder is not None and holder.token == self._me.token:
                return
            if not self._directory.parent.exists():  # the disk has gone, nobody has come
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._owner))
            self._sleep(SHORTLY_S)  # one that came late puts our name back at once, see `_steal`
        raise TaskLockLostError(
            f"{self._directory}: {self.holder() or 'somebody'} took this task over: what is on disk is kept"
        )

    def leave(self) -> None:
        """Keep the name when we let go: others are to find what we could not bring to its end."""
        self.is_left = True

    def release(self) -> None:
        """Let go, so that the next start need not look whether we live."""
        with contextlib.suppress(OSError, TaskLockLostError):
            self.verify()
            if self.is_left:
                self._name_nobody()
                return
            self._heartbeat.unlink(missing_ok=True)
            self._owner.unlink(missing_ok=True)

    def _name_nobody(self) -> None:
        """Say that we are dead, which our process may not be for long: in place, as a disk may be full."""
        file = os.open(self._owner, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            name = orjson.dumps(asdict(replace(self._me, pid=NOBODY)))
            os.pwrite(file, name.ljust(os.fstat(file).st_size), 0)
            os.fsync(file)
        finally:
            os.close(file)

    def _sign(self, file: int) -> None:
        try:
            os.write(file, orjson.dumps(asdict(self._me)))
            os.fsync(file)
        finally:
            os.close(file)
        sync_directory(self._directory)

    def _wait_for_its_end(self) -> bytes:
        """Return what `owner` holds once its holder is known to be dead; raises HeldError if it lives."""
        watch, told = HolderWatch(self._directory, self._me, clock=self._clock), False
        while (lives := watch.look()) is not False:
            if lives:
                raise self._held_by(watch.holder)
            if watch.holder and not told:
                told = True
                log.warning(
                    "%s: waiting %.0f s to see whether %s still lives",
                    self._directory, DEAD_AFTER_S, watch.holder,
                )  # fmt: skip
            self._sleep(LOOK_S)
        return watch.named

    def _held_by(self, holder: Holder | None) -> HeldError:
        return HeldError(
            f"{self._directory}: {holder or 'another process'} is writing this run; "
            "wait for it or use another path"
        )

    def _steal(self, of_the_dead: bytes) -> None:
        """Take a dead holder's name away. Of several that try, one does: a rename works once.

        One that comes late may take away the name of a holder that has just come, and puts it back.
        """
        aside = self._owner.with_name(f"owner-{self._me.token}")
        try:
            self._owner.rename(aside)
        except FileNotFoundError:
            return
        if _content(aside) != of_the_dead:
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._owner)
        aside.unlink()


@contextlib.contextmanager
def hold_task(
    run_dir: RunDir,
    sleep: Callable[[float], None] = time.sleep,
    *,
    directory: Path | None = None,
    of_the_dead: bytes | None = None,
    rows: int = 0,
) -> Iterator[TaskLock]:
    """Be the only writer of this task (or `directory`).

    Raises HeldError with the holder where there is one, OutputError where nothing can be written.

    `sleep` is called between looks at a holder of which only time can tell whether it lives; `of_the_dead`
    is what one's `owner` holds of whom it is known; `rows` are those of our input.
    Directories that were made for the claim and stayed empty are taken away again.
    """
    directory = directory or run_dir.task_directory
    made = [p for p in (directory, *directory.parents) if not p.exists()]
    claim = TaskLock(directory, replace(this_process(), rows=rows), sleep=sleep)
    try:
        make_directory(directory)
        claim.take(of_the_dead)
    except (OSError, ValueError) as failure:  # ValueError: a null byte in the path
        why = getattr(failure, "strerror", None) or failure
        raise OutputError(f"output.path {run_dir.path}: cannot be written: {why}") from None
    ended = threading.Event()
    beating = threading.Thread(target=_keep_beating, args=(claim, ended), name="heartbeat", daemon=True)
    beating.start()
    try:
        yield claim
    finally:
        ended.set()
        beating.join()
        claim.release()
        for path in made:  # nothing came of the run: leave nothing behind
            with contextlib.suppress(OSError):
                path.rmdir()


def _keep_beating(claim: TaskLock, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):  # a full disk overwrites a few bytes in place all the same
            claim.beat()


def _started(pid: int) -> str:
    """Return the kernel's start time of a process, "" where there is none (field 22 of /proc/PID/stat)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(path).readlink())
    return ""


def _holder_in(content: bytes) -> Holder | None:
    try:
        return Holder(**orjson.loads(content))
    except (ValueError, TypeError):
        return None


def _content(path: Path, *, needed: bool = False) -> bytes:
    """Return what a file holds, nothing where there is none; where `needed`, other errors are raised."""
    try:
        return path.read_bytes()
    except OSError as failure:
        if needed and not isinstance(failure, FileNotFoundError):
            raise
        return b""
