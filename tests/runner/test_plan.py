"""The plan of a run: what a start sends, keeps and discards, in all combinations of options and states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from batchrunner.core.errors import JobError, ResumeError
from batchrunner.runner.plan import (
    RunPlan,
    RunState,
    StartOptions,
    check_retry,
    has_grown,
    may_grow,
    plan_run,
)
from tests.conftest import examples

MOST_ROWS = 12
rows_of_input = st.integers(0, 2**MOST_ROWS - 1).map(
    lambda bits: BitMap64([row for row in range(MOST_ROWS) if bits >> row & 1])
)


@st.composite
def starts(draw: st.DrawFn, *, join: bool) -> StartOptions:
    """Any options of a start, those of an estimate included."""
    return StartOptions(
        fresh=not join and draw(st.booleans()),
        retry_failed=draw(st.booleans()),
        join=join,
        sample=None if join else draw(st.none() | rows_of_input),
    )


@st.composite
def states(draw: st.DrawFn) -> RunState:
    """Any rows of a run: a limit that shrank, a part of another worker, leases that have not ended."""
    answered = draw(rows_of_input)
    return RunState(
        selected=BitMap64(range(draw(st.integers(0, MOST_ROWS)))),
        answered=answered,
        failed=draw(rows_of_input) - answered,
        leased=draw(rows_of_input),
    )


@examples(300)
@given(start=st.booleans().flatmap(lambda join: starts(join=join)), state=states(), reused=rows_of_input)
def test_a_plan_loses_and_doubles_no_row(start: StartOptions, state: RunState, reused: BitMap64) -> None:
    """Each selected row is kept, missing, or done by other workers, and only one of them."""
    plan = plan_run(start, state)
    discarded = {
        "run": state.answered | state.failed,
        "failed rows": state.failed,
        "nothing": BitMap64(),
    }[plan.discard]
    assert plan.kept == (state.answered | state.failed) - discarded
    assert not plan.missing & plan.kept
    assert not plan.missing & state.leased
    assert plan.missing | (state.selected & (plan.kept | state.leased)) == state.selected
    assert plan.total == len(state.selected | plan.kept)

    after = plan.with_reused(reused & plan.missing)
    missing = plan.missing - reused
    assert after.rows == (missing if start.sample is None else missing & start.sample)
    assert (after.kept, after.discard, after.total) == (plan.kept, plan.discard, plan.total)


@pytest.mark.parametrize(
    ("options", "kept", "missing", "discard"),
    [
        ({}, [0, 1, 2, 9], [3, 4], "nothing"),
        ({"retry_failed": True}, [0, 1, 9], [2, 3, 4], "failed rows"),
        ({"fresh": True}, [], [0, 1, 2, 3, 4], "run"),
        ({"fresh": True, "retry_failed": True}, [], [0, 1, 2, 3, 4], "run"),
        ({"join": True}, [0, 1, 2, 9], [3, 4], "nothing"),
        ({"join": True, "retry_failed": True}, [0, 1, 9], [2, 3, 4], "failed rows"),
    ],
)
def test_each_option(options: dict[str, Any], kept: list[int], missing: list[int], discard: str) -> None:
    """What each option keeps, sends and discards.

    Rows 0, 1 and 9 are answered, row 2 failed, and rows from 5 on are not selected.
    """
    state = RunState(selected=BitMap64(range(5)), answered=BitMap64([0, 1, 9]), failed=BitMap64([2]))
    plan = plan_run(StartOptions(**options), state)
    assert (list(plan.kept), list(plan.missing), plan.discard) == (kept, missing, discard)
    assert list(plan.rows) == missing


def test_fresh_tells_workers_that_join_apart() -> None:
    """A worker that joins may not discard what others have done."""
    with pytest.raises(JobError, match="--fresh would discard"):
        StartOptions(fresh=True, join=True)


def test_failed_rows_are_sent_again_only_after_all_leases() -> None:
    """Workers that are still at it would write their failed rows after they were discarded."""
    retry = StartOptions(join=True, retry_failed=True)
    with pytest.raises(
        ResumeError, match=r"^out/run: --retry-failed: other workers are still retrying failed rows"
    ):
        check_retry(retry, "out/run", is_leased=True)
    check_retry(retry, "out/run", is_leased=False)
    check_retry(StartOptions(join=True), "out/run", is_leased=True)


@pytest.mark.parametrize(
    ("rows_of_files", "limit", "expected"),
    [(10, None, False), (11, None, True), (9, None, False), (10, 5, True), (11, 5, True)],
)
def test_growing_input(rows_of_files: int, limit: int | None, expected: bool) -> None:
    """More rows in the files, or another limit, need a further plan."""
    planned = {"files": [{"rows": 4}, {"rows": 6}], "limit": None}
    assert has_grown(planned, rows_of_files=rows_of_files, limit=limit) == expected


def test_a_run_within_its_limit_may_grow() -> None:
    """Files that are added to the input belong to a run that has not reached its limit."""
    assert may_grow(rows_of_run=10, limit=None)
    assert may_grow(rows_of_run=9, limit=10)
    assert not may_grow(rows_of_run=10, limit=10)


@dataclass
class Disk:
    """The stored rows of a run, and what its starts do to them; each may die at any point."""

    data: st.DataObject
    answered: BitMap64 = field(default_factory=BitMap64)
    failed: BitMap64 = field(default_factory=BitMap64)
    leased: BitMap64 = field(default_factory=BitMap64)
    selected: BitMap64 = field(default_factory=BitMap64)

    def some(self, rows: BitMap64) -> BitMap64:
        """Draw some of these rows, or all."""
        if not rows or self.data.draw(st.booleans()):
            return rows
        return rows & self.data.draw(rows_of_input)

    def dies(self) -> bool:
        return self.data.draw(st.integers(0, 4)) == 0

    def store(self, rows: BitMap64, *, as_failed: BitMap64) -> None:
        """Store results; a row that has one already would be doubled."""
        assert not rows & (self.answered | self.failed)
        self.failed |= rows & as_failed
        self.answered |= rows - as_failed

    def discard(self, plan: RunPlan) -> bool:
        """Discard what a plan says, part by part; tell whether the start lived through it.

        A run that is half discarded has a mark, and the next start discards the rest: it goes at once.
        """
        if plan.discard == "run":
            self.answered, self.failed, self.leased = BitMap64(), BitMap64(), BitMap64()
        elif plan.discard == "failed rows":
            if self.dies():
                self.failed -= self.some(self.failed)
                return False
            self.failed = BitMap64()
        return not self.dies()

    def state(self) -> RunState:
        return RunState(
            selected=self.selected, answered=self.answered, failed=self.failed, leased=self.leased
        )

    def start(self, options: StartOptions, *, reuses: bool) -> None:
        """Play one start: it plans, takes answers of another run, discards, sends, and may die meanwhile."""
        plan = plan_run(options, self.state())
        reused = self.some(plan.missing) if reuses else BitMap64()
        if not self.discard(plan):
            return
        self.store(reused, as_failed=BitMap64())
        plan = plan.with_reused(reused)
        if options.join:  # the rows are planned; workers take and end their leases
            self.leased |= plan.rows
            return
        self.store(self.some(plan.rows), as_failed=self.some(plan.rows))

    def work(self) -> None:
        """Workers end some leases, those of dead workers included."""
        rows = self.some(self.leased)
        self.store(rows, as_failed=self.some(rows))
        self.leased -= rows


@examples(200)
@given(data=st.data(), joins=st.booleans())
def test_any_sequence_of_starts_does_each_row_once(data: st.DataObject, *, joins: bool) -> None:
    """Starts with any options, deaths, a growing input and a shrinking limit: in the end each row is there.

    No start stores a row that has a result. A start after the end sends nothing.
    """
    disk, size = Disk(data), data.draw(st.integers(1, MOST_ROWS))
    for _ in range(data.draw(st.integers(0, 6))):
        size = min(MOST_ROWS, size + data.draw(st.integers(0, 4)))
        disk.selected = BitMap64(range(data.draw(st.sampled_from([size, size // 2]))))
        options = data.draw(starts(join=joins))
        if options.retry_failed and disk.leased:
            continue  # refused by `check_retry`
        disk.start(options, reuses=data.draw(st.booleans()))
        disk.work()
    disk.selected = BitMap64(range(size))
    end = plan_run(StartOptions(join=joins), disk.state())
    disk.store(end.rows | disk.leased, as_failed=BitMap64())
    disk.leased = BitMap64()
    assert disk.answered | disk.failed >= disk.selected
    assert not plan_run(StartOptions(join=joins), disk.state()).rows
    retry = plan_run(StartOptions(join=joins, retry_failed=True), disk.state())
    assert retry.rows == disk.failed & disk.selected
