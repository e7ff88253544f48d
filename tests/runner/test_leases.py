"""Ranges of rows that tasks lease: what is free, and who gets it."""

from batchrunner.runner.leases import next_lease


def test_tasks_meet_late() -> None:
    """The first begins at the beginning, each goes on where it is, a new one in the middle of the rest."""
    assert next_lease(range(100), None) == 0
    assert next_lease(range(1, 100), 0) == 1
    assert next_lease(range(1, 100), None) == 50
    assert next_lease([*range(10, 20), *range(40, 100)], 19) == 70
    assert next_lease([], 3) is None
