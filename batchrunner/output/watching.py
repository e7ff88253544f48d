"""Watches the tasks of a run from outside: on a disk by their files, in a store by an object of each."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchrunner.output.owner_object import parse_owner
from batchrunner.output.run_dir import OWNER, RunDir
from batchrunner.output.store_lock import has_ended
from batchrunner.output.stores.store import ConditionalObjects
from batchrunner.output.task_holder import LivenessMonitor, LockHolder, is_held, this_process

LOOK_S = 5.0
"""Shortest time between two reads of an object: 720 requests an hour for each task that is watched."""


class StoreLivenessMonitor(LivenessMonitor):
    """Observes the holder of a task whose run lies in an object store."""

    fresh_s = 40.0

    def __init__(
        self,
        objects: ConditionalObjects,
        run_dir: RunDir,
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run_dir` is the observed task's, `me` the observing process."""
        super().__init__(run_dir.task_directory, me, clock=clock)
        self._objects = objects
        self._name = _owner_of(run_dir)
        self._looked_at: float | None = None

    @property
    def holder(self) -> LockHolder | None:
        """The holder at the last poll; None where there was none."""
        return parse_owner(self.owner_content)

    def _has_ended(self, holder: LockHolder) -> bool | None:
        return has_ended(holder, self._me)

    def _look(self) -> tuple[bytes, bytes]:
        """Return the object's content and e_tag, which changes with each heartbeat; raises OSError."""
        if self._looked_at is not None and self._clock() - self._looked_at < LOOK_S:
            return self._last_seen
        found = self._objects.read(self._name)
        self._looked_at = self._clock()
        return (b"", b"") if found is None else (found[0], found[1].encode())


def watch(run_dir: RunDir) -> LivenessMonitor:
    """Return a monitor of the task's holder. For a run in an object store its polls may raise OSError."""
    objects = run_dir.store.objects
    return (
        LivenessMonitor(run_dir.task_directory) if objects is None else StoreLivenessMonitor(objects, run_dir)
    )


def is_task_held(run_dir: RunDir) -> bool | None:
    """Return whether a running process holds the task; None where only its heartbeat can tell.

    Raises OSError where the run lies in an object store that does not answer.
    """
    objects = run_dir.store.objects
    if objects is None:
        return is_held(run_dir.task_directory)
    found = objects.read(_owner_of(run_dir))
    holder = parse_owner(found[0]) if found is not None else None
    dead = True if holder is None else has_ended(holder, this_process())
    return None if dead is None else not dead


def _owner_of(run_dir: RunDir) -> str:
    return (run_dir.task_directory / OWNER).relative_to(run_dir.path).as_posix()
