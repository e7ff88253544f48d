"""Ranges of rows that the tasks of a run take, one after the other: which are free, held or done.

No file is ever changed, and each is made by a hard link, once, so that neither a cache that shows an old
directory nor a reply that was lost lets two tasks have the same rows:

    plan-000000      the rows of the run and where its leases begin; the next one, of what was added later
    order-….parquet  the rows in the order in which they are sent, where that is not the input's
    000012.0         lease 12 was taken, by the task that is named in it
    000012.0.end     it is over; what is left of its rows stands in it, and it is empty where nothing is …
    000012.1         … and was taken again

A task holds a lease as long as it holds its own directory (`claim`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import orjson
from pyroaring import BitMap64

from batchrunner.core.row_set import between, from_text, to_text
from batchrunner.core.types import Lease
from batchrunner.input.row_reader import SortedCopy
from batchrunner.output.run_dir import create_file, make_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NAME = re.compile(r"(\d{6,})\.(\d+)(\.end)?")
_PLAN = re.compile(r"plan-(\d{6})")


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """What the tasks do together."""

    rows: BitMap64
    cuts: list[int]
    """The places that bound the leases."""
    rows_total: int
    """Rows of the whole run, those that were done before among them."""
    fingerprint: dict[str, Any]
    order: str | None
    """Name of the copy in whose order the rows are sent; None for the input's. Cuts are places in it."""
    choice: dict[str, Any]
    """Which order it is, and why."""

    def count(self, places: range) -> int:
        """Count the rows at these places: a copy has no others."""
        return len(places) if self.order else self.rows.range_cardinality(places.start, places.stop)


class Leases:
    """The leases of a run as one task sees them; `task` is its name. All methods block and raise OSError."""

    def __init__(self, directory: Path, task: str = "") -> None:
        self.directory = directory
        self.plans: list[LeasePlan] = []
        self._task = task
        self._joined = False
        self._planned: list[tuple[LeasePlan, range]] = []  # the places of each lease
        self._copies: dict[str, SortedCopy] = {}
        self._turns: dict[int, tuple[int, bool]] = {}  # of those that were taken: the last, and if it ended
        self._lefts: dict[tuple[int, int], BitMap64] = {}  # of each lease and turn that ended
        self._holders: dict[tuple[int, int], str] = {}  # of each lease and turn

    def refresh(self) -> None:
        """Look what others have taken and ended since."""
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
        """Tell whether nothing that was planned is left to be done."""
        return not self.free() and not self.held()

    def join(self) -> None:
        """Keep to the plans that are there: a later one may have rows of files that we do not know."""
        self._joined = True

    def make_plan(self, plan: LeasePlan) -> None:
        """Write what is to be done from now on, unless another task has just done so."""
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
        """Return the leases that nobody holds and of which rows are left."""
        return [number for number in range(len(self)) if self._is_free(number)]

    def held(self) -> dict[int, str]:
        """Return the task that holds each lease that is held."""
        return {
            number: self._holder(number, turn) for number, (turn, ended) in self._turns.items() if not ended
        }

    def rows_free(self) -> int:
        """Count the rows that nobody has taken."""
        return sum(self._count_left(number) for number in self.free())

    def held_by(self, task: str) -> list[Lease]:
        """Return the leases that a task holds, with the rows that it was to do."""
        mine = [number for number, holder in self.held().items() if holder == task]
        return [self._lease(number, self._turns[number][0]) for number in mine]

    def __len__(self) -> int:
        """Count them, whatever has become of them."""
        return len(self._planned)

    def take(self, number: int) -> Lease | None:
        """Take a free one; None where somebody else was faster."""
        turn = self._next_turn(number)
        mine = create_file(self._path(number, turn), orjson.dumps({"task": self._task}), self._task)
        # a try before may have made it ours, and failed only then
        mine = mine or self._holder(number, turn) == self._task
        self._note(number, turn, ended=False)
        return self._lease(number, turn) if mine else None

    def end(self, lease: Lease, left: BitMap64) -> None:
        """End a lease that we hold, or whose holder we have replaced; `left` is still to be done."""
        content = orjson.dumps({"left": to_text(left)}) if left else b""
        create_file(self._end_path(lease.number, lease.turn), content, self._task)
        self._note(lease.number, lease.turn, ended=True)

    def leave_out(self, done: BitMap64) -> None:
        """End the free leases with rows that were done without a lease; their other rows are left."""
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
        """Count what is left of one that nobody holds."""
        if number not in self._turns:
            plan, places = self._planned[number]
            return plan.count(places)
        return len(self._left_before(number, self._next_turn(number)))

    def _left_before(self, number: int, turn: int) -> BitMap64:
        if turn == 0:
            plan, places = self._planned[number]
            if plan.order is None:
                return between(plan.rows, places.start, places.stop)
            return self._copy(plan.order).rows(places)
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
    """Return what an end leaves; most leave nothing, and are not opened: that takes a file server time."""
    return from_text(orjson.loads(end.read_bytes())["left"]) if end.stat().st_size else BitMap64()


def next_lease(free: Sequence[int], last: int | None) -> int | None:
    """Choose one of the free leases (sorted), `last` being the one before.

    The next one where it is free, so that a file is read on; else the middle of the longest free stretch,
    so that tasks meet late. Nobody begins at 0 where others have been; the first does.
    """
    if not free:
        return None
    if last is not None and last + 1 in free:
        return last + 1
    begin, length = max(_stretches(free), key=lambda stretch: stretch[1])
    return begin if begin == 0 else begin + length // 2


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and length of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
