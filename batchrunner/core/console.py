"""What the command prints: results on standard output, everything else on standard error."""

import errno
import functools
import io
import json
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchrunner.core.errors import BatchrunError


def wants_json(words: Sequence[str]) -> bool:
    """Tell whether `--json` is among the arguments of the command; behind `--` it would be a name."""
    return "--json" in (words[: words.index("--")] if "--" in words else words)


_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal or a page obeys instead of showing them: controls, line ends, directions."""


def escaped(text: str) -> str:
    """Return a text as one line that shows its controls, as JSON writes them.

    All that this package prints goes through it: data moves no cursor, makes no lines and hides no text.
    """
    return _OBEYED.sub(lambda each: json.dumps(each[0])[1:-1].replace("\x7f", "\\u007f"), text)


def tell(*lines: str) -> None:
    """Print lines to standard error, see `StandardStream`: a failure to print changes no exit code."""
    print("\n".join(map(escaped, lines)), file=sys.stderr, flush=True)  # noqa: T201


def show(found: Sequence[str] | Mapping[str, Any]) -> None:
    """Print a result to standard output: lines, or an object as JSON."""
    if isinstance(found, Mapping):
        found = json.dumps(found, indent=2, ensure_ascii=False, default=str).split("\n")
    print("\n".join(map(escaped, found)))  # noqa: T201


class LogLine(logging.Formatter):
    """Makes a line of each message of the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the message as one line."""
        return escaped(super().formatMessage(record))


def tell_failure(failure: BatchrunError, *, as_json: bool, of: BaseException | None = None) -> int:
    """Print an error as its lines, and as JSON where that is wanted; return the exit code.

    JSON also has the report of the rows done until then. Its `type` is the class of `of`, where given.
    """
    if as_json:
        report = failure.report.as_dict() if failure.report else {}
        error = {"type": type(of or failure).__name__, "message": failure.message, "hint": failure.hint}
        show({**report, "error": error, "exit_code": failure.exit_code})
    tell(*(f"batchrun: {line}" for line in failure.faults or [str(failure)]))
    return failure.exit_code


_COUNT = 3
"""Standard input, output and error are the descriptors 0, 1 and 2."""


class StandardStream(io.TextIOWrapper):
    """Standard output or error that raises no OSError: what cannot be written is dropped.

    `failure` is the first error.
    """

    def __init__(self, descriptor: int, encoding: str | None) -> None:
        """Write to a descriptor, which stays open when this stream is closed."""
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw),
            encoding=encoding or "utf-8",
            errors="backslashreplace",  # a file name may have bytes that are no UTF-8
            line_buffering=True,
        )
        self.failure: OSError | None = None

    def write(self, text: str, /) -> int:
        """Write a text, as far as that is possible."""
        try:
            return super().write(text)
        except OSError as failure:
            self.failure = self.failure or failure
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, as far as that is possible."""
        try:
            super().flush()
        except OSError as failure:
            self.failure = self.failure or failure


def open_missing_descriptors() -> None:
    """Open /dev/null on those of the descriptors 0, 1 and 2 that are closed, for child processes too."""
    for number in range(_COUNT):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


def open_standard_streams() -> None:
    """Give the command its three standard streams, whatever it was started with."""
    open_missing_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end
    if sys.stdout is sys.__stdout__:
        sys.stdout = StandardStream(1, getattr(sys.stdout, "encoding", None))
    if sys.stderr is sys.__stderr__:
        sys.stderr = StandardStream(2, getattr(sys.stderr, "encoding", None))


def lost_output() -> str | None:
    """Write what is buffered; return why standard output is incomplete, or None.

    A reader who has closed the pipe has read what it wants: nothing is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    failure = sys.stdout.failure if isinstance(sys.stdout, StandardStream) else None
    return None if failure is None or failure.errno == errno.EPIPE else failure.strerror or str(failure)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which gets an s unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a duration for people: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def background_line(background: Mapping[str, Any]) -> str:
    """Summarise the engine's use in a background run: our share, its users' share, preempted rows."""
    our_share, users_share = background["our_share"], background["users_share"]
    line = f"engine {our_share:.0%} ours, {users_share:.0%} its users'"
    if rows := background["rows_given_back"]:
        line += f", {counted(rows, 'row')} given back ({background['tokens_lost']:,} tokens lost)"
    return line


SOURCE_TREE = "from a source tree"
"""Stands for the version where this package is not installed."""


@functools.cache
def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None where it is not installed, as in a source tree.

    It is looked up once: what this process has imported does not change.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - takes 10 ms

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_line() -> str:
    """Return the line of `batchrun --version`."""
    return f"batchrun {installed_version('batchrunner') or SOURCE_TREE}"


def unforeseen(failure: BaseException) -> BatchrunError:
    """Write the traceback of an error to a new file; return the error for the user, which says where."""
    what = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    path = _write_traceback(failure)
    return BatchrunError(
        f"unforeseen error: {what}: its traceback is in {path}",
        hint="report it with that file; what is on disk is kept, run the same command again",
    )


def _write_traceback(failure: BaseException) -> Path:
    """Write the traceback to a file of the user's temporary directory that only the user can read."""
    descriptor, name = tempfile.mkstemp(
        prefix=f"batchrun-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-", suffix=".txt"
    )
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"batchrunner {installed_version('batchrunner') or SOURCE_TREE}\n")
        file.writelines(traceback.format_exception(failure))
    return Path(name)
