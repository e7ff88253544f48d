"""The machine's limits on open connections (files, local ports), and ports to listen on."""

import contextlib
import errno
import random
import resource
import socket
from pathlib import Path

from batchrunner.core.errors import EngineStartError

FEWEST_FILES = 256
"""File descriptors without which a run has no connections left, or does not even begin."""
OWN_FILES = 12
"""File descriptors that a run opens beside its connections, after the engine is open: input, journal, part,
heartbeat, lease, report. Five are open at once in a run of small parts."""
STATUS_FILES = 2
"""Connections to each server that carry no rows: one for its load, one for its model."""
MOST_FILES = 1 << 20
"""Limit where there is none: Linux refuses more by default."""
PORT_SHARE = 0.9
"""Fraction of the range of local ports that is used: a closed connection holds its port for a minute
(TIME_WAIT)."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_PORT_RANGE = (32768, 60999)
_LOWEST_PORT, _HIGHEST_PORT = 10_240, 21_999
"""Range of ports to listen on. From 22,000 on SGLang draws ports for its processes, and binds them later."""
_PORT_TRIES = 50


def raise_file_limit() -> int:
    """Raise the soft limit on open files as far as the system allows; return it.

    Raises EngineStartError where it is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_FILES
    new_limit = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):  # the kernel's maximum is below
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        soft = new_limit
    if soft < FEWEST_FILES:
        raise EngineStartError(
            f"only {soft} files can be open at once (ulimit -n), and a run needs {FEWEST_FILES}",
            hint="raise it (ulimit -n 4096)",
        )
    return soft


def free_port() -> int:
    """Return a free loopback port to listen on, below the range of local ports of connections if possible.

    A server that restarts on its port must find it free. With ten thousand connections open, one of them is
    likely to have taken a port of their own range meanwhile.
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

    Being bound later is no protection: a server listens only after minutes of loading. Raises OSError where
    no port is free.
    """

    def __init__(self) -> None:
        self._hold = socket.socket(socket.AF_UNIX)
        for _ in range(_PORT_TRIES):
            self.number = free_port()
            # an abstract name: like ports it belongs to the network namespace, and it ends with its process
            with contextlib.suppress(OSError):
                self._hold.bind(f"\0batchrunner-port-{self.number}")
                return
        self._hold.close()
        raise OSError(errno.EADDRINUSE, "no port is free")

    def release(self) -> None:
        """Let others have the port."""
        self._hold.close()


def _port_range() -> tuple[int, int]:
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_PORT_RANGE
    return low, high


def open_connections(addresses: int) -> tuple[int, str]:
    """Return how many connections can be open to so many addresses, and in words what limits them.

    Connections for polls are not counted.
    """
    low, high = _port_range()
    limit = raise_file_limit()
    files = limit - len([*Path("/dev/fd").iterdir()]) - OWN_FILES - STATUS_FILES * addresses
    files, ports = max(files, 1), int((high - low + 1) * PORT_SHARE) * addresses
    if files <= ports:
        return files, f"open files (ulimit -n {limit}, of which {files} are left for connections)"
    return ports, f"local ports ({ports} for {addresses} address{'es' if addresses > 1 else ''})"
