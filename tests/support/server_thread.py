"""A server of aiohttp in a thread with an event loop of its own, so that what is under test may block."""

import asyncio
import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

import aiohttp
from aiohttp import web

PATIENCE_S = 600.0
"""How long a test waits for something that must happen, on the slowest machine: it ends a hang, no more."""


class LocalServer:
    """A server of aiohttp on a port of this machine, which leaves no connection open when it ends.

    A connection that is left open is a ResourceWarning, in whichever test runs when Python notices it.
    """

    def __init__(self, runner: web.BaseRunner, port: int = 0) -> None:
        self._runner = runner
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ending = asyncio.Lock()

    async def start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    def stop_accepting(self) -> None:
        """Accept no new connection."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)

    async def end(self) -> None:
        """Close the port and all connections. Another call waits for the first one."""
        async with self._ending:
            if self._listener.fileno() < 0:
                return
            self.stop_accepting()
            # asyncio forgets a connection, and leaves it open, if the port is closed between its acceptance
            # and the next turn of the loop. aiohttp needs some more turns to know it.
            await _turn(5)
            await self._runner.cleanup()
            await _turn(3)  # The connections close.

    def connections(self) -> int:
        """Return how many clients are connected."""
        server = self._runner.server
        return len(server.connections) if server is not None else 0


@contextlib.asynccontextmanager
async def serving(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serve what a function answers in the running loop; the value is the URL."""
    server = LocalServer(web.ServerRunner(web.Server(answer)))
    await server.start()
    try:
        yield server.url
    finally:
        await server.end()


async def _turn(times: int) -> None:
    """Let the event loop turn."""
    for _ in range(times):
        await asyncio.sleep(0)


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
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=self.cancels)
        self.server = LocalServer(runner, self.port)
        await self.server.start()
        self.url = self.server.url
        async with aiohttp.ClientSession(auto_decompress=False) as self.session:  # to pass requests on
            self._up.set()
            await self._over.wait()
            await self.server.end()

    def wait_until_left(self) -> None:
        """Return when no client is connected: all that a killed one had sent has arrived by then."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE_S):
            pass  # whoever connected before was accepted before
        deadline = time.monotonic() + PATIENCE_S
        while self.server.connections():
            assert time.monotonic() < deadline, "a client stays connected"
            time.sleep(0.002)


def is_free(port: int) -> bool:
    """Tell whether a server can have a port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
