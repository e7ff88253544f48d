"""What a run shows while it goes on: a bar on a terminal, plain lines where there is none."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from batchrunner.report.report import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchrunner.core.types import SchedulerLoad

log = logging.getLogger(__name__)

RATE_SPAN_S = 30.0
LINE_EVERY_S = 5.0
MOST_NAMED = 8
"""Schedulers whose numbers are shown one by one; of more, their sum and range."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment."""

    rows_total: int
    rows_done: int
    """Over all starts, failed ones included."""
    rows_failed: int
    rows_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    """Of the prompts' tokens those that came from the cache."""
    window: int
    in_flight: int
    resting: int
    """Rows that wait for another try."""
    retractions: int
    signals: tuple[SchedulerLoad, ...]
    bands: dict[str, tuple[int, int]]
    """Healthy `#queue-req` of each scheduler, by its name."""
    by_scheduler: dict[str, dict[str, float]]
    """What else is known of each: its window, its part of the output and of the retractions."""
    simulated: bool

    @property
    def time_left_s(self) -> float | None:
        """Seconds to the end at the present rate, or None before there is one."""
        left = self.rows_total - self.rows_done
        return left / self.rows_per_s if self.rows_per_s > 0 else None

    def load(self, *, short: bool = False) -> str:
        """Return the load of all schedulers."""
        loads = [(s.scheduler, s.running, s.queue, s.token_usage) for s in self.signals]
        return load_line(loads, self.bands, self.retractions, short=short)

    def line(self) -> str:
        """Return one line of all of it."""
        left = "?" if self.time_left_s is None else duration(self.time_left_s)
        resting = f", {self.resting} wait for a retry" if self.resting else ""
        return (
            f"{'[simulated] ' if self.simulated else ''}{self.rows_done}/{self.rows_total} rows, "
            f"{self.rows_per_s:.1f} rows/s, {self.output_tokens_per_s:,.0f} output tok/s, {self.load()}, "
            f"{self.in_flight}/{self.window} in flight, {self.rows_failed} failed{resting}, {left} left"
        )


def load_line(
    loads: Sequence[tuple[str, int, int, float]],
    bands: Mapping[str, Sequence[int]],
    retractions: int,
    *,
    short: bool = False,
) -> str:
    """Write running, queue (with its band) and token usage, of each scheduler where there are a few.

    `loads` are (scheduler, `#running-req`, `#queue-req`, token usage from 0 to 1); `short` is for a bar.
    """
    if not loads:
        return "load unknown"
    names = ("run", "queue", "KV") if short else ("#running-req", "#queue-req", "token usage")
    _, running, queue, usage = zip(*loads, strict=True)
    band = bands.get(loads[0][0])
    healthy = f" ({band[0]}-{band[1]})" if band else ""
    retracted = f", {retractions} {'retracted' if short else 'retractions'}" if retractions else ""
    shares = [f"{share:.2f}" for share in usage]
    each = "/".join(shares) if len(loads) <= MOST_NAMED else f"{min(shares)}-{max(shares)}"
    return (
        f"{names[0]} {_counts(running)}, {names[1]} {_counts(queue)}{healthy}, {names[2]} {each}{retracted}"
    )


def _counts(values: Sequence[int]) -> str:
    if len(values) <= MOST_NAMED:
        return "+".join(map(str, values))
    return f"{sum(values)} ({min(values)}-{max(values)} each)"


class Rates:
    """How fast counts grow, over the last 30 s."""

    def __init__(self, now: float, counts: int) -> None:
        """There are so many `counts`, all of them 0 now."""
        self._points: deque[tuple[float, tuple[int, ...]]] = deque([(now, (0,) * counts)])

    def update(self, now: float, *counts: int) -> list[float]:
        """Add the counts so far; return the rate of each, a second."""
        self._points.append((now, counts))
        while len(self._points) > 2 and self._points[1][0] <= now - RATE_SPAN_S:  # noqa: PLR2004
            self._points.popleft()
        then, counts_then = self._points[0]
        span = max(now - then, 1e-9)
        return [(count - before) / span for count, before in zip(counts, counts_then, strict=True)]


class Display(Protocol):
    """Something that shows snapshots."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the present state; called a few times a second."""

    def close(self) -> None:
        """Finish the output."""


class Silent:
    """Shows nothing: for the library and `--quiet`."""

    def show(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """A line every 5 s: for logs of batch systems."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Print a line when the last one is old enough."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            with contextlib.suppress(OSError):  # a full disk, a pipe that nobody reads: the rows matter
                print(time.strftime("%H:%M:%S"), snapshot.line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: every line is whole."""


class ProgressBar:
    """tqdm's bar with the engine's load behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar."""
        if self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415 - only where there is a terminal

            self._bar = tqdm(
                total=snapshot.rows_total, initial=snapshot.rows_done, unit="row", file=self._stream,
                dynamic_ncols=True, desc="simulated " if snapshot.simulated else None,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )  # fmt: skip
        left = "?" if snapshot.time_left_s is None else duration(snapshot.time_left_s)
        # what a narrow terminal cuts comes last
        shown = [f"{left} left", f"{snapshot.rows_per_s:.1f} rows/s", f"failed {snapshot.rows_failed}"]
        shown += [f"retry {snapshot.resting}"] if snapshot.resting else []
        shown += [snapshot.load(short=True), f"window {snapshot.window}"]
        shown += [f"{snapshot.output_tokens_per_s:,.0f} tok/s"]
        self._bar.set_postfix_str(" · ".join(shown), refresh=False)
        self._bar.n, self._bar.total = snapshot.rows_done, snapshot.rows_total  # others may add rows
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.refresh()

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def make_display(*, quiet: bool, stream: TextIO | None = None) -> Display:
    """Choose the display for a stream (standard error by default)."""
    stream = stream or sys.stderr
    if quiet:
        return Silent()
    return ProgressBar(stream) if stream.isatty() else Lines(stream)
