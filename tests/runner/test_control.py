"""How a stop ends what waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batchrunner.core.errors import BatchrunError
from batchrunner.runner.control import Control


@pytest.mark.parametrize("stopped_first", [True, False])
def test_reading_that_blocks_is_left_at_a_stop(stopped_first: bool) -> None:
    """It ends with the exit code of the stop; a thread that reads from a dead mount is not waited for."""
    never = threading.Event()
    control = Control()

    async def read() -> None:
        if stopped_first:
            control.drain("interrupted", 130)
        else:
            asyncio.get_running_loop().call_later(0.01, control.drain, "interrupted", 130)
        try:
            await control.wait_for(
                asyncio.to_thread(never.wait), "while the input was looked at", grace_s=0.01
            )
        finally:
            never.set()

    with pytest.raises(BatchrunError, match="interrupted while the input was looked at") as failure:
        asyncio.run(read())
    assert failure.value.exit_code == 130


def test_reading_that_ends_is_not_lost_by_a_stop() -> None:
    """What is read at once is returned, also after a stop."""
    control = Control()
    control.drain("interrupted", 130)
    assert asyncio.run(control.wait_for(asyncio.to_thread(lambda: 7), "while", grace_s=1)) == 7
