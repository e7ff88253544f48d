"""Ports to listen on."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchrunner.engines.http.connections import HeldPort, free_port


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
