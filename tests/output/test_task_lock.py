"""One writer for each task, on a disk and in a store: only dead holders are replaced, by one clock alone."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

import batchrunner
from batchrunner.core.errors import InputError, OutputError, TaskLockLostError
from batchrunner.output.holder import LockHolder, parse_holder, this_process
from batchrunner.output.liveness import DEAD_AFTER_S, STORE_HEARTBEAT_S
from batchrunner.output.objects import RunObjects
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import (
    TRUSTED_S,
    FileTaskLock,
    StoreTaskLock,
    TaskLock,
    hold_task,
)
from tests.conftest import job_of, results_of, started, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.server_thread import PATIENCE_S


class Objects(RunObjects):
    """Objects in memory with the conditional writes of a store."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, str]] = {}
        self.is_away = False
        self._tags = map(str, itertools.count())

    def create(self, name: str, content: bytes) -> str | None:
        return None if self.read(name) else self._put(name, content)

    def swap(self, name: str, content: bytes, e_tag: str) -> str | None:
        found = self.read(name)
        return self._put(name, content) if found is not None and found[1] == e_tag else None

    def read(self, name: str) -> tuple[bytes, str] | None:
        if self.is_away:
            raise OSError("the store does not answer")
        return self.held.get(name)

    def _put(self, name: str, content: bytes) -> str:
        self.held[name] = content, next(self._tags)
        return self.held[name][1]


class Clock:
    """Time that passes when somebody sleeps; `each` is called at every look."""

    def __init__(self, first: float = 0.0) -> None:
        self.now = first
        self.each: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.each()


NAME = "tasks/main/owner"


class OnDisk:
    """Locks of one task directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self, holder: LockHolder, clock: Clock | None = None) -> TaskLock:
        clock = clock or Clock()
        return FileTaskLock(self.path, holder, clock=lambda: clock.now, sleep=clock.sleep)

    def write(self, content: bytes) -> None:
        (self.path / "owner").write_bytes(content)

    def owner(self) -> LockHolder | None:
        return parse_holder((self.path / "owner").read_bytes())

    def delete(self) -> None:
        (self.path / "owner").unlink()


class InStore:
    """Locks of one task in a store."""

    def __init__(self) -> None:
        self.objects = Objects()

    def lock(self, holder: LockHolder, clock: Clock | None = None) -> TaskLock:
        clock = clock or Clock()
        return StoreTaskLock(self.objects, NAME, holder, clock=lambda: clock.now, sleep=clock.sleep)

    def write(self, content: bytes) -> None:
        self.objects.create(NAME, content)

    def owner(self) -> LockHolder | None:
        return parse_holder(self.objects.held[NAME][0])

    def delete(self) -> None:
        self.objects.held.clear()


Place: TypeAlias = OnDisk | InStore


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where the lock lies."""
    return OnDisk(tmp_path) if request.param == "disk" else InStore()


def on_host(name: str) -> LockHolder:
    """A process of another machine."""
    return dataclasses.replace(
        this_process(), host=name, machine=f"machine of {name}", token=f"token of {name}"
    )


def test_the_living_are_left_alone(place: Place) -> None:
    """A holder on another host whose heartbeat continues is recognised in a few beats, and not replaced."""
    first, clock = place.lock(on_host("a")), Clock()
    first.acquire()
    clock.each = lambda: first.beat() if clock.now > 10 else None
    with pytest.raises(OutputError, match=r"batchrun with pid \d+ on a is writing"):
        place.lock(on_host("b"), clock).acquire()
    assert clock.now < 10 + STORE_HEARTBEAT_S
    first.verify()


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 1e9])
def test_the_dead_are_replaced(place: Place, skew_s: float) -> None:
    """A holder whose heartbeat stands still for long enough is replaced, whatever the hosts' clocks say."""
    first, clock = place.lock(on_host("a"), Clock(skew_s)), Clock()
    first.acquire()
    second = place.lock(on_host("b"), clock)
    second.acquire()
    assert DEAD_AFTER_S <= clock.now < DEAD_AFTER_S + 6
    second.verify()
    if isinstance(place, InStore):  # there the next heartbeat tells
        first.beat()
    with pytest.raises(TaskLockLostError, match="on b took this task over"):
        first.verify()
    first.release()  # it is not its own any more
    second.verify()
    assert place.owner() == on_host("b")


def test_a_process_of_this_machine_is_looked_up(place: Place) -> None:
    """On this machine a pid that is gone, or that another process reuses, is dead at once."""
    me, clock = this_process(), Clock()
    gone = dataclasses.replace(me, pid=2**22 + 1, token="gone")
    reused = dataclasses.replace(me, started="1", token="reused")
    rebooted = dataclasses.replace(me, boot="another", token="rebooted")
    for dead in (gone, reused, rebooted):
        place.lock(dead).acquire()
        lock = place.lock(me, clock)
        lock.acquire()
        lock.verify()
        lock.release()
    place.lock(me, clock).acquire()
    with pytest.raises(OutputError, match=f"pid {os.getpid()}"):
        place.lock(dataclasses.replace(me, token="second"), clock).acquire()
    assert clock.now == 0.0


@pytest.mark.parametrize("content", [b"", b"{}"])
def test_an_owner_that_is_no_name(place: Place, content: bytes) -> None:
    """A writer that died between the creation of `owner` and the write of its name delays nobody for long."""
    place.write(content)
    clock = Clock()
    place.lock(on_host("a"), clock).acquire()
    assert clock.now < 10
    assert place.owner() == on_host("a")


