"""Liveness of a task: which process holds it, whether it still runs, and its step before the first row.

The file or object `owner` of a task names its holder. A process on the same machine is looked up in /proc.
A process on another machine counts as dead when its heartbeat has stood still for DEAD_AFTER_S by the
observer's clock, so no two clocks are compared. The heartbeat is a counter in the file `heartbeat`, or in the
object `owner`.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.errors import TaskHeldError
from batchrunner.core.timing import TIMING
from batchrunner.output.files import using_run
from batchrunner.output.holder import HEARTBEAT, OWNER, LockHolder, parse_holder, this_process
from batchrunner.output.run_dir import ENGINE_STARTING, RunDir
from batchrunner.output.samples import LoggedSample

log = logging.getLogger(__name__)

DEAD_AFTER_S = 75.0
"""Seconds without a heartbeat after which the holder of a task's lock counts as dead. NFS may show an old
file for 60 s, so a shorter time would not be safe."""
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats on a file system."""
STORE_HEARTBEAT_S = 15.0
"""Seconds between two heartbeats in an object store, which makes 240 requests an hour."""
UNNAMED_AFTER_S = 5.0
"""Seconds after which an incomplete `owner` means that the process died while writing it."""
POLL_S = 1.0
"""Seconds between two checks whether the process that holds another task still runs."""
SHORT_POLL_S = 0.2
"""Pause in seconds between two polls while a change is expected within moments."""
LOOK_S = 5.0
"""Minimum seconds between two reads of `owner` in an object store: at most 720 requests an hour."""
FRESH_S = 15.0
"""Seconds after a heartbeat in a file during which the process that wrote it counts as running: the time of
three heartbeats."""
STORE_FRESH_S = 40.0
"""Seconds after a heartbeat in an object store during which the process that wrote it counts as running."""
SILENT_S = 300.0
"""Age in seconds from which a load sample no longer proves that a task on another machine is running: the
task may have ended, or that machine's clock may be wrong."""


class LivenessMonitor:
    """Finds out whether the holder of a task (the process that holds its lock) is running.

    For a holder on another machine, this takes up to DEAD_AFTER_S.
    """

    def __init__(
        self,
        look: Callable[[], tuple[bytes, bytes]],
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        fresh_s: float = FRESH_S,
        pause_s: float = 0.0,
    ) -> None:
        """Prepare to poll a task's holder by `look`.

        `look` returns the content of `owner`, and bytes that each heartbeat changes. It is called at most
        every `pause_s` seconds. `me` is the observer. A holder counts as running for `fresh_s` seconds after
        a heartbeat.
        """
        self._look = look
        self._me = me or this_process()
        self._clock = clock
        self._fresh_s, self._pause_s = fresh_s, pause_s
        self._looked_at = float("-inf")
        self._last_seen = (b"", b"")
        """The last result of `look`."""
        self._changed_at = clock()
        """Time at which a poll last found another result than before."""
        # `_has_beaten` becomes True when a poll finds a new heartbeat.
        self._has_beaten = False

    @property
    def owner_content(self) -> bytes:
        """Content of `owner` at the last poll."""
        return self._last_seen[0]

    @property
    def holder(self) -> LockHolder | None:
        """The process that held the task at the last poll.

        None if no process held it, or if the process had not written its whole name yet.
        """
        return parse_holder(self.owner_content)

    def poll(self) -> bool | None:
        """Look again; return whether the task's holder is running, or None while that is not clear yet.

        Also return False if no process holds the task: the holder has released it, or its name is still
        incomplete after UNNAMED_AFTER_S. Raises OSError if the run's store does not answer.
        """
        before, now = self._last_seen, self._clock()
        if now - self._looked_at >= self._pause_s:
            self._last_seen, self._looked_at = self._look(), now
        if self._last_seen != before:
            # The change is a heartbeat, unless `owner` was missing before or is missing now.
            old_owner_content, _ = before
            self._has_beaten = bool(old_owner_content and self.owner_content)
            self._changed_at = now
        silent_s = now - self._changed_at
        return judge_holder(
            self.holder,
            self._me,
            silent_s=silent_s,
            dead_after_s=DEAD_AFTER_S,
            is_fresh=self._has_beaten and silent_s <= self._fresh_s,
        )


def judge_holder(
    holder: LockHolder | None, observer: LockHolder, *, silent_s: float, dead_after_s: float, is_fresh: bool
) -> bool | None:
    """Return whether the process that holds a task runs; None while that is not clear yet.

    Without a `holder`, the lock was released, or the name in `owner` is incomplete. The last heartbeat was
    `silent_s` seconds ago. `is_fresh` says that a heartbeat was seen, and not long ago.
    """
    if holder is None:
        return False if silent_s > UNNAMED_AFTER_S else None
    is_dead = holder.is_dead(observer)
    if is_dead is not None:  # The holder is on this machine, or has abandoned the task.
        return not is_dead
    if silent_s > dead_after_s:
        return False
    return True if is_fresh else None


def monitor_of(run_dir: RunDir) -> LivenessMonitor:
    """Return a monitor of the process that holds this task."""
    objects = run_dir.store.objects
    if objects is None:
        return LivenessMonitor(lambda: look_at_files(run_dir.task_directory))
    return LivenessMonitor(lambda: objects.look(run_dir.owner), fresh_s=STORE_FRESH_S, pause_s=LOOK_S)


