"""The lines of an engine's log that say why it did not start or why it died."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchrunner.engines.logs.lines import clean

if TYPE_CHECKING:
    from pathlib import Path

TAIL_BYTES = 4 << 20
"""Of its end: after one rank's error its siblings may write thousands of tracebacks."""
HEAD_BYTES = 1 << 20
"""Of a log's beginning: the arguments of a server (16 kB a process) and its limits stand there."""
LINE_BYTES = 64 << 10
"""Of its end, where the newest line alone is asked for, again and again."""
MOST_LINES = 3
_PREFIX = re.compile(r"^(\[[^\]]*\]|\d{4}-\d\d-\d\d[ T]\S+|[A-Z]+:?\s)\s*")
# for example: torch.OutOfMemoryError: CUDA out of memory / launch_server.py: error: … / Not enough memory.
_CAUSE = re.compile(
    r"^(?:- )?([\w.]*(Error|Exception|Interrupt|Exit)\b: .+|[\w. ]+: error: .+|.*out of memory.*"
    r"|Not enough memory.*|.*address already in use.*|.*Killed$|Subprocess \S+ .*crashed.*)",
    re.IGNORECASE,
)
# what follows from a cause elsewhere, and would hide it
_CONSEQUENCE = re.compile(
    r"Scheduler or detokenizer|Received sigquit|Rank \d+ scheduler|exit ?code|EOFError|KeyboardInt"
)
# a process that somebody killed (most often the kernel, for memory) says nothing: no error before it is why
_KILLED = re.compile(r"^Subprocess \S+ .*crashed with exit code -9\b")


def cause_in(log: Path, since: int = 0) -> str:
    """Return the one to three lines of the log that matter most, joined by ` / `; empty without a log.

    `since` is where the log of this start begins, in bytes.
    """
    lines = _lines(log, since)
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
    return next((line for line in reversed(_lines(log, most=LINE_BYTES)) if line), "")


def head_and_tail(log: Path, since: int = 0) -> list[str]:
    """Return the lines of a log's beginning and end, as they are; empty without one."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            head = file.read(HEAD_BYTES)
            file.seek(max(file.tell(), log.stat().st_size - TAIL_BYTES))
            text = head + file.read(2 * TAIL_BYTES)
    except OSError:
        return []
    return text.decode(errors="replace").splitlines()


def unstamped(line: str) -> str:
    """Return a line without its time stamp, and clean: sglang_router colours its log, terminal or not."""
    return _PREFIX.sub("", clean(line).strip()).strip()


def _lines(log: Path, since: int = 0, most: int = TAIL_BYTES) -> list[str]:
    """Read the log's end without time stamps."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - most))
            return [unstamped(line) for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return []
