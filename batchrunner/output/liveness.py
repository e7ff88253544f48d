"""Tells which process holds a task (a worker's share of a run), and whether that process still runs.

The file or object `owner` of a task names its holder. A process on the same machine is looked up in /proc. A
process on another machine is dead if its heartbeat has not changed for DEAD_AFTER_S. The heartbeat is a
counter in the file `heartbeat`, or in the object `owner`. Only the observer's clock counts, so clocks need
not agree.
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

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats on a file system."""
STORE_HEARTBEAT_S = 15.0
"""Seconds between two heartbeats in an object store. They cost 240 requests an hour."""
DEAD_AFTER_S = 75.0
"""Seconds without a heartbeat after which the process that holds a worker's lock counts as dead.

NFS may show an old file for 60 s, so a shorter time would not be safe.
"""
UNNAMED_AFTER_S = 5.0
"""Seconds after which an incomplete `owner` means that the process died while writing it."""
POLL_S = 1.0
"""Seconds between two checks whether another process still runs."""
SHORT_POLL_S = 0.2
"""Seconds between two checks while a change is expected soon."""
LOOK_S = 5.0
"""Minimum seconds between two reads of `owner` in an object store: at most 720 requests an hour."""
FRESH_S = 3 * HEARTBEAT_S
"""Seconds after a heartbeat for which its process counts as running, on a file system."""
STORE_FRESH_S = 40.0
"""Seconds after a heartbeat for which its process counts as running, in an object store."""
SILENT_S = 300.0
"""Age in seconds at which a load sample no longer proves that a process on another machine runs.

The process may have ended, or that machine's clock may be wrong.
"""


class LivenessMonitor:
    """Finds out whether the process that holds a worker's lock is running.

    For a process on another machine, this takes up to DEAD_AFTER_S.
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
        """Prepare to watch the process that holds a worker's lock.

        `look` returns the content of `owner`, and bytes that each heartbeat changes. It is called at most
        every `pause_s` seconds. `me` is this process. The watched process counts as running for `fresh_s`
        seconds after a heartbeat.
        """
        self._look = look
        self._me = me or this_process()
        self._clock = clock
        self._fresh_s, self._pause_s = fresh_s, pause_s
        self._looked_at = float("-inf")
        self._last_seen = (b"", b"")
        self._changed_at = clock()
        """Time at which the result of `look` was last found changed."""
        # Whether a poll has found a new heartbeat.
        self._has_beaten = False

    @property
    def owner_content(self) -> bytes:
        """Content of `owner` at the last poll."""
        return self._last_seen[0]

    @property
    def holder(self) -> LockHolder | None:
        """The process that held the lock at the last poll.

        It is None if there was none, or if its name in `owner` was incomplete.
        """
        return parse_holder(self.owner_content)

    def poll(self) -> bool | None:
        """Look again; return whether the lock's holder is running, or None if that is not clear yet.

        The result is also False if no process holds the lock: it was released, or the name in `owner` is
        still incomplete after UNNAMED_AFTER_S. Raises OSError if the run's store does not answer.
        """
        seen_before, now = self._last_seen, self._clock()
        if now - self._looked_at >= self._pause_s:
            self._last_seen, self._looked_at = self._look(), now
        if self._last_seen != seen_before:
            # A change is a heartbeat if `owner` exists before and after it.
            old_owner_content, _ = seen_before
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
    """Tell whether the process that holds a worker's lock runs; None if that is not clear yet.

    `holder` is None if the lock was released, or if its name in `owner` is incomplete. `silent_s` are the
    seconds since the last heartbeat. `is_fresh` means that a recent heartbeat was seen.
    """
    if holder is None:
        return False if silent_s > UNNAMED_AFTER_S else None
    is_dead = holder.is_dead(observer)
    if is_dead is not None:  # The process is on this machine, or has given up its work.
        return not is_dead
    if silent_s > dead_after_s:
        return False
    return True if is_fresh else None


def monitor_of(run_dir: RunDir) -> LivenessMonitor:
    """Return a monitor of the process that holds this worker's lock."""
    objects = run_dir.store.objects
    if objects is None:
        return LivenessMonitor(lambda: look_at_files(run_dir.task_directory))
    return LivenessMonitor(lambda: objects.look(run_dir.owner), fresh_s=STORE_FRESH_S, pause_s=LOOK_S)


def read_owner(run_dir: RunDir) -> bytes:
    """Return the content of a worker's file or object `owner`; b"" if there is none."""
    objects = run_dir.store.objects
    if objects is None:
        return read_bytes(run_dir.task_directory / OWNER)
    return objects.look(run_dir.owner)[0]


