"""GET requests to one SGLang server: its model, its arguments, its counters, its load in every format."""

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import aiohttp
import orjson

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import AttemptFailedError, EngineDiedError, EngineDownError, RequestError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.model_guard import ModelGuard

log = logging.getLogger(__name__)

MODEL_INFO = ("/model_info", "/get_model_info")
SERVER_INFO = ("/server_info", "/get_server_info")
"""Paths of the server's description of itself, the newest release's first."""
LOADS, METRICS = "/v1/loads?include=core", "/metrics"
"""Paths at which a server may report its load, the better one first."""
KEY_REFUSED = frozenset({401, 403})
"""Statuses with which a server refuses the API key."""
PREFIX = "sglang:"
"""Beginning of the names of SGLang's metrics."""
MOST_BYTES = 8 << 20
"""Most bytes of a body that are read; `/metrics` of a large server has a tenth of them."""
MOST = 1 << 53
"""Largest value of a gauge or counter: up to there a double holds every integer."""
MOST_USAGE = 10.0
"""Largest share of the KV pool; SGLang's is 1, or a little more while requests are moved."""
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
        try:
            return await self._get(path, timeout_s)
        except NOT_REACHED:
            raise
        except Exception as failure:  # what no HTTP library foresaw
            raise aiohttp.ClientPayloadError(f"the answer cannot be read: {failure!r}") from failure

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
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
        """Return the load of each scheduler, from LOADS or METRICS; empty where the path is not there."""
        status, body = await self.get(path, timeout_s)
        return load_in(path, body, self.url, route) if status == 200 else []  # noqa: PLR2004


def load_in(path: str, body: bytes, url: str, route: str | None = None) -> list[SchedulerLoad]:
    """Read the reply of LOADS or METRICS; raises ValueError for anything else."""
    try:
        if path == METRICS:
            return from_metrics(body.decode(errors="replace"), url, route)
        return from_loads(orjson.loads(body), url, route)
    except Exception as failure:
        raise ValueError(f"no load: {type(failure).__name__}: {failure}") from failure


def from_loads(reply: Mapping[str, Any], url: str, route: str | None = None) -> list[SchedulerLoad]:
    """Read the reply of `GET /v1/loads?include=core` (SGLang ≥ 0.5.9), which has an entry per DP rank.

    `route` is the route to the server at `url`, if it is not the URL itself. Raises KeyError or TypeError
    where the reply is something else.
    """
    loads = reply["loads"]
    found = [
        SchedulerLoad(
            scheduler=url if len(loads) == 1 else f"{url}#dp{_count(load['dp_rank'])}",
            source="loads",
            running=_count(load["num_running_reqs"]),
            queue=_count(load["num_waiting_reqs"]),
            token_usage=_share(load["token_usage"]),
            used_tokens=_count(load["num_used_tokens"]),
            max_total_tokens=_count(load["max_total_num_tokens"]),
            max_running=_count(load["max_running_requests"]),
            route=route or url,
            taken_at=_optional(load.get("timestamp")),
            work=_work(load),
        )
        for load in loads
    ]
    if len({load.scheduler for load in found}) < len(found):
        raise TypeError("two schedulers have the same rank")
    return found


def from_metrics(text: str, url: str, route: str | None = None) -> list[SchedulerLoad]:
    """Read `GET /metrics`, Prometheus text of a server with --enable-metrics; empty without SGLang's gauges.

    Raises ValueError where the text is not Prometheus's.
    """
    gauges: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for rank, name, value in _samples_in(text):
        gauges[rank][name] = value
    ranks = {rank: g for rank, g in gauges.items() if "num_running_reqs" in g and "num_queue_reqs" in g}
    return [
        SchedulerLoad(
            scheduler=url if len(ranks) == 1 else f"{url}#dp{rank}",
            source="metrics",
            running=_count(g["num_running_reqs"]),
            queue=_count(g["num_queue_reqs"]),
            token_usage=_share(g.get("token_usage", 0.0)),
            used_tokens=_count(g["num_used_tokens"]) if "num_used_tokens" in g else None,
            max_total_tokens=_count(g["max_total_num_tokens"]) if "max_total_num_tokens" in g else None,
            max_running=_count(g["max_running_requests"]) if "max_running_requests" in g else None,
            route=route or url,
        )
        for rank, g in sorted(ranks.items())
    ]


