"""Is a task alive? Which process holds it, whether that still runs, and what it does before its first row.

`owner` of a task, a file or an object, names its holder. A process on the same machine is looked up in /proc.
One on another machine counts as dead when its heartbeat (a counter in the file `heartbeat`, or in the object
`owner`) has stood still for DEAD_AFTER_S of the observer's clock: no two clocks are compared.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.timing import TIMING
from batchrunner.output.files import using_run
from batchrunner.output.holder import HEARTBEAT, OWNER, LockHolder, parse_holder, this_process
from batchrunner.output.run_dir import ENGINE_STARTING, RunDir
from batchrunner.output.samples import LoggedSample

DEAD_AFTER_S = 75.0
"""Seconds without a heartbeat after which a holder counts as dead; NFS may show an old file for 60 s."""
UNNAMED_AFTER_S = 5.0
"""Seconds after which an `owner` without a whole name counts as left by a process that died writing it."""
POLL_S = 1.0
"""Pause between two polls of another task's holder."""
SHORT_POLL_S = 0.2
"""Pause where a change is expected at once."""
LOOK_S = 5.0
"""Shortest time between two reads of an object that is watched: 720 requests an hour."""
FRESH_S, STORE_FRESH_S = 15.0, 40.0
"""Seconds after its last heartbeat, of a file or an object, during which a holder is known to run."""
SILENT_S = 300.0
"""Age from which a sample says nothing of a task elsewhere: it ended, or its clock is wrong. A sample
that is older although the task runs here is from an earlier attempt."""


class LivenessMonitor:
    """Observes a task's holder from outside; for one on another machine that takes up to DEAD_AFTER_S."""

    def __init__(
        self,
        look: Callable[[], tuple[bytes, bytes]],
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        fresh_s: float = FRESH_S,
        pause_s: float = 0.0,
    ) -> None:
        """`look` returns the content of `owner` and what changes with each heartbeat; `me` is the observer.

        `fresh_s` are the seconds after a heartbeat during which the holder is known to run, `pause_s` those
        between two looks at least.
        """
        self._look = look
        self._me = me or this_process()
        self._clock = clock
        self._fresh_s, self._pause_s = fresh_s, pause_s
        self._looked_at = float("-inf")
        self._last_seen = (b"", b"")
        self._changed_at = clock()
        self._has_beaten = False  # since the first poll

    @property
    def owner_content(self) -> bytes:
        """Content of `owner` at the last poll."""
        return self._last_seen[0]

    @property
    def holder(self) -> LockHolder | None:
        """The holder at the last poll; None where there was none, or no whole name."""
        return parse_holder(self.owner_content)

    def poll(self) -> bool | None:
        """Look again and return whether the holder runs; None while that is not known yet.

        A holder that released the task, or whose name is not whole after UNNAMED_AFTER_S, does not run.
        Raises OSError where the run's store does not answer.
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
        # between its last heartbeat and the time when it counts as dead nobody knows
        return True if self._has_beaten and now - self._changed_at <= self._fresh_s else None


def monitor_of(run_dir: RunDir) -> LivenessMonitor:
    """Return a monitor of the task's holder."""
    objects = run_dir.store.objects
    if objects is None:
        return LivenessMonitor(lambda: look_at_files(run_dir.task_directory))
    return LivenessMonitor(lambda: objects.look(run_dir.owner), fresh_s=STORE_FRESH_S, pause_s=LOOK_S)


def look_at_files(directory: Path) -> tuple[bytes, bytes]:
    """Return the content of `owner` and `heartbeat` in a task directory, b"" of a file that is not there."""
    return read_bytes(directory / OWNER), read_bytes(directory / HEARTBEAT)


def holders_of(
    tasks: Sequence[tuple[RunDir, LoggedSample | None]], *, watch: bool = True
) -> list[str | None]:
    """Return the process that holds each task, or None; a task comes with the newest sample of its event log.

    A process on another machine runs if it has just written a sample. Where the sample is old, or its clock
    is another one, the heartbeat tells: those of all such tasks are watched for TIMING.other_heartbeat. Such
    tasks count as ended without `watch`, and in a run in an object store, whose heartbeats are rare. Raises
    OutputError or StoreAwayError where the store does not answer.
    """
    monitors = [monitor_of(run_dir) for run_dir, _ in tasks]
    with using_run(tasks[0][0].name if tasks else ""):
        running = [monitor.poll() for monitor in monitors]
    unknown = [
        at
        for at, (runs, (_, sample)) in enumerate(zip(running, tasks, strict=True))
        if runs is None and sample and not is_recent(sample)
    ]
    watched = [at for at in unknown if watch and not tasks[at][0].store.uri]
    if watched:
        time.sleep(TIMING.other_heartbeat)
    for at in unknown:
        running[at] = at in watched and monitors[at].poll() is True
    return [
        str(monitor.holder) if monitor.holder and runs is not False else None
        for monitor, runs in zip(monitors, running, strict=True)
    ]


def is_recent(sample: LoggedSample) -> bool:
    """Return whether a sample is of the last minutes, by this machine's clock."""
    return bool(abs(time.time() - sample.time) < SILENT_S)


@contextlib.contextmanager
def engine_starting(run_dir: RunDir) -> Iterator[None]:
    """Let others know during the block that the engine is starting; a full disk is ignored."""
    file = run_dir.task_directory / ENGINE_STARTING
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)
        file.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def starting_of(run_dir: RunDir) -> dict[str, Any] | None:
    """Return the step of a task that is held before its first row, `what`, and `since_s`; None afterwards.

    It is "input" while the input is read and sorted, then "engine" while the engine starts. The times of its
    files tell, all of one file system, so no two clocks are compared.
    """
    held = _time_of(run_dir.task_directory / OWNER)
    if not held or _time_of(run_dir.events) > held:
        return None
    engine = _time_of(run_dir.task_directory / ENGINE_STARTING)
    began = max(held, engine)  # a killed attempt may have left an older file
    since_s = round(max(0.0, time.time() - began), 1)
    return {"what": "engine" if engine >= held else "input", "since_s": since_s}


def _time_of(path: Path) -> float:
    """Return when a file was last written, in seconds since the epoch; 0 where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_bytes(path: Path, *, strict: bool = False) -> bytes:
    """Return a file's content, b"" where it does not exist; with `strict` raise any other OSError."""
    try:
        return path.read_bytes()
    except OSError as failure:
        if strict and not isinstance(failure, FileNotFoundError):
            raise
        return b""
