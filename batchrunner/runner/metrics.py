"""`--metrics-port`: the figures of a run for Prometheus, over HTTP."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.core.types import MetricsAddress
from batchrunner.runner.progress import Display

log = logging.getLogger(__name__)

PREFIX, SCHEDULER = "batchrunner_", "batchrunner_scheduler_"
"""What the names of figures of the whole task, and of a scheduler, begin with."""
MEANING = "The figure of this name in the run's sample events."


class MetricsPage(Display):
    """A display whose last state is what Prometheus gets: each number of a sample event, by its name."""

    def __init__(self) -> None:
        self._sample: dict[str, Any] | None = None
        self._ended = False

    def show(self, sample: dict[str, Any]) -> None:
        """Keep the present state."""
        self._sample = sample

    def close(self) -> None:
        """Say from now on that the run ended."""
        self._ended = True

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, each with its values; called by the server's threads."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        sample = self._sample
        running = float(sample is not None and not self._ended)
        yield GaugeMetricFamily(f"{PREFIX}running", "1 while rows are sent, else 0.", value=running)
        if sample is None:
            return
        for name, value in _numbers(sample):
            yield GaugeMetricFamily(PREFIX + name, MEANING, value=value)
        families: dict[str, Any] = {}
        for load in sample["signals"]:
            low, high = sample["bands"].get(load["scheduler"], (None, None))
            for name, value in _numbers({**load, "queue_low": low, "queue_high": high}):
                new = GaugeMetricFamily(SCHEDULER + name, MEANING, labels=["scheduler"])
                families.setdefault(name, new).add_metric([load["scheduler"]], value)
        yield from families.values()


def _numbers(figures: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in figures.items() if isinstance(value, (int, float))]


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
