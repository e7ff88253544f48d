"""Finds the lines of a log that explain why a server failed."""

import re
from pathlib import Path

from batchrunner.sglang.logs.lines import clean

TAIL_BYTES = 4 << 20
"""Number of bytes read from the end of a log. After the error of one rank, the other ranks may write
thousands of lines of tracebacks."""
HEAD_BYTES = 1 << 20
"""Number of bytes read from the beginning of a log. They contain the server's limits and arguments (16 kB per
process)."""
LINE_CHARACTERS = 300
"""Maximum number of characters of a log line in the explanation of a failure."""
MOST_LINES = 3
"""Maximum number of log lines in the explanation of a failure."""
_PREFIX = re.compile(r"^(\[[^\]]*\]|\d{4}-\d\d-\d\d[ T]\S+|[A-Z]+:?\s)\s*")
# For example: torch.OutOfMemoryError: CUDA out of memory / launch_server.py: error: … / Not enough memory.
_CAUSE = re.compile(
    r"^(?:- )?([\w.]*(Error|Exception|Interrupt|Exit)\b: .+|[\w. ]+: error: .+|.*out of memory.*"
    r"|Not enough memory.*|.*address already in use.*|.*Killed$|Subprocess \S+ .*crashed.*)",
    re.IGNORECASE,
)
# Errors that are only the consequences of another error, so they explain nothing.
_CONSEQUENCE = re.compile(
    r"Scheduler or detokenizer|Received sigquit|Rank \d+ scheduler|exit ?code|EOFError|KeyboardInt"
)
# A killed process logs no error of its own. So an error before such a line is not the cause of its end.
_KILLED = re.compile(r"^Subprocess \S+ .*crashed with exit code -9\b")


def cause_in(log: Path, since: int = 0) -> str:
    """Return the lines after byte `since` of a log that best explain a failure, joined by ` / `.

    Return at most MOST_LINES lines; the last lines if none explains the failure.
    """
    lines = [unstamped(line) for line in head_and_tail(log, since)]
    causes = [line for line in lines if _CAUSE.match(line)]
    # Take the first of these lists that is not empty.
    best_lines = (
        [line for line in lines if _KILLED.match(line)]
        or [line for line in causes if not _CONSEQUENCE.search(line)]
        or causes
        or [line for line in lines if line][-MOST_LINES:]
    )
    distinct_lines = [*dict.fromkeys(best_lines)]
    return " / ".join(line[:LINE_CHARACTERS] for line in distinct_lines[-MOST_LINES:])


def unstamped(line: str) -> str:
    """Return a log line without time stamp, ranks, log level and colours."""
    return _PREFIX.sub("", clean(line).strip()).strip()


def head_and_tail(log: Path, since: int = 0) -> list[str]:
    """Return the first and the last lines of a log after byte `since`; empty if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            head = file.read(HEAD_BYTES)
            # The tail begins after the head, so that no line of a short log is read twice.
            file.seek(max(file.tell(), log.stat().st_size - TAIL_BYTES))
            # A running server may append lines during the reading. So up to twice the tail is read, but no
            # more.
            text = head + file.read(2 * TAIL_BYTES)
    except OSError:
        return []
    return text.decode(errors="replace").splitlines()
