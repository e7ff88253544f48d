"""Who holds a task, told from its files at once: no wait for the heartbeat of another machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from batchrunner.output.task_lock import TaskLock

if TYPE_CHECKING:
    from batchrunner.output.run_dir import RunDir

SILENT_S = 300.0
"""A task on another machine counts as ended when its last sample is older than this, by this machine's clock.
A sample that is older although the task is running is from an earlier attempt."""


def holder_of(run_dir: RunDir, sample: dict[str, Any] | None) -> str | None:
    """Return the process that holds a task, or None; `sample` is the newest in the task's event log."""
    lock = TaskLock(run_dir.task_directory)
    held = lock.is_held()
    if held is None and sample:  # only the heartbeat could tell, which takes a minute; the log is at hand
        held = is_recent(sample)
    return None if held is False else str(lock.holder())


def is_recent(sample: dict[str, Any]) -> bool:
    """Tell whether a sample is young enough for its task to be running."""
    return bool(time.time() - sample["time"] < SILENT_S)
