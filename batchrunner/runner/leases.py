"""Files that record the leases of a shared run: the plans, the holder of each lease, and its end.

A lease is a number of rows that one worker does. Each file is created once (`Store.claim`) and never changed.
So two workers never get the same rows, even if a directory listing is old or a file server's reply is lost.
The files are:

    plan-000000      the rows of the run and where its leases begin; plan-000001 has rows added later
    order-….parquet  the rows in the order in which they are sent, if it is not the input's
    000012.0         lease 12 was taken by the worker that the file names
    000012.0.end     lease 12 has ended, and all its rows are done; the file is empty
    000012.0.left    lease 12 has ended before all its rows were done; the file has the remaining rows
    000012.1         lease 12 was taken a second time, with the remaining rows of 000012.0.left
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from pyroaring import BitMap64

from batchrunner.core.types import Lease, rows_from_text, rows_to_text
from batchrunner.input.sorted_copy import SortedCopy, remove_sorted_copies
from batchrunner.output.files import create_file, make_directory
from batchrunner.output.store import LOCAL, Store

END, LEFT = ".end", ".left"
"""Suffixes of the files that end a lease: without remaining rows, and with them."""
_NAME = re.compile(rf"(\d{{6,}})\.(\d+)({re.escape(END)}|{re.escape(LEFT)})?")
_PLAN = re.compile(r"plan-(\d{6})")
_UNTAKEN = (-1, True)
"""Entry of `Leases._turns` for a lease that nobody has taken yet: turn -1, which has ended."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Rows that the workers of a shared run do together, and the division of these rows into leases."""

    rows: BitMap64
    cuts: list[int]
    """Position of the first row of each lease in the order of sending, ascending, and then the end of the
    last lease."""
    rows_total: int
    """Number of rows of the whole run, including rows that were done before this plan."""
    fingerprint: dict[str, Any]
    """Properties that the jobs of all workers must have in common (`PreparedJob.fingerprint`)."""
    order: str | None
    """Name of the sorted copy in whose order the rows are sent; None for input order."""
    choice: dict[str, Any]
    """The fields of the OrderDecision, which says in what order the rows are sent, and why."""


SORTED = re.compile(r"leases/order-.*")
"""Names of the sorted copies of the input, below the run's URI in an object store."""


