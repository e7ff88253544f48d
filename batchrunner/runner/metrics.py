"""Metrics of a run for Prometheus, on a port of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import UnsetType

from batchrunner.core.errors import JobError
from batchrunner.output.samples import RunSample, SchedulerSample
from batchrunner.runner.progress import Display

if TYPE_CHECKING:
    from prometheus_client import Metric

HIGHEST_PORT = 65_535
"""Maximum number of a TCP port."""


class MetricsServer(Display):
    """Serves the newest state of a run at `/metrics`, in Prometheus' text format or as OpenMetrics."""

    def __init__(self, address: str) -> None:
        """Listen on `HOST:PORT`, or on all addresses of this machine for `:PORT` and `PORT`.

        Raises JobError if the address is malformed or not free.
        """
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - for few runs

        host, _, port = address.rpartition(":")
        if not port.isascii() or not port.isdecimal() or int(port) > HIGHEST_PORT:
            raise JobError(f"--metrics {address}: not an address", hint="give HOST:PORT or :PORT")
        self._sample: RunSample | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server, _ = start_http_server(int(port), host or "0.0.0.0", registry)  # noqa: S104 - as documented
        except OSError as failure:
            raise JobError(
                f"--metrics {address}: cannot listen: {failure.strerror or failure}", hint="give another port"
            ) from None
        self._server = server
        self.url = f"http://{host or 'localhost'}:{server.server_port}/metrics"
        """Address of the metrics on this machine."""

    def show(self, sample: RunSample) -> None:
        """Keep the state of the run for the next request."""
        self._sample = sample

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none before the first state. `prometheus_client` calls this for each scrape."""
        sample = self._sample
        if sample is not None:
            yield from _metrics_of_run(sample)
            yield from _metrics_of_schedulers(sample.signals)


def _metrics_of_run(sample: RunSample) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily  # noqa: PLC0415

    labels = {"task": sample.task, "simulated": str(sample.simulated).lower()}
    yield InfoMetricFamily("batchrunner_run", "Properties of the run.", value=labels)
    rows = CounterMetricFamily(
        "batchrunner_rows", "Rows that ended, in earlier starts too.", labels=["outcome"]
    )
    rows.add_metric(["ok"], sample.rows_done - sample.rows_failed)
    rows.add_metric(["failed"], sample.rows_failed)
    yield rows
    counters = {
        "output_tokens": ("Output tokens of this start.", sample.output_tokens),
        "prompt_tokens": ("Prompt tokens of this start.", sample.prompt_tokens),
        "cached_prompt_tokens": ("Prompt tokens from the prefix cache.", sample.cached_tokens),
        "retractions": ("Requests that SGLang retracted because the KV cache was full.", sample.retractions),
    }
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(f"batchrunner_{name}", text, value=count)
    gauges: dict[str, tuple[str, float | None]] = {
        "rows_selected": ("Rows of the run; absent if unknown.", sample.rows_total or None),
        "rows_unsent": ("Rows that were never sent.", sample.unsent),
        "rows_to_retry": ("Rows that failed once and wait for a retry.", sample.resting),
        "requests_in_flight": ("Requests that were sent and have no answer yet.", sample.in_flight),
        "concurrency_limit": ("Maximum number of requests in flight.", sample.window),
        "time_left_seconds": ("Estimated time to the end; absent if unknown.", sample.time_left_s),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(f"batchrunner_{name}", text, value=value)


def _metrics_of_schedulers(schedulers: list[SchedulerSample]) -> Iterator[Metric]:
    """Yield the load of each scheduler, labelled with the replica (server) that the scheduler belongs to."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    labels = ["replica", "scheduler"]
    running = GaugeMetricFamily(
        "batchrunner_running_requests", "Running requests (#running-req).", labels=labels
    )
    queued = GaugeMetricFamily("batchrunner_queued_requests", "Queued requests (#queue-req).", labels=labels)
    usage = GaugeMetricFamily(
        "batchrunner_token_usage_ratio", "Used fraction of the KV cache (token usage).", labels=labels
    )
    limit = GaugeMetricFamily(
        "batchrunner_scheduler_concurrency_limit", "Maximum number of requests in flight.", labels=labels
    )
    retractions = CounterMetricFamily(
        "batchrunner_scheduler_retractions", "Requests that the scheduler retracted.", labels=labels
    )
    for load in schedulers:
        of_scheduler = [load.route, load.scheduler]
        running.add_metric(of_scheduler, load.running)
        queued.add_metric(of_scheduler, load.queue)
        usage.add_metric(of_scheduler, load.token_usage)
        if not isinstance(load.window, UnsetType):
            limit.add_metric(of_scheduler, load.window)
        if not isinstance(load.retractions, UnsetType):
            retractions.add_metric(of_scheduler, load.retractions)
    yield from (running, queued, usage, limit, retractions)
