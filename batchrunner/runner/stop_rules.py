"""Ends a run from inside: after a failed write, at the deadline, or if too many rows fail."""

from collections.abc import Sequence
from typing import Protocol

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.types import Outcome
from batchrunner.output.counts import RowCounts
from batchrunner.runner.control import Control

FEWEST_ROWS = 100
"""Rows that must have been sent and ended before `limits.abort_failed_share` stops a run."""


class InFlightTotal(Protocol):
    """What knows how many requests are in flight."""

    @property
    def in_flight(self) -> int:
        """Requests in flight."""


class CheckedWriter(Protocol):
    """What takes outcomes, and may fail in the background."""

    def check(self) -> None:
        """Raise the StorageError of what failed in the background."""


class FailureLimit:
    """Counts outcomes, and stops the run if too large a share of the rows that were sent failed.

    A refusal comes back at once and an answer late, so rows in flight count as rows that did not fail. Rows
    that were not sent (a null prompt, for example) say nothing about the engine or the other rows.
    """

    def __init__(
        self, counts: RowCounts, control: Control, slots: InFlightTotal, most_failed_share: float
    ) -> None:
        """Stop the run above `most_failed_share` (`limits.abort_failed_share`), from 0 to 1."""
        self._counts = counts
        self._control = control
        self._slots = slots
        self._most_failed_share = most_failed_share
        self._sent = 0
        self._failed = 0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self._counts.add(outcome)
        if not outcome.attempts:
            return
        self._sent += 1
        if outcome.error is None:
            return
        self._failed += 1
        all_sent = self._sent + max(0, self._slots.in_flight - 1)  # the slot of this row is still taken
        if self._sent >= FEWEST_ROWS and self._failed / all_sent > self._most_failed_share:
            self._control.drain(
                f"{self._failed / self._sent:.0%} of the rows failed (limits.abort_failed_share): "
                "correct what the errors below name, and start with --retry-failed"
            )


class StopRules:
    """Checks at every load sample whether the run has to end before its last row."""

    def __init__(
        self, writer: CheckedWriter, control: Control, deadline_s: float | None, *, now: float
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
