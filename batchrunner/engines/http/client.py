"""An SGLang server over HTTP, or several replicas of one model, behind a gateway or not: the client."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from batchrunner.core.errors import (
    EngineDownError,
    EngineStartError,
    NoAnswerError,
)
from batchrunner.core.types import EngineInfo, SchedulerLoad
from batchrunner.engines.http import wire
from batchrunner.engines.http.connections import loopback_sources, open_connections
from batchrunner.engines.http.endpoint import Route
from batchrunner.engines.http.failures import FailureClassifier
from batchrunner.engines.http.load import from_loads, from_metrics
from batchrunner.engines.http.tokenizer_info import same_for_all, tokenizing_of
from batchrunner.engines.model_files import model_identity, vocabulary_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchrunner.core.types import Completion, Request
    from batchrunner.input.tokenize.detokenizer import Detokenizer

log = logging.getLogger(__name__)

KEEPALIVE_S = 3.0
"""SGLang (uvicorn) closes an idle connection after 5 s: ours are dropped before that."""
POLL_TIMEOUT_S = 2.0
OPEN_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 30.0
_NO_TIMER = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S)
_JSON = {"Content-Type": "application/json"}
_NO_SUCH_PATH = {404, 405}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
GATEWAY_ROUTE = "gateway"
AFFINITY_HEADER = "X-SMG-Routing-Key"
"""By which sglang_router's policy `manual` keeps requests together; the others do not look at it."""
_RESOLVED = {
    "max_running_requests": "effective_max_running_requests_per_dp",
    "max_total_num_tokens": "max_total_num_tokens",
}
"""A scheduler's limits as its arguments call them, and as its state does."""
_LPM_NOTE = ("the server schedules by lpm, which changes our order while few rows wait: fcfs keeps it",)


