"""What shows a run while it goes on: a bar, lines of a log, calls of a program, metrics for Prometheus."""

import contextlib
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from batchrunner.core.console import tell
from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from batchrunner.core.types import MetricsAddress
from batchrunner.dispatch.progress import sample_line

log = logging.getLogger(__name__)

BAR_FORMAT = "{percentage:3.0f}%|{bar:10}| {elapsed} {desc}"
"""The bar of tqdm, short, so that the line has room for the state of the run; a terminal's width cuts it."""
LINE_EVERY_S = 5.0


class Display(ABC):
    """What shows the state of a run."""

    @abstractmethod
    def show(self, sample: dict[str, Any]) -> None:
        """Show the present state, a `sample` event; called a few times a second."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Finish the output."""


class ProgressLines(Display):
    """A line on standard error every 5 s, and when the run begins to stop: for logs of batch systems."""

    _shown: tuple[float, bool] | None = None

    def show(self, sample: dict[str, Any]) -> None:
        """Print a line where it is time for one."""
        now = time.monotonic() // LINE_EVERY_S, sample["stopping"]
        if now != self._shown:
            self._shown = now
            tell(f"{time.strftime('%H:%M:%S')} {sample_line(sample)}")


class ProgressBar(Display):
    """tqdm's bar with the line of progress: a widget in a notebook, else a line on standard error."""

    _bar: Any = None

    def show(self, sample: dict[str, Any]) -> None:
        """Move the bar."""
        if self._bar is None:
            from tqdm.auto import tqdm  # noqa: PLC0415 - only where a bar is asked for

            bar = BAR_FORMAT if sample["rows_total"] else "{elapsed} {desc}"
            self._bar = tqdm(dynamic_ncols=True, bar_format=bar, delay=1e-9)  # until its line is known
        self._bar.n, self._bar.total = sample["rows_done"], sample["rows_total"]  # others may add rows
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.set_description_str(sample_line(sample))

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run at one moment, for `on_progress`."""

    rows_done: int
    """Rows that ended, failed ones and earlier starts included."""
    rows_total: int | None
    """Rows of the run; None where `stream` reads an iterator."""
    rows_failed: int
    """Those of `rows_done` with an error."""
    rows_per_s: float
    """Rows that end in a second, lately."""
    eta_s: float | None
    """Seconds to the end; None while nobody can know."""
    output_tokens_per_s: float
    """Generated tokens in a second, lately."""
    rows_in_flight: int
    """Rows that the engine has now."""
    simulated: bool
    """Whether the answers are made up."""


ProgressListener = Callable[[Progress], object]
"""What a program gives as `on_progress`."""


@dataclass
class ProgressCalls(Display):
    """Calls a program at most once a second, and once more at the end; in the thread of the run."""

    _listener: ProgressListener | None
    _untold: dict[str, Any] | None = None
    _next: float = 0.0

    def show(self, sample: dict[str, Any]) -> None:
        """Tell the present state, if the last call is old enough."""
        self._untold = sample
        if time.monotonic() >= self._next:
            self._tell()
            self._next = time.monotonic() + TIMING.progress

    def close(self) -> None:
        """Tell the last state."""
        self._tell()

    def _tell(self) -> None:
        sample, self._untold = self._untold, None
        if sample is None or self._listener is None:
            return
        try:
            self._listener(
                Progress(
                    rows_done=sample["rows_done"],
                    rows_total=sample["rows_total"] or None,
                    rows_failed=sample["rows_failed"],
                    rows_per_s=sample["rows_per_s"],
                    eta_s=sample["time_left_s"],
                    output_tokens_per_s=sample["output_tokens_per_s"],
                    rows_in_flight=sample["in_flight"],
                    simulated=sample["simulated"],
                )
            )
        except Exception:  # the rows of a long run matter more than what is shown of it
            log.exception("on_progress failed: it is not called any more")
            self._listener = None


def make_displays(*, progress: bool, on_progress: ProgressListener | None) -> list[Display]:
    """Return what shows a run to a program that asks for a bar, calls, both or neither.

    Raises JobError where `on_progress` cannot be called with a Progress.
    """
    if on_progress is not None and (not callable(on_progress) or inspect.iscoroutinefunction(on_progress)):
        raise JobError(
            f"on_progress: {on_progress!r} cannot be called",
            hint="give a plain function of one argument, a batchrunner.Progress",
        )
    displays: list[Display] = [ProgressBar()] if progress else []
    return displays if on_progress is None else [*displays, ProgressCalls(on_progress)]


PREFIX, SCHEDULER = "batchrunner_", "batchrunner_scheduler_"
"""What the names of figures of the whole task, and of a scheduler, begin with."""
MEANING = "The figure of this name in the run's sample events."


class MetricsPage(Display):
    """A display whose last state is what Prometheus gets: each number of a sample event, by its name."""

    _sample: dict[str, Any] | None = None
    _ended = False

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
