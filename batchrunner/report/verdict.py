"""The exit code of a run, and the reason why it ended. Only this module decides on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchrunner.core.console import counted
from batchrunner.core.errors import EXIT_DONE, EXIT_FAILED_ROWS, EXIT_STOPPED, BatchrunError
from batchrunner.job.spec import LimitsSpec

GO_ON = "run the same command again"
"""What to do after most runs that ended with remaining rows."""


class RunVerdict(NamedTuple):
    """The exit code of a run, and the reason why it ended."""

    exit_code: int
    reason: str
    next_step: str = GO_ON
    """What to do if rows remain; empty if `reason` says it."""


STOPPED = RunVerdict(EXIT_STOPPED, "stopped")
SAMPLE_DONE = RunVerdict(
    EXIT_STOPPED,
    "the sample of an estimate is done; a run will not send the sampled rows again",
    next_step="",
)
NOTHING_FREE = RunVerdict(EXIT_DONE, "no rows can be leased: other workers have leased the rest")
DONE = RunVerdict(EXIT_DONE, "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Facts about the end of one start of a run, from which `verdict_of` derives the exit code."""

    rows_total: int
    rows_failed: int
    """Number of failed rows of the run, as far as this worker knows them."""
    max_failed_rows: float
    """`limits.max_failed_rows`: a number of rows if it is an int, otherwise a fraction of all rows."""
    rows_left: int = 0
    """Number of rows without a result among those that this worker was to send."""
    rows_unheld: int = 0
    """Number of further rows without a result that no running worker has taken."""
    rows_lost: int = 0
    """Number of rows that are in no result file, although all workers of the run have ended."""
    rows_held: int = 0
    """Number of rows without a result that other running workers have taken."""
    was_empty: bool = False
    """Whether no row remained to be sent when this start began."""
    is_sample: bool = False
    """Whether this start was to send only the sample of an estimate."""
    failure: BatchrunError | None = None
    """Error that made the run fail; None if it did not fail."""
    stop: RunVerdict | None = None
    """Exit code and reason of a stop by a signal, a limit or a caller. They count only if rows remain."""
    added_files: Sequence[str] = ()
    """Input files of the run that were added, or grew, while it ran."""

    @property
    def is_cut_short(self) -> bool:
        """Whether this start failed, or left rows for a later start."""
        return bool(self.failure or self.rows_left or self.rows_unheld or self.added_files)


def verdict_of(end: RunEnd) -> RunVerdict:
    """Return the exit code of one start of a run, and the reason why it ended.

    If several reasons apply, the one that is checked first counts.
    """
    if end.failure is not None:
        # The text of an error may have its hint already.
        next_step = "" if end.failure.hint in str(end.failure) else end.failure.hint
        return RunVerdict(end.failure.exit_code, str(end.failure), next_step)
    # Rows remain that this worker has taken, or that nobody has. Only then does a requested stop count.
    if end.rows_left or end.rows_unheld:
        return _incomplete(end) if end.stop is None else end.stop
    if end.added_files:
        example, *others = end.added_files
        files = f"{example} and {len(others)} more" if others else example
        return RunVerdict(
            EXIT_STOPPED,
            f"{files} appeared in the input, or grew, during the run: {GO_ON}",
            next_step="",
        )
    if end.rows_lost:
        rows = counted(end.rows_lost, "row")
        return RunVerdict(
            EXIT_STOPPED,
            f"{rows} of the run are missing from all result files: {GO_ON}",
            next_step="",
        )
    if failed_rows := too_many_failed(
        end.rows_failed, rows_total=end.rows_total, max_failed_rows=end.max_failed_rows
    ):
        return RunVerdict(EXIT_FAILED_ROWS, f"done, but {failed_rows}")
    # Other running workers do the rows in `rows_held`, so this start is done in any case. If it had no rows
    # to send from the beginning, the reason tells the user why.
    return NOTHING_FREE if end.was_empty and end.rows_held else DONE


def _incomplete(end: RunEnd) -> RunVerdict:
    """Return the exit code and the reason for a start that left rows, although no stop was requested."""
    if end.rows_left:
        return SAMPLE_DONE if end.is_sample else STOPPED
    rows = f"{end.rows_unheld:,} rows remain that no running worker has leased"
    return RunVerdict(EXIT_STOPPED, f"{rows}: {GO_ON}", next_step="")


def too_many_failed(rows_failed: int, *, rows_total: int, max_failed_rows: float) -> str | None:
    """Return a clause for users if more rows failed than `limits.max_failed_rows` tolerates; otherwise None.

    `max_failed_rows` is a number of rows if it is an int, otherwise a fraction of all rows.
    """
    tolerated = max_failed_rows if isinstance(max_failed_rows, int) else max_failed_rows * rows_total
    if rows_failed <= tolerated:
        return None
    return f"{counted(rows_failed, 'row')} of the run failed, more than limits.max_failed_rows tolerates"


def max_failed_rows_of(run_facts: Mapping[str, Any]) -> float:
    """Return `limits.max_failed_rows` of the job in the content of run.json, or its default."""
    limits: Mapping[str, Any] = run_facts["job"].get("limits", {})
    max_failed_rows: float = limits.get("max_failed_rows", LimitsSpec().max_failed_rows)
    return max_failed_rows