def test_a_disk_that_has_gone_is_no_other_holder(tmp_path: Path) -> None:
    """A missing disk is waited for, like a full one; the task is lost only if another process may have it."""
    task = tmp_path / "run" / "tasks" / "main"
    task.mkdir(parents=True)
    lock = OnDisk(task).lock(this_process())
    lock.acquire()
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        lock.verify()
    (tmp_path / "gone").rename(tmp_path / "run")
    lock.verify()
    (task / "owner").unlink()
    with pytest.raises(TaskLockLostError):
        lock.verify()


def test_a_store_that_is_away() -> None:
    """The lock is trusted shortly after a heartbeat; later nothing is written until the store answers.

    A lock that could not be given up is not in the way of the same process; one that was deleted is lost.
    """
    place, clock = InStore(), Clock()
    lock = place.lock(this_process(), clock)
    lock.acquire()
    place.objects.is_away = True
    lock.verify()
    clock.now += TRUSTED_S + 1
    with pytest.raises(OSError, match="does not answer"):
        lock.verify()
    lock.release()
    place.objects.is_away = False
    again = place.lock(this_process())
    again.acquire()
    place.delete()
    again.beat()
    with pytest.raises(TaskLockLostError):
        again.verify()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_is_full_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A start that failed to take the lock leaves no name: it would be that of a living process."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = job_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", full)
        with pytest.raises(OutputError, match="cannot be used: No space left"):
            batchrunner.run(job)
    assert not (tmp_path / "run" / "tasks" / "main" / "owner").exists()
    assert batchrunner.run(job).rows_ok == 10


@pytest.mark.parametrize("turn", range(10))
def test_of_many_one_takes_over(place: Place, turn: int) -> None:
    """Of sixteen processes that replace the same dead holder at once, one succeeds and the others notice."""
    place.lock(on_host("dead")).acquire()
    ready, over = threading.Barrier(16), threading.Event()
    won: list[TaskLock] = []
    told: list[str] = []

    def contend(number: int) -> None:
        clock = Clock()
        clock.each = lambda: time.sleep(0.0002 * (number % 3))
        lock = place.lock(on_host(f"host {turn}.{number:02d}"), clock)
        ready.wait()
        try:
            lock.acquire()
        except OutputError as refused:
            told.append(str(refused))
            return
        won.append(lock)
        while not over.wait(0.0005):  # it lives; the others' virtual minute passes in a moment
            lock.beat()

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while len(told) + len(won) < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join()
    holders = [lock for lock in won if _holds(lock)]
    assert len(holders) == 1
    assert len(told) + len(won) == 16


def _holds(lock: TaskLock) -> bool:
    try:
        lock.beat()
        lock.verify()
    except TaskLockLostError:
        return False
    return True


def test_a_file_that_the_successor_deleted(tmp_path: Path) -> None:
    """A worker that wakes without its lock says so, and not that the files which it misses are damaged."""
    run_dir = RunDir(tmp_path)
    missing = InputError("the sorted rows of this run are missing")
    with pytest.raises(InputError, match="are missing"), hold_task(run_dir):
        raise missing
    elsewhere = json.dumps(dataclasses.asdict(on_host("elsewhere")))

    def wake_without_the_lock() -> None:
        with hold_task(run_dir):
            (run_dir.task_directory / "owner").write_text(elsewhere)
            raise missing

    with pytest.raises(TaskLockLostError, match="on elsewhere took this task over") as lost:
        wake_without_the_lock()
    assert lost.value.__cause__ is missing


def test_a_directory_that_is_discarded_while_its_lock_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts while another one discards the run takes its lock again."""
    run_dir, sync, discards = RunDir(tmp_path), os.fsync, iter([True])

    def discard_at_first(file: int) -> None:
        if (run_dir.task_directory / "owner").exists() and next(discards, False):
            shutil.rmtree(tmp_path / "tasks")
        sync(file)

    monkeypatch.setattr(os, "fsync", discard_at_first)
    with hold_task(run_dir) as lock:
        lock.verify()
        assert next(discards, None) is None  # the directory was deleted once
        assert lock.token in (run_dir.task_directory / "owner").read_text()


@pytest.mark.parametrize("join", [[], ["--join"]])
def test_a_run_that_was_taken_over_ends(tmp_path: Path, server: FakeSGLang, join: list[str]) -> None:
    """A run that was stopped for long finds another's name, writes nothing more, and ends with exit 1."""

    def taken_over_at_once(sent: Sent) -> Behaviour:
        if sent.prompt == "row 0":
            (owner,) = (tmp_path / "run" / "tasks").glob("*/owner")
            owner.write_text(json.dumps(dataclasses.asdict(on_host("elsewhere"))))
        return "answer" if sent.row < 5 else "hold"  # it ends before these do

    server.script = taken_over_at_once
    job = job_of(tmp_path, server, rows=20)
    with started(write_job(job, tmp_path), *join) as process:
        assert process.end() == 1
    assert any("on elsewhere took this task over" in line for line in process.lines)
    assert any("0 of 20 rows ok" in line for line in process.lines)
    assert len(results_of(job)) == 0
    (owner,) = (tmp_path / "run" / "tasks").glob("*/owner")
    assert json.loads(owner.read_text())["host"] == "elsewhere"
