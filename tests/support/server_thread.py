"""A server of aiohttp in a thread with an event loop of its own, so that what is under test may block."""

import asyncio
import contextlib
import socket
import threading
import time
import urllib.request
from typing import Self

import aiohttp
from aiohttp import web

PATIENCE_S = 600.0
"""How long a test waits for something that must happen, on the slowest machine: it ends a hang, no more."""


class ServerThread:
    """`with` starts the thread and waits until it serves at `url`; its end stops the server.

    A subclass adds its routes in `add_routes`.
    """

    port = 0
    """Port to listen on; 0 takes any."""
    cancels = True
    """Whether a request ends when its client goes."""

    def __init__(self) -> None:
        self.url = ""
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

    def add_routes(self, app: web.Application) -> None:
        """Add what the server answers; called in its own loop."""
        raise AssertionError("a subclass serves")

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        self.add_routes(app)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0, handler_cancellation=self.cancels
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        async with aiohttp.ClientSession(auto_decompress=False) as self.session:  # to pass requests on
            self._up.set()
            await self._over.wait()
            await end(self._runner)


async def end(runner: web.BaseRunner) -> None:
    """Stop a server, also the connections that it takes as it stops: those left open would be warnings."""
    for site in list(runner.sites):
        await site.stop()
    # A connection that was accepted is known some turns later. aiohttp would forget one that becomes known
    # while it closes the others.
    for _ in range(5):
        await asyncio.sleep(0)
    await runner.cleanup()
    for _ in range(3):  # the transports close
        await asyncio.sleep(0)


def wait_until_left(url: str, runner: web.AppRunner) -> None:
    """Return when nobody is connected to a server: what a killed client had sent has arrived by then."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S):
        pass  # whoever connected before was accepted before
    deadline = time.monotonic() + PATIENCE_S
    while (server := runner.server) is not None and server.connections:
        assert time.monotonic() < deadline, "a client stays connected"
        time.sleep(0.002)


def is_free(port: int) -> bool:
    """Tell whether a server can have a port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
