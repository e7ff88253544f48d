"""What a task does before its first row: it prepares its input, then its engine starts, which takes minutes.

A file in the task directory says that the engine is starting. Which step is the last is told by the times of
files on one file system, so no two clocks are compared for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchrunner.output.run_dir import ENGINE_STARTING, OWNER, RunDir


@dataclass(frozen=True, slots=True)
class Starting:
    """The step of a task that has not begun to send rows."""

    what: str
    """"input" while the input is read and sorted, "engine" while the engine starts."""
    since_s: float
    """Seconds since the step began."""

    def __str__(self) -> str:
        steps = {"input": "preparing the input", "engine": "engine starting"}
        return f"{steps[self.what]}, {self.since_s:.0f} s"


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


def starting_of(run_dir: RunDir) -> Starting | None:
    """Return what a task that is held does before its first row; None once it has begun."""
    held = _time_of(run_dir.task_directory / OWNER)
    if not held or _time_of(run_dir.events) > held:
        return None
    engine = _time_of(run_dir.task_directory / ENGINE_STARTING)
    began = max(held, engine)  # a killed attempt may have left an older file
    return Starting("engine" if engine >= held else "input", round(max(0.0, time.time() - began), 1))


def _time_of(path: Path) -> float:
    """Return when a file was last written, in seconds since the epoch; 0 where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
