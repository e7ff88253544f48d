"""Ports and addresses for connections."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchrunner.engines.http.connections import HeldPort, free_port, loopback_sources


def test_ports_to_listen_on_are_not_for_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < low for _ in range(20))


def test_a_held_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of a node that draw the same port do not both start a server on it."""
    one, other = free_port(), free_port()
    drawn = iter([one, one, other, one])
    monkeypatch.setattr("batchrunner.engines.http.connections.free_port", lambda: next(drawn))
    ours = HeldPort()
    theirs = HeldPort()
    ours.release()
    later = HeldPort()
    assert (ours.number, theirs.number, later.number) == (one, other, one)
    theirs.release()
    later.release()


def test_connections_from_several_addresses() -> None:
    """Where one address of ours has no port left, the next has: shown with a range of four ports."""
    ip_local_port_range, first = 51, 40_000
    narrow = struct.pack("I", ((first + 3) << 16) | first)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect(make: Any) -> str:
            address = server.getsockname()
            made = stack.enter_context(make((socket.AF_INET, socket.SOCK_STREAM, 0, "", address)))
            made.setblocking(True)
            try:
                made.setsockopt(socket.IPPROTO_IP, ip_local_port_range, narrow)
            except OSError:
                pytest.skip("skipped: the kernel has no port range for one socket (Linux < 6.3)")
            made.connect(address)
            host: str = made.getsockname()[0]
            return host

        one, two = loopback_sources(1), loopback_sources(2)
        taken = Counter(connect(two) for _ in range(6))
        assert taken == {"127.0.0.1": 3, "127.0.0.2": 3}
        with pytest.raises(OSError, match="assign requested address"):  # noqa: PT012
            for _ in range(4):
                connect(one)
