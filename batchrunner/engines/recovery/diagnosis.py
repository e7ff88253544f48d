"""The diagnosis of a death, from the server's log, its exit status and the kernel's count of kills. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchrunner.engines.logs.cause import unstamped
from batchrunner.engines.logs.facts import Facts
from batchrunner.engines.logs.records import Phase

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
"""Exit status of the launcher where SIGKILL ended its server."""


@dataclass(frozen=True, slots=True)
class EndedServer:
    """Evidence of a server's last life: from its last start to its end, or until now."""

    lines: Sequence[str]
    """Beginning and end of its log."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that it was started with, as `engine.args` has them."""
    exit_code: int | None = None
    """128 + signal where a signal ended it; None while it runs."""
    oom_kills: int = 0
    """Processes of our cgroup that the kernel has killed since then because memory ran out."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a server died."""

    kind: Phase | Kind
    """Phase in which memory ran out; `killed` by the kernel because it ran out; `crash` for anything else."""
    why: str
    """Line of the log that says so, or a sentence."""
    running: int = 0
    """Requests that ran just before, `#running-req` in the log."""

    @property
    def of_memory(self) -> bool:
        """Whether memory ran out: safer arguments may help, and no row is at fault."""
        return self.kind != "crash"


def examine(ended: EndedServer, facts: Facts) -> Death:
    """Diagnose a death; `facts` are read from the server's log."""
    if last := facts.last_trouble:
        return Death(last.phase, unstamped(last.what.text)[:300], last.running)
    killed = ended.exit_code == KILLED or (facts.died is not None and facts.died.killed)
    if ended.oom_kills and killed:
        return Death("killed", f"killed by the kernel for want of memory ({ended.oom_kills} processes)")
    return Death("crash", f"exit {ended.exit_code}")
