"""A server's report of its load → SchedulerLoads, for every source that SGLang offers. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from batchrunner.core.types import SchedulerLoad

PREFIX = "sglang:"


def from_loads(reply: Mapping[str, Any], url: str, route: str | None = None) -> list[SchedulerLoad]:
    """Read the reply of `GET /v1/loads?include=core` (SGLang ≥ 0.5.9), which has an entry per DP rank.

    `route` is the route to the server at `url`, if it is not the URL itself. Raises KeyError or TypeError
    where the reply is something else.
    """
    loads = reply["loads"]
    return [
        SchedulerLoad(
            scheduler=url if len(loads) == 1 else f"{url}#dp{load['dp_rank']}",
            source="loads",
            running=int(load["num_running_reqs"]),
            queue=int(load["num_waiting_reqs"]),
            token_usage=float(load["token_usage"]),
            used_tokens=int(load["num_used_tokens"]),
            max_total_tokens=int(load["max_total_num_tokens"]),
            max_running=int(load["max_running_requests"]),
            route=route or url,
            taken_at=load.get("timestamp"),
            work=_work(load),
        )
        for load in loads
    ]


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
            running=int(g["num_running_reqs"]),
            queue=int(g["num_queue_reqs"]),
            token_usage=g.get("token_usage", 0.0),
            used_tokens=int(g["num_used_tokens"]) if "num_used_tokens" in g else None,
            max_total_tokens=int(g["max_total_num_tokens"]) if "max_total_num_tokens" in g else None,
            max_running=int(g["max_running_requests"]) if "max_running_requests" in g else None,
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
        if rank == first[dp]:
            yield dp, sample.name.removeprefix(PREFIX), sample.value


def _work(load: Mapping[str, Any]) -> float | None:
    """Return microseconds of prefill + decode steps; None before SGLang 0.5.23, which counts them."""
    if "total_prefill_busy_us" not in load:
        return None
    return float(load["total_prefill_busy_us"] + (load.get("decode_moments") or [0])[0])
