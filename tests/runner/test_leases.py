"""Ranges of rows that tasks lease: what is free, and who gets it."""

from __future__ import annotations

from pathlib import Path

from batchrunner.runner.leases import Leases, next_lease
from tests.conftest import job_of
from tests.support.runs import Task


def test_tasks_meet_late() -> None:
    """The first begins at the beginning, each goes on where it is, a new one in the middle of the rest."""
    assert next_lease(range(100), None) == 0
    assert next_lease(range(1, 100), 0) == 1
    assert next_lease(range(1, 100), None) == 50
    assert next_lease([*range(10, 20), *range(40, 100)], 19) == 70
    assert next_lease([], 3) is None


def test_sixteen_take_the_same(tmp_path: Path) -> None:
    """A lease that several want at the same time goes to one of them, also where its directory looks old."""
    first = Task(job_of(tmp_path, rows=100), "first")
    boards = [Leases(first.run_dir.leases, f"task-{n}") for n in range(16)]
    for board in boards:
        board.refresh()
    taken = [board.take(5) for board in boards]
    assert [lease is not None for lease in taken] == [True] + [False] * 15
