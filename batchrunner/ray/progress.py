"""The progress of a job on a Ray cluster, read from the files of the run: one display for all workers."""

import sys
import time
from typing import Any

from batchrunner.core.console import tell
from batchrunner.core.errors import BatchrunError
from batchrunner.core.timing import TIMING
from batchrunner.report.report import duration
from batchrunner.runner.progress import LINE_EVERY_S
from batchrunner.runner.status import status

COST_SHARE = 0.1
"""Most of the time that is spent on reading the run's files."""


class RunProgress:
    """Shows how far a run is: a bar on a terminal, else a line every 5 s."""

    def __init__(self, path: str, *, quiet: bool) -> None:
        self._path = path
        self._quiet = quiet
        self._bar: Any = None
        self._done = 0
        self._next_look = 0.0
        self._next_line = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the last look is old enough for another one."""
        return time.monotonic() >= self._next_look

    def update(self, workers: int) -> bool:
        """Look at the run and show it, with so many workers; return whether rows were done meanwhile."""
        now = time.monotonic()
        try:
            state = status(self._path, watch=False)  # the cluster knows which workers live
        except BatchrunError:  # no worker has begun
            return False
        finally:
            cost_s = time.monotonic() - now
            self._next_look = now + max(TIMING.ray_progress, cost_s / COST_SHARE)
        grown: bool = state["rows_on_disk"] > self._done
        self._done = state["rows_on_disk"]
        if not self._quiet and state["rows_total"] is not None:
            self._show(state, workers, now)
        return grown

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _show(self, state: dict[str, Any], workers: int, now: float) -> None:
        left = state["time_left_s"]
        at_work = "1 worker" if workers == 1 else f"{workers} workers"
        text = f"{state['rows_per_s']:.1f} rows/s, {at_work}, {state['rows_failed']} failed"
        text += "" if left is None else f", {duration(left)} left"
        if sys.stderr.isatty():
            self._move_bar(state, text)
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            done = f"{state['rows_on_disk']:,}/{state['rows_total']:,} rows"
            tell(f"{time.strftime('%H:%M:%S')} {done}, {text}")

    def _move_bar(self, state: dict[str, Any], text: str) -> None:
        if self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415 - only where there is a terminal

            self._bar = tqdm(
                total=state["rows_total"], file=sys.stderr, dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}", unit=text,
            )  # fmt: skip
        self._bar.unit = f"rows · {text}"
        self._bar.n = state["rows_on_disk"]
        self._bar.refresh()
