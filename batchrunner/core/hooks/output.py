"""What the functions of a job print: lines of the log."""

import contextlib
import logging
import os
import threading

log = logging.getLogger(__name__)

LONGEST_LINE = 2000
"""Characters of a line that are shown."""
_READ_BYTES = 1 << 16
_END_S = 1.0


class HookOutput:
    """A pipe for the standard output and error of the processes, and the thread that logs its lines."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._read, name="batchrunner function output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Log what is left, unless a program that a function started keeps the pipe open."""
        os.close(self.descriptor)
        self._thread.join(_END_S)

    def _read(self) -> None:
        rest = b""
        with contextlib.closing(os.fdopen(self._reading, "rb", buffering=0)) as pipe:
            while read := pipe.read(_READ_BYTES):
                *lines, rest = (rest + read).split(b"\n")
                if len(rest) > _READ_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    _show(line)
        _show(rest)


def _show(line: bytes) -> None:
    text = line.decode("utf-8", "replace").rstrip()
    if text:
        log.info("python: %s", text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…")
