"""Ranges of rows that tasks lease: what is free, and who gets it."""

import sys
from pathlib import Path

from pyroaring import BitMap64

from batchrunner.runner.leases import LeasePlan, Leases, lease_name, next_lease


def test_tasks_meet_late() -> None:
    """The first begins at the beginning, each goes on where it is, a new one in the middle of the rest."""
    assert next_lease(range(100), None) == 0
    assert next_lease(range(1, 100), 0) == 1
    assert next_lease(range(1, 100), None) == 50
    assert next_lease([*range(10, 20), *range(40, 100)], 19) == 70
    assert next_lease([], 3) is None


def test_a_worker_that_wakes_frees_no_rows_that_are_done(tmp_path: Path) -> None:
    """If a lease was ended as done by another worker, its late holder cannot free its rows once more."""
    late, other = Leases(tmp_path, "late"), Leases(tmp_path, "other")
    late.make_plan(
        LeasePlan(
            rows=BitMap64(range(10)), cuts=[0, 10], rows_total=10, fingerprint={}, order=None, choice={}
        )
    )
    lease = late.take(0)
    assert lease is not None
    other.refresh()
    other.end(lease, BitMap64())
    late.end(lease, lease.rows)
    for leases in (late, other, Leases(tmp_path)):
        leases.refresh()
        assert (leases.rows_free(), leases.is_done()) == (0, True)


def test_rows_that_are_left_are_taken_again(tmp_path: Path) -> None:
    """A lease that ended early is free again, with the remaining rows alone."""
    first, second = Leases(tmp_path, "first"), Leases(tmp_path, "second")
    first.make_plan(
        LeasePlan(
            rows=BitMap64(range(10)), cuts=[0, 10], rows_total=10, fingerprint={}, order=None, choice={}
        )
    )
    lease = first.take(0)
    assert lease is not None
    first.end(lease, BitMap64([3, 4]))
    second.refresh()
    again = second.take(0)
    assert again is not None
    assert (again.turn, list(again.rows)) == (1, [3, 4])


def test_a_takeover_reads_few_leases(tmp_path: Path) -> None:
    """Leases that others show in their beacons are not read to find out who holds them."""
    plan = LeasePlan(
        rows=BitMap64(range(100)),
        cuts=[*range(0, 101, 10)],
        rows_total=100,
        fingerprint={},
        order=None,
        choice={},
    )
    dead, other, third = (Leases(tmp_path, name) for name in ("dead", "other", "third"))
    dead.make_plan(plan)
    for number in range(9):
        leases = dead if number in {2, 5} else other
        leases.refresh()
        assert leases.take(number) is not None
    shown = {lease_name(number, 0) for number in (0, 1, 3, 4)}  # the others were taken after a heartbeat
    for name in shown:
        (tmp_path / name).write_text("not to be read")
    third.refresh()
    assert {lease.number for lease in third.held_by("dead", held_by_others=shown)} == {2, 5}


def test_a_look_counts_only_what_has_changed(tmp_path: Path) -> None:
    """A look at 10,000 leases of which one was taken and one has ended early costs few calls."""
    cuts = [*range(0, 100_001, 10)]
    plan = LeasePlan(
        rows=BitMap64(range(100_000)), cuts=cuts, rows_total=100_000, fingerprint={}, order=None, choice={}
    )
    worker, other = Leases(tmp_path, "worker"), Leases(tmp_path, "other")
    worker.make_plan(plan)
    worker.refresh()
    assert worker.rows_free() == 100_000
    other.refresh()
    other.take(5)
    lease = other.take(7)
    assert lease is not None
    other.end(lease, BitMap64([70, 71]))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    worker.refresh()
    free, rows_free = worker.free(), worker.rows_free()
    sys.setprofile(None)
    assert (len(free), rows_free) == (9_999, 99_982)
    assert calls < 200
