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
from batchrunner.input.sorted_copy import COPY_PREFIX, SortedCopy, remove_sorted_copies
from batchrunner.output.files import create_file, make_directory
from batchrunner.output.store import LOCAL, Store

END, LEFT = ".end", ".left"
"""Suffixes of the files that end a lease (rows of one worker): all rows done, or some remaining."""
_NAME = re.compile(rf"(\d{{6,}})\.(\d+)({re.escape(END)}|{re.escape(LEFT)})?")
_PLAN = re.compile(r"plan-(\d{6})")
_UNTAKEN = (-1, True)
"""Entry of `Leases._turns` for a lease that nobody has taken yet."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Rows that the workers of a shared run do together, and the division of these rows into leases."""

    rows: BitMap64
    cuts: list[int]
    """Position, in the order of sending, of the first row of each lease, ascending. The last item is the end
    of the last lease."""
    rows_total: int
    """Number of rows of the whole run, including rows that were done before this plan."""
    fingerprint: dict[str, Any]
    """Settings that the jobs of all workers must have in common (`PreparedJob.fingerprint`)."""
    order: str | None
    """Name of the sorted copy of the input that sets the order of sending; None for input order."""
    choice: dict[str, Any]
    """The order in which rows are sent, and the reason for it (fields of OrderDecision)."""


SORTED = re.compile(f"leases/{COPY_PREFIX}.*")
"""Names of the sorted copies of the input, below the run's URI in an object store."""


