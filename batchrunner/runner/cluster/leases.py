"""Leases: ranges of rows that the tasks of a run take one after the other; each is free, held or done.

No file is ever changed, and each is made once, by a hard link. So neither an old directory listing nor a
lost reply of a file server gives two tasks the same rows:

    plan-000000      the rows of the run and where its leases begin; plan-000001 has rows added later
    order-….parquet  the rows in the order in which they are sent, if it is not the input's
    000012.0         lease 12 was taken by the task named in it
    000012.0.end     it has ended; the file holds the rows that are left, and is empty if none are
    000012.1         it was taken again

A task holds its leases as long as it holds its task lock.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from pyroaring import BitMap64

from batchrunner.core.row_set import from_text, to_text
from batchrunner.core.types import Lease
from batchrunner.input.sort.sorted_copy import SortedCopy
from batchrunner.output.files import create_file, make_directory

_NAME = re.compile(r"(\d{6,})\.(\d+)(\.end)?")
_PLAN = re.compile(r"plan-(\d{6})")


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Rows that the tasks do together, and how they are cut into leases."""

    rows: BitMap64
    cuts: list[int]
    """Places at which leases begin, and the end of the last one; sorted."""
    rows_total: int
    """Rows of the whole run, including those that were done before."""
    fingerprint: dict[str, Any]
    order: str | None
    """Name of the sorted copy in whose order the rows are sent; None for input order."""
    choice: dict[str, Any]
    """The order decision, as a mapping."""

    def count(self, positions: range) -> int:
        """Return the number of rows at these positions; in a sorted copy every position has a row."""
        return len(positions) if self.order else self.rows.range_cardinality(positions.start, positions.stop)


