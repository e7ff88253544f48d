"""Leases: ranges of rows that the tasks of a run take one after the other; each is free, held or done.

A task holds its leases as long as it holds its task lock.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from pyroaring import BitMap64

from batchrunner.core.types import Lease
from batchrunner.input.sorted_copy import remove_sorted_copies
from batchrunner.output.stores.store import LOCAL, Store
from batchrunner.runner.cluster.lease_files import LeaseFiles, LeasePlan, plans_in, turns_in
from batchrunner.runner.cluster.planned_leases import PlannedLeases

SORTED = re.compile(r"leases/order-.*")
"""Names of sorted copies in a run's store."""


class Leases:
    """The leases of a run as one task sees them. All methods block and may raise OSError."""

    def __init__(self, directory: Path, task: str = "", store: Store = LOCAL) -> None:
        self.directory = directory
        self.store = store
        self._files = LeaseFiles(directory, task, store)
        self.planned = PlannedLeases(self._files)
        self._joined = False
        self._turns: dict[int, tuple[int, bool]] = {}  # last turn of each taken lease, and whether it ended

    def refresh(self) -> None:
        """Read which leases others have taken and ended since the last call."""
        names = self._files.names()
        for number in () if self._joined else plans_in(names):
            self.planned.read_plan(number)
        for number, turn, ended in turns_in(names):
            if number < len(self):
                self._note(number, turn, ended=ended)

    @property
    def plan(self) -> LeasePlan | None:
        """The newest plan; None before there is one."""
        return self.planned.plans[-1] if self.planned.plans else None

    def is_done(self) -> bool:
        """Tell whether no lease is free or held."""
        return not self.free() and not self.held()

    def join(self) -> None:
        """Ignore later plans, which may have rows of files that this task does not know."""
        self._joined = True

    def make_plan(self, plan: LeasePlan) -> None:
        """Write a plan, unless another task has just written one."""
        number = len(self.planned.plans)
        self._files.write_plan(number, plan)
        self.planned.read_plan(number)  # ours, or the other's: its directory may be slow to show it

    def free(self) -> list[int]:
        """Return the numbers of the leases that nobody holds and that have rows left."""
        return [number for number in range(len(self)) if self._is_free(number)]

    def held(self) -> dict[int, str]:
        """Return the task that holds each held lease, by the lease's number."""
        return {
            number: self._files.holder(number, turn)
            for number, (turn, ended) in self._turns.items()
            if not ended
        }

    def rows_free(self) -> int:
        """Return the number of rows in free leases."""
        return sum(map(self.count_left, self.free()))

    def rows_held(self) -> dict[int, tuple[str, int]]:
        """Return the task that holds each held lease, and the number of its rows, by the lease's number.

        Some of the rows may be done.
        """
        return {
            number: (task, self.planned.count_at(number, self._turns[number][0]))
            for number, task in self.held().items()
        }

    def remove_copies(self) -> None:
        """Delete the sorted copies of all plans, finished or not."""
        if self.directory.exists():
            remove_sorted_copies(self.directory)
        self.store.clear(SORTED)

    def held_by(self, task: str) -> list[Lease]:
        """Return the leases that a task holds."""
        mine = [number for number, holder in self.held().items() if holder == task]
        return [self.planned.lease(number, self._turns[number][0]) for number in mine]

    def __len__(self) -> int:
        """Return the number of leases, free, held and done."""
        return len(self.planned)

    def take(self, number: int) -> Lease | None:
        """Take a free lease; None if another task was faster."""
        turn = self._next_turn(number)
        mine = self._files.take(number, turn)
        self._note(number, turn, ended=False)
        return self.planned.lease(number, turn) if mine else None

    def end(self, lease: Lease, left: BitMap64) -> None:
        """End a lease of this task, or of a dead one; the rows in `left` are still to be done."""
        self._files.end(lease.number, lease.turn, left)
        self._note(lease.number, lease.turn, ended=True)

    def leave_out(self, done: BitMap64) -> None:
        """Take rows that were done without a lease out of the free leases."""
        if not any(plan.rows.intersect(done) for plan in self.planned.plans):
            return
        for number in self.free():
            if self.planned.rows_at(number, self._next_turn(number)).intersect(done):
                lease = self.take(number)
                if lease is not None:
                    self.end(lease, lease.rows - done)

    def _next_turn(self, number: int) -> int:
        return self._turns[number][0] + 1 if number in self._turns else 0

    def _is_free(self, number: int) -> bool:
        return self._turns.get(number, (-1, True))[1] and self.count_left(number) > 0

    def count_left(self, number: int) -> int:
        """Return the number of rows left in a lease that nobody holds."""
        return self.planned.count_at(number, self._next_turn(number))

    def _note(self, number: int, turn: int, *, ended: bool) -> None:
        self._turns[number] = max(self._turns.get(number, (-1, True)), (turn, ended))


def next_lease(free: Sequence[int], last: int | None) -> int | None:
    """Choose one of the free leases, which are sorted; `last` is the one that this task had before.

    It is the next one if that is free, so that a file is read on; else the first lease if it is in the
    longest free stretch; else the middle of that stretch, so that tasks meet late.
    """
    if not free:
        return None
    if last is not None and last + 1 in free:
        return last + 1
    begin, length = max(_stretches(free), key=lambda stretch: stretch[1])
    return begin if begin == 0 else begin + length // 2


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and length of each stretch of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