class Leases:
    """Leases of a run, as one worker sees and takes them. Methods block, and may raise OSError."""

    def __init__(self, directory: Path, task: str = "", store: Store = LOCAL) -> None:
        self.directory = directory
        self.store = store
        self.plans: list[LeasePlan] = []
        """The plans that were read, in the order of their numbers."""
        self._task = task
        self._joined = False
        """Whether the worker has joined the run. Plans that are written later are then ignored."""
        self._places: list[tuple[LeasePlan, range]] = []
        """The plan of each lease, and the positions of the lease's rows in the order of the plan. The index
        is the number of the lease."""
        self._turns: dict[int, tuple[int, bool]] = {}
        """The last turn of each lease that was taken, and whether that turn has ended. The first worker that
        takes a lease has turn 0."""
        self._free: dict[int, int] = {}
        """Number of remaining rows of each free lease, by the number of the lease."""
        self._changed: set[int] = set()
        """Numbers of the leases whose entry in `_free` is outdated. So a look at a run of many leases counts
        only the leases that have changed since the last look."""
        self._contents: dict[str, dict[str, Any]] = {}
        """Contents of the files that were read, by name. A content stays valid, because files never
        change."""
        self._names: set[str] = set()
        """Names of the lease files that this worker has noted, without plans."""
        self._copies: dict[str, SortedCopy] = {}
        """The sorted copies of the input that were opened, by file name."""

    def __len__(self) -> int:
        """Return the number of all leases: free, held and done ones."""
        return len(self._places)

    def refresh(self) -> list[str]:
        """Read which leases other workers have taken and ended since the last call.

        Return the names of all files in the directory.
        """
        names = self.store.names(self.directory)
        if not self._joined:
            for plan in filter(None, map(_PLAN.fullmatch, names)):
                self._read_plan(int(plan[1]))
        for match in filter(None, map(_NAME.fullmatch, set(names) - self._names)):
            number, turn, end = match.groups()
            # Plans that were written after this worker joined are ignored, and so are their leases.
            if int(number) < len(self):
                self._names.add(match[0])
                self._note(int(number), int(turn), ended=end is not None)
        return names

    @property
    def plan(self) -> LeasePlan | None:
        """The newest plan; None if no plan was read yet."""
        return self.plans[-1] if self.plans else None

    def join(self) -> None:
        """Ignore later plans, which may have rows of files that this worker does not know."""
        self._joined = True

    def make_plan(self, plan: LeasePlan) -> None:
        """Write a plan and read it.

        If another worker has just written a plan with the same number, read that plan instead.
        """
        number = len(self.plans)
        make_directory(self.directory)
        self._create(f"plan-{number:06d}", orjson.dumps({**asdict(plan), "rows": rows_to_text(plan.rows)}))
        # `refresh` could miss this plan, because a listing may be too old to show the plan of another worker.
        self._read_plan(number)

    def rows(self) -> BitMap64:
        """Return the rows of all plans, including rows that are done."""
        return BitMap64().union(*(plan.rows for plan in self.plans))

    def copies(self) -> list[Path]:
        """Return the paths of the sorted copies of the input that the plans use."""
        return [self.directory / plan.order for plan in self.plans if plan.order]

    def remove_copies(self) -> None:
        """Delete the sorted copies of all plans, also copies whose sort was interrupted."""
        if self.directory.exists():
            remove_sorted_copies(self.directory)
        self.store.clear(SORTED)

    def is_done(self) -> bool:
        """Return whether all leases have ended without remaining rows, so that none is free or held."""
        return not self.free() and not self.held_count()

    def held_count(self) -> int:
        """Return the number of leases that are held; reads no files."""
        return sum(not ended for _, ended in self._turns.values())

    def free(self) -> list[int]:
        """Return the numbers of the leases that nobody holds and that have remaining rows."""
        self._update_free()
        return sorted(self._free)

    def rows_free(self) -> int:
        """Return the number of rows in free leases."""
        self._update_free()
        return sum(self._free.values())

    def rows_left(self) -> int:
        """Return the number of rows in free and held leases. Some rows of held leases may be done already."""
        return sum(map(self._count, range(len(self))))

    def held(self) -> dict[int, str]:
        """Return which worker holds each held lease: the name of the worker by the number of the lease."""
        return {
            number: self._holder(number, turn) for number, (turn, ended) in self._turns.items() if not ended
        }

    def held_by(self, task: str, *, held_by_others: Collection[str]) -> list[Lease]:
        """Return the leases that a worker holds.

        `held_by_others` has names of leases that other workers took. Of these, the holder is not read.
        """
        return [
            self._lease(number)
            for number, (turn, ended) in self._turns.items()
            if not ended
            and lease_name(number, turn) not in held_by_others
            and self._holder(number, turn) == task
        ]

    def take(self, number: int) -> Lease | None:
        """Take a free lease and return it; return None if another worker was faster."""
        turn = self._turn(number)
        is_created = self._create(lease_name(number, turn), orjson.dumps({"task": self._task}))
        # An earlier call by this worker may have created the file and then failed.
        is_ours = is_created or self._holder(number, turn) == self._task
        self._note(number, turn, ended=False)  # Whoever took the lease, it is no longer free.
        return self._lease(number) if is_ours else None

    def end(self, lease: Lease, remaining: BitMap64) -> None:
        """End a lease of this worker or of a dead worker. The `remaining` rows can then be taken again."""
        name = lease_name(lease.number, lease.turn)
        if remaining:
            file, content = f"{name}{LEFT}", orjson.dumps({"left": rows_to_text(remaining)})
        else:
            file, content = f"{name}{END}", b""
        self._create(file, content)
        self._names.add(file)
        self._note(lease.number, lease.turn, ended=True)

    def _create(self, name: str, content: bytes) -> bool:
        """Create a file unless it exists; return whether this call created it."""
        return create_file(self.directory / name, content, self._task, self.store.claim)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the content of a file."""
        if name not in self._contents:
            path = self.directory / name
            self.store.bring(path)
            self._contents[name] = orjson.loads(path.read_bytes())
        return self._contents[name]

    def _read_plan(self, number: int) -> None:
        """Read a plan unless it was read before. Plans must be read in the order of their numbers."""
        if number >= len(self.plans):
            content = self._read(f"plan-{number:06d}")
            plan = LeasePlan(**{**content, "rows": rows_from_text(content["rows"])})
            self.plans.append(plan)
            leases_before = len(self)
            self._places += [(plan, range(start, stop)) for start, stop in pairwise(plan.cuts)]
            self._changed.update(range(leases_before, len(self)))

    def _holder(self, number: int, turn: int) -> str:
        """Return the name of the worker that took a lease at a turn."""
        return str(self._read(lease_name(number, turn))["task"])

    def _lease(self, number: int) -> Lease:
        """Return a lease with its remaining rows."""
        plan, positions = self._places[number]
        turn = self._turn(number)
        copy = self._copy(plan.order) if plan.order else None
        return Lease(number=number, turn=turn, rows=self._rows(number, turn), positions=positions, copy=copy)

    def _copy(self, name: str) -> Path:
        """Fetch a sorted copy if this machine lacks it; return its path.

        The path may not exist, because the copy may have been deleted.
        """
        self.store.bring(self.directory / name)
        return self.directory / name

    def _count(self, number: int) -> int:
        """Return how many rows of a lease the worker gets that holds it now, or that takes it next."""
        plan, positions = self._places[number]
        turn = self._turn(number)
        if turn:
            return len(self._rows(number, turn))
        # Each position of a sorted copy has one row, so its rows need not be read to count them.
        if plan.order:
            return len(positions)
        return plan.rows.range_cardinality(positions.start, positions.stop)

    def _rows(self, number: int, turn: int) -> BitMap64:
        """Return the rows of a lease at a turn, which is the time for which one worker holds the lease.

        At turn 0 these are all rows of the lease; later, the rows that remained at the end of the turn
        before.
        """
        if turn:
            name = lease_name(number, turn - 1)
            # Two workers may have ended this turn: one that was believed dead but woke up, and the one that
            # took over from it. If either of them found no remaining rows, all rows are done.
            is_done = f"{name}{END}" in self._names or f"{name}{LEFT}" not in self._names
            return BitMap64() if is_done else rows_from_text(self._read(f"{name}{LEFT}")["left"])
        plan, positions = self._places[number]
        if plan.order is None:  # In input order, the position of a row is its number in the input.
            return plan.rows & BitMap64(positions)
        if plan.order not in self._copies:
            self._copies[plan.order] = SortedCopy(self._copy(plan.order))
        return self._copies[plan.order].rows(positions)

    def _turn(self, number: int) -> int:
        """Return the turn at which a lease is held, or at which it will be taken next.

        A turn is the time for which one worker holds the lease; turns are counted from 0.
        """
        turn, has_ended = self._turns.get(number, _UNTAKEN)
        return turn + 1 if has_ended else turn

    def _note(self, number: int, turn: int, *, ended: bool) -> None:
        """Record that a lease was taken at a turn or that the turn has ended; ignore older facts."""
        self._turns[number] = max(self._turns.get(number, _UNTAKEN), (turn, ended))
        self._changed.add(number)

    def _update_free(self) -> None:
        """Count the remaining rows of the leases that have changed. Raises OSError."""
        while self._changed:
            number = next(iter(self._changed))
            _, has_ended = self._turns.get(number, _UNTAKEN)
            rows = self._count(number) if has_ended else 0
            if rows:
                self._free[number] = rows
            else:
                self._free.pop(number, None)
            # The lease leaves the set only now, because the count may fail.
            self._changed.discard(number)


def lease_name(number: int, turn: int) -> str:
    """Return the name of the file that records which worker holds a lease at a turn.

    A turn is the time for which one worker holds the lease; turns are counted from 0.
    """
    return f"{number:06d}.{turn}"


def next_lease(free: Sequence[int], last: int | None) -> int | None:
    """Choose a lease from the sorted numbers of the free leases; return None if no lease is free.

    `last` is the number of the lease that this worker took before. If the lease after `last` is free, it is
    chosen, so that the worker reads on in the same file. Otherwise the lease comes from the longest stretch
    of consecutive free leases: lease 0 if the stretch begins with it, else the lease in the middle of the
    stretch. So workers, each of which goes on with the next lease, reach each other's leases as late as
    possible.
    """
    if not free:
        return None
    if last is not None and last + 1 in free:
        return last + 1
    begin, length = max(_stretches(free), key=lambda stretch: stretch[1])
    return begin if begin == 0 else begin + length // 2


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and length of each stretch of consecutive numbers."""
    stretches: list[tuple[int, int]] = []
    for number in numbers:
        begin, length = stretches[-1] if stretches else (0, 0)
        if stretches and begin + length == number:
            stretches[-1] = (begin, length + 1)
        else:
            stretches.append((number, 1))
    return stretches
