"""What a run shows while it goes on: a bar on a terminal, plain lines where there is none."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.dispatch.progress import AttemptProgress, Snapshot
from batchrunner.output.events import EventLog
from batchrunner.runner.screen import Opening, engine_line, progress_text

COLUMNS = 80
"""Width of a terminal that does not tell it."""
LINE_EVERY_S = 5.0
SAMPLE_S = 2.0
"""Seconds between two samples in the event log: 43,000 lines a day. A young run is sampled more often."""


class Display(Protocol):
    """What shows the state of a run."""

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


class NoDisplay:
    """Shows nothing: for the library and `--quiet`."""

    def begin(self, opening: Opening) -> None:
        """Do nothing."""

    def show(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ProgressLines:
    """A line every 5 s: for logs of batch systems."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def begin(self, opening: Opening) -> None:
        """Do nothing: the log says it."""

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
    """Two lines on a terminal: tqdm's bar, and below it the engine."""

    def __init__(self, stream: TextIO, *, colours: bool = False) -> None:
        self._stream = stream
        self._colours = colours
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
                colour="green" if self._colours else None,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}",
                unit=progress_text(snapshot),
            )  # fmt: skip
            self._engine = tqdm(file=self._stream, position=1, leave=False, bar_format="{desc}")
        self._bar.unit = progress_text(snapshot)
        line = engine_line(snapshot, _columns(self._stream), colours=self._colours)
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
        return NoDisplay()
    return ProgressBar(stream, colours=has_colours(stream)) if stream.isatty() else ProgressLines(stream)


def has_colours(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal whose user wants colours, see no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
