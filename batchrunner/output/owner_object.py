"""The object `owner` of a task in an object store: who holds the task, and whose results were recovered."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import orjson

from batchrunner.output.task_holder import LockHolder

MOST_BEFORE = 100
"""Earlier holders that are kept: those whose writes may still be under way."""


@dataclass(frozen=True, slots=True)
class OwnerObject:
    """The content of the object."""

    holder: LockHolder | None
    """None where the content names no holder."""
    beats: int = 0
    before: tuple[str, ...] = ()
    """Tokens of the holders before, oldest first."""
    recovered: int = 0
    """How many of them, from the oldest on, have left no row to recover: what they still write is ignored."""

    is_clean: bool = False
    """Whether the holder gave the task up when all that it had was written."""

    @classmethod
    def read(cls, content: bytes) -> OwnerObject:
        """Return what an object says; other content says nothing."""
        try:
            found = orjson.loads(content)
            holder = LockHolder(**found["holder"])
            before, recovered = tuple(map(str, found.get("before", ()))), int(found.get("recovered", 0))
            return cls(holder, int(found.get("beats", 0)), before, recovered, found.get("is_clean") is True)
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(None)

    def content(self) -> bytes:
        """Return the bytes of the object."""
        return orjson.dumps(asdict(self))

    def succeeded_by(self, holder: LockHolder) -> OwnerObject:
        """Return the object as the next holder writes it."""
        before = self.before if self.holder is None else (*self.before, self.holder.token)
        dropped = max(0, len(before) - MOST_BEFORE)
        return OwnerObject(holder, 0, before[dropped:], max(0, self.recovered - dropped))

    def all_recovered(self) -> OwnerObject:
        """Return the object once nothing of earlier holders is left to recover."""
        return replace(self, recovered=len(self.before))


def parse_owner(content: bytes) -> LockHolder | None:
    """Return the holder that the object names; None where the content names none."""
    return OwnerObject.read(content).holder