class Leases:
    """The leases of a shared run, as one worker sees them. A lease is a number of rows that one worker does.

    Methods block, and may raise OSError.
    """

    def __init__(self, directory: Path, task: str = "", store: Store = LOCAL) -> None:
        self.directory = directory
        self.store = store
        self.plans: list[LeasePlan] = []
        """The plans that were read, in the order of their numbers."""
        self._task = task
        self._joined = False
        """Whether the worker has joined the run. From then on, it ignores new plans."""
        self._places: list[tuple[LeasePlan, range]] = []
        """For each lease, by its number: its plan, and the positions of its rows in the plan's order."""
        self._turns: dict[int, tuple[int, bool]] = {}
        """For each lease that was taken: how often it was taken before (its turn, from 0), and whether its
        last holder has ended it."""
        self._free: dict[int, int] = {}
        """Number of remaining rows of each lease that nobody holds, by the number of the lease."""
        self._changed: set[int] = set()
        """Numbers of the leases whose entry in `_free` is outdated. Only these are counted again."""
        self._contents: dict[str, dict[str, Any]] = {}
        """Contents of the files that were read, by name. They stay valid, because files never change."""
        self._names: set[str] = set()
        """Names of all known lease files, without plans."""
        self._copies: dict[str, SortedCopy] = {}
        """Sorted copies of the input that were opened, by file name."""

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
            # Leases of plans that were written after this worker joined are ignored.
            if int(number) < len(self):
                self._names.add(match[0])
                self._note(int(number), int(turn), ended=end is not None)
        return names

    @property
    def plan(self) -> LeasePlan | None:
        """The newest plan; None if no plan was read yet."""
        return self.plans[-1] if self.plans else None

    def join(self) -> None:
        """Ignore plans that are written later. They may have rows of files that this worker does not know."""
        self._joined = True

    def make_plan(self, plan: LeasePlan) -> None:
        """Write a plan and read it.

        If another worker has just written a plan with the same number, read that plan instead.
        """
        number = len(self.plans)
        make_directory(self.directory)
        self._create(f"plan-{number:06d}", orjson.dumps({**asdict(plan), "rows": rows_to_text(plan.rows)}))
        # `refresh` could miss another worker's plan, because a directory listing may be old.
        self._read_plan(number)

    def rows(self) -> BitMap64:
        """Return all planned rows, including rows that are done."""
        return BitMap64().union(*(plan.rows for plan in self.plans))

    def copies(self) -> list[Path]:
        """Return the paths of the sorted copies of the input that the plans use."""
        return [self.directory / plan.order for plan in self.plans if plan.order]

    def remove_copies(self) -> None:
        """Delete the sorted copies of the input, including those whose sort was interrupted."""
        if self.directory.exists():
            remove_sorted_copies(self.directory)
        self.store.clear(SORTED)

    def is_done(self) -> bool:
        """Return whether all rows of all leases are done."""
        return not self.free() and not self.held_count()

    def held_count(self) -> int:
        """Return the number of leases that workers hold; reads no files."""
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
        """Return the name of the worker that holds each lease, by the number of the lease."""
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
        # This worker may have created the file in an earlier call that then failed.
        is_ours = is_created or self._holder(number, turn) == self._task
        self._note(number, turn, ended=False)  # whoever took the lease, it is no longer free
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
        return create_file(self.directory / name, content, self._task, self.store.claim)

    def _read(self, name: str) -> dict[str, Any]:
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
        """Return the name of the worker that took a lease.

        `turn` counts from 0 how often the lease was taken before.
        """
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
        """Return the number of rows of a lease: those of its holder, or of the next one if it is free."""
        plan, positions = self._places[number]
        turn = self._turn(number)
        if turn:
            return len(self._rows(number, turn))
        # In a sorted copy (`plan.order`) each position is one row, so the rows are counted without reading
        # them.
        if plan.order:
            return len(positions)
        return plan.rows.range_cardinality(positions.start, positions.stop)

    def _rows(self, number: int, turn: int) -> BitMap64:
        """Return the rows that a worker gets with a lease.

        `turn` counts from 0 how often the lease was taken before. At turn 0 the worker gets all rows of the
        lease. Later it gets the rows that the worker before it left.
        """
        if turn:
            name = lease_name(number, turn - 1)
            # Two workers may have ended this lease: one that was believed dead but woke up, and the one that
            # took over from it. If either of them found no remaining rows (`.end`), all rows are done, and
            # the `.left` of the other no longer counts.
            is_done = f"{name}{END}" in self._names or f"{name}{LEFT}" not in self._names
            return BitMap64() if is_done else rows_from_text(self._read(f"{name}{LEFT}")["left"])
        plan, positions = self._places[number]
        if plan.order is None:  # in input order, a row's position is its number in the input
            return plan.rows & BitMap64(positions)
        if plan.order not in self._copies:
            self._copies[plan.order] = SortedCopy(self._copy(plan.order))
        return self._copies[plan.order].rows(positions)

    def _turn(self, number: int) -> int:
        """Return how often a lease was taken before its present holder, or before its next one."""
        turn, has_ended = self._turns.get(number, _UNTAKEN)
        return turn + 1 if has_ended else turn

    def _note(self, number: int, turn: int, *, ended: bool) -> None:
        """Record that a lease was taken, or that its holder ended it; ignore outdated facts.

        `turn` counts from 0 how often the lease was taken before.
        """
        self._turns[number] = max(self._turns.get(number, _UNTAKEN), (turn, ended))
        self._changed.add(number)

    def _update_free(self) -> None:
        """Update the entries in `_free` of the leases that have changed. Raises OSError."""
        while self._changed:
            number = next(iter(self._changed))
            # A lease is free if nobody has taken it (`_UNTAKEN` counts as ended), or if its last holder has
            # ended it and rows remain.
            _, has_ended = self._turns.get(number, _UNTAKEN)
            remaining_rows = self._count(number) if has_ended else 0
            if remaining_rows:
                self._free[number] = remaining_rows
            else:
                self._free.pop(number, None)
            # The lease leaves the set only now, because the count above may fail.
            self._changed.discard(number)


def lease_name(number: int, turn: int) -> str:
    """Return the name of the file that records which worker holds a lease.

    `turn` counts from 0 how often the lease was taken before.
    """
    return f"{number:06d}.{turn}"


def next_lease(free: Sequence[int], last: int | None) -> int | None:
    """Choose a lease from the sorted numbers of the free leases; return None if no lease is free.

    `last` is the number of the lease that this worker took before. If the lease after `last` is free, it is
    chosen, so that the worker reads on in the same file. Otherwise it is the middle of the longest stretch of
    consecutive free leases, or lease 0 if that stretch begins with it. So each worker can go on in its
    stretch for as long as possible.
    """
    if not free:
        return None
    if last is not None and last + 1 in free:
        return last + 1
    begin, length = max(_stretches(free), key=lambda stretch: stretch[1])
    return begin if begin == 0 else begin + length // 2


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first number and the length of each stretch of consecutive numbers."""
    stretches: list[tuple[int, int]] = []
    for number in numbers:
        begin, length = stretches[-1] if stretches else (0, 0)
        if stretches and begin + length == number:
            stretches[-1] = (begin, length + 1)
        else:
            stretches.append((number, 1))
    return stretches
