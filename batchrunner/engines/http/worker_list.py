"""The workers of a Model Gateway, read and changed over its HTTP interface."""

import asyncio
import logging
import math
import re
import time
from typing import Any

import aiohttp
import orjson

from batchrunner.core.errors import EngineStartError

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
POLL_S = 0.1
ASK_AGAIN_S = 10.0
"""Seconds after which a change that has not happened is requested again: the gateway queues changes."""
GIVE_UP_S = 120.0
_RANK = re.compile(r"@\d+$")  # a gateway with --dp-aware lists each DP rank of a worker


class WorkerList:
    """The list of workers of one gateway, which may be down at any time."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._one_at_a_time = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def addresses(self) -> list[str]:
        """Return the URL of every worker that speaks HTTP; raises EngineStartError where there is no list."""
        try:
            status, reply = await self._ask("GET", "/workers")
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            raise EngineStartError(
                f"{self.url}: no connection ({failure})", hint="start the gateway, or correct engine.url"
            ) from None
        if status in {401, 403}:
            raise EngineStartError(
                f"{self.url}: refuses the API key ({status})", hint="see engine.api_key_env"
            )
        if status != 200 or not isinstance(reply.get("workers"), list):  # noqa: PLR2004
            raise EngineStartError(f"{self.url}: is not SGLang's Model Gateway (GET /workers gave {status})")
        return urls_in(reply["workers"])

    async def bring_to(self, wanted: set[str]) -> bool:
        """Add and remove workers until the list is `wanted`; return False if it is not within 120 s.

        `wanted` may change meanwhile, and a gateway that does not answer is asked again until it does.
        """
        async with self._one_at_a_time:
            began = time.monotonic()
            asked: dict[str, float] = {}
            while (now := time.monotonic()) - began < GIVE_UP_S:
                try:
                    listed = await self._listed()
                    wrong = wanted ^ listed.keys()
                    if not wrong:
                        return True
                    for url in wrong:
                        if now - asked.get(url, -math.inf) >= ASK_AGAIN_S:
                            asked[url] = now
                            await self._change(url, listed.get(url, []))
                except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError) as failure:
                    log.debug("the gateway's list of workers: %r", failure)
                    asked.clear()
                await asyncio.sleep(POLL_S)
            return False

    async def _listed(self) -> dict[str, list[str]]:
        """Return the ids of each worker: one, or one for each DP rank."""
        _, reply = await self._ask("GET", "/workers")
        listed: dict[str, list[str]] = {}
        for worker in reply["workers"]:
            listed.setdefault(_RANK.sub("", worker["url"]), []).append(worker["id"])
        return listed

    async def _change(self, url: str, listed_as: list[str]) -> None:
        for worker_id in listed_as:
            await self._ask("DELETE", f"/workers/{worker_id}")
        if not listed_as:
            await self._ask("POST", "/workers", {"url": url, "api_key": self._key})

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            )
        async with self._session.request(method, self.url + path, json=body) as response:
            content = await response.read()
            try:
                reply = orjson.loads(content)
            except orjson.JSONDecodeError:
                reply = {}
            return response.status, reply if isinstance(reply, dict) else {}


def urls_in(workers: Any) -> list[str]:
    """Return the URLs of the workers in a gateway's list that speak HTTP, each once."""
    urls = [
        _RANK.sub("", str(worker.get("url"))).rstrip("/")
        for worker in (workers if isinstance(workers, list) else ())
        if isinstance(worker, dict) and worker.get("connection_mode") != "GRPC"
    ]
    return list(dict.fromkeys(url for url in urls if url.startswith("http")))
