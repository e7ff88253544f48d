"""One timer for all requests ends each of them in its time, and only by that."""

from __future__ import annotations

import asyncio

import pytest

from batchrunner.engines.http.endpoint import Deadline


async def wait_under(deadline: Deadline, seconds: float) -> str:
    with deadline:
        await asyncio.sleep(seconds)
    return "in time"


async def test_only_what_is_late_ends() -> None:
    """Only those of many tasks that take too long are ended by their shared timer."""
    deadline = Deadline(6)  # a machine may stand still for some of it
    ended = await asyncio.gather(
        *(wait_under(deadline, seconds) for seconds in (0, 30, 0.01, 30)), return_exceptions=True
    )
    assert [type(end) for end in ended] == [str, TimeoutError, str, TimeoutError]


async def test_it_ends_the_later_ones_later() -> None:
    """Each has the whole time from its own start, also after the timer has stopped."""
    deadline = Deadline(0.2)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        began = loop.time()
        with pytest.raises(TimeoutError):
            await wait_under(deadline, 30)
        assert loop.time() - began >= 0.2


async def test_a_cancelled_task_stays_cancelled() -> None:
    """A cancellation from outside is not mistaken for a timeout."""
    deadline = Deadline(30)
    task = asyncio.create_task(wait_under(deadline, 30))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_passes() -> None:
    """What fails in its time fails with its own error."""
    with pytest.raises(OSError, match="gone"), Deadline(30):
        raise OSError("gone")


async def test_the_task_lives_on() -> None:
    """After a timeout the task can go on waiting, and use the deadline again."""
    deadline = Deadline(4)
    with pytest.raises(TimeoutError):
        await wait_under(deadline, 30)
    await asyncio.sleep(0.01)
    assert await wait_under(deadline, 0) == "in time"
