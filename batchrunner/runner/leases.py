"""The files of leases: which task took a lease, when it ended, and the plan of the run.

No file is ever changed, and each is made once, by a hard link. So neither an old directory listing nor a
lost reply of a file server gives two tasks the same rows:

    plan-000000      the rows of the run and where its leases begin; plan-000001 has rows added later
    order-….parquet  the rows in the order in which they are sent, if it is not the input's
    000012.0         lease 12 was taken by the task named in it
    000012.0.end     it has ended; the file holds the rows that are left, and is empty if none are
    000012.1         it was taken again
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from pyroaring import BitMap64

from batchrunner.core.types import Lease, rows_from_text, rows_to_text
from batchrunner.input.sorted_copy import SortedCopy, remove_sorted_copies
from batchrunner.output.files import create_file, make_directory
from batchrunner.output.store import LOCAL, Store

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


class LeaseFiles:
    """The files of one run, as one task makes and reads them. All methods block and may raise OSError."""

    def __init__(self, directory: Path, task: str, store: Store = LOCAL) -> None:
        self.directory = directory
        self._task = task
        self._store = store
        self._copies: dict[str, SortedCopy] = {}
        self._lefts: dict[tuple[int, int], BitMap64] = {}  # rows left, by lease and turn
        self._holders: dict[tuple[int, int], str] = {}  # task, by lease and turn

    def names(self) -> list[str]:
        """Return the names of all files, sorted; none before the first plan."""
        return self._store.names(self.directory)

    def write_plan(self, number: int, plan: LeasePlan) -> None:
        """Write a plan, unless another task has written one with this number."""
        make_directory(self.directory)
        text = {
            "rows": rows_to_text(plan.rows),
            "cuts": plan.cuts,
            "rows_total": plan.rows_total,
            "fingerprint": plan.fingerprint,
            "order": plan.order,
            "choice": plan.choice,
        }
        create_file(self._plan_path(number), orjson.dumps(text), self._task, self._store.claim)

    def read_plan(self, number: int) -> LeasePlan:
        """Read a plan."""
        found = orjson.loads(self._read(self._plan_path(number)))
        return LeasePlan(**{**found, "rows": rows_from_text(found["rows"])})

    def take(self, number: int, turn: int) -> bool:
        """Write that this task took a lease; tell whether it was the first to do so."""
        name = orjson.dumps({"task": self._task})
        mine = create_file(self._path(number, turn), name, self._task, self._store.claim)
        # an earlier try may have created the file and then failed
        return mine or self.holder(number, turn) == self._task

    def end(self, number: int, turn: int, left: BitMap64) -> None:
        """Write that a lease has ended, and which rows are left."""
        content = orjson.dumps({"left": rows_to_text(left)}) if left else b""
        create_file(self._end_path(number, turn), content, self._task, self._store.claim)

    def holder(self, number: int, turn: int) -> str:
        """Return the task that took a lease."""
        key = number, turn
        if key not in self._holders:
            self._holders[key] = orjson.loads(self._read(self._path(number, turn)))["task"]
        return self._holders[key]

    def left_by(self, number: int, turn: int) -> BitMap64:
        """Return the rows that an ended lease left; empty files are not opened, which takes time on NFS."""
        key = number, turn
        if key not in self._lefts:
            end = self._end_path(number, turn)
            has_rows = self._store.size(end) > 0
            self._lefts[key] = (
                rows_from_text(orjson.loads(self._read(end))["left"]) if has_rows else BitMap64()
            )
        return self._lefts[key]

    def sorted_copy(self, name: str) -> SortedCopy:
        """Open a sorted copy; raises InputError if it is gone."""
        if name not in self._copies:
            self._copies[name] = SortedCopy(self.copy_of(name), leased=True)
        return self._copies[name]

    def copy_of(self, name: str) -> Path:
        """Return the path of a sorted copy, which is there unless nobody has it any more."""
        self._store.bring(self.directory / name)
        return self.directory / name

    def _read(self, path: Path) -> bytes:
        self._store.bring(path)
        return path.read_bytes()

    def _path(self, number: int, turn: int) -> Path:
        return self.directory / f"{number:06d}.{turn}"

    def _end_path(self, number: int, turn: int) -> Path:
        return self.directory / f"{number:06d}.{turn}.end"

    def _plan_path(self, number: int) -> Path:
        return self.directory / f"plan-{number:06d}"


def plans_in(names: list[str]) -> Iterator[int]:
    """Yield the numbers of the plans among file names."""
    return (int(found[1]) for found in map(_PLAN.fullmatch, names) if found)


def turns_in(names: list[str]) -> Iterator[tuple[int, int, bool]]:
    """Yield lease, turn, and whether it is an end, of the lease files among file names."""
    return ((int(f[1]), int(f[2]), bool(f[3])) for f in map(_NAME.fullmatch, names) if f)


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
