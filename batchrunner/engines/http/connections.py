"""How many requests the machine lets us hold open at once: file descriptors and ephemeral ports.

Also a port to listen on that no connection takes, and connections from several loopback addresses.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

RESERVED_FILES = 128
"""Descriptors kept for files, logs, pipes and the interpreter."""
PORT_SHARE = 0.9
"""Closed connections hold their port for a minute (TIME_WAIT), so not all of the range is ever free."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_PORT_RANGE = (32768, 60999)
_LOWEST_PORT, _HIGHEST_PORT = 10_240, 21_999
"""From 22,000 on SGLang draws the ports of its own processes, which it binds later."""
_PORT_TRIES = 50
_IP_BIND_ADDRESS_NO_PORT = 24  # <linux/in.h>; Python names it from 3.12 on


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one; return how many sockets may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # e.g. a kernel maximum below the hard limit: keep what we have
            pass
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(soft - RESERVED_FILES, 1)


def ephemeral_ports() -> int:
    """Return the number of local ports that connections to one address can use."""
    low, high = _port_range()
    return int((high - low + 1) * PORT_SHARE)


def free_port() -> int:
    """Return a loopback port to listen on, below the ports that connections are given where one is free.

    A server that is started again on its port must find it free: with ten thousand connections open, a port
    of the connections' own range is likely to be taken by one of them meanwhile.
    """
    above = max(_LOWEST_PORT + 1, min(_port_range()[0], _HIGHEST_PORT + 1))
    for _ in range(_PORT_TRIES):
        port = random.randrange(_LOWEST_PORT, above)  # noqa: S311 - not a secret
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HeldPort:
    """A free port that no other batchrunner on this machine is given until it is released.

    A server that loads for minutes listens only then. Raises OSError where there is none.
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
        """Let others have it."""
        self._hold.close()


def loopback_sources(addresses: int) -> Callable[[tuple[int, int, int, str, tuple[str, int]]], socket.socket]:
    """Return a maker of sockets for connections to loopback, each from the next of several own addresses.

    The ephemeral ports are counted for each pair of addresses, so a server that listens on 127.0.0.1 alone
    can be reached over N times as many connections from 127.0.0.1 … 127.0.0.N. (A test shows it
    with a range of a few ports. The other way, several addresses as destinations, would need a gateway that
    listens on 0.0.0.0, for all the network to see.)
    """
    sources = itertools.cycle(f"127.0.0.{n}" for n in range(1, addresses + 1))

    def connect_from_next(info: tuple[int, int, int, str, tuple[str, int]]) -> socket.socket:
        made = socket.socket(info[0], info[1], info[2])
        made.setblocking(False)
        if info[0] == socket.AF_INET and info[4][0].startswith("127.") and sys.platform == "linux":
            # the port is chosen at connect, when both addresses are known: else bind takes it from all
            made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            made.bind((next(sources), 0))
        return made

    return connect_from_next


def _port_range() -> tuple[int, int]:
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_PORT_RANGE
    return low, high


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def open_connections(addresses: int, files_each: int = 1) -> tuple[int, str]:
    """Return how many connections can be open to this many addresses, and by what that is limited.

    `files_each` is 2 where a process of ours passes each on: it has the same limit on files, and needs two.
    """
    files, ports = raise_file_limit() // files_each, ephemeral_ports() * addresses
    if files <= ports:
        return files, f"open files (ulimit -n, {files} free)"
    return ports, f"local ports ({ports} for {addresses} address{'es' if addresses > 1 else ''})"
