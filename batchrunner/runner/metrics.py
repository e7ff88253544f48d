"""`--metrics-port`: the state of a run as Prometheus metrics, over HTTP."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.core.types import MetricsAddress
from batchrunner.dispatch.progress import Snapshot
from batchrunner.runner.progress import Display, Opening

log = logging.getLogger(__name__)

OF_RUN = {
    "rows_selected": (
        "rows_total", "gauge", "Rows that the task has to do; an estimate where tasks share the rows."
    ),
    "rows_done": (
        "rows_done", "counter", "Rows that ended, failed ones and those of earlier starts included."
    ),
    "rows_failed": ("rows_failed", "counter", "Rows that ended with an error."),
    "rows_left": ("rows_left", "gauge", "Rows that are not done yet."),
    "rows_in_flight": ("in_flight", "gauge", "Rows that the engine has now."),
    "rows_waiting_for_retry": ("waiting", "gauge", "Rows that wait for another try."),
    "rows_per_second": ("rows_per_s", "gauge", "Rows that end in a second, over the last 30 s."),
    "rows_per_request": (
        "rows_per_request", "gauge", "Rows that share a request on average, over the last 30 s."
    ),
    "prompt_tokens": ("prompt_tokens", "counter", "Prompt tokens of this start."),
    "cached_prompt_tokens": (
        "cached_tokens", "counter", "Prompt tokens of this start that came from the prefix cache."
    ),
    "output_tokens": ("output_tokens", "counter", "Generated tokens of this start."),
    "output_tokens_per_second": (
        "output_tokens_per_s", "gauge", "Generated tokens in a second, over the last 30 s."
    ),
    "retractions": ("retractions", "counter", "Retractions of this start."),
    "window": ("window", "gauge", "Most rows in flight, over all replicas."),
    "time_left_seconds": (
        "time_left_s", "gauge", "Seconds to the end at the present rate; absent without a rate."
    ),
}  # fmt: skip
"""Metrics of the whole task, without the prefix `batchrunner_`: names in Snapshot, types, what they say."""
OF_SCHEDULER = {
    "running_requests": ("running", "gauge", "Requests that decode, SGLang's #running-req."),
    "waiting_requests": ("queue", "gauge", "Requests that wait, SGLang's #queue-req."),
    "waiting_requests_low": ("low", "gauge", "Lower end of the range in which #queue-req is kept."),
    "waiting_requests_high": ("high", "gauge", "Upper end of that range."),
    "token_usage_ratio": ("token_usage", "gauge", "Fraction of the KV pool in use, 0 to 1."),
    "window": ("window", "gauge", "Most rows in flight for this scheduler."),
    "output_tokens_per_second": (
        "output_tokens_per_s", "gauge", "Generated tokens in a second, over the last 30 s."
    ),
    "retractions": ("retractions", "counter", "Retractions of this start."),
}  # fmt: skip
"""Metrics of each scheduler, with the prefix `batchrunner_scheduler_` and the label `scheduler`, alike."""
PREFIX, SCHEDULER = "batchrunner_", "batchrunner_scheduler_"


class MetricsPage(Display):
    """A display: what it was shown last is what Prometheus gets."""

    def __init__(self) -> None:
        self._opening: Opening | None = None
        self._snapshot: Snapshot | None = None
        self._ended = False

    def begin(self, opening: Opening) -> None:
        """Keep what the run is going to do."""
        self._opening = opening

    def show(self, snapshot: Snapshot) -> None:
        """Keep the present state."""
        self._snapshot = snapshot

    def close(self) -> None:
        """Say from now on that the run ended."""
        self._ended = True

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, each with its values; called by the server's threads."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily  # noqa: PLC0415

        snapshot = self._snapshot
        running = snapshot is not None and not self._ended
        yield GaugeMetricFamily(f"{PREFIX}running", "1 while rows are sent, else 0.", value=float(running))
        if self._opening is not None:
            facts = {"model": self._opening.model, "engine": self._opening.kind}
            facts |= {"results": self._opening.results}
            yield InfoMetricFamily(f"{PREFIX}run", "What runs, as labels.", value=facts)
        if snapshot is None:
            return
        left = max(0, snapshot.rows_total - snapshot.rows_done)
        for name, (key, kind, meaning) in OF_RUN.items():
            value = left if key == "rows_left" else getattr(snapshot, key)
            if value is not None:
                yield _family(kind, PREFIX + name, meaning, [((), value)])
        for name, (key, kind, meaning) in OF_SCHEDULER.items():
            values = [((who,), own[key]) for who, own in _by_scheduler(snapshot) if own.get(key) is not None]
            if values:
                yield _family(kind, SCHEDULER + name, meaning, values)


def _by_scheduler(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is known of each scheduler, by its name."""
    for load in snapshot.loads:
        low, high = snapshot.bands.get(load.scheduler, (None, None))
        state = {"low": low, "high": high, **snapshot.by_scheduler.get(load.scheduler, {})}
        gauges = {"running": load.running, "queue": load.queue, "token_usage": load.token_usage}
        yield load.scheduler, state | gauges


def _family(kind: str, name: str, meaning: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    values = list(values)
    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    made = family(name, meaning, labels=["scheduler"] if values[0][0] else [])
    for labels, value in values:
        made.add_metric(labels, value)
    return made


@contextlib.contextmanager
def metrics_server(address: MetricsAddress) -> Iterator[MetricsPage]:
    """Serve the metrics of what the page is shown.

    Raises JobError where the address cannot be had.
    """
    port, host = address
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415

    page, registry = MetricsPage(), CollectorRegistry()
    registry.register(page)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as failure:
        raise JobError(
            f"--metrics-port {port}: cannot listen at {host}: {failure.strerror or failure}",
            hint="take another port, or 0 for any free one; each task on a machine needs its own",
        ) from None
    try:
        log.info("metrics: http://%s:%d/metrics", host, server.server_port)
        yield page
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
