"""Pools of threads, and actions that a thread repeats."""

import threading
from concurrent.futures import Future

import pytest

from batchrunner.core.processes import repeating, thread_pool
from tests.support.server_thread import PATIENCE_S


def test_an_interrupt_waits_for_no_thread() -> None:
    """A thread may read from a mount that never answers; what has not begun does not begin."""
    begun, never = threading.Event(), threading.Event()
    waiting: list[Future[bool]] = []

    def begin() -> None:
        begun.set()
        never.wait()

    def interrupted() -> None:
        with thread_pool(1) as pool:
            pool.submit(begin)
            waiting.append(pool.submit(never.wait))
            begun.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert waiting[0].cancelled()
    never.set()


def test_an_action_is_repeated_until_the_block_ends() -> None:
    """After the block its thread has ended."""
    calls = threading.Semaphore(0)
    with repeating(calls.release, 0.001, thread="repeater"):
        for _ in range(3):
            assert calls.acquire(timeout=PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "repeater"]