def read_owner(run_dir: RunDir) -> bytes:
    """Return the content of the file or object `owner` of a task; b"" if there is none."""
    objects = run_dir.store.objects
    if objects is None:
        return read_bytes(run_dir.task_directory / OWNER)
    return objects.look(run_dir.owner)[0]


def wait_until_dead(monitors: Mapping[str, LivenessMonitor], sleep: Callable[[float], object]) -> None:
    """Wait until the holders of several tasks are all known to be dead.

    All are watched at the same time. A key of `monitors` is the name of a task in messages. `sleep` may raise
    to end the wait. Raises TaskHeldError as soon as one holder is known to run.
    """
    unclear, has_warned = dict(monitors), False
    while unclear:
        for place, monitor in [*unclear.items()]:  # A copy, because the loop deletes entries.
            is_running = monitor.poll()
            if is_running:
                raise TaskHeldError(
                    f"{place}: {monitor.holder or 'another process'} is writing this run",
                    hint="wait until that process ends, or use another path",
                )
            if is_running is False:
                del unclear[place]
            elif monitor.holder and not has_warned:
                has_warned = True  # All holders are watched in the same time, so one warning is enough.
                log.warning(
                    "%s: waiting %.0f s to see whether %s is still running",
                    place, DEAD_AFTER_S, monitor.holder,
                )  # fmt: skip
        if unclear:
            sleep(POLL_S)


def look_at_files(directory: Path) -> tuple[bytes, bytes]:
    """Return the contents of `owner` and `heartbeat` in a task directory; b"" stands for a missing file."""
    return read_bytes(directory / OWNER), read_bytes(directory / HEARTBEAT)


def holders_of(
    tasks: Sequence[tuple[RunDir, LoggedSample | None]], *, watch: bool = True
) -> list[str | None]:
    """Return the name of the process that holds each task; None for a task without a running process.

    Each task comes with the newest load sample in its event log. A process on another machine counts as
    running if that sample is recent, or if there is no sample yet. If the sample is old, the process may have
    ended, or the clock of its machine may be wrong. So the heartbeats of all such tasks are watched together
    for TIMING.other_heartbeat seconds. Without `watch`, and in an object store, where heartbeats are rare, a
    task with an old sample counts as ended. Raises OutputError or StoreAwayError if the store does not
    answer.
    """
    monitors = [monitor_of(run_dir) for run_dir, _ in tasks]
    with using_run(tasks[0][0].name if tasks else ""):
        is_running = [monitor.poll() for monitor in monitors]
    unclear = []
    for index, (_, sample) in enumerate(tasks):
        if is_running[index] is None and sample and not is_recent(sample):
            unclear.append(index)
    watched = [index for index in unclear if watch and not tasks[index][0].store.uri]
    if watched:
        time.sleep(TIMING.other_heartbeat)
    # Only a heartbeat during the wait proves that such a process runs.
    for index in unclear:
        is_running[index] = index in watched and monitors[index].poll() is True
    names: list[str | None] = []
    for index, monitor in enumerate(monitors):
        # None in `is_running` means that the process is not known to have ended, so it counts as running.
        is_held = monitor.holder is not None and is_running[index] is not False
        names.append(str(monitor.holder) if is_held else None)
    return names


def is_recent(sample: LoggedSample) -> bool:
    """Whether a load sample is younger than SILENT_S by this machine's clock."""
    return bool(abs(time.time() - sample.time) < SILENT_S)


@contextlib.contextmanager
def engine_starting(run_dir: RunDir) -> Iterator[None]:
    """Show other processes during the block that the task's engine is starting, by a file in its directory.

    The file is for display only, so a disk that cannot be written is ignored.
    """
    mark = run_dir.task_directory / ENGINE_STARTING
    with contextlib.suppress(OSError):
        # Replace a mark that a killed attempt left, because its time shows when the engine began to start.
        mark.unlink(missing_ok=True)
        mark.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def starting_of(run_dir: RunDir) -> dict[str, Any] | None:
    """Return what a task does before its first row (`what`), and for how many seconds already (`since_s`).

    `what` is "input" while the task reads and sorts the input, and "engine" while its engine starts. Once the
    task sends rows, return None. The answer follows from the modification times of the task's files, which
    the clock of one file system sets.
    """
    lock_time = _modification_time(run_dir.task_directory / OWNER)
    # The attempt writes its first event when its engine is ready.
    if not lock_time or _modification_time(run_dir.events) > lock_time:
        return None
    mark_time = _modification_time(run_dir.task_directory / ENGINE_STARTING)
    is_engine = mark_time >= lock_time  # A mark older than the lock is from a killed attempt.
    since_s = round(max(0.0, time.time() - max(lock_time, mark_time)), 1)
    return {"what": "engine" if is_engine else "input", "since_s": since_s}


def _modification_time(path: Path) -> float:
    """Return when a file was last written, in seconds since the epoch; 0 for a missing file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_bytes(path: Path, *, strict: bool = False) -> bytes:
    """Return the content of a file, or b"" if it is missing or unreadable.

    With `strict`, raise the OSError of a file that exists but cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as failure:
        if strict and not isinstance(failure, FileNotFoundError):
            raise
        return b""
