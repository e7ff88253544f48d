"""The lines of an engine's log that say why it did not start, or why it died."""

import re
from pathlib import Path

from batchrunner.engines.logs.lines import clean

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
