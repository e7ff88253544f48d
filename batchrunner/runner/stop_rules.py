"""What ends a run from inside, checked at every load sample: a failed write, the deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.core.types import SchedulerLoad
    from batchrunner.output.writer import ResultWriter
    from batchrunner.runner.control import Control


class StopRules:
    """Stops the run where it has to end before its last row."""

    def __init__(
        self, writer: ResultWriter, control: Control, deadline_s: float | None, *, now: float
    ) -> None:
        """Allow `deadline_s` seconds from `now` on (`limits.deadline`); None for no limit."""
        self._writer = writer
        self._control = control
        self._ends_at = None if deadline_s is None else now + deadline_s

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Raise the StorageError of a write that failed in the background; drain after the deadline."""
        del loads
        self._writer.check()
        if self._ends_at is not None and now > self._ends_at:
            self._control.drain("the deadline passed (limits.deadline)")
