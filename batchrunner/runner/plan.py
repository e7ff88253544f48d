"""Plan of a run: the rows that a start sends, the results that it keeps, and those that it discards.

This module decides what `--fresh`, `--retry-failed`, `--join`, `input.limit`, `output.reuse`, estimates and a
growing input mean for rows. It uses no files and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pyroaring import BitMap64

from batchrunner.core.errors import JobError, ResumeError
from batchrunner.output.resume import DoneRows

Discard: TypeAlias = Literal["run", "failed rows", "nothing"]
"""Results that a start of a run deletes before it writes its first result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options with which a run is started. Raises JobError if two options contradict each other."""

    fresh: bool = False
    """Discard the run and begin again."""
    retry_failed: bool = False
    """Send the failed rows again."""
    join: bool = False
    """Share the rows with all other workers that join."""
    sample: BitMap64 | None = None
    """The only rows that an estimate sends; None sends all."""

    @property
    def discards(self) -> bool:
        """Whether this start discards results itself.

        In a shared run, the worker that makes a plan does so.
        """
        return (self.fresh or self.retry_failed) and not self.join

    def __post_init__(self) -> None:
        if self.join and self.fresh:
            raise JobError(
                "--fresh would discard what other workers have done", hint="delete the directory instead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Rows of a run when it starts or resumes: selected, answered, failed and leased."""

    selected: BitMap64
    """Rows of the input within `input.limit`."""
    answered: BitMap64 = field(default_factory=BitMap64)
    """Rows with a stored answer."""
    failed: BitMap64 = field(default_factory=BitMap64)
    """Rows with a stored error, and without a stored answer."""
    leased: BitMap64 = field(default_factory=BitMap64)
    """Rows of all plans of a shared run, which its workers are doing; empty once all leases have ended."""

    @classmethod
    def of(cls, selected: BitMap64, stored: DoneRows, leased: BitMap64 | None = None) -> RunState:
        """Return the state of a run whose results are `stored`."""
        return cls(
            selected=selected,
            answered=stored.answered,
            failed=stored.failed,
            leased=BitMap64() if leased is None else leased,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The rows that a start sends, keeps and discards."""

    selected: BitMap64
    """Rows of the input within `input.limit`."""
    kept: BitMap64
    """Rows whose results stay, even if `input.limit` no longer selects them."""
    missing: BitMap64
    """Selected rows that are neither kept nor leased. `output.reuse` may have answers for some of them."""
    discard: Discard
    """Results to delete before the first new result is stored."""
    sample: BitMap64 | None = None
    """The only rows that an estimate sends; None sends all."""

    @property
    def rows(self) -> BitMap64:
        """Rows to send."""
        return self.missing if self.sample is None else self.missing & self.sample

    @property
    def total(self) -> int:
        """Number of rows with a result once all missing rows have one."""
        return len(self.selected | self.kept)

    def with_reused(self, reused: BitMap64) -> RunPlan:
        """Return the plan without the rows that got their answers from another run (`output.reuse`).

        The rows are not added to `kept`, because the start counts reused rows separately.
        """
        return replace(self, missing=self.missing - reused)


def plan_run(start: StartOptions, state: RunState) -> RunPlan:
    """Decide what a start sends, keeps and discards."""
    discard: Discard = "nothing"
    kept = state.answered | state.failed
    if start.fresh:
        discard, kept = "run", BitMap64()
    elif start.retry_failed:
        discard, kept = "failed rows", state.answered
    return RunPlan(
        selected=state.selected,
        kept=kept,
        missing=state.selected - kept - state.leased,
        discard=discard,
        sample=start.sample,
    )


def check_retry(start: StartOptions, run: str, *, is_leased: bool) -> None:
    """Raise ResumeError for `--retry-failed` while leases of a shared run are free or held.

    `run` is the name of the run.
    """
    if start.retry_failed and is_leased:
        raise ResumeError(
            f"{run}: --retry-failed: other workers are still retrying failed rows, or died while retrying",
            hint="wait until these workers end, or run --join without --retry-failed first",
        )


def has_grown(planned: Mapping[str, Any], *, rows_of_files: int, limit: int | None) -> bool:
    """Return whether the input files have more rows than those of a plan, or `input.limit` differs.

    `planned` is the fingerprint of the plan.
    """
    planned_rows = sum(file["rows"] for file in planned["files"])
    return bool(rows_of_files > planned_rows or planned["limit"] != limit)


def may_grow(*, rows_of_run: int, limit: int | None) -> bool:
    """Return whether rows that are added to the input would belong to the run, as `input.limit` permits."""
    return limit is None or rows_of_run < limit
