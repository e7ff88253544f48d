"""Why an engine died: what its log, its exit status and the kernel say together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batchrunner.engines.logs.cause import unstamped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchrunner.engines.logs.facts import Facts
    from batchrunner.engines.logs.lines import Phase

Kind = Literal["killed", "crash"]

NAMES: Mapping[Phase | Kind, str] = {
    "prefill": "out of memory in prefill",
    "decode": "out of memory in decode",
    "requests": "out of request slots",
    "graph": "out of memory at graph capture",
    "prefill-graph": "out of memory at capture of prefill graphs",
    "general": "out of memory",
    "load": "the weights do not fit",
    "pool": "no room for a KV pool",
    "killed": "killed by the kernel for want of memory",
    "crash": "a crash",
}

KILLED = 128 + 9
"""The launcher's exit status of a server that SIGKILL ended."""


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


def examine(life: Life, told: Facts) -> Death:
    """Tell what a server died of; `told` is what its log says."""
    if last := told.last_trouble:
        return Death(last.phase, unstamped(last.what.text)[:300], last.running)
    if life.oom_kills and (life.code == KILLED or (told.died is not None and told.died.killed)):
        return Death("killed", f"killed by the kernel for want of memory ({life.oom_kills} processes)")
    return Death("crash", f"exit {life.code}")
