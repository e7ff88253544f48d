"""GET requests to one SGLang server: its model, its arguments, its load, its counters."""

import contextlib
from typing import Any

import aiohttp
import orjson

from batchrunner.core.types import SchedulerLoad
from batchrunner.engines.http.load import from_loads, from_metrics

MODEL_INFO = ("/model_info", "/get_model_info")
SERVER_INFO = ("/server_info", "/get_server_info")
"""Paths of the server's description of itself, the newest release's first."""
LOADS, METRICS = "/v1/loads?include=core", "/metrics"
"""Paths at which a server may report its load, the better one first."""
KEY_REFUSED = frozenset({401, 403})
"""Statuses with which a server refuses the API key."""
MOST_BYTES = 8 << 20
"""Most bytes of a body that are read; `/metrics` of a large server has a tenth of them."""
NOT_REACHED = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors that every request here raises where the server does not answer in time."""
NOT_SGLANG = (ValueError, KeyError, TypeError)
"""Errors that `load` raises too, for a reply that is not SGLang's."""


class ServerStatus:
    """Asks the server at `url`; every request ends after its `timeout_s`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the body of a path; a body that is too long comes back empty."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(self.url + path, timeout=timeout) as response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MOST_BYTES:
                    return response.status, b""
            return response.status, bytes(body)

    async def mapping(self, paths: tuple[str, ...], timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Ask the paths in turn; return the last status and the first JSON object, empty without one."""
        status = 0
        for path in paths:
            status, body = await self.get(path, timeout_s)
            if status in KEY_REFUSED:
                break
            with contextlib.suppress(orjson.JSONDecodeError):
                found = orjson.loads(body) if status == 200 else None  # noqa: PLR2004
                if isinstance(found, dict):
                    return status, found
        return status, {}

    async def load(self, path: str, timeout_s: float, route: str | None = None) -> list[SchedulerLoad]:
        """Return the load of each scheduler, from LOADS or METRICS; empty where the path is not there.

        `route` is where requests for this server are sent, if that is not its own URL.
        """
        status, body = await self.get(path, timeout_s)
        if status != 200:  # noqa: PLR2004
            return []
        if path == METRICS:
            return from_metrics(body.decode(errors="replace"), self.url, route)
        return from_loads(orjson.loads(body), self.url, route)
