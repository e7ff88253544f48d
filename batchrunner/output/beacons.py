"""Beacons: empty files by which the workers of a shared run show that they are running.

A worker that holds leases (ranges of rows) has one beacon in the directory of leases, such as
`alive.NAME.MACHINE.TOKEN.000125_000012.0_000013.0`. It renames the file at each heartbeat. The first number
is the time of the heartbeat, in seconds since the worker started. Behind it are the names of leases that the
worker holds, so that others need not read who holds them. One listing of the directory therefore shows the
last heartbeat of all workers. So watching a thousand workers costs a file server as much as watching two. An
observer that lists the directory rarely still knows how long a worker has been silent.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchrunner.output.holder import LockHolder, parse_holder, this_process
from batchrunner.output.liveness import (
    DEAD_AFTER_S,
    FRESH_S,
    HEARTBEAT_S,
    STORE_FRESH_S,
    STORE_HEARTBEAT_S,
    LivenessMonitor,
    judge_holder,
    monitor_of,
    read_owner,
)
from batchrunner.output.run_dir import RunDir
from batchrunner.output.store import Store

_NAME = re.compile(
    r"alive\.(?P<task>.+)\.(?P<machine>[0-9a-f]{8})\.(?P<token>[0-9a-f]+)"
    r"\.(?P<seconds>\d{6,})(?P<leases>(_\d{6,}\.\d+)*)"
)
LEASES_SHOWN = 8
"""Maximum number of leases in the name of a beacon, because a file name has at most 255 bytes."""
OWNERS_READ = 8
"""Maximum number of workers whose file `owner` is read after a listing, beginning with the most silent.

`owner` shows at once if a worker on this machine was killed. Heartbeats show it only after `silence_s`.
"""
TAKEOVER_S = 1.0
"""Seconds that are set aside for the listing after which a worker counts as dead, and for its replacement."""


def silence_s(heartbeat_s: float) -> float:
    """Return the seconds since the last heartbeat after which a worker is dead.

    `heartbeat_s` is the pause between two heartbeats. An observer may date a heartbeat too late, by up to
    this pause. The silence, this pause and TAKEOVER_S add up to DEAD_AFTER_S, within which a dead worker is
    replaced. On NFS, where heartbeats are 5 s apart, a listing may be 60 s old, so that a running worker may
    seem silent for 65 s.
    """
    return DEAD_AFTER_S - heartbeat_s - TAKEOVER_S


class Beacon:
    """The beacon of this worker: an empty file whose name shows its last heartbeat. Thread-safe."""

    def __init__(self, directory: Path, task: str, holder: LockHolder, store: Store) -> None:
        """Prepare the beacon; `light` creates its file.

        `directory` contains the leases (claimed ranges of rows). `holder` is this worker, as its lock names
        it.
        """
        self._directory = directory
        self._prefix = f"alive.{task}.{holder.machine_key}.{holder.token}"
        self._store = store
        self._began = time.monotonic()
        self._seconds = 0
        """Time of the last heartbeat, in seconds since `_began`."""
        self._leases: Sequence[str] = ()
        """Names of the leases that this worker holds, for the next name of the beacon."""
        self._path: Path | None = None
        """Current path of the beacon; None while there is none."""
        self._turn = threading.Lock()
        """Held while a thread creates, renames or deletes the file."""

    def light(self) -> None:
        """Create the file of the beacon, unless it exists. Raises OSError if it cannot be created."""
        with self._turn:
            if self._path is None:
                path = self._next_path()
                self._store.mark(path)
                self._path = path

    def show(self, leases: Sequence[str]) -> None:
        """Show the names of these leases from the next heartbeat on: all or the first of them."""
        self._leases = leases[:LEASES_SHOWN]

    def beat(self) -> None:
        """Rename the file of the beacon, if there is one, to show other workers that this one runs.

        Raises OSError if it cannot be renamed, for example because another worker has removed it.
        """
        with self._turn:
            if self._path is not None:
                path = self._next_path()
                self._store.move(self._path, path)
                self._path = path

    def put_out(self) -> None:
        """Delete the file of the beacon if there is one. Raises OSError if it cannot be deleted."""
        with self._turn:
            if self._path is not None:
                self._store.remove(self._path)
                self._path = None

    def _next_path(self) -> Path:
        self._seconds = max(self._seconds + 1, int(time.monotonic() - self._began))
        leases = "".join(f"_{lease}" for lease in self._leases)
        return self._directory / f"{self._prefix}.{self._seconds:06d}{leases}"


@dataclass(slots=True)
class _Sighting:
    """A worker's beacon as it was last seen."""

    token: str
    machine_key: str
    """Key of the worker's machine (`LockHolder.machine_key`)."""
    seconds: int
    """Time of the last heartbeat by the worker's clock, from the newest name."""
    seen_at: float
    """Time at which a listing first had the newest name, by the observer's clock."""
    beat_at: float
    """Time of the last heartbeat by the observer's clock; it may be a few seconds too late."""
    offset: float
    """`seen_at` minus `seconds`: the difference between the two clocks, plus the delay of the listing."""
    has_moved: bool = False
    """Whether the observer has seen a heartbeat (a change of the name)."""
    leases: Sequence[str] = ()
    """Names of leases that the worker held at its last heartbeat."""
    names: list[str] = field(default_factory=list)
    """Names of the beacon in the last listing: one, or two after an interrupted rename in an object store."""

    @classmethod
    def first(cls, *, token: str, machine_key: str, seconds: int, now: float) -> _Sighting:
        """Return the record of a beacon that appears for the first time, in a listing at the time `now`."""
        return cls(
            token=token,
            machine_key=machine_key,
            seconds=seconds,
            seen_at=now,
            beat_at=now,
            offset=now - seconds,
        )

    def move(self, seconds: int, *, now: float, looked_at: float) -> None:
        """Record a newer name, and estimate the time of its heartbeat by the observer's clock.

        `seconds` is the time in the new name, by the worker's clock. The listing at `now` had the new name,
        and the listing before it, at `looked_at`, did not. Both times are by the observer's clock.
        """
        # The offset contains the delay until a listing showed the heartbeat. The smaller of the last two
        # offsets has the smaller delay. Older ones do not count, because clocks drift and machines are
        # suspended.
        offset = now - seconds
        # The heartbeat came after the previous listing, which still had the old name.
        self.beat_at = max(looked_at, min(offset, self.offset) + seconds)
        self.seconds, self.seen_at, self.offset, self.has_moved = seconds, now, offset, True


