"""Where outcomes go: they are counted, stored, and watched for too many failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.output.run_json import DISCARD

if TYPE_CHECKING:
    from batchrunner.core.types import Outcome
    from batchrunner.output.counts import RowCounts
    from batchrunner.output.writer import ResultWriter
    from batchrunner.runner.control import Control

FEWEST_ROWS = 100
"""Rows that must have ended before `limits.abort_failed_share` stops a run."""


class RowResults:
    """The dispatcher's `ResultSink`."""

    def __init__(
        self, counts: RowCounts, writer: ResultWriter, control: Control, most_failed_share: float
    ) -> None:
        """Above `most_failed_share` (`limits.abort_failed_share`) the run is stopped."""
        self._counts = counts
        self._writer = writer
        self._control = control
        self._most_failed_share = most_failed_share

    async def put(self, outcome: Outcome) -> None:
        """Count and store an outcome; waits while the disk is behind. Raises StorageError."""
        # counted first: the row is in a part even if a stop comes while we wait for the disk
        self._counts.add(outcome)
        await self._writer.put(outcome)
        if outcome.completion is None and self._counts.done >= FEWEST_ROWS:
            share = self._counts.failed / self._counts.done
            if share > self._most_failed_share:
                self._control.drain(
                    f"{share:.0%} of the rows failed (limits.abort_failed_share): correct the job and start "
                    f"with {DISCARD}; or mend the engine and start with --retry-failed"
                )
