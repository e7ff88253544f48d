"""Displays of a run in progress: a progress bar, log lines, or calls of a function of the program."""

import contextlib
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from batchrunner.core.console import background_line, duration, tell
from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from batchrunner.job.tasks import GENERATE
from batchrunner.output.samples import RolloutSample, RunSample
from batchrunner.tuning.signals import Corner

log = logging.getLogger(__name__)

BAR_FORMAT = "{percentage:3.0f}%|{bar:10}| {elapsed} {desc}"
"""Format of tqdm's bar. The bar is short, because the state of the run must fit into the same line."""
LINE_EVERY_S = 5.0
"""Seconds between two lines of progress in the log of a batch job."""


def sample_line(sample: RunSample) -> str:
    """Return the state of a run as one line.

    The most important facts come first, because a terminal may cut the end off.
    """
    total = sample.rows_total
    parts = [f"{sample.rows_done:,}{f'/{total:,}' if total else ''} rows"]
    if sample.stopping:
        parts.append(f"stopping: {sample.in_flight:,} in flight")
    else:
        parts.append(f"{sample.rows_per_s:,.1f} rows/s")
    if sample.time_left_s is not None:
        parts.append(f"{duration(sample.time_left_s)} left")
    if sample.rows_reused:
        parts.append(f"{sample.rows_reused:,} reused")
    parts.append(f"{sample.rows_failed:,} failed")
    parts += _load_parts(sample)
    if sample.background:
        parts.append(background_line(msgspec.structs.asdict(sample.background)))
    if sample.prompt_tokens_per_s > 0:
        parts.append(f"cache {min(1.0, sample.cached_tokens_per_s / sample.prompt_tokens_per_s):.0%}")
    if sample.rollouts:
        parts += _rollout_parts(sample.rollouts)
    if sample.resting:
        parts.append(f"{sample.resting:,} to retry")
    parts.append(f"{sample.in_flight:,}/{sample.window:,} in flight")
    if sample.retractions:
        parts.append(f"{sample.retractions:,} retracted")
    if sample.task == GENERATE:
        parts.append(f"{sample.output_tokens_per_s:,.0f} output tok/s")
    else:
        parts.append(f"{sample.prompt_tokens_per_s:,.0f} prompt tok/s")
    return ("[simulated] " if sample.simulated else "") + ", ".join(parts)


def _load_parts(sample: RunSample) -> list[str]:
    """Return the engine's load and its schedulers' load states, as parts of the progress line.

    `#running-req` and `#queue-req` are sums over the schedulers. The range in brackets is the healthy length
    of a scheduler's queue.
    """
    loads = sample.signals
    if not loads:
        return ["load unknown"]
    healthy = ""
    # The range of the first scheduler stands for all: they are usually alike.
    if loads[0].scheduler in sample.bands:
        low, high = sample.bands[loads[0].scheduler]
        healthy = f" ({low:,}-{high:,}{' each' if len(loads) > 1 else ''})"
    usages = sorted({f"{load.token_usage:.2f}" for load in loads})
    usage = usages[0] if len(usages) == 1 else f"{usages[0]}-{usages[-1]}"
    parts = [
        f"#running-req {sum(load.running for load in loads):,}",
        f"#queue-req {sum(load.queue for load in loads):,}{healthy}",
        f"usage {usage}",
    ]
    # The event log may come from another version of batchrunner, with load states that `Corner` lacks.
    load_states = Counter(load.corner for load in loads if load.corner in set(Corner))
    for load_state, count in load_states.most_common():
        words = Corner(load_state).words
        parts.append(words if count == len(loads) else f"{words} ({count} of {len(loads)})")
    return parts


def _rollout_parts(rollouts: RolloutSample) -> list[str]:
    """Return the state of the multi-turn rollouts, as parts of the progress line."""
    waiting = f"{rollouts.waiting_for_tools:,} wait for tools"
    if rollouts.blocked:
        waiting = f"{rollouts.blocked:,} wait for a rollout that blocks their process"
    return [f"{rollouts.open:,} rows open ({waiting})", f"{rollouts.turns:,} turns"]


class Display(ABC):
    """Shows the state of a run."""

    @abstractmethod
    def show(self, sample: RunSample) -> None:
        """Show the present state of the run. Called a few times a second."""

    def close(self) -> None:  # noqa: B027 - a display of lines has nothing to close
        """End the progress line on the terminal; nothing is shown afterwards."""


