"""Beacons: workers of a shared run watch each other through one listing, whatever their number."""

import dataclasses
import math
import time
from pathlib import Path

import pytest

from batchrunner.output import beacons
from batchrunner.output.beacons import LEASES_SHOWN, OWNERS_READ, Beacon, BeaconWatch, silence_s
from batchrunner.output.holder import this_process
from batchrunner.output.liveness import (
    DEAD_AFTER_S,
    FRESH_S,
    HEARTBEAT_S,
    SHORT_POLL_S,
    STORE_HEARTBEAT_S,
)
from batchrunner.output.objects import RunObjects
from batchrunner.output.run_dir import RunDir
from batchrunner.output.store import LOCAL, Store
from batchrunner.output.task_lock import TRUSTED_S, FileTaskLock
from benchmarks.measure import in_fresh_process
from tests.conftest import eventually, job_of, rows_in, started, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.runs import Task, status_of


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Make the watch's time stand still."""
    return Clock(monkeypatch)


class OtherWorker:
    """A worker of a run on another machine, which holds leases."""

    def __init__(self, run: RunDir, name: str) -> None:
        holder = dataclasses.replace(this_process(), host=name, machine=f"machine of {name}")
        self.lock = FileTaskLock(run.of_task(name).task_directory, holder)
        self.lock.acquire()
        self.beacon = self.lock.beacon = Beacon(run.leases, name, holder, LOCAL)
        self.beacon.light()


def run_at(directory: Path) -> RunDir:
    """Return the run in a directory as the worker "me" sees it."""
    run = RunDir(directory / "run", "me")
    run.leases.mkdir(parents=True)
    return run


def look(watch: BeaconWatch, run: RunDir) -> None:
    """Give the watch a new listing of the leases."""
    watch.look(LOCAL.names(run.leases))


def test_a_worker_that_beats_is_alive(tmp_path: Path, clock: Clock) -> None:
    """A worker is unclear at first sight, runs once its beacon has moved, and is gone with its beacon."""
    run = run_at(tmp_path)
    other, watch = OtherWorker(run, "other"), BeaconWatch(run)
    look(watch, run)
    assert (len(watch), watch.all_run, watch.dead) == (1, False, [])
    clock.now += 5
    other.lock.beat()
    look(watch, run)
    assert (watch.all_run, watch.dead) == (True, [])
    clock.now += FRESH_S + 1
    look(watch, run)
    assert (watch.all_run, watch.dead) == (False, [])
    other.beacon.put_out()
    look(watch, run)
    assert (len(watch), watch.all_run) == (0, True)


def test_a_beacon_shows_leases(tmp_path: Path, clock: Clock) -> None:
    """From the next heartbeat on, others see in a listing which leases a worker holds."""
    run = run_at(tmp_path)
    first, second = OtherWorker(run, "first"), OtherWorker(run, "second")
    watch = BeaconWatch(run)
    first.beacon.show([f"{number:06d}.0" for number in range(LEASES_SHOWN + 1)])
    second.beacon.show(["000020.3"])
    look(watch, run)
    assert watch.leases_except("me") == set()
    for worker in (first, second):
        worker.lock.beat()
    look(watch, run)
    assert watch.leases_except("first") == {"000020.3"}
    assert watch.leases_except("second") == {f"{number:06d}.0" for number in range(LEASES_SHOWN)}


def test_a_silent_worker_is_dead(tmp_path: Path, clock: Clock) -> None:
    """A worker on another machine is dead once its beacon has stood still for `silence_s`, not before."""
    run = run_at(tmp_path)
    OtherWorker(run, "other")
    watch = BeaconWatch(run)
    look(watch, run)
    assert watch.seconds_to_verdict() == silence_s(HEARTBEAT_S)
    clock.now += silence_s(HEARTBEAT_S)
    look(watch, run)
    assert watch.dead == []
    clock.now += 1
    look(watch, run)
    assert watch.dead == ["other"]
    watch.remove("other")
    assert LOCAL.names(run.leases) == []