class HttpEngine:
    """Replicas of one model; the URL of each is a route.

    With the address of a `gateway` all requests go there, on the one route `gateway`; the replicas are then
    only asked what they are and how loaded.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None,
        request_timeout_s: float,
        gateway: str | None = None,
        reader: Detokenizer | None = None,
    ) -> None:
        """Take a `reader` of answers where the replicas have no tokenizer."""
        self.urls = list(urls)
        """The replicas that are polled; those behind a gateway may change."""
        self._gateway = gateway
        self._reader = reader
        self.routes = {
            GATEWAY_ROUTE if gateway else url: Route(url, request_timeout_s)
            for url in ([gateway] if gateway else urls)
        }
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = request_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._load_path: str | None = None
        self._vocabulary: int | None = None
        self.blame = FailureClassifier(self._is_alive)

    async def open(self) -> EngineInfo:
        """Connect and read what every replica says of itself; see `Engine.open`."""
        urls = self.urls
        addresses, files_each = len(urls), 1
        if self._gateway:
            # a gateway has one address: ours are several, as many as the ports to the replicas are
            near = urlsplit(self._gateway).hostname in _LOOPBACK
            addresses, files_each = (len(urls), 2) if near else (1, 1)
        connections, limited_by = open_connections(addresses, files_each)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEPALIVE_S,
                socket_factory=loopback_sources(addresses) if self._gateway and addresses > 1 else None,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=_NO_TIMER,
            # a proxy is for hosts elsewhere; it can never reach our loopback
            trust_env=not all(
                urlsplit(url).hostname in _LOOPBACK for url in [*urls, self._gateway or urls[0]]
            ),
        )
        models = [await self._model_info(url) for url in urls]
        names = {str(model["model_path"]) for model in models}
        if len(names) > 1:
            raise EngineStartError(f"the replicas serve different models: {', '.join(sorted(names))}")
        model = names.pop()
        self._vocabulary = vocabulary_of(model)
        servers = [await self._server_info(url) for url in urls]
        self._load_path = await self._find_load_path(urls[0])
        load = await self.signals()
        load = load if {signal.server for signal in load} >= set(urls) else []
        return EngineInfo(
            kind="attach",
            model=model_identity(model),
            version=servers[0].get("version"),
            max_running=_told(signal.max_running for signal in load)
            or _told(server.get("max_running_requests") for server in servers),
            max_total_tokens=_told(signal.max_total_tokens for signal in load)
            or _told(server.get("max_total_num_tokens") for server in servers),
            context_length=servers[0].get("context_length") or servers[0].get("max_req_input_len"),
            prefill_tokens=wire.prefill_tokens(servers[0]),
            caches_prefixes=not servers[0].get("disable_radix_cache"),
            routes=tuple(self.routes),
            tokenizing=same_for_all([*map(tokenizing_of, models, servers)]),
            connections=connections,
            keeps_together=self._gateway is not None,
            notes=(*self._notes(limited_by), *_LPM_NOTE * (servers[0].get("schedule_policy") == "lpm")),
        )

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        assert self._session is not None
        wire.refuse_deadly(request, self._vocabulary)
        if self._gateway:
            wire.refuse_dropped(request)
        if self._reader is not None:
            request = self._reader.with_ends(request)
        body = wire.bytes_of(wire.body_of(request))
        # bytes as they are: aiohttp would look up how to send them, for 5 % of our time
        payload = aiohttp.BytesPayload(body, content_type="application/json")
        key = {AFFINITY_HEADER: request.affinity} if self._gateway and request.affinity else None
        reply = await self._post(self.routes[route], wire.path_of(request), payload, key)
        if self._reader is not None:
            return wire.completion_in_ids(request, reply, self._reader)
        return wire.completion_of(request, reply)

    async def tokens_of(self, request: Request) -> list[int] | None:
        """Ask the first replica; see `Engine.tokens_of`."""
        assert self._session is not None
        url, body = self.urls[0] + wire.TOKENIZE_PATH, wire.bytes_of(wire.tokenize_body(request))
        timeout = aiohttp.ClientTimeout(total=OPEN_TIMEOUT_S)
        try:
            async with self._session.post(url, data=body, headers=_JSON, timeout=timeout) as response:
                content = await response.read()
        except TimeoutError:
            raise NoAnswerError(f"no answer within {OPEN_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as failure:
            raise EngineDownError(f"connection lost: {failure or type(failure).__name__}") from None
        if response.status in _NO_SUCH_PATH:
            return None
        if response.status != 200:  # noqa: PLR2004
            raise wire.error_of(response.status, content)
        return wire.tokens_in(content)

    async def signals(self) -> list[SchedulerLoad]:
        """Poll every replica's load; one that does not answer in 2 s is left out."""
        if self._load_path is None:
            return []
        polls = await asyncio.gather(*map(self._poll, self.urls))
        return [signal for signals in polls for signal in signals]

    @property
    def tells_load(self) -> bool:
        """Whether the server has told its load when it was opened."""
        return self._load_path is not None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(
        self, route: Route, path: str, payload: aiohttp.BytesPayload, headers: dict[str, str] | None
    ) -> bytes:
        """Send a body and return the whole reply; raises what a refusal or a failure means."""
        assert self._session is not None
        if route.closed:
            raise EngineDownError(route.closed)
        sent_at = time.monotonic()
        route.in_flight += 1
        try:
            with route.deadline:
                async with self._session.post(route.paths[path], data=payload, headers=headers) as response:
                    content = await response.read()
        except aiohttp.ClientConnectorError as failure:
            raise EngineDownError(f"no connection to {route.url}: {failure.os_error}") from None
        except aiohttp.ConnectionTimeoutError:  # a host that is gone: no row is why
            raise EngineDownError(f"no connection to {route.url} within {CONNECT_TIMEOUT_S:g} s") from None
        except TimeoutError:
            if route.closed:
                raise EngineDownError(route.closed) from None
            raise NoAnswerError(f"no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as failure:
            what = f"connection lost: {failure or type(failure).__name__}"
            if self._gateway:  # it only passes rows on: none of them is why it ended
                raise EngineDownError(what) from None
            raise await self.blame.of(route.url, sent_at, what) from None
        finally:
            route.in_flight -= 1
        route.answers += 1
        self.blame.saw(route.url, alive=True)
        if response.status == 200:  # noqa: PLR2004
            return content
        error = wire.error_of(response.status, content, response.headers.get("Retry-After"))
        named = next((url for url in self.urls if f"{url}/" in str(error)), None)
        if named is not None and isinstance(error, EngineDownError):
            raise await self.blame.of(named, sent_at, str(error))
        raise error

    async def _is_alive(self, url: str) -> bool:
        try:
            await self._get(url + "/model_info", POLL_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError, OSError, AssertionError):
            return False
        return True

    async def _poll(self, url: str) -> list[SchedulerLoad]:
        assert self._load_path is not None
        route = GATEWAY_ROUTE if self._gateway else url
        try:
            status, content = await self._get(url + self._load_path, POLL_TIMEOUT_S)
            if status != 200:  # noqa: PLR2004
                return []
            self.blame.saw(url, alive=True)
            if self._load_path == "/metrics":
                return from_metrics(content.decode(errors="replace"), url, route)
            return from_loads(orjson.loads(content), url, route)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as failure:
            log.debug("poll of %s failed: %r", url, failure)
            return []

    async def _get(self, url: str, timeout_s: float = OPEN_TIMEOUT_S) -> tuple[int, bytes]:
        assert self._session is not None
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return response.status, await response.read()

    async def _get_json(self, url: str, *paths: str) -> tuple[int, dict[str, Any] | None]:
        """Ask the paths in turn (newer releases' first); return the last status and the first mapping."""
        status = 0
        for path in paths:
            try:
                status, content = await self._get(url + path)
            except TimeoutError:
                raise EngineStartError(
                    f"{url}: no answer to GET {path} within {OPEN_TIMEOUT_S:g} s"
                ) from None
            except (aiohttp.ClientError, OSError) as failure:
                reason = getattr(failure, "os_error", None) or failure
                raise EngineStartError(f"{url}: no connection ({reason}): {self._remedy}") from None
            if status in {401, 403}:
                raise EngineStartError(f"{url}: refuses the API key ({status}): see engine.api_key_env")
            if status == 200:  # noqa: PLR2004
                try:
                    reply = orjson.loads(content)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(reply, dict):
                    return status, reply
        return status, None

    async def _model_info(self, url: str) -> dict[str, Any]:
        status, reply = await self._get_json(url, "/model_info", "/get_model_info")
        if reply is None or "model_path" not in reply:
            raise EngineStartError(
                f"{url}: something answers, but it is not SGLang (GET /model_info gave {status})"
            )
        if reply.get("is_generation") is False:
            raise EngineStartError(f"{url}: serves {reply['model_path']}, which does not generate text")
        return reply

    async def _server_info(self, url: str) -> dict[str, Any]:
        _, reply = await self._get_json(url, "/server_info", "/get_server_info")
        info = reply or {}
        if info.get("skip_tokenizer_init") and self._reader is None:
            raise EngineStartError(
                f"{url}: runs with --skip-tokenizer-init and returns no text: start it without"
            )
        states = [state for state in info.get("internal_states") or [] if isinstance(state, dict)]
        # the scheduler's own numbers are the resolved ones; the arguments may be null
        for name, own in _RESOLVED.items():
            resolved = [state.get(own) or state.get(name) for state in states]
            if any(resolved):
                info[name] = sum(filter(None, resolved))
        return info

    async def _find_load_path(self, url: str) -> str | None:
        for path in ("/v1/loads?include=core", "/metrics"):
            self._load_path = path
            if await self._poll(url):
                return path
        return None

    @property
    def _remedy(self) -> str:
        if self._gateway:
            return "the gateway's workers must be within reach from here too, for their load"
        return "start the server, or correct engine.urls"

    def _notes(self, limited_by: str) -> tuple[str, ...]:
        if self._load_path is None:
            return (
                f"the server tells no load (no /v1/loads, no /metrics); connections limited by {limited_by}",
            )
        return (f"load from {self._load_path.split('?')[0]}; connections limited by {limited_by}",)


def api_key_from(variable: str) -> str | None:
    """Return the API key that an environment variable holds, or None."""
    return os.environ.get(variable) or None


def _told(limits: Iterable[Any]) -> int | None:
    """Return the sum of what all schedulers have; None where one does not tell."""
    found = list(limits)
    return sum(found) if found and all(isinstance(limit, int) for limit in found) else None
