"""The machine's limits on open connections (open files, local ports), and free ports to listen on."""

import contextlib
import errno
import random
import resource
import socket
from pathlib import Path

from batchrunner.core.errors import EngineStartError

FEWEST_FILES = 256
"""Lowest limit on open files with which a run can start. With fewer, it could not open its connections."""
OWN_FILES = 12
"""Number of files reserved for what a run opens after the engine is open, besides connections: input,
journal, part file (a Parquet file of results), heartbeat, lease, report. At most five of them were open at
the same time in a run with small part files."""
STATUS_FILES = 2
"""Number of connections to each server that carry no rows: one for its load, one for its model."""
MOST_FILES = 1 << 20
"""Limit on open files that is assumed if the system sets none. By default, Linux refuses a higher limit."""
PORT_SHARE = 0.9
"""Fraction of the ephemeral ports that connections may use. The rest is for closed connections, which keep
their ports for a minute (TIME_WAIT)."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the lowest and the highest ephemeral port, in Linux."""
_DEFAULT_PORT_RANGE = (32768, 60999)
_LOWEST_PORT = 10_240
"""Lowest port to listen on."""
_HIGHEST_PORT = 21_999
"""Highest port to listen on. SGLang draws ports from 22,000 for its processes, and binds them later."""
_PORT_TRIES = 50
"""Maximum number of random ports that are tried."""


def raise_file_limit() -> int:
    """Raise the soft limit on open files as far as the system allows; return the new limit.

    Raises EngineStartError if the limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_FILES
    new_limit = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    # The kernel may refuse the hard limit, because its own maximum is lower. Then the soft limit stays.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        soft = new_limit
    if soft < FEWEST_FILES:
        raise EngineStartError(
            f"only {soft} files can be open at once (ulimit -n), and a run needs {FEWEST_FILES}",
            hint="raise the limit (ulimit -n 4096)",
        )
    return soft


def free_port() -> int:
    """Return a free loopback port to listen on, if possible below the range of ephemeral ports.

    A server that restarts needs the same port again. An ephemeral port would probably be taken by then,
    because ten thousand outgoing connections may be open.
    """
    first_local_port = _port_range()[0]
    is_range_below = _LOWEST_PORT < first_local_port < _HIGHEST_PORT
    end = first_local_port if is_range_below else _HIGHEST_PORT
    for _ in range(_PORT_TRIES):
        port = random.randrange(_LOWEST_PORT, end)  # noqa: S311 - not a secret
        # `bind` raises OSError if the port is in use.
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class HeldPort:
    """A free port that is reserved: no other batchrunner process on this machine takes it until `release`.

    A server binds its port only after minutes of loading the model. Raises OSError if no port is free.
    """

    def __init__(self) -> None:
        """Reserve a free port, which is `number` from then on."""
        self._reservation = socket.socket(socket.AF_UNIX)
        for _ in range(_PORT_TRIES):
            self.number = free_port()
            # The reservation is an abstract Unix socket with the port in its name. Like ports, such sockets
            # belong to the network namespace, and they vanish with their process. An OSError means that
            # another process has reserved the port.
            with contextlib.suppress(OSError):
                self._reservation.bind(f"\0batchrunner-port-{self.number}")
                return
        self._reservation.close()
        raise OSError(errno.EADDRINUSE, "no port is free")

    def release(self) -> None:
        """End the reservation of the port, so that other batchrunner processes may use it."""
        self._reservation.close()


def _port_range() -> tuple[int, int]:
    """Return the lowest and the highest ephemeral port, which the system gives to outgoing connections."""
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_PORT_RANGE
    return low, high


def open_connections(addresses: int) -> tuple[int, str]:
    """Return the maximum number of connections for rows, and a phrase that names the limit.

    `addresses` is the number of servers. Connections to different addresses may use the same local port.
    """
    lowest_port, highest_port = _port_range()
    limit = raise_file_limit()
    open_files = len([*Path("/dev/fd").iterdir()])
    files = max(limit - open_files - OWN_FILES - STATUS_FILES * addresses, 1)
    ports = int((highest_port - lowest_port + 1) * PORT_SHARE) * addresses
    if files <= ports:
        return files, f"open files (ulimit -n {limit}, of which {files} are left for connections)"
    return ports, f"local ports ({ports} for {addresses} address{'es' if addresses > 1 else ''})"
