"""The lock of a task in a store: one holder at a time, whatever the machines and their clocks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchrunner.core.errors import TaskHeldError, TaskLockLostError
from batchrunner.output.owner_object import parse_owner
from batchrunner.output.store_lock import BEAT_S, TRUSTED_S, StoreTaskLock
from batchrunner.output.task_holder import DEAD_AFTER_S, LockHolder, this_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Objects:
    """Objects in memory, written on a condition as a store does."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, str]] = {}
        self.is_away = False
        self._tags = map(str, itertools.count())

    def create(self, name: str, content: bytes) -> str | None:
        return None if name in self._here() else self._put(name, content)

    def swap(self, name: str, content: bytes, e_tag: str) -> str | None:
        found = self._here().get(name)
        return self._put(name, content) if found is not None and found[1] == e_tag else None

    def read(self, name: str) -> tuple[bytes, str] | None:
        return self._here().get(name)

    def _here(self) -> dict[str, tuple[bytes, str]]:
        if self.is_away:
            raise OSError("the store does not answer")
        return self.held

    def _put(self, name: str, content: bytes) -> str:
        tag = next(self._tags)
        self.held[name] = content, tag
        return tag


class Clock:
    """A clock that goes on while somebody sleeps, and calls what then happens."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.then: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


HERE = this_process()
ELSEWHERE = replace(HERE, host="elsewhere", machine="m2", boot="b2", namespace="n2")


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lock_of(objects: Objects, clock: Clock, tmp_path: Path, me: LockHolder, token: str) -> StoreTaskLock:
    directory = tmp_path / "tasks" / "main"
    return StoreTaskLock(
        objects, directory, tmp_path, replace(me, token=token), clock=clock, sleep=clock.sleep
    )


def holder(objects: Objects) -> LockHolder | None:
    return parse_owner(objects.held["tasks/main/owner"][0])


def test_one_holder_on_a_machine(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """A running process keeps its lock; one that gave it up, or has ended, is replaced at once."""
    first = lock_of(objects, clock, tmp_path, HERE, "a")
    first.acquire()
    second = lock_of(objects, clock, tmp_path, HERE, "b")
    with pytest.raises(TaskHeldError, match=f"pid {HERE.pid}"):
        second.acquire()
    first.release()
    second.acquire()
    dead = lock_of(objects, clock, tmp_path, replace(HERE, started="1"), "c")
    second.release()
    dead.acquire()
    lock_of(objects, clock, tmp_path, HERE, "d").acquire()
    assert holder(objects) == replace(HERE, token="d")
    assert clock.now == 1000.0


def test_a_holder_on_another_machine_that_lives(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """Its heartbeat is seen within the time of a few beats; its clock does not matter."""
    other = lock_of(objects, Clock(), tmp_path, ELSEWHERE, "a")
    other.acquire()
    began = clock.now
    clock.then = lambda: other.beat() if clock.now - began > BEAT_S else None
    with pytest.raises(TaskHeldError, match="elsewhere"):
        lock_of(objects, clock, tmp_path, HERE, "b").acquire()
    assert clock.now - began < 2 * BEAT_S
    other.verify()


def test_a_holder_on_another_machine_that_is_gone(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """It is replaced after DEAD_AFTER_S; if it comes back, it finds that out before it writes."""
    other = lock_of(objects, clock, tmp_path, ELSEWHERE, "a")
    other.acquire()
    began = clock.now
    mine = lock_of(objects, clock, tmp_path, HERE, "b")
    mine.acquire()
    assert DEAD_AFTER_S < clock.now - began < DEAD_AFTER_S + 5
    with pytest.raises(TaskLockLostError, match="took this task over"):
        other.verify()
    other.release()
    mine.beat()
    mine.verify()
    assert holder(objects) == replace(HERE, token="b")


def test_two_that_replace_the_same_one(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """One of them succeeds, and the other waits for it as for any holder."""
    lock_of(objects, clock, tmp_path, ELSEWHERE, "a").acquire()
    faster = lock_of(objects, clock, tmp_path, replace(HERE, host="third", machine="m3"), "b")
    began = clock.now
    done: list[bool] = []

    def be_faster() -> None:
        if clock.now - began > DEAD_AFTER_S - 2 and not done:
            done.append(True)
            faster._e_tag = faster._replace(*objects.held["tasks/main/owner"])

    clock.then = be_faster
    with pytest.raises(TaskHeldError, match="third"):
        lock_of(objects, clock, tmp_path, HERE, "c").acquire()
    assert holder(objects) == replace(HERE, host="third", machine="m3", token="b")


def test_a_store_that_is_away(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """Shortly after a heartbeat the lock counts; later nothing is written before the store answers."""
    lock = lock_of(objects, clock, tmp_path, HERE, "a")
    lock.acquire()
    objects.is_away = True
    lock.verify()
    clock.now += TRUSTED_S + 1
    with pytest.raises(OSError, match="does not answer"):
        lock.verify()
    lock.release()
    objects.is_away = False
    assert holder(objects) == replace(HERE, token="a")


def test_a_lock_whose_object_was_deleted(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """It is lost: whoever deleted it may have deleted the run. A new attempt creates it again."""
    lock = lock_of(objects, clock, tmp_path, HERE, "a")
    lock.acquire()
    objects.held.clear()
    lock.beat()
    with pytest.raises(TaskLockLostError):
        lock.verify()
    lock_of(objects, clock, tmp_path, HERE, "b").acquire()


def test_an_owner_that_is_no_name(objects: Objects, clock: Clock, tmp_path: Path) -> None:
    """Content that names nobody is replaced."""
    objects.create("tasks/main/owner", b"{}")
    lock_of(objects, clock, tmp_path, HERE, "a").acquire()
    assert holder(objects) == replace(HERE, token="a")
