"""Standard input, output and error of the command: always there, and never a reason to fail.

A shell, cron or a service manager may start a program without them. Sockets then get their descriptors, 0 to
2, which libuv refuses to close: it ends the process.
"""

import errno
import io
import os
import sys

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
