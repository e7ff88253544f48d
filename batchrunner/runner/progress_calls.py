"""What the library shows of a run: a bar (`progress=True`), and calls of the program (`on_progress`)."""

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.progress import Snapshot
from batchrunner.runner.progress import Display
from batchrunner.runner.screen import Opening

log = logging.getLogger(__name__)


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


def progress_of(snapshot: Snapshot) -> Progress:
    """Return what a program is told of a snapshot."""
    left_s = snapshot.time_left_s
    return Progress(
        rows_done=snapshot.rows_done,
        rows_total=snapshot.rows_total or None,
        rows_failed=snapshot.rows_failed,
        rows_per_s=round(snapshot.rows_per_s, 2),
        eta_s=None if left_s is None or not snapshot.rows_total else round(left_s, 1),
        output_tokens_per_s=round(snapshot.output_tokens_per_s, 1),
        rows_in_flight=snapshot.in_flight,
        simulated=snapshot.simulated,
    )


class ProgressCalls:
    """Calls a program at most once a second, and once more at the end; in the thread of the run."""

    def __init__(self, listener: ProgressListener) -> None:
        self._listener: ProgressListener | None = listener
        self._untold: Snapshot | None = None
        self._next = 0.0

    def begin(self, opening: Opening) -> None:
        """Do nothing."""

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
            self._listener(progress_of(snapshot))
        except Exception:  # the rows of a long run matter more than what is shown of it
            log.exception("on_progress failed: it is not called any more")
            self._listener = None


class AutoBar:
    """tqdm's bar for programs: a widget in a notebook, else a line on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None

    def begin(self, opening: Opening) -> None:
        """Do nothing."""

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


class Displays:
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


def _not_a_listener(given: object) -> str | None:
    """Return why an object cannot be called with a Progress; None where it can."""
    if not callable(given):
        return "is no function"
    if inspect.iscoroutinefunction(given):
        return "is an asynchronous function"
    try:
        inspect.signature(given).bind(None)
    except TypeError:
        return "does not take one argument"
    except ValueError:  # some functions written in C do not tell their arguments
        return None
    return None


def make_displays(*, progress: bool, on_progress: ProgressListener | None) -> Displays:
    """Return what shows a run to a program that asks for a bar, calls, both or neither.

    Raises JobError where `on_progress` cannot be called with a Progress.
    """
    if on_progress is not None and (problem := _not_a_listener(on_progress)):
        raise JobError(
            f"on_progress: {on_progress!r} {problem}",
            hint="give a plain function of one argument, a batchrunner.Progress",
        )
    calls = [ProgressCalls(on_progress)] if on_progress is not None else []
    return Displays([*([AutoBar()] if progress else []), *calls])
