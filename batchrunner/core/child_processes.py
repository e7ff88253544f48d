"""The processes that a library has started here with `multiprocessing`, and those that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run. Slurm, systemd and `timeout` send them to all of its processes, but only the run
takes them: it waits for its rows in flight, which need those processes."""


def children() -> set[int]:
    """Return the ids of the processes that `multiprocessing` has started here and that run."""
    module = sys.modules.get("multiprocessing")  # whoever has started one has imported it
    return {child.pid for child in module.active_children()} if module is not None else set()


def kill_children(which: set[int] | None = None) -> None:
    """Kill these processes, by default all `children`, with all that they have started."""
    for pid in children() if which is None else which & children():
        for process in [*_below(pid), pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that they have."""
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield from _below(child)
                yield child
