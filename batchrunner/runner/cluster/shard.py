"""What one of several tasks does: a share of the rows by its number, or what is left."""

from __future__ import annotations

import os
import re
import secrets
import socket
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrunner.core.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNEVEN = 0.1
"""A shard's end is moved to the end of a row group that is not farther away than this share of a shard: then
each row group is read by one task only."""

_SLURM = ("ID", "MIN", "STEP", "COUNT")


@dataclass(frozen=True, slots=True)
class Shard:
    """Task `index` of `count`, counted from 0."""

    index: int
    count: int

    @property
    def task(self) -> str:
        """Name of the task's directory and of its parts."""
        return f"shard-{self.index:05d}-of-{self.count:05d}"

    def rows(self, total: int, group_ends: Sequence[int]) -> range:
        """Return the ordinals of this share of `total` rows; `group_ends`, sorted, end the row groups."""
        return range(self._cut(self.index, total, group_ends), self._cut(self.index + 1, total, group_ends))

    def _cut(self, number: int, total: int, group_ends: Sequence[int]) -> int:
        even = round(total * number / self.count)
        if number in {0, self.count}:
            return even
        at = bisect_left(group_ends, even)
        near = min(group_ends[max(0, at - 1) : at + 1], key=lambda end: abs(end - even), default=even)
        return near if abs(near - even) <= UNEVEN * total / self.count else even


@dataclass(frozen=True, slots=True)
class JoinTask:
    """A task that takes leases; each start has a name of its own."""

    task: str


def joint_task(host: str, token: str, environ: Mapping[str, str]) -> JoinTask:
    """Name a start by its host and, under Slurm, by job, array task and restart; `token` makes it its own."""
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    restart = environ.get("SLURM_RESTART_COUNT")
    parts = ["join", host, job, index and f"t{index}", restart and f"r{restart}", token]
    return JoinTask("-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts if part))


def this_start() -> JoinTask:
    """Name the task that this process begins: one of its own each time."""
    return joint_task(socket.gethostname(), secrets.token_hex(3), os.environ)


def parse_shard(text: str, environ: Mapping[str, str]) -> Shard:
    """Read `3/16`, or for `slurm` what Slurm tells the task of an array; raises JobError."""
    if text == "slurm":
        try:
            index, first, step, count = (int(environ[f"SLURM_ARRAY_TASK_{name}"]) for name in _SLURM)
        except (KeyError, ValueError) as failure:
            raise JobError(f"--shard slurm: not the task of a Slurm array: {failure} is not set") from None
        return Shard((index - first) // step, count)
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if not match or int(match[1]) >= int(match[2]):
        raise JobError(f"--shard {text}: write it as i/n, from 0/n to (n-1)/n")
    return Shard(int(match[1]), int(match[2]))


def parted(task: str) -> str:
    """Return how a run is parted that has a task of this name, as one says it on the command line."""
    match = re.fullmatch(r"shard-\d+-of-(\d+)", task)
    if match:
        return f"--shard i/{int(match[1])}"
    return "--join" if task.startswith("join-") else ""
