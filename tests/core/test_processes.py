"""Pools of threads."""

import threading
from concurrent.futures import Future

import pytest

from batchrunner.core.processes import thread_pool


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
