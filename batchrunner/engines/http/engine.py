"""What engines on HTTP servers have in common, whoever started the servers."""

from collections.abc import Sequence

from batchrunner.core.engine_info import Incident
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine, IncidentQueue, RowAnswers
from batchrunner.engines.http.client import SGLangClient


class HttpEngine(Engine):
    """The part of an engine on HTTP servers that is the same whoever started the servers."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._incidents = IncidentQueue()

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        return await self._client.generate(request, route)

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:
        """Send several requests in one; see `Engine.generate_many`."""
        await self._client.generate_many(requests, route, answers)

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Ask the first server; see `Engine.tokens_of`."""
        return await self._client.tokens_of(request, special=special)

    def incidents(self) -> list[Incident]:
        """Return what happened to the servers; see `Engine.incidents`."""
        return self._incidents.take()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
