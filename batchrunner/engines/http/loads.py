"""The load of SGLang servers: asked for and parsed, from `/v1/loads` or else from `/metrics`."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
import orjson

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.timing import TIMING

MODEL_INFO, SERVER_INFO = "/model_info", "/server_info"
"""Paths of the server's description of itself."""
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
NOT_REACHED = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors that every request here raises where the server does not answer in time."""
NOT_SGLANG = (ValueError, KeyError, TypeError, msgspec.MsgspecError)
"""Errors that `load` raises too, for a reply that is not SGLang's."""


def in_words(failure: Exception) -> str:
    """Say in one line why a server gave no answer; some of aiohttp's errors do not say it, or in several."""
    if isinstance(failure, aiohttp.TooManyRedirects):
        return "its redirects lead in a circle"
    return " ".join(str(getattr(failure, "os_error", failure)).split()) or type(failure).__name__


class ServerStatus:
    """GET requests to the server at `url`, each of which ends after its `timeout_s`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and the body of a path; a body that is too long comes back empty."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(self.url + path, timeout=timeout) as response:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > MOST_BYTES:
                        return response.status, b""
                return response.status, bytes(body)
        except NOT_REACHED:
            raise
        except Exception as failure:  # what no HTTP library foresaw
            raise aiohttp.ClientPayloadError(f"the answer cannot be read: {failure!r}") from failure

    async def mapping(self, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON object of a path, empty without one."""
        status, body = await self.get(path, timeout_s)
        with contextlib.suppress(orjson.JSONDecodeError):
            found = orjson.loads(body) if status == 200 else None  # noqa: PLR2004
            if isinstance(found, dict):
                return status, found
        return status, {}

    async def load(self, path: str, timeout_s: float) -> list[SchedulerLoad]:
        """Return the load of each scheduler, from LOADS or METRICS; empty where the path is not there."""
        status, body = await self.get(path, timeout_s)
        return load_in(path, body, self.url) if status == 200 else []  # noqa: PLR2004

    async def is_alive(self) -> bool:
        """Tell whether the server answers within 2 s, with whatever status."""
        try:
            await self.get(MODEL_INFO, TIMING.status_timeout)
        except NOT_REACHED:
            return False
        return True


Requests = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""Requests at one scheduler: at most sixteen times as many as one address has ports."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class _Scheduler(msgspec.Struct):
    """What a scheduler tells of its load; a gauge out of its range makes it no load."""

    num_running_reqs: Requests
    num_waiting_reqs: Requests
    token_usage: Annotated[float, msgspec.Meta(ge=0, le=10)]
    """Share of the KV pool; SGLang's is 1, or a little more while requests are moved."""
    num_used_tokens: Tokens | None = None
    max_total_num_tokens: Tokens | None = None
    max_running_requests: Requests | None = None
    dp_rank: int = 0
    timestamp: Any = None
    total_prefill_busy_us: Amount | None = None
    decode_moments: list[Amount] | None = None


class _Loads(msgspec.Struct):
    loads: list[_Scheduler]


_read_loads = msgspec.json.Decoder(_Loads)


def load_in(path: str, body: bytes, url: str) -> list[SchedulerLoad]:
    """Read the reply of LOADS or METRICS of the server at `url`; raises ValueError for anything else."""
    try:
        if path == METRICS:
            return from_metrics(body.decode(errors="replace"), url)
        return _loads_of(_read_loads.decode(body).loads, "loads", url)
    except Exception as failure:
        raise ValueError(f"no load: {type(failure).__name__}: {failure}") from failure


def from_metrics(text: str, url: str) -> list[SchedulerLoad]:
    """Read `GET /metrics`, Prometheus text of a server with --enable-metrics; empty without SGLang's gauges.

    Raises one of NOT_SGLANG for another text.
    """
    ranks: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for rank, name, value in _samples_in(text):
        ranks[rank]["num_waiting_reqs" if name == "num_queue_reqs" else name] = value
    schedulers = [
        msgspec.convert({"token_usage": 0.0, **gauges, "dp_rank": rank or 0}, _Scheduler, strict=False)
        for rank, gauges in sorted(ranks.items())
        if "num_running_reqs" in gauges
    ]
    return _loads_of(schedulers, "metrics", url)


def _loads_of(
    found: Sequence[_Scheduler], source: Literal["loads", "metrics"], url: str
) -> list[SchedulerLoad]:
    """Return the load of each DP rank of a server."""
    return [
        SchedulerLoad(
            scheduler=url if len(found) == 1 else f"{url}#dp{load.dp_rank}",
            source=source,
            running=load.num_running_reqs,
            queue=load.num_waiting_reqs,
            token_usage=load.token_usage,
            used_tokens=load.num_used_tokens,
            max_total_tokens=load.max_total_num_tokens,
            max_running=load.max_running_requests,
            route=url,
            taken_at=load.timestamp if type(load.timestamp) in {int, float} else None,
            work=_work(load),
        )
        for load in found
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
        if rank == first[dp] and 0 <= sample.value <= MOST:
            yield dp, sample.name.removeprefix(PREFIX), sample.value


def _work(load: _Scheduler) -> float | None:
    """Return microseconds of prefill + decode steps; None before SGLang 0.5.23, which counts them."""
    if load.total_prefill_busy_us is None:
        return None
    return load.total_prefill_busy_us + (load.decode_moments or [0])[0]
