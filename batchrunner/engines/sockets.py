"""How many requests the machine lets us hold open at once: file descriptors and ephemeral ports."""

from __future__ import annotations

import resource
from pathlib import Path

RESERVED_FILES = 128
"""Descriptors kept for files, logs, pipes and the interpreter."""
PORT_SHARE = 0.9
"""Closed connections hold their port for a minute (TIME_WAIT), so not all of the range is ever free."""
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_PORT_RANGE = (32768, 60999)


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
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = _DEFAULT_PORT_RANGE
    return int((high - low + 1) * PORT_SHARE)


def open_connections(addresses: int) -> tuple[int, str]:
    """Return how many connections can be open to this many addresses, and by what that is limited."""
    files, ports = raise_file_limit(), ephemeral_ports() * addresses
    if files <= ports:
        return files, f"open files (ulimit -n, {files} free)"
    return ports, f"local ports ({ports} for {addresses} address{'es' if addresses > 1 else ''})"
