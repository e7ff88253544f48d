"""A server of aiohttp in a thread with an event loop of its own, so that what is under test may block."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

PATIENCE_S = 300.0
"""How long a test waits for something that must happen."""


class ServerThread:
    """`with` starts the thread and waits until it serves; its end stops the server.

    A subclass serves in `_serve`, which calls `_begin` first, sets `_up` when it is ready, and ends after
    `_over`.
    """

    def __init__(self) -> None:
        self._up = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name=f"server of {type(self).__name__}"
        )
        self._thread.start()
        assert self._up.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE_S)

    def _begin(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()

    async def _serve(self) -> None:
        raise AssertionError("a subclass serves")