class FilesAsObjects(RunObjects):
    """An object store whose objects are files of a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def look(self, name: str) -> tuple[bytes, bytes]:
        return (self._root / name).read_bytes(), b""


class StoreInDirectory(Store):
    """Keeps the leases of a run in a directory, and says that this is an object store."""

    def __init__(self, root: Path) -> None:
        self.objects = FilesAsObjects(root)


@pytest.mark.parametrize("died_after_beat_s", [0.0, 2.0, 4.0])
@pytest.mark.parametrize("pause_s", [1.0, 7.0, 20.0])
@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_death_is_noticed_in_time(
    tmp_path: Path, clock: Clock, place: str, pause_s: float, died_after_beat_s: float
) -> None:
    """A waiting worker notices a death on another machine within 75 s, and not while a lock is trusted."""
    run = run_at(tmp_path)
    beat_s = HEARTBEAT_S
    if place == "store":
        run = RunDir(run.path, "me", StoreInDirectory(run.path))
        beat_s = STORE_HEARTBEAT_S
    other, watch = OtherWorker(run, "other"), BeaconWatch(run)
    began, last_beat_at = clock.now, clock.now + 30 * beat_s
    died_at = last_beat_at + died_after_beat_s * beat_s / HEARTBEAT_S
    beat_at, look_at = began, began
    while not watch.dead:
        clock.now = min(beat_at, look_at)
        if clock.now == beat_at:
            other.lock.beat()
            beat_at = beat_at + beat_s if beat_at < last_beat_at else math.inf
        if clock.now == look_at:
            look(watch, run)
            look_at = clock.now + min(pause_s, watch.seconds_to_verdict() + SHORT_POLL_S)
    assert clock.now - died_at <= DEAD_AFTER_S
    assert clock.now - last_beat_at > TRUSTED_S


def test_owners_of_other_machines_are_not_read_after_a_heartbeat(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once many workers have been seen to beat, a listing is all that it costs to watch them."""
    run = run_at(tmp_path)
    others = [OtherWorker(run, f"w{number}") for number in range(3 * OWNERS_READ)]
    watch = BeaconWatch(run)
    look(watch, run)
    reads: list[str] = []

    def read_owner(run_dir: RunDir) -> bytes:
        reads.append(run_dir.task)
        return b""

    monkeypatch.setattr(beacons, "read_owner", read_owner)
    for _ in range(5):
        clock.now += HEARTBEAT_S
        for other in others:
            other.lock.beat()
        look(watch, run)
    assert (reads, watch.all_run) == ([], True)


def test_a_rare_look_shows_how_long_a_worker_is_silent(tmp_path: Path, clock: Clock) -> None:
    """A busy worker that looks every five minutes finds at its first look who has been dead for 75 s."""
    run = run_at(tmp_path)
    dies, lives = OtherWorker(run, "dies"), OtherWorker(run, "lives")
    watch = BeaconWatch(run)
    dies_at = clock.now + 605
    for step in range(1, 138):
        clock.now += 5
        lives.lock.beat()
        if clock.now < dies_at:
            dies.lock.beat()
        if step % 60 == 0:
            look(watch, run)
            assert (watch.dead, watch.all_run) == ([], step > 60)
    assert clock.now == dies_at + DEAD_AFTER_S + 5
    look(watch, run)
    assert watch.dead == ["dies"]


def test_a_suspended_worker_is_not_dead(tmp_path: Path, clock: Clock) -> None:
    """The clock of a virtual machine stands still while the machine does; its worker lives on after that."""
    run = run_at(tmp_path)
    other, watch = OtherWorker(run, "other"), BeaconWatch(run)
    of_worker = clock.now
    for suspended_s in (0, 0, 60, 60, 60):
        clock.now += suspended_s
        for _ in range(4):
            of_worker, clock.now, of_observer = of_worker + 5, of_worker + 5, clock.now + 5
            other.lock.beat()
            clock.now = of_observer
            look(watch, run)
            assert watch.dead == []


