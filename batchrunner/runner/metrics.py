"""`--metrics-port`: the state of a run as Prometheus metrics, over HTTP."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.core.types import MetricsAddress
from batchrunner.dispatch.progress import Snapshot
from batchrunner.runner.progress import Opening

log = logging.getLogger(__name__)

OF_RUN = {
    "rows_selected": ("gauge", "Rows that the task has to do; an estimate where tasks share the rows."),
    "rows_done": ("counter", "Rows that ended, failed ones and those of earlier starts included."),
    "rows_failed": ("counter", "Rows that ended with an error."),
    "rows_left": ("gauge", "Rows that are not done yet."),
    "rows_in_flight": ("gauge", "Rows that the engine has now."),
    "rows_waiting_for_retry": ("gauge", "Rows that wait for another try."),
    "rows_per_second": ("gauge", "Rows that end in a second, over the last 30 s."),
    "rows_per_request": ("gauge", "Rows that share a request on average, over the last 30 s."),
    "prompt_tokens": ("counter", "Prompt tokens of this start."),
    "cached_prompt_tokens": ("counter", "Prompt tokens of this start that came from the prefix cache."),
    "output_tokens": ("counter", "Generated tokens of this start."),
    "output_tokens_per_second": ("gauge", "Generated tokens in a second, over the last 30 s."),
    "retractions": ("counter", "Retractions of this start."),
    "window": ("gauge", "Most rows in flight, over all replicas."),
    "time_left_seconds": ("gauge", "Seconds to the end at the present rate; absent without a rate."),
}
"""Metrics of the whole task, without the prefix `batchrunner_`: their types, and what they say."""
OF_SCHEDULER = {
    "running_requests": ("gauge", "Requests that decode, SGLang's #running-req."),
    "waiting_requests": ("gauge", "Requests that wait, SGLang's #queue-req."),
    "waiting_requests_low": ("gauge", "Lower end of the range in which #queue-req is kept."),
    "waiting_requests_high": ("gauge", "Upper end of that range."),
    "token_usage_ratio": ("gauge", "Fraction of the KV pool in use, 0 to 1."),
    "window": ("gauge", "Most rows in flight for this scheduler."),
    "output_tokens_per_second": ("gauge", "Generated tokens in a second, over the last 30 s."),
    "retractions": ("counter", "Retractions of this start."),
}
"""Metrics of each scheduler, with the prefix `batchrunner_scheduler_` and the label `scheduler`."""
PREFIX, SCHEDULER = "batchrunner_", "batchrunner_scheduler_"


def values_of_run(snapshot: Snapshot) -> dict[str, float | None]:
    """Return the values of OF_RUN; None where there is none."""
    return {
        "rows_selected": snapshot.rows_total,
        "rows_done": snapshot.rows_done,
        "rows_failed": snapshot.rows_failed,
        "rows_left": max(0, snapshot.rows_total - snapshot.rows_done),
        "rows_in_flight": snapshot.in_flight,
        "rows_waiting_for_retry": snapshot.waiting,
        "rows_per_second": snapshot.rows_per_s,
        "rows_per_request": snapshot.rows_per_request,
        "prompt_tokens": snapshot.prompt_tokens,
        "cached_prompt_tokens": snapshot.cached_tokens,
        "output_tokens": snapshot.output_tokens,
        "output_tokens_per_second": snapshot.output_tokens_per_s,
        "retractions": snapshot.retractions,
        "window": snapshot.window,
        "time_left_seconds": snapshot.time_left_s,
    }


def values_of_schedulers(snapshot: Snapshot) -> dict[str, dict[str, float | None]]:
    """Return the values of OF_SCHEDULER by the scheduler's name; None where there is none."""
    found: dict[str, dict[str, float | None]] = {}
    for load in snapshot.loads:
        low, high = snapshot.bands.get(load.scheduler, (None, None))
        own = snapshot.by_scheduler.get(load.scheduler, {})
        found[load.scheduler] = {
            "running_requests": load.running,
            "waiting_requests": load.queue,
            "waiting_requests_low": low,
            "waiting_requests_high": high,
            "token_usage_ratio": load.token_usage,
            **{name: own.get(name) for name in ("window", "retractions")},
            "output_tokens_per_second": own.get("output_tokens_per_s"),
        }
    return found


class MetricsPage:
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
        for name, value in values_of_run(snapshot).items():
            if value is not None:
                kind, meaning = OF_RUN[name]
                yield _family(kind, PREFIX + name, meaning, [((), value)])
        schedulers = values_of_schedulers(snapshot)
        for name, (kind, meaning) in OF_SCHEDULER.items():
            values = [((who,), value) for who, own in schedulers.items() if (value := own[name]) is not None]
            if values:
                yield _family(kind, SCHEDULER + name, meaning, values)


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
        _stop(server, thread)


def _stop(server: Any, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()
