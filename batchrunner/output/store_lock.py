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
from dataclasses import replace
from pathlib import Path

from batchrunner.core.errors import TaskHeldError, TaskLockLostError
from batchrunner.output.owner_object import OwnerObject, parse_owner
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


def has_ended(holder: LockHolder, observer: LockHolder) -> bool | None:
    """Return whether a holder is gone, or is this process, which could not give up as the store was away.

    None where the process `observer` cannot tell.
    """
    is_ours = replace(holder, token="") == replace(observer, token="")
    return True if is_ours and holder.token not in _HELD_HERE else holder.is_dead(observer)


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
        self._object = OwnerObject(self._me)
        self._e_tag: str | None = None
        self._beaten_at = 0.0
        self._turn = threading.Lock()  # the thread of the heartbeat, and those that verify

    beat_s = BEAT_S

    def acquire(self, dead_owner: bytes | None = None) -> None:
        """Become the holder; waits for up to DEAD_AFTER_S where the holder is on another machine.

        `dead_owner` is the content of the object where its holder is already known to be dead. Raises
        TaskHeldError where a running process holds the lock, OSError where the store fails.
        """
        while self._e_tag is None:
            found = self._objects.read(self._name)
            asked_at = self._clock()
            if found is None:
                self._object = OwnerObject(self._me)
                self._e_tag = self._objects.create(self._name, self._object.content())
            else:
                known = found[0] == dead_owner
                dead = found if known else self._once_dead(*found)
                asked_at = self._clock()
                if dead is not None:
                    self._e_tag = self._replace(*dead)
            self._beaten_at = asked_at
        _HELD_HERE.add(self.token)
        self._look_for_conditions()

    def beat(self) -> None:
        """Rewrite the object; `verify` tells where another process holds the lock. Raises OSError."""
        with self._turn:
            self._write(replace(self._object, beats=self._object.beats + 1))

    def note_recovered(self) -> None:
        """Note that earlier holders have left nothing to recover. Raises OSError."""
        with self._turn:
            if self._object.recovered < len(self._object.before):
                self._write(self._object.all_recovered())

    def _write(self, content: OwnerObject) -> None:
        if self._e_tag is not None:
            asked_at = self._clock()
            self._e_tag = self._objects.swap(self._name, content.content(), self._e_tag)
            self._object, self._beaten_at = content, asked_at

    def _replace(self, earlier: bytes, e_tag: str) -> str | None:
        """Become the holder in place of another one, whose object has this e_tag."""
        before = OwnerObject.read(earlier)
        self._object = before.succeeded_by(self._me)
        self.replaced_unclean = not before.is_clean
        return self._objects.swap(self._name, self._object.content(), e_tag)

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
                given_up = replace(
                    self._object, holder=replace(self._me, pid=ABANDONED_PID), is_clean=not self.is_abandoned
                )
                try:
                    self._objects.swap(self._name, given_up.content(), self._e_tag)
                except OSError as failure:
                    log.debug("%s: not given up: %s", self._name, failure)
                self._e_tag = None

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

    def _holder(self) -> LockHolder | None:
        found = self._objects.read(self._name)
        return None if found is None else parse_owner(found[0])

    def _once_dead(self, content: bytes, e_tag: str) -> tuple[bytes, str] | None:
        """Return content and e_tag of the object once its holder is dead; raises TaskHeldError if it runs.

        None: the object is gone.
        """
        began, holder = self._clock(), parse_owner(content)
        dead = True if holder is None else has_ended(holder, self._me)
        if dead is None:
            log.warning("%s: waiting %.0f s to see whether %s still lives", self._name, DEAD_AFTER_S, holder)
        while dead is None and self._clock() - began <= DEAD_AFTER_S:
            self._sleep(POLL_S)
            now = self._objects.read(self._name)
            if now is None:
                return None
            if now[1] != e_tag:
                (content, e_tag), holder = now, parse_owner(now[0])
                dead = holder is None or holder.pid == ABANDONED_PID
        if dead is False:
            raise TaskHeldError(
                f"{self._name}: {holder or 'another process'} is writing this run",
                hint="wait for it or use another path",
                mark=";",
            )
        return content, e_tag
