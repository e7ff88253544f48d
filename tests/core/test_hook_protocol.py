"""Frames between a run and its worker processes."""

import asyncio
import os
import resource
import socket

import pytest

from batchrunner.core.hook_protocol import Channel, frame, read_frame


def test_values_arrive_whole() -> None:
    """Each frame is one tuple, whatever its size; the end of the other side is an EOFError."""
    ours, theirs = map(Channel, socket.socketpair())
    assert not ours.can_receive(0.0)
    theirs.send(1, [b"x" * 100, None])
    assert ours.can_receive(0.0)
    assert ours.receive() == (1, [b"x" * 100, None])
    theirs.socket.sendall(frame("cut")[:-1])
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_many_open_files() -> None:
    """A run with thousands of connections has descriptors that `select` cannot take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    ours, theirs = socket.socketpair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    try:
        high = os.dup2(ours.fileno(), 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    ours.close()
    channel, other = Channel(socket.socket(fileno=high)), Channel(theirs)
    other.send("value")
    assert channel.can_receive(0.0)
    assert channel.receive() == ("value",)
    channel.close()
    other.close()


def test_the_loop_reads_the_same_frames() -> None:
    """A stream reader reads what a channel sends."""

    async def reads() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame("a", 1) + frame("b"))
        reader.feed_eof()
        assert await read_frame(reader) == ("a", 1)
        assert await read_frame(reader) == ("b",)
        with pytest.raises(EOFError):
            await read_frame(reader)

    asyncio.run(reads())
