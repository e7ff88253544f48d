"""What a run shows while it goes on: a bar on a terminal, lines where there is none, calls of a program."""

import contextlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.progress import AttemptProgress, Snapshot, engine_parts
from batchrunner.output.events import EventLog
from batchrunner.report.report import duration

log = logging.getLogger(__name__)

_BETWEEN = " · "


@dataclass(frozen=True, slots=True)
class Opening:
    """What a run is going to do, for a person who sees it begin."""

    rows: int
    """Rows to do."""
    rows_done: int
    """Rows that earlier attempts ended."""
    model: str
    """Identity of the model."""
    kind: str
    """The job's `engine.kind`."""
    window: int
    """Requests in flight at first, over all replicas."""
    is_fixed: bool
    """Whether the job sets that number."""
    results: str
    """Directory of the results."""

    def lines(self) -> list[str]:
        """Return the three lines: what, how and where."""
        before = f" ({self.rows_done:,} done before)" if self.rows_done else ""
        follows = "set by the job" if self.is_fixed else "adapted to its load"
        return [
            f"rows:    {self.rows:,} to do{before}, model {self.model}",
            f"engine:  {self.kind}, {self.window:,} requests in flight, {follows}",
            f"results: {self.results} (Ctrl-C stops; the same command resumes)",
        ]


def progress_text(snapshot: Snapshot) -> str:
    """Return what stands behind the bar: rows per second, and the time left."""
    left = "?" if snapshot.time_left_s is None else duration(snapshot.time_left_s)
    return f"rows · {snapshot.rows_per_s:.1f} rows/s · {left} left"


def engine_line(snapshot: Snapshot, columns: int) -> str:
    """Return the engine's state in one line of less than `columns` characters; failed rows are not cut."""
    failed = f"{snapshot.rows_failed:,} failed"
    parts = [failed, *engine_parts(snapshot.as_sample())]
    while len(parts) > 1 and len(_BETWEEN.join(parts)) >= columns:
        parts.pop()
    return _BETWEEN.join([*parts[1:], failed])[: columns - 1]


COLUMNS = 80
"""Width of a terminal that does not tell it."""
LINE_EVERY_S = 5.0
SAMPLE_S = 2.0
"""Seconds between two samples in the event log: 43,000 lines a day. A young run is sampled more often."""


class Display:
    """What shows the state of a run; this one shows nothing, as for the library and `--quiet`."""

    def begin(self, opening: Opening) -> None:
        """Show what the run is going to do; called once, before the first state."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the present state; called a few times a second."""

    def close(self) -> None:
        """Finish the output."""


