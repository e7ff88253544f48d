"""A Model Gateway that runs already: rows go to it, the load comes from its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from batchrunner.engines.http import HttpEngine
from batchrunner.engines.workerlist import WorkerList
from batchrunner.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.records import Completion, EngineInfo, Request, Signals

REFRESH_S = 15.0
"""Somebody else adds and removes the workers: the list is read again after this time."""


class AttachedGateway:
    """Somebody else's gateway and workers; one route leads to all of them."""

    def __init__(self, url: str, *, api_key: str | None, request_timeout_s: float) -> None:
        self._url = url
        self._key = api_key
        self._timeout_s = request_timeout_s
        self._workers = WorkerList(url, api_key)
        self._client: HttpEngine | None = None
        self._read_at = 0.0

    async def open(self) -> EngineInfo:
        """Find the workers and read what they say of themselves; see `Engine.open`."""
        urls = await self._workers.addresses()
        self._read_at = time.monotonic()
        if not urls:
            raise EngineStartError(f"{self._url}: the gateway has no workers that speak HTTP")
        self._client = HttpEngine(
            urls, api_key=self._key, request_timeout_s=self._timeout_s, gateway=self._url
        )
        info = await self._client.open()
        notes = (f"{len(urls)} workers behind the gateway {self._url}: {', '.join(urls)}", *info.notes)
        return dataclasses.replace(info, kind="gateway", notes=notes)

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        assert self._client is not None
        return await self._client.generate(request, route)

    async def signals(self) -> Sequence[Signals]:
        """Return the load of each worker that answers now."""
        if self._client is None:
            return []
        if time.monotonic() - self._read_at > REFRESH_S:
            self._read_at = time.monotonic()
            with contextlib.suppress(EngineStartError):  # it is down: those that we know are what there is
                self._client.urls = await self._workers.addresses() or self._client.urls
        return await self._client.signals()

    async def close(self) -> None:
        """Close all connections."""
        await self._workers.close()
        if self._client is not None:
            await self._client.close()
            self._client = None
