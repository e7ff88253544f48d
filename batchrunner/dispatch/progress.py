"""Computes the state of a run from load samples and answers, for the display, events and report.json."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from msgspec import UNSET

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import Backlog, RowSource
from batchrunner.dispatch.route import Routes
from batchrunner.engines.base import Engine
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.output.samples import BackgroundSample, RolloutSample, RunSample, SchedulerSample
from batchrunner.tuning.signals import Corner

if TYPE_CHECKING:
    from batchrunner.dispatch.concurrency.background import BackgroundController
    from batchrunner.dispatch.concurrency.law import Controller
    from batchrunner.dispatch.rollouts import Rollouts

REPORTED = frozenset({"recalled", "died", "hangs", "healed", "lost", "adapts", "adapted"})
"""Kinds of incidents that report.json lists. Other incidents are only in the event log."""
DOWN = frozenset({"died", "hangs", "lost", "adapts"})
"""Kinds of incidents after which a server answers no rows until the incident `back`."""
SPAN_S = 30.0
"""Seconds over which a rate is averaged."""
PACE_ROWS = 32
"""Minimum half-life, in rows, of the average time per row: a row counts half after this many later rows."""
PACE_ROUNDS = 4
"""Minimum half-life of the average time per row, as a multiple of the rows in flight."""
PACE_SHARE = 0.25
"""Minimum half-life of the average time per row, as a fraction of the rows that have ended. It makes the
average smooth in long runs."""
STOPPED_S = 30.0
"""Seconds without a load sample after which this process itself must have stood still: it was stopped
(Ctrl-Z, SIGSTOP), or its machine or container was suspended."""


CONTRADICTION = 0.5
"""The estimated time per row may be dropped if the measured time differs from it by more than this fraction.
The run must also be late or early by LATE_SHARE."""
LATE_SHARE = 0.05
"""The estimate of a run is dropped only if the run is late or early by more than this fraction of the
estimated run time. Less is normal, since a run begins slowly."""
CHANCE = 3.0
"""A deviation of the mean row time counts as chance up to this many standard errors. The standard deviation
of a single row's time is assumed to equal the mean."""


class Rates:
    """Rates of several counts over the last 30 s."""

    def __init__(self, now: float, counts: int) -> None:
        """Start at time `now` with as many zeros as there are `counts`."""
        self._points: deque[tuple[float, tuple[int, ...]]] = deque([(now, (0,) * counts)])

    def update(self, now: float, counts: tuple[int, ...]) -> list[float]:
        """Record the present values of the counts; return the rate of each, per second."""
        self._points.append((now, counts))
        # Keep one point that is at least SPAN_S old, so that the rate covers the whole span.
        while len(self._points) > 2 and self._points[1][0] <= now - SPAN_S:  # noqa: PLR2004
            self._points.popleft()
        then, counts_then = self._points[0]
        span = max(now - then, 1e-9)
        return [(count - before) / span for count, before in zip(counts, counts_then, strict=True)]