class ProgressLog:
    """Shows every load sample on the display, and writes one to the event log every 2 s."""

    def __init__(self, progress: AttemptProgress, display: Display, events: EventLog, *, now: float) -> None:
        """Begin at `now`, in seconds of the monotonic clock."""
        self._progress = progress
        self._display = display
        self._events = events
        self._began = now
        self._next_sample = 0.0
        self._loads: Sequence[SchedulerLoad] = ()

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Show and write a load sample."""
        self._loads = loads
        snapshot = self._progress.polled(loads, now)
        self._display.show(snapshot)
        if now >= self._next_sample:
            self._next_sample = now + min(SAMPLE_S, (now - self._began) / 50)
            self._events.write("sample", **snapshot.as_sample())

    def finish(self, now: float) -> None:
        """Show and write the last state."""
        last = self._progress.snapshot(self._loads, now)
        self._display.show(last)
        self._events.write("sample", **last.as_sample())


class ProgressLines(Display):
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


class ProgressBar(Display):
    """Two lines on a terminal: tqdm's bar, and below it the engine."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._engine: Any = None

    def begin(self, opening: Opening) -> None:
        """Print what the run is going to do."""
        with contextlib.suppress(OSError):  # the terminal was closed
            print(*opening.lines(), sep="\n", file=self._stream, flush=True)

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar, and show the engine's state."""
        if self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415 - only where there is a terminal

            self._bar = tqdm(
                total=snapshot.rows_total, initial=snapshot.rows_done, file=self._stream, position=0,
                dynamic_ncols=True, desc="simulated " if snapshot.simulated else None,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}",
                unit=progress_text(snapshot),
            )  # fmt: skip
            self._engine = tqdm(file=self._stream, position=1, leave=False, bar_format="{desc}")
        self._bar.unit = progress_text(snapshot)
        line = engine_line(snapshot, _columns(self._stream))
        self._engine.set_description_str(line, refresh=False)
        self._bar.n, self._bar.total = snapshot.rows_done, snapshot.rows_total  # others may add rows
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.refresh()
            self._engine.refresh()

    def close(self) -> None:
        """Leave the bar's last state on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._engine.close()
                self._bar.close()


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal in characters; 80 where nobody knows it."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):  # no terminal any more, or never one
        return COLUMNS


def make_display(*, quiet: bool, stream: TextIO | None = None) -> Display:
    """Choose the display for a stream (standard error by default)."""
    stream = stream or sys.stderr
    if quiet:
        return Display()
    return ProgressBar(stream) if stream.isatty() else ProgressLines(stream)


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
        self._untold: Snapshot | None = None
        self._next = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Tell the present state, if the last call is old enough."""
        self._untold = snapshot
        if time.monotonic() >= self._next:
            self._tell()
            self._next = time.monotonic() + TIMING.progress

    def close(self) -> None:
        """Tell the last state."""
        self._tell()

    def _tell(self) -> None:
        snapshot, self._untold = self._untold, None
        if snapshot is None or self._listener is None:
            return
        try:
            left_s, total = snapshot.time_left_s, snapshot.rows_total or None
            self._listener(
                Progress(
                    rows_done=snapshot.rows_done,
                    rows_total=total,
                    rows_failed=snapshot.rows_failed,
                    rows_per_s=round(snapshot.rows_per_s, 2),
                    eta_s=None if left_s is None or total is None else round(left_s, 1),
                    output_tokens_per_s=round(snapshot.output_tokens_per_s, 1),
                    rows_in_flight=snapshot.in_flight,
                    simulated=snapshot.simulated,
                )
            )
        except Exception:  # the rows of a long run matter more than what is shown of it
            log.exception("on_progress failed: it is not called any more")
            self._listener = None


class AutoBar(Display):
    """tqdm's bar for programs: a widget in a notebook, else a line on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar."""
        if self._bar is None:
            from tqdm.auto import tqdm  # noqa: PLC0415 - only where a bar is asked for

            self._bar = tqdm(
                initial=snapshot.rows_done, total=snapshot.rows_total or None, unit="row",
                desc="simulated" if snapshot.simulated else None, dynamic_ncols=True,
            )  # fmt: skip
        self._bar.n, self._bar.total = snapshot.rows_done, snapshot.rows_total or None
        with contextlib.suppress(OSError):  # the terminal was closed
            self._bar.set_postfix({"failed": snapshot.rows_failed, "in flight": snapshot.in_flight})

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


class Displays(Display):
    """Several displays as one."""

    def __init__(self, displays: Sequence[Display]) -> None:
        self._displays = displays

    def begin(self, opening: Opening) -> None:
        """Show on all what the run is going to do."""
        for display in self._displays:
            display.begin(opening)

    def show(self, snapshot: Snapshot) -> None:
        """Show the present state on all."""
        for display in self._displays:
            display.show(snapshot)

    def close(self) -> None:
        """Finish all."""
        for display in self._displays:
            display.close()


def make_displays(*, progress: bool, on_progress: ProgressListener | None) -> Displays:
    """Return what shows a run to a program that asks for a bar, calls, both or neither.

    Raises JobError where `on_progress` cannot be called with a Progress.
    """
    if on_progress is not None and (not callable(on_progress) or inspect.iscoroutinefunction(on_progress)):
        raise JobError(
            f"on_progress: {on_progress!r} cannot be called",
            hint="give a plain function of one argument, a batchrunner.Progress",
        )
    calls = [ProgressCalls(on_progress)] if on_progress is not None else []
    return Displays([*([AutoBar()] if progress else []), *calls])
