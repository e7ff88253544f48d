"""A stand-in for the Model Gateway: it lists workers and passes rows on to them in turn."""

from __future__ import annotations

import itertools

import aiohttp
from aiohttp import web

from tests.support.server_thread import ServerThread, end


class FakeGateway(ServerThread):
    """`with FakeGateway(urls) as gateway: ... gateway.url`; `workers` may change at any time."""

    def __init__(self, workers: list[str]) -> None:
        super().__init__()
        self.workers = workers
        self.url = ""
        self._turn = itertools.count()

    async def _serve(self) -> None:
        self._begin()
        app = web.Application()
        app.router.add_get("/workers", self._list)
        app.router.add_post("/generate", self._pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        async with aiohttp.ClientSession() as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._up.set()
            await self._over.wait()
            await end(runner)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": url, "id": url} for url in self.workers]})

    async def _pass_on(self, request: web.Request) -> web.Response:
        url = self.workers[next(self._turn) % len(self.workers)]
        try:
            async with self._session.post(url + request.path, data=await request.read()) as reply:
                return web.Response(
                    status=reply.status, body=await reply.read(), content_type="application/json"
                )
        except aiohttp.ClientError as failure:
            error = {"code": "call_upstream_request_error", "message": f"{url}/generate: {failure}"}
            return web.json_response({"error": error}, status=500)
