"""Rows that are done: what many part files cost to count."""

from pyroaring import BitMap64

from batchrunner.output.resume import DoneRows


def test_a_part_file_costs_the_same_however_many_rows_are_done() -> None:
    """The rows of a part file are added in place, and a later answer supersedes a failure."""
    done = DoneRows(answered=BitMap64(range(1000)), failed=BitMap64([5000, 5001]))
    answered, failed = done.answered, done.failed
    done.include(DoneRows(answered=BitMap64([5000, 1000]), failed=BitMap64([7, 6000])))
    assert done.answered is answered
    assert done.failed is failed
    assert sorted(failed) == [5001, 6000]
    assert len(done) == 1002 + 2