def test_a_worker_that_was_killed_during_a_rename(tmp_path: Path, clock: Clock) -> None:
    """Two names of one beacon, as a kill leaves them in an object store, do not look like heartbeats."""
    run = run_at(tmp_path)
    OtherWorker(run, "other")
    (first,) = run.leases.glob("alive.*")
    first.with_name(first.name.replace("000001", "000002")).touch()
    watch = BeaconWatch(run)
    for _ in range(3):
        look(watch, run)
        assert (watch.all_run, watch.dead) == (False, [])
        clock.now += DEAD_AFTER_S / 3 + 1
    look(watch, run)
    assert watch.dead == ["other"]
    watch.remove("other")
    assert LOCAL.names(run.leases) == []


def test_a_worker_that_is_being_taken_over_is_not_dead(tmp_path: Path, clock: Clock) -> None:
    """While another worker holds the lock of a dead one, to take over, nobody else judges it dead."""
    run = run_at(tmp_path)
    dead, watch = OtherWorker(run, "dead"), BeaconWatch(run)
    look(watch, run)
    clock.now += DEAD_AFTER_S + 1
    successor = dataclasses.replace(this_process(), host="third", machine="machine of third")
    lock = FileTaskLock(run.of_task("dead").task_directory, successor)
    (run.of_task("dead").task_directory / "owner").unlink()
    lock.acquire()
    look(watch, run)
    assert watch.dead == []
    dead.beacon.put_out()


def test_all_dead_workers_are_found_in_turn(tmp_path: Path, clock: Clock) -> None:
    """A listing leads to few reads, however many workers are silent; all dead ones are found."""
    run = run_at(tmp_path)
    for number in range(3 * OWNERS_READ):
        OtherWorker(run, f"w{number}")
    watch = BeaconWatch(run)
    look(watch, run)
    clock.now += DEAD_AFTER_S + 1
    rounds = 0
    while len(watch):
        look(watch, run)
        assert len(watch.dead) <= OWNERS_READ
        for task in watch.dead:
            watch.remove(task)
        rounds += 1
    assert rounds == 3


def test_leases_of_a_worker_without_a_beacon(tmp_path: Path) -> None:
    """A dead worker whose beacon was lost, as after a power failure, is found by the leases that it holds."""
    job = job_of(tmp_path, rows=300)
    dead = Task(job, "dead")
    dead.work(1)
    dead.die()
    run = RunDir(tmp_path / "run")
    for beacon in run.leases.glob("alive.*"):
        beacon.unlink()
    last = Task(job, "last")
    last.work(10_000)
    assert rows_in(job) == list(range(300))
    last.end()


def test_beacons_come_and_go_with_leases(tmp_path: Path, server: FakeSGLang) -> None:
    """A worker that has rows has one beacon, and none is left at the end of a run."""
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server, rows=100, window=8)
    leases = tmp_path / "run" / "leases"
    with started(write_job(job, tmp_path), "--join") as worker:
        eventually(lambda: len(server.sent) == 8)
        assert len(list(leases.glob("alive.*"))) == 1
        server.script = lambda _: "answer"
        server.answer_held()
        assert worker.end() == 0
    assert list(leases.glob("alive.*")) == []
    assert status_of(tmp_path / "run")["finished"]


def test_many_workers_cost_the_shared_directory_little() -> None:
    """Of 12 workers in virtual time two die: each row is stored once, with few operations a worker."""
    figures = in_fresh_process("benchmarks.many_workers", "--one", "--workers", "12")
    assert (figures["rows_missing"], figures["rows_twice"]) == (0, 0)
    assert figures["taken_over"] == figures["killed"] == 2
    assert figures["takeover_s_worst"] <= DEAD_AFTER_S
    assert figures["operations_a_second_worst_worker"] <= 2
