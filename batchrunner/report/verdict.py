"""The exit code of a run, and the reason for it. No other module decides them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchrunner.core.console import counted
from batchrunner.core.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_STOPPED, BatchrunError


class RunVerdict(NamedTuple):
    """The exit code of a run, and why it ended."""

    exit_code: int
    reason: str


STOPPED = RunVerdict(EXIT_STOPPED, "stopped")
SAMPLE_DONE = RunVerdict(EXIT_STOPPED, "a sample is done: the job asks no row again")
NOTHING_FREE = RunVerdict(EXIT_DONE, "no rows are free: other workers hold the rest")
FAILED_ROWS = RunVerdict(EXIT_FAILED_ROWS, "done, but more rows failed than limits.max_failed_rows tolerates")
DONE = RunVerdict(EXIT_DONE, "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How an attempt ended, and the rows of its run."""

    rows_total: int
    rows_failed: int
    max_failed_rows: float
    """`limits.max_failed_rows`: a number of rows, or a share of all rows."""
    rows_left: int = 0
    """Rows without a result that this worker was to do."""
    rows_unheld: int = 0
    """Further rows without a result, which no living worker holds."""
    rows_lost: int = 0
    """Rows of the run in no part, although all its workers have ended."""
    rows_failed_here: int | None = None
    """Failed rows of this worker, if `rows_failed` counts those of all workers."""
    rows_held: int = 0
    """Further rows without a result, which other living workers hold."""
    was_empty: bool = False
    """Whether the attempt found nothing to do."""
    is_sample: bool = False
    """Whether only the sample of an estimate was to be sent."""
    failure: BatchrunError | None = None
    """Why the run could not go on."""
    stop: RunVerdict | None = None
    """The stop that a signal, a limit or a caller asked for. It counts only if rows remain."""
    added_files: Sequence[str] = ()
    """Input files that were added or grew during the run, and that belong to the run."""

    @property
    def is_cut_short(self) -> bool:
        """Whether the attempt failed, or a later start has rows to do."""
        return bool(self.failure or self.rows_left or self.rows_unheld or self.added_files)


def verdict_of(end: RunEnd) -> RunVerdict:
    """Return the exit code of an attempt, and the reason for it."""
    if end.failure is not None:
        return RunVerdict(end.failure.exit_code, str(end.failure))
    if end.rows_left or end.rows_unheld:
        return _incomplete(end) if end.stop is None else end.stop
    if end.added_files:
        first, *others = end.added_files
        files = f"{first} and {len(others)} more" if others else first
        came = f"{files} appeared in the input, or grew, during the run"
        return RunVerdict(EXIT_STOPPED, f"{came}: run the same command again")
    if end.rows_lost:
        rows = f"{counted(end.rows_lost, 'row')} of the run are missing from all parts"
        return RunVerdict(EXIT_STOPPED, f"{rows}: run the same command again")
    if end.rows_failed > tolerated(end.max_failed_rows, end.rows_total):
        return _too_many_failed(end)
    return NOTHING_FREE if end.was_empty and end.rows_held else DONE


def _incomplete(end: RunEnd) -> RunVerdict:
    """Return the verdict where rows remain for a later start, and nobody asked for a stop."""
    if end.rows_left:
        return SAMPLE_DONE if end.is_sample else STOPPED
    rows = f"{end.rows_unheld:,} rows are left that no living worker holds"
    return RunVerdict(EXIT_STOPPED, f"{rows}: run the same command again")


def _too_many_failed(end: RunEnd) -> RunVerdict:
    """Return the verdict on too many failed rows. The reason has their number if other workers had some."""
    if end.rows_failed_here in {None, end.rows_failed}:
        return FAILED_ROWS
    rows = counted(end.rows_failed, "row")
    reason = f"done, but {rows} of the run failed, more than limits.max_failed_rows tolerates"
    return RunVerdict(EXIT_FAILED_ROWS, reason)


def tolerated(max_failed_rows: float, rows_total: int) -> float:
    """Return how many rows may fail; `max_failed_rows` is a number, or a share of all rows."""
    return max_failed_rows if isinstance(max_failed_rows, int) else max_failed_rows * rows_total
