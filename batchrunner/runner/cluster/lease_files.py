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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pyroaring import BitMap64

from batchrunner.core.types import rows_from_text, rows_to_text
from batchrunner.input.sorted_copy import SortedCopy
from batchrunner.output.files import create_file, make_directory
from batchrunner.output.stores.store import LOCAL, Store

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
