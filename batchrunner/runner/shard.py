"""How a run is split among tasks: into fixed shards (`--shard`), or by leases (`--join`)."""

import os
import re
import secrets
import socket
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchrunner.core.errors import JobError

MOST_SHIFT = 0.1
"""Largest distance, as a share of a shard, by which its end moves to the end of a row group: then only one
task reads that row group."""

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
        """Return the ordinals of this shard's rows, of `total`; `group_ends` are the ends of row groups."""
        return range(self._cut(self.index, total, group_ends), self._cut(self.index + 1, total, group_ends))

    def _cut(self, number: int, total: int, group_ends: Sequence[int]) -> int:
        even = round(total * number / self.count)
        if number in {0, self.count}:
            return even
        at = bisect_left(group_ends, even)
        near = min(group_ends[max(0, at - 1) : at + 1], key=lambda end: abs(end - even), default=even)
        return near if abs(near - even) <= MOST_SHIFT * total / self.count else even


@dataclass(frozen=True, slots=True)
class JoinTask:
    """A task that takes leases; each attempt is a task of its own."""

    task: str
    """Name of the task's directory and of its parts."""


def join_task(host: str, token: str, environ: Mapping[str, str]) -> JoinTask:
    """Name a task by its host and, under Slurm, by job, array task and restart; `token` makes it unique."""
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    restart = environ.get("SLURM_RESTART_COUNT")
    parts = ["join", host, job, index and f"t{index}", restart and f"r{restart}", token]
    return JoinTask("-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts if part))


def new_join_task() -> JoinTask:
    """Return a task with a new name, for this process."""
    return join_task(socket.gethostname(), secrets.token_hex(3), os.environ)


def parse_shard(text: str, environ: Mapping[str, str]) -> Shard:
    """Parse `3/16`; for `slurm` read the number from the environment of an array task. Raises JobError."""
    if text == "slurm":
        try:
            index, first, step, count = (int(environ[f"SLURM_ARRAY_TASK_{name}"]) for name in _SLURM)
        except (KeyError, ValueError) as failure:
            raise JobError(f"--shard slurm: not the task of a Slurm array: {failure} is not set") from None
        return Shard((index - first) // step, count)
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if not match or int(match[1]) >= int(match[2]):
        raise JobError(f"--shard {text}", hint="write it as i/n, from 0/n to (n-1)/n")
    return Shard(int(match[1]), int(match[2]))


def split_option(task: str) -> str:
    """Return the command-line option of a task with this name; empty for a run of one task."""
    match = re.fullmatch(r"shard-\d+-of-(\d+)", task)
    if match:
        return f"--shard i/{int(match[1])}"
    return "--join" if task.startswith("join-") else ""
