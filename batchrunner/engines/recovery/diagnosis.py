"""The diagnosis of a death, from the server's log, its exit status and the kernel's count of kills. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchrunner.engines.logs.facts import Facts
from batchrunner.engines.logs.lines import Phase, clean

TAIL_BYTES = 4 << 20
"""Bytes read of a log's end: after one rank's error the others may write thousands of tracebacks."""
HEAD_BYTES = 1 << 20
"""Bytes read of a log's beginning, which has a server's arguments (16 kB a process) and limits."""
LINE_BYTES = 64 << 10
"""Bytes read of a log's end to find its newest line, which is asked for often."""
MOST_LINES = 3
_PREFIX = re.compile(r"^(\[[^\]]*\]|\d{4}-\d\d-\d\d[ T]\S+|[A-Z]+:?\s)\s*")
# for example: torch.OutOfMemoryError: CUDA out of memory / launch_server.py: error: … / Not enough memory.
_CAUSE = re.compile(
    r"^(?:- )?([\w.]*(Error|Exception|Interrupt|Exit)\b: .+|[\w. ]+: error: .+|.*out of memory.*"
    r"|Not enough memory.*|.*address already in use.*|.*Killed$|Subprocess \S+ .*crashed.*)",
    re.IGNORECASE,
)
# errors that follow from another one, which they would hide
_CONSEQUENCE = re.compile(
    r"Scheduler or detokenizer|Received sigquit|Rank \d+ scheduler|exit ?code|EOFError|KeyboardInt"
)
# a killed process (most often by the kernel, for memory) logs no error: those before it are not why it died
_KILLED = re.compile(r"^Subprocess \S+ .*crashed with exit code -9\b")


def cause_in(log: Path, since: int = 0) -> str:
    """Return the one to three lines after byte `since` that best explain a failure, joined by ` / `."""
    lines = [unstamped(line) for line in head_and_tail(log, since, head_bytes=0)]
    causes = [line for line in lines if _CAUSE.match(line)]
    best = (
        [line for line in lines if _KILLED.match(line)]
        or [line for line in causes if not _CONSEQUENCE.search(line)]
        or causes
    )
    chosen = list(dict.fromkeys(best))[-MOST_LINES:] or [line for line in lines if line][-MOST_LINES:]
    return " / ".join(line[:300] for line in chosen)


def last_line(log: Path) -> str:
    """Return the newest line of a log; empty without one."""
    lines = map(unstamped, reversed(head_and_tail(log, head_bytes=0, tail_bytes=LINE_BYTES)))
    return next(filter(None, lines), "")


def unstamped(line: str) -> str:
    """Return a line without time stamp and colours, which sglang_router writes to files too."""
    return _PREFIX.sub("", clean(line).strip()).strip()


def head_and_tail(
    log: Path, since: int = 0, *, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES
) -> list[str]:
    """Return the lines of a log's beginning and end from the byte `since` on; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            head = file.read(head_bytes)
            file.seek(max(file.tell(), log.stat().st_size - tail_bytes))
            text = head + file.read(2 * tail_bytes)
    except OSError:
        return []
    return text.decode(errors="replace").splitlines()


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