class TimeLeft:
    """Remaining time of a run, from the time per row of the rows that ended recently.

    Until enough rows have ended, an estimate of the run is used, if there is one. It is dropped as soon as
    the measured times contradict it.
    """

    def __init__(self, now: float, row_s: float | None = None) -> None:
        """Start without ended rows; `row_s` is the estimated time of a row in seconds."""
        self._rows = self._seconds = 0.0
        """Number of ended rows and their time in seconds; the older a row is, the less it counts."""
        self._done = 0.0
        self._began = now
        self._ended = now
        self._updated = now
        """Time of the last call of `update` or `stand_still`."""
        self._expected_s = row_s or 0.0
        # Weight of the estimated time per row, from 0 to 1. The measured time has the rest.
        self._trust = 1.0 if row_s else 0.0

    def stand_still(self, now: float) -> None:
        """Do not count the time since the last call, because no server was up or this process was stopped.

        Otherwise the time left would count down while no row can end, and rows would seem slow afterwards.
        """
        pause_s = now - self._updated
        self._began += pause_s
        self._ended += pause_s
        self._updated = now

    def update(self, now: float, done: float, in_flight: int, remaining: float) -> float | None:
        """Record the rows that ended so far; return the seconds until the remaining rows have ended.

        The done part of an open rollout counts in `done` as a fraction of a row, and not in `remaining`.
        Without an estimate, the result is None until as many rows have ended as are in flight, because quick
        rows end first. While no further row ends, the time counts down. It is None once it would be negative.
        """
        if now - self._updated > STOPPED_S:
            # Neither the time of the stop nor the rows that servers finished meanwhile say anything about the
            # pace.
            self.stand_still(now)
            self._done = max(self._done, done)
        self._updated = now
        # As long as the input is being read or sorted, the clock does not run.
        if not done and not in_flight:
            self._began = self._ended = now
        if done > self._done:
            self._update_pace(now, done, in_flight)
        total = done + remaining
        if self._trust and self._contradicts_estimate(now - self._began, done, in_flight, total):
            self._trust = 0.0
        if self._rows and done >= max(1, in_flight):
            # Average the estimated and the measured time per row, and subtract the time since the last row
            # ended.
            pace_s = self._seconds / self._rows
            row_s = self._trust * self._expected_s + (1 - self._trust) * pace_s
            left_s = remaining * row_s - (now - self._ended)
        elif self._trust:  # Only quick rows have ended, so only the estimate counts.
            left_s = total * self._expected_s - (now - self._began)
        else:
            return None
        return round(left_s, 1) if left_s >= 0 else None

    def _update_pace(self, now: float, done: float, in_flight: int) -> None:
        """Add the rows that ended since the last call to the average time per row; older rows count less."""
        ended = done - self._done
        half_life_rows = max(PACE_ROWS, PACE_ROUNDS * in_flight, PACE_SHARE * self._done)
        weight = 0.5 ** (ended / half_life_rows)
        self._rows = self._rows * weight + ended
        self._seconds = self._seconds * weight + now - self._ended
        self._done, self._ended = done, now
        # The more rows have ended, the less the estimate counts.
        self._trust *= weight

    def _contradicts_estimate(self, elapsed_s: float, done: float, in_flight: int, total: float) -> bool:
        """Tell whether rows are much slower or quicker than estimated, by more than chance explains.

        The run is late if it took longer than the estimate for all ended rows and all rows in flight. It is
        early if it took less than the estimate for the ended rows alone.
        """
        # A smaller difference than this is normal, however certain it is.
        least_difference_s = LATE_SHARE * total * self._expected_s
        # By the estimate, the ended rows and the rows in flight take at most this time.
        latest_s = (done + in_flight) * self._expected_s
        is_late = elapsed_s > max(latest_s * _tolerance(done + in_flight), latest_s + least_difference_s)
        if is_late or done < max(1, in_flight):
            return is_late  # As long as only the quickest rows have ended, the run cannot count as early.
        expected_s = done * self._expected_s
        return elapsed_s < min(expected_s / _tolerance(done, in_flight), expected_s - least_difference_s)


def _tolerance(done: float, in_flight: int = 0) -> float:
    """Return the factor by which the mean time of the ended rows may differ from the true mean.

    Rows in flight widen the tolerance, because time was spent on them although they have not ended.
    """
    done = max(1.0, done)
    return 1 + max(CONTRADICTION, CHANCE / math.sqrt(done), in_flight / done)