def wait_until_dead(monitors: Mapping[str, LivenessMonitor], sleep: Callable[[float], object]) -> None:
    """Wait until the processes that hold the locks of several workers are all known to be dead.

    All are watched at the same time. The keys of `monitors` name the workers in messages. `sleep` may raise
    an exception to end the wait. Raises TaskHeldError as soon as one process is known to run.
    """
    unclear, has_warned = dict(monitors), False
    while unclear:
        for place, monitor in [*unclear.items()]:  # The loop deletes entries, so it runs over a copy.
            is_running = monitor.poll()
            if is_running:
                raise TaskHeldError(
                    f"{place}: {monitor.holder or 'another process'} is writing this run",
                    hint="wait until that process ends, or use another path",
                )
            if is_running is False:
                del unclear[place]
            elif monitor.holder and not has_warned:
                has_warned = True  # All processes are watched at the same time, so one warning is enough.
                log.warning(
                    "%s: waiting %.0f s to see whether %s is still running",
                    place, DEAD_AFTER_S, monitor.holder,
                )  # fmt: skip
        if unclear:
            sleep(POLL_S)


def look_at_files(directory: Path) -> tuple[bytes, bytes]:
    """Return the contents of `owner` and `heartbeat` in a worker's directory; b"" for a missing file."""
    return read_bytes(directory / OWNER), read_bytes(directory / HEARTBEAT)


def holders_of(
    tasks: Sequence[tuple[RunDir, LoggedSample | None]], *, watch: bool = True
) -> list[str | None]:
    """Return the name of each worker's process; None for a worker without a running process.

    Each worker comes with the newest load sample in its event log. A process on another machine counts as
    running if that sample is recent, or if there is none yet. If the sample is old, the process may have
    ended, or its clock may be wrong. Then heartbeats are watched for TIMING.other_heartbeat seconds, for all
    such workers together. With `watch` false, or in an object store, where heartbeats are rare, such a worker
    counts as ended. Raises OutputError or StoreAwayError if the store does not answer.
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
    # For these processes, only a heartbeat during the wait proves that they run.
    for index in unclear:
        is_running[index] = index in watched and monitors[index].poll() is True
    names: list[str | None] = []
    for index, monitor in enumerate(monitors):
        # None means that the process is not known to have ended, so it counts as running.
        is_held = monitor.holder is not None and is_running[index] is not False
        names.append(str(monitor.holder) if is_held else None)
    return names


def is_recent(sample: LoggedSample) -> bool:
    """Tell whether a load sample is younger than SILENT_S by this machine's clock."""
    return bool(abs(time.time() - sample.time) < SILENT_S)


@contextlib.contextmanager
def engine_starting(run_dir: RunDir) -> Iterator[None]:
    """During the block, a file in the worker's directory tells other processes that its engine is starting.

    The file is only for display, so errors in writing it are ignored.
    """
    mark = run_dir.task_directory / ENGINE_STARTING
    with contextlib.suppress(OSError):
        # A killed attempt may have left a file. The new file's time shows when the engine began to start.
        mark.unlink(missing_ok=True)
        mark.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def starting_of(run_dir: RunDir) -> dict[str, Any] | None:
    """Return what a worker does before its first row (`what`), and for how long (`since_s`, in seconds).

    `what` is "input" while the input is read and sorted, and "engine" while the engine starts. Returns None
    once the worker sends rows. The result comes from modification times of files, which all follow one clock.
    """
    lock_time = _modification_time(run_dir.task_directory / OWNER)
    # The attempt writes its first event when its engine is ready.
    if not lock_time or _modification_time(run_dir.events) > lock_time:
        return None
    mark_time = _modification_time(run_dir.task_directory / ENGINE_STARTING)
    is_engine = mark_time >= lock_time  # An older mark is from a killed attempt.
    since_s = round(max(0.0, time.time() - max(lock_time, mark_time)), 1)
    return {"what": "engine" if is_engine else "input", "since_s": since_s}


def _modification_time(path: Path) -> float:
    """Return when a file was last written, in seconds since the Unix epoch; 0 for a missing file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_bytes(path: Path, *, strict: bool = False) -> bytes:
    """Return the content of a file; b"" if it is missing or unreadable.

    With `strict`, an existing file that cannot be read raises OSError.
    """
    try:
        return path.read_bytes()
    except OSError as failure:
        if strict and not isinstance(failure, FileNotFoundError):
            raise
        return b""