def counters_in(text: str) -> dict[str, float]:
    """Return SGLang's numbers of `GET /metrics`, summed over schedulers, by their names without `sglang:`.

    Raises ValueError where the text is not Prometheus's.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for _, name, value in _samples_in(text):
        found[name] += value
    return dict(found)


def _samples_in(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield SGLang's counters and gauges: the DP rank, the name without `sglang:`, the value.

    Values that no counter or gauge has (infinite, not a number, negative) are left out.

    All pipeline stages and tensor-parallel ranks of a DP rank report the same values, so only the first one
    counts. With DP attention that is not rank 0.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only where needed

    samples = [
        (
            sample.labels.get("dp_rank", ""),
            (int(sample.labels.get("pp_rank") or 0), int(sample.labels.get("tp_rank") or 0)),
            sample,
        )
        for family in text_string_to_metric_families(text)
        if family.type in {"counter", "gauge"} and family.name.startswith(PREFIX)
        for sample in family.samples
    ]
    first: dict[str, tuple[int, int]] = {}
    for dp, rank, _ in samples:
        first[dp] = min(rank, first.get(dp, rank))
    for dp, rank, sample in samples:
        if rank == first[dp] and _optional(sample.value) is not None:
            yield dp, sample.name.removeprefix(PREFIX), sample.value


def _work(load: Mapping[str, Any]) -> float | None:
    """Return microseconds of prefill + decode steps; None before SGLang 0.5.23, which counts them."""
    if "total_prefill_busy_us" not in load:
        return None
    return _number(load["total_prefill_busy_us"]) + _number((load.get("decode_moments") or [0])[0])


def _number(value: Any) -> float:
    """Return a number that a gauge can have; raises TypeError for anything else, also for true and false."""
    if type(value) not in {int, float} or not 0 <= value <= MOST:
        raise TypeError(f"{str(value)[:40]!r} is no number from 0 to {MOST}")
    return float(value)


def _count(value: Any) -> int:
    return int(_number(value))


def _share(value: Any) -> float:
    if (share := _number(value)) > MOST_USAGE:
        raise TypeError(f"{share} is no share of the KV pool")
    return share


def _optional(value: Any) -> float | None:
    """Return a number that a gauge can have, or None."""
    return value if type(value) in {int, float} and 0 <= value <= MOST else None


def in_words(failure: Exception) -> str:
    """Say in one line why a server gave no answer; some of aiohttp's errors do not say it, or in several."""
    if isinstance(failure, aiohttp.TooManyRedirects):
        return "its redirects lead in a circle"
    return " ".join(str(getattr(failure, "os_error", failure)).split()) or type(failure).__name__


class Probe(Protocol):
    """Asks servers whether they are alive."""

    async def is_alive(self, url: str) -> bool:
        """Tell whether a server answers."""


class DeathVerdicts(Protocol):
    """Knows why servers ended that this run started."""

    async def excuses(self, url: str, sent_at: float) -> bool:
        """Tell whether a server ended after `sent_at` for a reason that is no row's fault."""