class LoadSummary:
    """Averages of the schedulers' load over a run, such as the share of time with a healthy queue.

    Only a scheduler's steady time counts. It begins when requests first wait at the scheduler or its KV pool
    is full, and ends when no row remains to be sent.
    """

    def __init__(self, concurrency: ConcurrencyLimits) -> None:
        self._concurrency = concurrency
        self._last: float | None = None
        # Sum of each value times the seconds for which it lasted.
        self._sums: defaultdict[str, float] = defaultdict(float)

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Add a load sample, weighted by the seconds since the last sample.

        For a background run, which yields to a server's users, the time is divided between the users and the
        run.
        """
        span_s = 0.0 if self._last is None else now - self._last
        self._last = now
        schedulers = self._concurrency.schedulers
        is_tail = any(scheduler.controller.state == "tail" for scheduler in schedulers.values())
        self._sums["all"] += span_s
        self._sums["tail"] += span_s * is_tail
        for load in loads:
            controller = schedulers[load.scheduler].controller
            if self._concurrency.is_background:
                self._add_background(load, cast("BackgroundController", controller), span_s)
            elif controller.state not in {"start", "tail"}:
                self._add_steady(load, controller, span_s)

    def _add_background(self, load: SchedulerLoad, controller: BackgroundController, span_s: float) -> None:
        """Split a time span of a shared server between its users and this run, by their numbers of requests.

        Time without any requests belongs to neither.
        """
        requests = load.running + load.queue
        users_share = min(1.0, controller.users / max(1, requests))
        self._sums["users"] += span_s * users_share
        if requests:
            self._sums["ours"] += span_s * (1 - users_share)
        self._sums["served"] += span_s

    def _add_steady(self, load: SchedulerLoad, controller: Controller, span_s: float) -> None:
        """Add a load that lasted for `span_s` seconds to the sums of its scheduler."""
        sums, band = self._sums, controller.band
        sums["steady"] += span_s
        sums["in_band"] += span_s * (band.low <= load.queue <= band.high)
        sums["empty"] += span_s * (load.queue == 0)
        sums["usage"] += span_s * load.token_usage
        sums["queue"] += span_s * load.queue
        # `corner` is the scheduler's load state, such as FULL. The report has the share of time of each
        # state.
        if controller.corner is not None:
            sums[controller.corner] += span_s

    @property
    def background(self) -> dict[str, Any]:
        """The fractions of a shared server's time that this run and the users took, and the preempted rows.

        Empty unless the run is a background run, which yields to the server's users.
        """
        served_s = self._sums["served"]
        if not served_s:
            return {}
        return {
            "our_share": round(self._sums["ours"] / served_s, 4),
            "users_share": round(self._sums["users"] / served_s, 4),
            "rows_given_back": self._concurrency.returned_rows,
            "tokens_lost": self._concurrency.tokens_lost,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `load`. Shares are fractions of the steady time, None if there was none."""
        steady_s = self._sums["steady"]

        def share(name: str, whole_s: float = steady_s) -> float | None:
            return round(self._sums[name] / whole_s, 4) if whole_s else None

        return {
            "background": self.background or None,
            "steady_s": round(steady_s, 1),
            "in_band_share": share("in_band"),
            "empty_queue_share": share("empty"),
            "corner_shares": {str(corner): share(corner) for corner in Corner},
            "mean_queue": share("queue"),
            "mean_token_usage": share("usage"),
            "tail_share": share("tail", self._sums["all"]),
            "retractions": self._concurrency.retractions,
        }