class BeaconWatch:
    """Judges from the beacons of the other workers which of them are dead.

    A worker on another machine is dead if its last heartbeat was `silence_s` ago by this machine's clock. A
    worker on this machine is looked up in /proc.
    """

    def __init__(self, run_dir: RunDir) -> None:
        """Watch the other workers of a run; `run_dir` is the one of this worker."""
        self._run_dir = run_dir
        self._me: LockHolder = this_process()
        is_local = run_dir.store.objects is None
        self._fresh_s = FRESH_S if is_local else STORE_FRESH_S
        self._silence_s = silence_s(HEARTBEAT_S if is_local else STORE_HEARTBEAT_S)
        self._looked_at = time.monotonic()
        """Time of the last call of `look`."""
        self._sightings: dict[str, _Sighting] = {}
        """Beacons in the listings so far, by the worker's name."""
        self._monitors: dict[str, LivenessMonitor] = {}
        """Monitors of workers without a beacon, and of processes that took over a dead worker's lock."""
        self._runs: dict[str, bool | None] = {}
        """Whether each worker runs; None if that is not clear yet."""
        self._owners: dict[str, bytes] = {}
        """Content of each worker's `owner` when it was last read."""

    def __len__(self) -> int:
        """Return the number of workers that hold leases (ranges of rows)."""
        return len(self._runs)

    @property
    def dead(self) -> list[str]:
        """Names of the workers that are known to be dead."""
        return sorted(task for task, runs in self._runs.items() if runs is False)

    @property
    def all_run(self) -> bool:
        """Whether all workers are known to run."""
        return all(self._runs.values())

    def owner_content(self, task: str) -> bytes:
        """Return the content that `owner` had when this worker was judged to be dead."""
        return self._owners[task]

    def seconds_to_verdict(self) -> float:
        """Return the seconds until the next silent worker counts as dead; infinity if none is silent.

        A worker is silent if it is not clear whether it runs.
        """
        now = time.monotonic()
        times = [
            sighting.beat_at + self._silence_s - now
            for task, sighting in self._sightings.items()
            if self._runs[task] is None
        ]
        # A past time means that the verdict waits for something else, such as a process that takes over the
        # worker's lock.
        return min((seconds for seconds in times if seconds >= 0), default=math.inf)

    def look(self, names: Iterable[str]) -> None:
        """Find out which workers run, by their beacons (files renamed at each heartbeat).

        `names` are all names in a new listing of the directory. Raises OSError if the `owner` of a worker
        cannot be read.
        """
        now = time.monotonic()
        # In an object store, a rename creates a new object and then deletes the old one. If the worker is
        # killed in between, both names remain. The newest counts.
        beacons: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(_NAME.fullmatch, names)):
            if match["task"] != self._run_dir.task:
                beacons.setdefault(match["task"], []).append(match)
        last_sightings, self._sightings = self._sightings, {}
        for task, matches in beacons.items():
            newest = max(matches, key=lambda match: int(match["seconds"]))
            seconds = int(newest["seconds"])
            sighting = last_sightings.get(task)
            if sighting is None or sighting.token != newest["token"]:
                sighting = _Sighting.first(
                    token=newest["token"], machine_key=newest["machine"], seconds=seconds, now=now
                )
            elif seconds > sighting.seconds:
                sighting.move(seconds, now=now, looked_at=self._looked_at)
            sighting.names = [match[0] for match in matches]
            sighting.leases = newest["leases"].split("_")[1:]
            self._sightings[task] = sighting
        self._looked_at = now
        # A worker renames its beacon at each heartbeat, so a recent rename proves that it runs.
        self._runs = {
            task: True if self._is_fresh(sighting) else None for task, sighting in self._sightings.items()
        }
        # Judging a worker means reading its `owner`. After a heartbeat, the `owner` of a worker on another
        # machine shows nothing new. Of the other workers, those that were silent longest are judged.
        doubtful = [
            task
            for task, sighting in self._sightings.items()
            if not self._runs[task] or sighting.machine_key == self._me.machine_key
        ]
        doubtful.sort(key=lambda task: self._sightings[task].beat_at)
        for task in doubtful[:OWNERS_READ]:
            self._runs[task] = self._judge(task, self._sightings[task])

    def look_without_beacons(self, tasks: Iterable[str]) -> None:
        """Find out which workers run that hold leases but have no beacon, for example after a power failure.

        Raises OSError if the run's store does not answer.
        """
        for task in tasks:
            self._runs[task] = self._poll_owner(task)

    def leases_except(self, task: str) -> set[str]:
        """Return the names of the leases that the beacons of other workers than `task` show.

        These workers took the leases, since only one worker can take a lease. They may have ended them since.
        """
        others = (sighting for name, sighting in self._sightings.items() if name != task)
        return {lease for sighting in others for lease in sighting.leases}

    def remove(self, task: str) -> None:
        """Delete the beacon of a dead worker, whose leases have ended. Raises OSError if that fails."""
        del self._runs[task]
        if sighting := self._sightings.pop(task, None):
            for name in sighting.names:
                self._run_dir.store.remove(self._run_dir.leases / name)

    def _judge(self, task: str, sighting: _Sighting) -> bool | None:
        """Tell whether a worker runs; None if that is not clear yet.

        The answer follows from the worker's last heartbeat, and from the file or object `owner`, which names
        the process that holds the worker's lock. Raises OSError if `owner` cannot be read.
        """
        content = read_owner(self._run_dir.of_task(task))
        self._owners[task] = content
        holder = parse_holder(content)
        if holder is not None and holder.token != sighting.token:
            # The beacon is from an earlier process: the worker's lock now belongs to another one, which may
            # be dead too. So that process is polled.
            return self._poll_owner(task)
        return judge_holder(
            holder,
            self._me,
            silent_s=self._looked_at - sighting.beat_at,
            dead_after_s=self._silence_s,
            is_fresh=self._is_fresh(sighting),
        )

    def _is_fresh(self, sighting: _Sighting) -> bool:
        """Tell whether the last listing, or one shortly before it, showed a new heartbeat of the worker."""
        return sighting.has_moved and self._looked_at - sighting.seen_at <= self._fresh_s

    def _poll_owner(self, task: str) -> bool | None:
        """Tell whether the process that holds a worker's lock runs; None if that is not clear yet."""
        monitor = self._monitors.setdefault(task, monitor_of(self._run_dir.of_task(task)))
        runs = monitor.poll()
        self._owners[task] = monitor.owner_content
        return runs