class FailureClassifier:
    """Records which servers are alive, and judges rows that were cut off by that."""

    def __init__(self, probe: Probe, verdicts: DeathVerdicts | None) -> None:
        """`verdicts` is None for servers that others started: none of their deaths is excused."""
        self._probe = probe
        self._verdicts = verdicts
        self._questions: dict[str, asyncio.Future[bool]] = {}
        self._dead: set[str] = set()  # servers that did not answer when last asked
        self._died_at: dict[str, float] = {}

    def record(self, url: str, *, alive: bool) -> None:
        """Record whether a server is alive now."""
        if alive:
            self._dead.discard(url)
        elif url not in self._dead:
            self._dead.add(url)
            self._died_at[url] = time.monotonic()

    async def classify(self, url: str, sent_at: float, what: str) -> RequestError:
        """Return the error of a row that was sent to a server at `sent_at` and cut off; `what` is its text.

        If the server is alive, the row may be at fault, and the attempt counts against it. If the server
        died after the row was sent, it may have died of the row, unless the verdict on the death excuses all
        rows. If it was dead before, no row is at fault.
        """
        alive = await self._is_alive(url)
        if sent_at < self._died_at.get(url, -math.inf):
            excused = self._verdicts is not None and await self._verdicts.excuses(url, sent_at)
            return EngineDownError(what) if excused else EngineDiedError(what)
        return AttemptFailedError(what) if alive else EngineDownError(what)

    async def _is_alive(self, url: str) -> bool:
        """Ask a server, once for all rows that were cut off together."""
        question = self._questions.get(url)
        if question is None:
            question = self._questions[url] = asyncio.ensure_future(self._probe.is_alive(url))
            question.add_done_callback(lambda _: self._questions.pop(url, None))
        alive = await asyncio.shield(question)
        self.record(url, alive=alive)
        return alive


class LoadPoller:
    """Asks servers for their load by the path that the first of them has."""

    def __init__(self, guard: ModelGuard, verdicts: DeathVerdicts | None) -> None:
        self.replicas: list[str] = []
        """URLs of the servers that are polled; those behind a gateway may change."""
        self.failures = FailureClassifier(self, verdicts)
        self._guard = guard
        self._route: str | None = None
        self._path: str | None = None
        self._session: aiohttp.ClientSession | None = None

    async def begin(self, session: aiohttp.ClientSession, route: str | None) -> str:
        """Find the path at which the first replica reports its load; return a note for the log.

        The `route` is the one that leads to all replicas; None where each has its own.
        """
        self._session, self._route = session, route
        for path in (LOADS, METRICS):
            if await self._poll(session, self.replicas[0], path):
                self._path = path
                return f"load from {path.partition('?')[0]}"
        return "the server tells no load (no /v1/loads, no /metrics)"

    def end(self) -> None:
        """Poll no more: the session is about to be closed."""
        self._session = None

    @property
    def reports_load(self) -> bool:
        """Whether the first replica reported its load at the beginning."""
        return self._path is not None

    async def loads(self) -> list[SchedulerLoad]:
        """Poll every replica's load; one that does not answer in 2 s is left out."""
        session, path = self._session, self._path
        if session is None or path is None:
            return []
        polls: Sequence[list[SchedulerLoad]] = await asyncio.gather(
            *(self._poll(session, url, path) for url in self.replicas)
        )
        return [load for loads in polls for load in loads]

    async def is_alive(self, url: str) -> bool:
        """Tell whether a replica answers within 2 s, with whatever status."""
        if self._session is None:
            return False
        try:
            await ServerStatus(self._session, url).get(MODEL_INFO[0], TIMING.status_timeout)
        except NOT_REACHED:
            return False
        return True

    async def _poll(self, session: aiohttp.ClientSession, url: str, path: str) -> list[SchedulerLoad]:
        """Return the loads that one replica reports; empty if it does not answer."""
        try:
            loads = await ServerStatus(session, url).load(path, TIMING.status_timeout, self._route)
        except (*NOT_REACHED, *NOT_SGLANG) as failure:
            log.debug("the load of %s could not be read: %r", url, failure)
            if isinstance(failure, NOT_REACHED):
                self._guard.doubt(url)
            return []
        self.failures.record(url, alive=True)
        return loads
