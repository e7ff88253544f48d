"""Why an engine died: what its log, its exit status and the kernel say together. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batchrunner.engines.serverlog import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchrunner.care.facts import Trouble
    from batchrunner.engines.batchlines import Phase

Kind = Literal["killed", "crash"]

NAMES: Mapping[Phase | Kind, str] = {
    "prefill": "out of memory in prefill",
    "decode": "out of memory in decode",
    "requests": "out of request slots",
    "graph": "out of memory at graph capture",
    "general": "out of memory",
    "load": "the weights do not fit",
    "pool": "no room for a KV pool",
    "killed": "killed by the kernel for want of memory",
    "crash": "a crash",
}

KILLED = 128 + 9
"""The launcher's exit status of a server that SIGKILL ended."""
_KILLED_CHILD = re.compile(r"exit ?code:? -9\b")
# what an engine dies of is raised, not only told as of a row that is given up; a graph capture can fail for
# other reasons
_RAISED = re.compile(
    r"(?!.*even after retracting)(?=.*memory)([\w.]*(Error|Exception)\b:|.*Try to lower|Cuda failure)"
)


@dataclass(frozen=True, slots=True)
class Life:
    """What the life of a server left behind."""

    lines: Sequence[str]
    """The beginning and the end of its log."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """What it was started with, as `engine.args` has it."""
    code: int | None = None
    """Its exit status, 128 + signal where a signal ended it."""
    oom_kills: int = 0
    """Processes of our cgroup that the kernel killed for want of memory in that time."""


@dataclass(frozen=True, slots=True)
class Death:
    """What a server died of."""

    kind: Phase | Kind
    """Where memory was wanting, that the kernel killed for want of it, or that it was something else."""
    why: str
    """The line of the log that says so, or a sentence."""
    running: int = 0
    """`#running-req` before it."""

    @property
    def of_memory(self) -> bool:
        """Whether memory was wanting, so that less of something helps: no row is to blame."""
        return self.kind != "crash"


def examine(life: Life, troubles: Sequence[Trouble]) -> Death:
    """Tell what a server died of; `troubles` are the times that memory ran out, by its log."""
    for trouble in reversed(troubles):
        line = clean(trouble.what.text)
        if _RAISED.match(line):
            return Death(trouble.phase, line[:300], trouble.running)
    if life.oom_kills and (life.code == KILLED or any(map(_KILLED_CHILD.search, life.lines))):
        return Death("killed", f"killed by the kernel for want of memory ({life.oom_kills} processes)")
    return Death("crash", f"exit {life.code}")
