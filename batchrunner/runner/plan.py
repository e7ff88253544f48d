"""Decides which rows a start of a run sends, and which earlier results it keeps or discards.

It covers `--fresh`, `--retry-failed`, `--join`, `input.limit`, `output.reuse`, estimates and a growing input.
It uses no files and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pyroaring import BitMap64

from batchrunner.core.errors import JobError, ResumeError
from batchrunner.output.resume import DoneRows

Discard: TypeAlias = Literal["run", "failed rows", "nothing"]
"""The old results that a start deletes before it writes its first result."""


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

        In a shared run, only the worker that makes a plan discards results.
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
    """Rows that the workers of a shared run are doing; empty once they have ended."""

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
    """Selected rows that have no kept result, and that no other worker does. Another run may have answers for
    some of them (`output.reuse`)."""
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
        """Return the plan without the rows that got answers from another run (`output.reuse`).

        These rows are not added to `kept`, because they are counted separately.
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
    """Raise ResumeError for `--retry-failed` while workers of a shared run still have rows to do.

    `run` is the name of the run.
    """
    if start.retry_failed and is_leased:
        raise ResumeError(
            f"{run}: --retry-failed: other workers are still retrying failed rows, or died while retrying",
            hint="wait until these workers end, or run --join without --retry-failed first",
        )


def has_grown(planned: Mapping[str, Any], *, rows_of_files: int, limit: int | None) -> bool:
    """Return whether the input has more rows, or another `input.limit`, than a plan was made for.

    `planned` is the fingerprint of the plan.
    """
    planned_rows = sum(file["rows"] for file in planned["files"])
    return bool(rows_of_files > planned_rows or planned["limit"] != limit)


def may_grow(*, rows_of_run: int, limit: int | None) -> bool:
    """Return whether `input.limit` lets rows that are added to the input join the run."""
    return limit is None or rows_of_run < limit
