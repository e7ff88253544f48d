"""The lock of a task whose run lies in an object store: an object `owner` that its holder rewrites.

It is created with `If-None-Match`, and rewritten with `If-Match` on the last e_tag: at every heartbeat, when
it is taken over, and when it is given up. So of several processes one succeeds, and one that was replaced
notices it at its next heartbeat. No two clocks are compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import orjson

from batchrunner.core.errors import TaskHeldError, TaskLockLostError
from batchrunner.output.run_dir import OWNER
from batchrunner.output.stores.store import ConditionalObjects
from batchrunner.output.task_holder import ABANDONED_PID, DEAD_AFTER_S, POLL_S, LockHolder
from batchrunner.output.task_lock import TaskLock

log = logging.getLogger(__name__)

BEAT_S = 15.0
"""Seconds between two heartbeats: 240 requests an hour."""
_HELD_HERE: set[str] = set()
"""Tokens of the locks that this process holds."""
TRUSTED_S = 45.0
"""Seconds after a heartbeat during which the lock is held for sure, less than DEAD_AFTER_S."""


class StoreTaskLock(TaskLock):
    """The lock of one task in an object store, before and while this process holds it."""

    def __init__(
        self,
        objects: ConditionalObjects,
        directory: Path,
        root: Path,
        me: LockHolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`directory` is what is locked, in the working copy `root` of the run."""
        super().__init__(directory, me, clock=clock, sleep=sleep)
        self._objects = objects
        self._name = (directory / OWNER).relative_to(root).as_posix()
        self._e_tag: str | None = None
        self._beaten_at = 0.0
        self._turn = threading.Lock()  # the thread of the heartbeat, and those that verify

    beat_s = BEAT_S

    def acquire(self, dead_owner: bytes | None = None) -> None:
        """Become the holder; waits for up to DEAD_AFTER_S where the holder is on another machine.

        Raises TaskHeldError where a running process holds the lock, OSError where the store fails.
        """
        del dead_owner
        while self._e_tag is None:
            found = self._objects.read(self._name)
            asked_at = self._clock()
            if found is None:
                self._e_tag = self._objects.create(self._name, self._content())
            else:
                e_tag = self._e_tag_of_dead(*found)
                asked_at = self._clock()
                if e_tag is not None:
                    self._e_tag = self._objects.swap(self._name, self._content(), e_tag)
            self._beaten_at = asked_at
        _HELD_HERE.add(self.token)
        self._look_for_conditions()

    def beat(self) -> None:
        """Rewrite the object; `verify` tells where another process holds the lock. Raises OSError."""
        with self._turn:
            if self._e_tag is not None:
                self._beats += 1
                asked_at = self._clock()
                self._e_tag = self._objects.swap(self._name, self._content(), self._e_tag)
                self._beaten_at = asked_at

    def verify(self) -> None:
        """Raise TaskLockLostError where another process holds the lock, OSError where the store fails."""
        if self._clock() - self._beaten_at > TRUSTED_S:
            self.beat()
        if self._e_tag is None:
            winner = self._holder() or "another process"
            raise TaskLockLostError(f"{self._name}: {winner} took this task over: what is stored is kept")

    def release(self) -> None:
        """Mark the object as given up, so that the next attempt need not wait; errors are ignored."""
        with self._turn:
            _HELD_HERE.discard(self.token)
            if self._e_tag is not None:
                self._me = replace(self._me, pid=ABANDONED_PID)
                try:
                    self._objects.swap(self._name, self._content(), self._e_tag)
                except OSError as failure:
                    log.debug("%s: not given up: %s", self._name, failure)
                self._e_tag = None

    def _is_left_by_us(self, holder: LockHolder) -> bool:
        """Tell whether this process held the lock, and could not give it up as the store was away."""
        return replace(holder, token="", rows=0) == replace(self._me, token="", rows=0) and (
            holder.token not in _HELD_HERE
        )

    def _look_for_conditions(self) -> None:
        """Log a warning where the store writes whatever the condition."""
        written = self._objects.create(self._name, b"{}")
        if written is not None:
            log.warning(
                "%s: the store has no conditional writes: see to it that no other process writes this run",
                self._name,
            )
            self._e_tag = written
            self.beat()

    def _content(self) -> bytes:
        return orjson.dumps({"holder": asdict(self._me), "beats": self._beats})

    def _holder(self) -> LockHolder | None:
        found = self._objects.read(self._name)
        return None if found is None else parse_owner(found[0])

    def _e_tag_of_dead(self, content: bytes, e_tag: str) -> str | None:
        """Return the e_tag of the object once its holder is dead; raises TaskHeldError if it runs.

        None: the object is gone.
        """
        began, holder = self._clock(), parse_owner(content)
        dead = True if holder is None or self._is_left_by_us(holder) else holder.is_dead(self._me)
        if dead is None:
            log.warning("%s: waiting %.0f s to see whether %s still lives", self._name, DEAD_AFTER_S, holder)
        while dead is None and self._clock() - began <= DEAD_AFTER_S:
            self._sleep(POLL_S)
            now = self._objects.read(self._name)
            if now is None:
                return None
            if now[1] != e_tag:
                e_tag, holder = now[1], parse_owner(now[0])
                dead = holder is None or holder.pid == ABANDONED_PID
        if dead is False:
            raise TaskHeldError(
                f"{self._name}: {holder or 'another process'} is writing this run",
                hint="wait for it or use another path",
                mark=";",
            )
        return e_tag


def parse_owner(content: bytes) -> LockHolder | None:
    """Return the holder that the object names; None where the content names none."""
    try:
        return LockHolder(**orjson.loads(content)["holder"])
    except (ValueError, TypeError, KeyError):
        return None
