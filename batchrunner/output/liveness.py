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
"""Seconds without a heartbeat after which a holder counts as dead; NFS may show an old file for 60 s."""
UNNAMED_AFTER_S = 5.0
"""Seconds after which an incomplete `owner` counts as one whose process died while writing it."""
POLL_S = 1.0
"""Seconds between two polls of another task's holder."""
SHORT_POLL_S = 0.2
"""Seconds between two polls when a change is expected at once."""
LOOK_S = 5.0
"""Minimum seconds between two reads of a watched object, which makes 720 requests an hour."""
FRESH_S, STORE_FRESH_S = 15.0, 40.0
"""Seconds after a heartbeat during which the holder certainly runs: for heartbeats in a file, and in an
object."""
SILENT_S = 300.0
"""A load sample of this age in seconds does not prove that a task on another machine runs. The task may
have ended, or that machine's clock may be wrong. For a task on this machine the sample decides nothing,
because it may be from an earlier attempt."""


class LivenessMonitor:
    """Observes the holder of a task; needs up to DEAD_AFTER_S to judge one on another machine."""

    def __init__(
        self,
        look: Callable[[], tuple[bytes, bytes]],
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        fresh_s: float = FRESH_S,
        pause_s: float = 0.0,
    ) -> None:
        """`look` returns the content of `owner`, and bytes that change with each heartbeat.

        `me` is the observer. A holder certainly runs for `fresh_s` after a heartbeat. Two looks are at least
        `pause_s` apart.
        """
        self._look = look
        self._me = me or this_process()
        self._clock = clock
        self._fresh_s, self._pause_s = fresh_s, pause_s
        self._looked_at = float("-inf")
        self._last_seen = (b"", b"")
        self._changed_at = clock()
        self._has_beaten = False  # whether a heartbeat came since the first poll

    @property
    def owner_content(self) -> bytes:
        """Content of `owner` at the last poll."""
        return self._last_seen[0]

    @property
    def holder(self) -> LockHolder | None:
        """The holder at the last poll; None where there was none, or its name was incomplete."""
        return parse_holder(self.owner_content)

    def poll(self) -> bool | None:
        """Look again and return whether the holder runs; None while that is not clear yet.

        There is no holder, so False is returned, if it released the task, or if its name is still incomplete
        after UNNAMED_AFTER_S. Raises OSError where the run's store does not answer.
        """
        before, now = self._last_seen, self._clock()
        if now - self._looked_at >= self._pause_s:
            self._last_seen, self._looked_at = self._look(), now
        if self._last_seen != before:
            self._has_beaten = bool(before[0] and self.owner_content)  # a new `owner` is no heartbeat
            self._changed_at = now
        dead = self.holder.is_dead(self._me) if self.holder else None
        if dead is not None:
            return not dead
        if now - self._changed_at > (DEAD_AFTER_S if self.holder else UNNAMED_AFTER_S):
            return False
        is_fresh = self._has_beaten and now - self._changed_at <= self._fresh_s
        return True if is_fresh else None


def monitor_of(run_dir: RunDir) -> LivenessMonitor:
    """Return a monitor of the holder of this task."""
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
    """Wait until all holders are dead, for all of them at the same time; raises TaskHeldError if one runs.

    A key of `monitors` is the name of a task in messages. `sleep` may raise to end the wait.
    """
    unclear, has_warned = dict(monitors), False
    while unclear:
        for place, monitor in monitors.items():
            if place not in unclear:
                continue
            runs = monitor.poll()
            if runs:
                raise TaskHeldError(
                    f"{place}: {monitor.holder or 'another process'} is writing this run",
                    hint="wait for it or use another path",
                )
            if runs is False:
                del unclear[place]
            elif monitor.holder and not has_warned:
                has_warned = True
                log.warning(
                    "%s: waiting %.0f s to see whether %s still lives", place, DEAD_AFTER_S, monitor.holder
                )
        if unclear:
            sleep(POLL_S)


def look_at_files(directory: Path) -> tuple[bytes, bytes]:
    """Return the contents of `owner` and `heartbeat` in a task directory; b"" stands for a missing file."""
    return read_bytes(directory / OWNER), read_bytes(directory / HEARTBEAT)


def holders_of(
    tasks: Sequence[tuple[RunDir, LoggedSample | None]], *, watch: bool = True
) -> list[str | None]:
    """Return the name of the process that holds each task, or None.

    Each task comes with the newest load sample in its event log. A process on another machine runs if that
    sample is recent. If the sample is old, or the clock of its machine is wrong, the heartbeats of all such
    tasks are watched for TIMING.other_heartbeat. Without `watch`, and in an object store, where heartbeats
    are rare, such tasks count as ended. Raises OutputError or StoreAwayError where the store does not answer.
    """
    monitors = [monitor_of(run_dir) for run_dir, _ in tasks]
    with using_run(tasks[0][0].name if tasks else ""):
        is_running = [monitor.poll() for monitor in monitors]
    unclear = [
        at
        for at, (_, sample) in enumerate(tasks)
        if is_running[at] is None and sample and not is_recent(sample)
    ]
    watched = [at for at in unclear if watch and not tasks[at][0].store.uri]
    if watched:
        time.sleep(TIMING.other_heartbeat)
    for at in unclear:
        is_running[at] = at in watched and monitors[at].poll() is True
    return [
        str(monitor.holder) if monitor.holder and is_running[at] is not False else None
        for at, monitor in enumerate(monitors)
    ]


def is_recent(sample: LoggedSample) -> bool:
    """Whether a load sample is younger than SILENT_S by this machine's clock."""
    return bool(abs(time.time() - sample.time) < SILENT_S)


@contextlib.contextmanager
def engine_starting(run_dir: RunDir) -> Iterator[None]:
    """Show other processes during the block that the engine is starting; a full disk is ignored."""
    mark = run_dir.task_directory / ENGINE_STARTING
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)
        mark.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def starting_of(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the step of a held task before its first row (`what`) and its age in seconds (`since_s`).

    The step is "input" while the input is read and sorted, "engine" while the engine starts; None afterwards.
    The step follows from the modification times of files on one file system, so no two clocks are compared.
    """
    lock_time = _modification_time(run_dir.task_directory / OWNER)
    if not lock_time or _modification_time(run_dir.events) > lock_time:
        return None
    mark_time = _modification_time(run_dir.task_directory / ENGINE_STARTING)
    is_engine = mark_time >= lock_time  # an older mark is from an attempt that was killed
    since_s = round(max(0.0, time.time() - max(lock_time, mark_time)), 1)
    return {"what": "engine" if is_engine else "input", "since_s": since_s}


def _modification_time(path: Path) -> float:
    """Return when a file was last written, in seconds since the epoch; 0 for a missing file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_bytes(path: Path, *, strict: bool = False) -> bytes:
    """Return the content of a file, b"" for an unreadable one; with `strict` only for a missing one."""
    try:
        return path.read_bytes()
    except OSError as failure:
        if strict and not isinstance(failure, FileNotFoundError):
            raise
        return b""
