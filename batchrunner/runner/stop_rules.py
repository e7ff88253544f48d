"""Ends a run from inside: after a failed write, at the deadline, or if too many rows fail."""

from collections.abc import Sequence

from batchrunner.core.types import Outcome, SchedulerLoad
from batchrunner.output.counts import RowCounts
from batchrunner.output.run_json import DISCARD
from batchrunner.output.writer import ResultWriter
from batchrunner.runner.control import Control

FEWEST_ROWS = 100
"""Rows that must have ended before `limits.abort_failed_share` stops a run."""


class FailureLimit:
    """Counts outcomes, and stops the run if too large a share of the rows failed."""

    def __init__(self, counts: RowCounts, control: Control, most_failed_share: float) -> None:
        """Stop the run above `most_failed_share` (`limits.abort_failed_share`), from 0 to 1."""
        self._counts = counts
        self._control = control
        self._most_failed_share = most_failed_share

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self._counts.add(outcome)
        if outcome.completion is None and self._counts.done >= FEWEST_ROWS:
            share = self._counts.failed / self._counts.done
            if share > self._most_failed_share:
                self._control.drain(
                    f"{share:.0%} of the rows failed (limits.abort_failed_share): correct the job and start "
                    f"with {DISCARD}; or mend the engine and start with --retry-failed"
                )


class StopRules:
    """Checks at every load sample whether the run has to end before its last row."""

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
