"""The machine's limits on open connections (files, local ports), and ports to listen on."""

import contextlib
import errno
import random
import resource
import socket
from pathlib import Path

from batchrunner.core.errors import EngineStartError

FEWEST_FILES = 256
"""Minimum number of file descriptors. With fewer, a run has none left for connections, or cannot even
begin."""
OWN_FILES = 12
"""File descriptors that a run opens beside its connections, after the engine is open: input, journal, output
part, heartbeat, lease, report. Five of them are open at once in a run with small output parts."""
STATUS_FILES = 2
"""Connections to each server that carry no rows: one for its load, one for its model."""
MOST_FILES = 1 << 20
"""Limit on open files that is assumed if the system sets none. By default, Linux refuses a higher one."""
PORT_SHARE = 0.9
"""Fraction of the range of local ports that connections may use. The rest is for closed connections, which
hold their ports for a minute (TIME_WAIT)."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_PORT_RANGE = (32768, 60999)
_LOWEST_PORT, _HIGHEST_PORT = 10_240, 21_999
"""Range of ports to listen on. From 22,000 on SGLang draws ports for its processes, and binds them later."""
_PORT_TRIES = 50


def raise_file_limit() -> int:
    """Raise the soft limit on open files as far as the system allows; return it.

    Raises EngineStartError if the limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_FILES
    new_limit = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):  # the kernel's maximum is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        soft = new_limit
    if soft < FEWEST_FILES:
        raise EngineStartError(
            f"only {soft} files can be open at once (ulimit -n), and a run needs {FEWEST_FILES}",
            hint="raise it (ulimit -n 4096)",
        )
    return soft


def free_port() -> int:
    """Return a free loopback port to listen on, if possible below the range of connections' local ports.

    A server that restarts must find its port free again. If the port were in the range from which the system
    takes local ports, one of ten thousand open connections would probably have taken it meanwhile.
    """
    first = _port_range()[0]
    above = first if _LOWEST_PORT < first < _HIGHEST_PORT else _HIGHEST_PORT
    for _ in range(_PORT_TRIES):
        port = random.randrange(_LOWEST_PORT, above)  # noqa: S311 - not a secret
        with contextlib.suppress(OSError), socket.socket() as probe:  # OSError: it is in use
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class HeldPort:
    """A free port that no other batchrunner on this machine gets until it is released.

    The server itself binds the port only after minutes of loading, so until then this object must protect it.
    Raises OSError if no port is free.
    """

    def __init__(self) -> None:
        self._hold = socket.socket(socket.AF_UNIX)
        for _ in range(_PORT_TRIES):
            self.number = free_port()
            # An abstract Unix socket reserves the port: it belongs to the network namespace, as ports do, and
            # vanishes with its process.
            with contextlib.suppress(OSError):
                self._hold.bind(f"\0batchrunner-port-{self.number}")
                return
        self._hold.close()
        raise OSError(errno.EADDRINUSE, "no port is free")

    def release(self) -> None:
        """Let other batchrunner processes have the port."""
        self._hold.close()


def _port_range() -> tuple[int, int]:
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_PORT_RANGE
    return low, high


def open_connections(addresses: int) -> tuple[int, str]:
    """Return how many connections can be open to this number of addresses, and a phrase for the limit.

    Connections for polls are not counted.
    """
    low, high = _port_range()
    limit = raise_file_limit()
    files = limit - len([*Path("/dev/fd").iterdir()]) - OWN_FILES - STATUS_FILES * addresses
    files, ports = max(files, 1), int((high - low + 1) * PORT_SHARE) * addresses
    if files <= ports:
        return files, f"open files (ulimit -n {limit}, of which {files} are left for connections)"
    return ports, f"local ports ({ports} for {addresses} address{'es' if addresses > 1 else ''})"
