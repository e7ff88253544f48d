"""The protocol between a run and its worker processes for Python functions: messages on a socket.

A message (frame) is a pickle after its length in eight bytes.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FLUSH_S = 1.0
"""Seconds after which a worker process returns the results so far, although rows remain."""
_OTHERS_CODE = (str(Path(__file__).parent.parent), *{*sysconfig.get_paths().values(), "<frozen"})
"""Path prefixes of code that the user did not write: this package, Python and its installed packages."""
_LONGEST_ERROR = 500
"""Maximum length of a row's error in characters."""
_LENGTH = struct.Struct("=Q")
"""Format of the length in front of a message between a run and a worker process."""


def frame(*values: Any) -> bytes:
    """Return a message with its length in front, which contains the values."""
    content = pickle.dumps(values)
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    """Read the next message (with its length in front) from a stream, and return its values.

    Raises EOFError once the other end has closed.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        content = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        raise EOFError from None
    values: tuple[Any, ...] = pickle.loads(content)  # noqa: S301 - written by this package
    return values


class Channel:
    """One end of the socket between a run and a worker process, for a thread that may block."""

    def __init__(self, connection: socket.socket) -> None:
        """Send and receive messages on `connection`, which `close` closes."""
        self.socket = connection
        self._reader = connection.makefile("rb")
        self._poll = select.poll()  # select.select() would fail for descriptors above 1023.
        self._poll.register(connection, select.POLLIN)

    def send(self, *values: Any) -> None:
        """Send the values as one message. Raises OSError if the other end has closed."""
        self.socket.sendall(frame(*values))

    def can_receive(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; tell whether data, or the end of the stream, can be read."""
        return bool(self._poll.poll(1000 * timeout_s))

    def receive(self) -> tuple[Any, ...]:
        """Wait for the next message, and return its values.

        Raises EOFError or OSError once the other end has closed.
        """
        content = self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        values: tuple[Any, ...] = pickle.loads(content)  # noqa: S301 - written by this package
        return values

    def close(self) -> None:
        """Close this end of the socket."""
        self._reader.close()
        self.socket.close()

    def _read(self, length: int) -> bytes:
        content = self._reader.read(length)
        if len(content) < length:
            raise EOFError
        return content


class HookResult(NamedTuple):
    """Result of one call: a value, or the error of its row."""

    value: Any
    error: str | None = None


class HookFacts(NamedTuple):
    """Properties of a loaded Python function of a job."""

    where: str
    """Job field that names the function, such as `prompt.python`."""
    name: str
    """Name of the function in messages: `module:function`."""
    columns: tuple[tuple[str, Any], ...] = ()
    """Result columns that the function makes, with their types."""
    takes_row: bool = False
    """Whether the function takes the row as a second argument, after the answer."""
    reads: tuple[str, ...] | None = None
    """Columns of the row that the function declares to read, by the annotation of its argument.

    None for all.
    """
    code_digest: str | None = None
    """Digest of the function's source code; None without source."""


class HookLoadError(Exception):
    """A function cannot be called; the message is one line for the user."""


class UnusableValueError(Exception):
    """A function returned an unusable value; the message becomes the error of its row."""


class WorkerSetup(NamedTuple):
    """What a worker process needs before its first call."""

    load: Callable[[], tuple[Sequence[HookFacts], Sequence[Callable[..., Any]]]]
    """Loads the functions. Returns their properties and, in the same order, a callable for each function.

    The callable calls the function and converts its result; it raises UnusableValueError if the result cannot
    be used. If a function cannot be loaded, `load` raises HookLoadError.
    """
    names: str
    """Names of the functions, for messages."""
    directories: tuple[str, ...]
    """Directories that are searched for modules before `sys.path`, in order."""
    limit_s: float
    """Time limit of one call, in seconds."""
    memory_bytes: int
    """Memory limit of the process in bytes, beyond the memory of its imports."""


class CallTooLongError(BaseException):
    """A call exceeded its time limit. As a BaseException, it passes `except Exception` in user code."""


def failure_text(place: str, failure: BaseException, limit_s: float = 0.0) -> str:
    """Return the error text of a row for which a Python function raised `failure`.

    It has the job field (`place`), the file and line in the user's code, and the exception's class and
    message.
    """
    if isinstance(failure, UnusableValueError):
        return f"{place}: {failure}"
    frames = traceback.extract_tb(failure.__traceback__)
    # asyncio.TaskGroup wraps exceptions in a group. Report the first one.
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
        frames += traceback.extract_tb(failure.__traceback__)
    file = ""
    line: int | None = None
    for frame_summary in frames:  # The last frame in the user's code shows the line to correct.
        if not frame_summary.filename.startswith(_OTHERS_CODE):
            file, line = frame_summary.filename, frame_summary.lineno
    if isinstance(failure, SyntaxError):  # Only the SyntaxError itself has the position of the wrong code.
        file, line = failure.filename or "", failure.lineno
    prefix = f"{place}: {Path(file).name}:{line}: " if file else f"{place}: "
    if isinstance(failure, CallTooLongError):
        return f"{prefix}took more than {limit_s:g} s (limits.python)"
    message = " ".join(traceback.format_exception_only(failure)[-1].split())
    limit = " (limits.python_memory_gb)" if isinstance(failure, MemoryError) else ""
    return f"{prefix}{message}"[:_LONGEST_ERROR] + limit