class ProgressLines(Display):
    """Prints a line on standard error every 5 s and when the run begins to stop, for logs of batch jobs."""

    _shown: tuple[float, bool] | None = None

    def show(self, sample: RunSample) -> None:
        """Print a line if the last one is 5 s old, or if the run has begun to stop."""
        now = time.monotonic() // LINE_EVERY_S, sample.stopping
        if now != self._shown:
            self._shown = now
            tell(f"{time.strftime('%H:%M:%S')} {sample_line(sample)}")


class ProgressBar(Display):
    """Shows a progress bar of tqdm: a widget in a notebook, otherwise a line on standard error."""

    _bar: Any = None

    def show(self, sample: RunSample) -> None:
        """Move the bar, and show the state of the run next to it."""
        if self._bar is None:
            from tqdm.auto import tqdm  # noqa: PLC0415 - only where a bar is asked for

            bar = BAR_FORMAT if sample.rows_total else "{elapsed} {desc}"
            # The delay keeps tqdm from printing a bar before its description is set.
            self._bar = tqdm(dynamic_ncols=True, bar_format=bar, delay=1e-9)
        # The total may change during the run, as other workers may add rows.
        self._bar.n, self._bar.total = sample.rows_done, sample.rows_total
        with contextlib.suppress(OSError):  # the terminal may have been closed
            self._bar.set_description_str(sample_line(sample))

    def close(self) -> None:
        """End the bar, with the last state left on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run at one moment, for `on_progress`."""

    rows_done: int
    """Number of rows that have ended, including failed rows and rows of earlier starts."""
    rows_total: int | None
    """Number of rows of the run; None if `stream` reads an iterator."""
    rows_failed: int
    """Number of rows in `rows_done` that ended with an error."""
    rows_per_s: float
    """Rows that ended per second, over the last 30 s."""
    eta_s: float | None
    """Estimated seconds to the end; None while unknown."""
    output_tokens_per_s: float
    """Output tokens per second, over the last 30 s."""
    rows_in_flight: int
    """Number of rows that were sent to the engine and have not ended."""
    simulated: bool
    """Whether the engine is simulated, so that the answers are made up."""


ProgressListener = Callable[[Progress], object]
"""The function that a program passes as `on_progress`."""


@dataclass
class ProgressCalls(Display):
    """Calls the program's function at most once a second, and once at the end, in the thread of the run."""

    _listener: ProgressListener | None
    """The program's function; None once it has raised an exception."""
    _pending: RunSample | None = None
    """The newest state, if the function was not called with it yet."""
    _next_at: float = 0.0
    """Time of the next call, on the monotonic clock."""

    def show(self, sample: RunSample) -> None:
        """Call the function with the present state, if the last call is old enough."""
        self._pending = sample
        if time.monotonic() >= self._next_at:
            self._call()
            self._next_at = time.monotonic() + TIMING.progress

    def close(self) -> None:
        """Call the function with the last state."""
        self._call()

    def _call(self) -> None:
        """Call the function with the newest state, unless it was called with that state before."""
        sample, self._pending = self._pending, None
        if sample is None or self._listener is None:
            return
        try:
            self._listener(
                Progress(
                    rows_done=sample.rows_done,
                    rows_total=sample.rows_total or None,
                    rows_failed=sample.rows_failed,
                    rows_per_s=sample.rows_per_s,
                    eta_s=sample.time_left_s,
                    output_tokens_per_s=sample.output_tokens_per_s,
                    rows_in_flight=sample.in_flight,
                    simulated=sample.simulated,
                )
            )
        except Exception:  # an error of a display must not end a long run
            log.exception("on_progress raised an exception: the function is not called any more")
            self._listener = None


def make_displays(*, progress: bool, on_progress: ProgressListener | None) -> list[Display]:
    """Return the displays of a run: a progress bar, calls of the function `on_progress`, both or neither.

    Raises JobError if `on_progress` is asynchronous, because nothing would await it.
    """
    if inspect.iscoroutinefunction(on_progress):
        raise JobError(
            "on_progress: an `async def` function cannot be used, because nothing would await its calls",
            hint="give a plain function",
        )
    displays: list[Display] = [ProgressBar()] if progress else []
    return displays if on_progress is None else [*displays, ProgressCalls(on_progress)]
