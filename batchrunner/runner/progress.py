"""What a run shows while it goes on: a bar on a terminal, lines where there is none, calls of a program."""

import contextlib
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchrunner.core.console import tell
from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.progress import AttemptProgress, engine_parts, sample_line
from batchrunner.output.events import EventLog

log = logging.getLogger(__name__)

BAR_FORMAT = "{l_bar}{bar:10}{r_bar}"
"""The bar of tqdm, short, so that the line has room for the engine's state; a terminal's width cuts it."""
LINE_EVERY_S = 5.0
SAMPLE_S = 2.0
"""Seconds between two samples in the event log: 43,000 lines a day. A young run is sampled more often."""


class Display(ABC):
    """What shows the state of a run."""

    @abstractmethod
    def show(self, sample: dict[str, Any]) -> None:
        """Show the present state, a `sample` event; called a few times a second."""

    @abstractmethod
    def close(self) -> None:
        """Finish the output."""


class ProgressLog:
    """Shows every load sample on the displays, and writes one to the event log every 2 s."""

    def __init__(
        self, progress: AttemptProgress, displays: Sequence[Display], events: EventLog, *, now: float
    ) -> None:
        """Begin at `now`, in seconds of the monotonic clock."""
        self._progress = progress
        self._displays = displays
        self._events = events
        self._began = now
        self._next_sample = 0.0
        self._loads: Sequence[SchedulerLoad] = ()

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Show and write a load sample."""
        self._loads = loads
        sample = self._progress.polled(loads, now)
        self._show(sample)
        if now >= self._next_sample:
            self._next_sample = now + min(SAMPLE_S, (now - self._began) / 50)
            self._events.write("sample", **sample)

    def finish(self, now: float) -> None:
        """Show and write the last state."""
        last = self._progress.sample(self._loads, now)
        self._show(last)
        self._events.write("sample", **last)

    def _show(self, sample: dict[str, Any]) -> None:
        for display in self._displays:
            display.show(sample)


class ProgressLines(Display):
    """A line on standard error every 5 s: for logs of batch systems."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self, sample: dict[str, Any]) -> None:
        """Print a line when the last one is old enough."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            tell(f"{time.strftime('%H:%M:%S')} {sample_line(sample)}")

    def close(self) -> None:
        """Leave the lines as they are."""


class ProgressBar(Display):
    """tqdm's bar and, behind it, the engine: a widget in a notebook, else a line on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, sample: dict[str, Any]) -> None:
        """Move the bar."""
        if self._bar is None:
            from tqdm.auto import tqdm  # noqa: PLC0415 - only where a bar is asked for

            self._bar = tqdm(
                initial=sample["rows_done"], unit="row", dynamic_ncols=True, bar_format=BAR_FORMAT,
                desc="simulated" if sample["simulated"] else None,
            )  # fmt: skip
        self._bar.n, self._bar.total = (
            sample["rows_done"],
            sample["rows_total"] or None,
        )  # others may add rows
        parts = [f"{sample['rows_failed']:,} failed", *engine_parts(sample)]
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.set_postfix_str(", ".join(parts))

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run at one moment, for `on_progress`."""

    rows_done: int
    """Rows that ended, failed ones and those of earlier starts included."""
    rows_total: int | None
    """Rows that the run has; None where `stream` reads an iterator, whose length nobody knows."""
    rows_failed: int
    """Rows of `rows_done` that have an error."""
    rows_per_s: float
    """Rows that end in a second, over the last seconds."""
    eta_s: float | None
    """Seconds to the end at this rate; None where there is no rate yet, or no `rows_total`."""
    output_tokens_per_s: float
    """Generated tokens in a second, over the last seconds."""
    rows_in_flight: int
    """Rows that the engine has now."""
    simulated: bool
    """Whether the answers are made up."""


ProgressListener = Callable[[Progress], object]
"""What a program gives as `on_progress`."""


class ProgressCalls(Display):
    """Calls a program at most once a second, and once more at the end; in the thread of the run."""

    def __init__(self, listener: ProgressListener) -> None:
        self._listener: ProgressListener | None = listener
        self._untold: dict[str, Any] | None = None
        self._next = 0.0

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
    bar = [ProgressBar()] if progress else []
    return [*bar, *([ProgressCalls(on_progress)] if on_progress is not None else [])]
