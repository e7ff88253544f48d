"""The leases of all plans of a run: which rows each has at each of its turns."""

from itertools import pairwise
from pathlib import Path

from pyroaring import BitMap64

from batchrunner.core.types import Lease
from batchrunner.runner.cluster.lease_files import LeaseFiles, LeasePlan


class PlannedLeases:
    """The leases of the plans that were read. All methods but `len` may block and raise OSError."""

    def __init__(self, files: LeaseFiles) -> None:
        self.plans: list[LeasePlan] = []
        self._files = files
        self._planned: list[tuple[LeasePlan, range]] = []  # the positions of each lease

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._planned)

    def read_plan(self, number: int) -> None:
        """Read a plan, unless it was read before; plans are read in the order of their numbers."""
        if number < len(self.plans):
            return
        plan = self._files.read_plan(number)
        self.plans.append(plan)
        self._planned += [(plan, range(start, stop)) for start, stop in pairwise(plan.cuts)]

    def rows(self) -> BitMap64:
        """Return the rows of all plans, done or not."""
        return BitMap64().union(*(plan.rows for plan in self.plans))

    def copies(self) -> list[Path]:
        """Return the sorted copies in whose orders the rows are sent."""
        return [self._files.directory / plan.order for plan in self.plans if plan.order]

    def lease(self, number: int, turn: int) -> Lease:
        """Return a lease with the rows that it has at a turn."""
        plan, positions = self._planned[number]
        copy = self._files.copy_of(plan.order) if plan.order else None
        return Lease(number, turn, self.rows_at(number, turn), positions, copy)

    def count_at(self, number: int, turn: int) -> int:
        """Return the number of rows that a lease has at a turn."""
        if turn == 0:
            plan, positions = self._planned[number]
            return plan.count(positions)
        return len(self.rows_at(number, turn))

    def rows_at(self, number: int, turn: int) -> BitMap64:
        """Return the rows that a lease has at a turn: those planned, or those that the turn before left."""
        if turn == 0:
            plan, positions = self._planned[number]
            if plan.order is None:
                return plan.rows & BitMap64(positions)
            return self._files.sorted_copy(plan.order).rows(positions)
        return self._files.left_by(number, turn - 1)
