"""Output of the command: results on standard output, everything else on standard error."""

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
    """Tell whether the command line has the option `--json`. After `--`, it is an argument instead."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal or browser obeys instead of displaying.

They are control characters, line separators, and marks that change the direction of text.
"""


def escaped(text: str) -> str:
    """Return a text as one line, with control characters escaped as in JSON.

    All output of this package is escaped in this way, so that data cannot move the cursor, add lines or hide
    text.
    """

    def escape(match: re.Match[str]) -> str:
        # json.dumps does not escape DEL.
        return json.dumps(match[0])[1:-1].replace("\x7f", "\\u007f")

    return _CONTROL_CHARACTERS.sub(escape, text)


def tell(*lines: str) -> None:
    """Print lines to standard error. A failed write does not change the exit code (`StandardStream`)."""
    print("\n".join(map(escaped, lines)), file=sys.stderr, flush=True)  # noqa: T201


def show(result: Sequence[str] | Mapping[str, Any]) -> None:
    """Print a result to standard output: a sequence as lines, a mapping as a JSON object."""
    if isinstance(result, Mapping):
        lines: Sequence[str] = json.dumps(result, indent=2, ensure_ascii=False, default=str).split("\n")
    else:
        lines = result
    print("\n".join(map(escaped, lines)))  # noqa: T201


class LogLine(logging.Formatter):
    """Formats each log message as one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the message as one line."""
        return escaped(super().formatMessage(record))


def tell_failure(failure: BatchrunError, *, as_json: bool, cause: BaseException | None = None) -> int:
    """Print an error to standard error, with `as_json` also as JSON to standard output; return its exit code.

    The JSON object includes the report of the rows that are done. Its `type` is the class of `cause`, or of
    `failure` without a cause.
    """
    if as_json:
        report = failure.report.as_dict() if failure.report else {}
        error = {"type": type(cause or failure).__name__, "message": failure.message, "hint": failure.hint}
        show({**report, "error": error, "exit_code": failure.exit_code})
    tell(*(f"batchrun: {line}" for line in failure.faults or [str(failure)]))
    return failure.exit_code


class StandardStream(io.TextIOWrapper):
    """Standard output or standard error that drops text instead of raising OSError for a failed write."""

    def __init__(self, descriptor: int, encoding: str | None) -> None:
        """Open a stream on a file descriptor, which stays open when the stream is closed."""
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw),
            encoding=encoding or "utf-8",
            errors="backslashreplace",  # File names with invalid UTF-8 must be printable too.
            line_buffering=True,
        )
        self.failure: OSError | None = None
        """The first error of a write, or None."""

    def write(self, text: str, /) -> int:
        """Write a text; a failure is recorded, not raised."""
        try:
            return super().write(text)
        except OSError as failure:
            self.failure = self.failure or failure
            return len(text)

    def flush(self) -> None:
        """Write buffered text; a failure is recorded, not raised."""
        try:
            super().flush()
        except OSError as failure:
            self.failure = self.failure or failure


def open_missing_descriptors() -> None:
    """Open /dev/null in place of each closed standard stream, and let child processes inherit it.

    Otherwise the next file that is opened would get the descriptor of a standard stream.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The new descriptor is the lowest free one, which is usually `number` already.
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)


def open_standard_streams() -> None:
    """Make the three standard streams usable, even if the command was started with closed streams."""
    open_missing_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    # A stream that a test has replaced is kept.
    if sys.stdout is sys.__stdout__:
        sys.stdout = StandardStream(1, getattr(sys.stdout, "encoding", None))
    if sys.stderr is sys.__stderr__:
        sys.stderr = StandardStream(2, getattr(sys.stderr, "encoding", None))


def lost_output() -> str | None:
    """Flush standard output and error; return why standard output is incomplete, or None.

    Output to a closed pipe counts as complete: its reader (`head`, for example) needs no more.
    """
    # A StandardStream records a failed write or flush instead of raising it.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # A stream with which a test has replaced standard output records no failure.
    failure = sys.stdout.failure if isinstance(sys.stdout, StandardStream) else None
    if failure is None or failure.errno == errno.EPIPE:
        return None
    return failure.strerror or str(failure)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a number of seconds as a text such as 4.2 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def background_line(background: Mapping[str, Any]) -> str:
    """Describe how a background run and the server's other users shared the engine's time.

    `background` is the section `background` of report.json.
    """
    our_share, users_share = background["our_share"], background["users_share"]
    line = f"engine: {our_share:.0%} of its time for this run, {users_share:.0%} for its users"
    if rows := background["rows_given_back"]:
        line += f", {counted(rows, 'row')} preempted ({background['tokens_lost']:,} tokens lost)"
    return line


SOURCE_TREE = "from a source tree"
"""Text in place of the version if this package is not installed but runs from a source tree."""


@functools.cache
def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed.

    The result is cached: an upgrade during the run does not change a package that is already imported.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - takes 10 ms

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_line() -> str:
    """Return the line that `batchrun --version` prints."""
    return f"batchrun {installed_version('batchrunner') or SOURCE_TREE}"


def unforeseen(failure: BaseException) -> BatchrunError:
    """Write the traceback of an unforeseen error to a new file; return an error that names the file."""
    summary = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    path = _write_traceback(failure)
    return BatchrunError(
        f"unforeseen error: {summary}: the traceback is in {path}",
        hint="report the error with that file; to resume, run the same command again: finished rows are kept",
    )


def _write_traceback(failure: BaseException) -> Path:
    """Write the traceback to a temporary file that only this user can read."""
    descriptor, name = tempfile.mkstemp(
        prefix=f"batchrun-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-", suffix=".txt"
    )
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"batchrunner {installed_version('batchrunner') or SOURCE_TREE}\n")
        file.writelines(traceback.format_exception(failure))
    return Path(name)
