"""The bridge between threads and event loops."""

import asyncio
import threading

import pytest

from batchrunner.core.errors import BatchrunError
from batchrunner.core.loop_thread import LoopThread, call_in_thread


async def forever() -> None:
    """Wait for a cancellation."""
    await asyncio.Event().wait()


def test_results_and_errors_cross_the_bridge() -> None:
    """A thread gets what the coroutine returns or raises."""

    async def fails() -> None:
        raise ValueError("no")

    with LoopThread() as loop:
        assert loop.call(lambda: asyncio.sleep(0, "yes")) == "yes"
        with pytest.raises(ValueError, match="no"):
            loop.call(fails)


def test_work_is_cancelled_once() -> None:
    """Cancelled work may await while it cleans up; whoever cancels it waits for its end."""
    steps = list[str]()

    async def work() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            steps.append("cancelled")
            await asyncio.to_thread(steps.append, "cleaned up")
            raise

    with LoopThread() as loop:
        running = loop.start(work)
        loop.call(lambda: asyncio.sleep(0))  # The work has begun.
        running.cancel()
        running.cancel_and_wait()
        assert steps == ["cancelled", "cleaned up"]
        with pytest.raises(BatchrunError, match="the engine is closed"):
            running.wait()
        running.cancel_and_wait()  # It has ended.


def test_the_end_of_the_block_cancels_its_work() -> None:
    """Streams that a program leaves behind end with the loop, and nothing starts on it any more."""
    with LoopThread() as loop:
        running = loop.start(forever)
    assert running.result.done()
    with pytest.raises(BatchrunError, match="the engine is closed"):
        loop.start(forever)
    running.cancel()  # The loop is closed.


def test_cancelling_a_waiter_cancels_the_work() -> None:
    """A coroutine of another loop waits for work; its own cancellation ends the work first."""

    async def program(loop: LoopThread) -> None:
        running = loop.start(forever)
        waiting = asyncio.create_task(running.wait_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert running.result.done()
        other = loop.start(forever)
        await other.cancel_and_wait_async()
        with pytest.raises(BatchrunError):
            await other.wait_async()

    with LoopThread() as loop:
        asyncio.run(program(loop))


def test_cancelling_a_blocking_call_ends_what_it_started() -> None:
    """The call runs in a thread of its own, and its work ends before the cancellation is raised."""
    began = threading.Event()

    def blocking() -> None:
        with LoopThread() as loop:
            running = loop.start(forever)
            began.set()
            running.wait()

    async def program() -> str:
        call = asyncio.create_task(call_in_thread(blocking))
        await asyncio.to_thread(began.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await call_in_thread(str, 7)

    assert asyncio.run(program()) == "7"