class Leases:
    """The leases of a run as one task sees them. All methods block and may raise OSError."""

    def __init__(self, directory: Path, task: str = "") -> None:
        self.directory = directory
        self.plans: list[LeasePlan] = []
        self._task = task
        self._joined = False
        self._planned: list[tuple[LeasePlan, range]] = []  # the positions of each lease
        self._copies: dict[str, SortedCopy] = {}
        self._turns: dict[int, tuple[int, bool]] = {}  # last turn of each taken lease, and whether it ended
        self._lefts: dict[tuple[int, int], BitMap64] = {}  # rows left, by lease and turn
        self._holders: dict[tuple[int, int], str] = {}  # task, by lease and turn

    def refresh(self) -> None:
        """Read which leases others have taken and ended since the last call."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.directory))
        except FileNotFoundError:
            return
        for plan in filter(None, map(_PLAN.fullmatch, () if self._joined else names)):
            self._read_plan(int(plan[1]))
        for file in filter(None, map(_NAME.fullmatch, names)):
            if int(file[1]) < len(self):
                self._note(int(file[1]), int(file[2]), ended=bool(file[3]))

    @property
    def plan(self) -> LeasePlan | None:
        """The newest plan; None before there is one."""
        return self.plans[-1] if self.plans else None

    def is_done(self) -> bool:
        """Tell whether no lease is free or held."""
        return not self.free() and not self.held()

    def join(self) -> None:
        """Ignore later plans, which may have rows of files that this task does not know."""
        self._joined = True

    def make_plan(self, plan: LeasePlan) -> None:
        """Write a plan, unless another task has just written one."""
        make_directory(self.directory)
        text = {
            "rows": to_text(plan.rows),
            "cuts": plan.cuts,
            "rows_total": plan.rows_total,
            "fingerprint": plan.fingerprint,
            "order": plan.order,
            "choice": plan.choice,
        }
        number = len(self.plans)
        create_file(self._plan_path(number), orjson.dumps(text), self._task)
        self._read_plan(number)  # ours, or the other's: its directory may be slow to show it

    def free(self) -> list[int]:
        """Return the numbers of the leases that nobody holds and that have rows left."""
        return [number for number in range(len(self)) if self._is_free(number)]

    def held(self) -> dict[int, str]:
        """Return the task that holds each held lease, by the lease's number."""
        return {
            number: self._holder(number, turn) for number, (turn, ended) in self._turns.items() if not ended
        }

    def rows_free(self) -> int:
        """Return the number of rows in free leases."""
        return sum(self._count_left(number) for number in self.free())

    def held_by(self, task: str) -> list[Lease]:
        """Return the leases that a task holds."""
        mine = [number for number, holder in self.held().items() if holder == task]
        return [self._lease(number, self._turns[number][0]) for number in mine]

    def __len__(self) -> int:
        """Return the number of leases, free, held and done."""
        return len(self._planned)

    def take(self, number: int) -> Lease | None:
        """Take a free lease; None if another task was faster."""
        turn = self._next_turn(number)
        mine = create_file(self._path(number, turn), orjson.dumps({"task": self._task}), self._task)
        # an earlier try may have created the file and then failed
        mine = mine or self._holder(number, turn) == self._task
        self._note(number, turn, ended=False)
        return self._lease(number, turn) if mine else None

    def end(self, lease: Lease, left: BitMap64) -> None:
        """End a lease of this task, or of a dead one; the rows in `left` are still to be done."""
        content = orjson.dumps({"left": to_text(left)}) if left else b""
        create_file(self._end_path(lease.number, lease.turn), content, self._task)
        self._note(lease.number, lease.turn, ended=True)

    def leave_out(self, done: BitMap64) -> None:
        """Take rows that were done without a lease out of the free leases."""
        if not any(plan.rows.intersect(done) for plan in self.plans):
            return
        for number in self.free():
            if self._left_before(number, self._next_turn(number)).intersect(done):
                lease = self.take(number)
                if lease is not None:
                    self.end(lease, lease.rows - done)

    def _next_turn(self, number: int) -> int:
        return self._turns[number][0] + 1 if number in self._turns else 0

    def _lease(self, number: int, turn: int) -> Lease:
        return Lease(number, turn, self._left_before(number, turn), self._planned[number][1])

    def _is_free(self, number: int) -> bool:
        return self._turns.get(number, (-1, True))[1] and self._count_left(number) > 0

    def _count_left(self, number: int) -> int:
        """Return the number of rows left in a lease that nobody holds."""
        if number not in self._turns:
            plan, positions = self._planned[number]
            return plan.count(positions)
        return len(self._left_before(number, self._next_turn(number)))

    def _left_before(self, number: int, turn: int) -> BitMap64:
        if turn == 0:
            plan, positions = self._planned[number]
            if plan.order is None:
                return plan.rows & BitMap64(positions)
            return self._copy(plan.order).rows(positions)
        key = number, turn - 1
        if key not in self._lefts:
            self._lefts[key] = _left_in(self._end_path(*key))
        return self._lefts[key]

    def _copy(self, name: str) -> SortedCopy:
        if name not in self._copies:
            self._copies[name] = SortedCopy(self.directory / name, leased=True)
        return self._copies[name]

    def _holder(self, number: int, turn: int) -> str:
        key = number, turn
        if key not in self._holders:
            self._holders[key] = orjson.loads(self._path(number, turn).read_bytes())["task"]
        return self._holders[key]

    def _note(self, number: int, turn: int, *, ended: bool) -> None:
        self._turns[number] = max(self._turns.get(number, (-1, True)), (turn, ended))

    def _path(self, number: int, turn: int) -> Path:
        return self.directory / f"{number:06d}.{turn}"

    def _end_path(self, number: int, turn: int) -> Path:
        return self.directory / f"{number:06d}.{turn}.end"

    def _plan_path(self, number: int) -> Path:
        return self.directory / f"plan-{number:06d}"

    def _read_plan(self, number: int) -> None:
        if number < len(self.plans):
            return
        found = orjson.loads(self._plan_path(number).read_bytes())
        plan = LeasePlan(**{**found, "rows": from_text(found["rows"])})
        self.plans.append(plan)
        self._planned += [(plan, range(start, stop)) for start, stop in pairwise(plan.cuts)]


def _left_in(end: Path) -> BitMap64:
    """Return the rows that an ended lease left; empty files are not opened, which would take time on NFS."""
    return from_text(orjson.loads(end.read_bytes())["left"]) if end.stat().st_size else BitMap64()


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