@dataclass
class AttemptProgress:
    """Progress of an attempt (one start of a run), for the display and for report.json."""

    rows: RowSource
    done: DoneRows
    counts: RowCounts
    routes: Routes
    concurrency: ConcurrencyLimits
    backlog: Backlog
    engine: Engine
    events: EventLog
    began: float
    """Time of this start of the run, in seconds of the monotonic clock."""
    task: str
    rollouts: Rollouts | None = None
    """Multi-turn rollouts of the run; None if each row is one request."""
    row_s: float | None = None
    """Estimated seconds per row; None without an estimate of the run."""

    def __post_init__(self) -> None:
        self.load = LoadSummary(self.concurrency)
        self._rates = Rates(self.began, counts=4)
        self._time_left = TimeLeft(self.began, self.row_s)
        self._token_rates = defaultdict[str, Rates](lambda: Rates(self.began, counts=1))  # by scheduler
        self._down: set[str] = set()
        """Names of the servers that answer no rows at present."""
        self.incidents: list[dict[str, Any]] = []
        """Deaths, hangs and healing of the engine's servers, for report.json."""

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> RunSample:
        """Record a load sample; return the state of the run."""
        self.load.polled(loads, now)
        self.write_incidents()
        return self.sample(loads, now)

    def write_incidents(self) -> None:
        """Write what happened to the engine's servers since the last call to the event log."""
        for incident in self.engine.incidents():
            values = {"who": incident.who, "why": incident.why, **incident.facts}
            self.events.write(f"engine_{incident.what}", **values)
            if incident.what in DOWN:
                self._down.add(incident.who)
            elif incident.what == "back":
                self._down.discard(incident.who)
            if incident.what in REPORTED:
                self.incidents.append({"what": incident.what, **values})

    def sample(self, loads: Sequence[SchedulerLoad], now: float) -> RunSample:
        """Return the state of the run; `loads` is the newest load sample."""
        counts, concurrency = self.counts, self.concurrency
        rows_s, output_s, prompt_s, cached_s = self._rates.update(
            now, (counts.own, counts.output_tokens, counts.prompt_tokens, counts.cached_tokens)
        )
        total, done = self.rows.total, len(self.done) + counts.done
        stopping, in_flight = self.backlog.is_stopping, self.routes.in_flight
        # Rows of rollouts end in waves, whereas their requests are answered steadily.
        begun = self.rollouts.done_of_open if self.rollouts is not None else 0.0
        if self._down and len(self._down) >= len([*self.routes]):
            self._time_left.stand_still(now)
        left_s = self._time_left.update(now, counts.own + begun, in_flight, total - done - begun)
        all_counts = self.done.counts_of_failed, self.done.counts_of_answered, counts
        background = self.load.background
        bands = {}
        if not background:
            for name, scheduler in concurrency.schedulers.items():
                bands[name] = (scheduler.controller.band.low, scheduler.controller.band.high)
        return RunSample(
            rows_total=total,
            rows_done=done,
            rows_failed=sum(part.failed for part in all_counts),
            rows_reused=sum(part.reused for part in all_counts),
            rows_per_s=round(rows_s, 2),
            time_left_s=left_s if total and not stopping else None,
            stopping=stopping,
            output_tokens_per_s=round(output_s, 1),
            prompt_tokens_per_s=round(prompt_s, 1),
            cached_tokens_per_s=round(cached_s, 1),
            output_tokens=counts.output_tokens,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            tokens=sum(part.prompt_tokens + part.output_tokens for part in all_counts),
            window=self.routes.window,
            in_flight=in_flight,
            resting=self.backlog.waiting,
            unsent=self.backlog.unsent,
            retractions=concurrency.retractions,
            signals=self._signals(loads, now),
            bands=bands,
            task=self.task,
            simulated=concurrency.info.simulated,
            rollouts=RolloutSample(**self.rollouts.state()) if self.rollouts is not None else UNSET,
            background=BackgroundSample(**background) if background else UNSET,
        )

    def _signals(self, loads: Sequence[SchedulerLoad], now: float) -> list[SchedulerSample]:
        """Return each scheduler's load, concurrency limit and load state.

        The token rate and the retractions are counted by server. They are left out if a server has several
        schedulers.
        """
        concurrency = self.concurrency
        samples = {load.scheduler: SchedulerSample.of(load) for load in loads}
        for name, scheduler in concurrency.schedulers.items():
            sample, route = samples.get(name), scheduler.route
            is_alone = route.only_scheduler is scheduler
            tokens_per_s = 0.0
            # Update the rate at each call, even without a new load sample.
            if is_alone:
                (tokens_per_s,) = self._token_rates[name].update(now, (route.ended.output_tokens,))
            if sample is None:
                continue
            if concurrency.fixed is None:
                sample.window = min(scheduler.controller.window, concurrency.window_of(route))
            if scheduler.controller.corner is not None:
                sample.corner = str(scheduler.controller.corner)
            if is_alone:
                sample.output_tokens_per_s = round(tokens_per_s, 1)
                sample.retractions = route.ended.retractions
        return [*samples.values()]
