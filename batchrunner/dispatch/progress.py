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
    from batchrunner.dispatch.rollouts import Rollouts

REPORTED = frozenset({"recalled", "died", "hangs", "healed", "lost", "adapts", "adapted"})
"""Kinds of incidents that report.json lists; changes of a gateway's workers are in the event log only."""
SPAN_S = 30.0
"""Seconds over which a rate is averaged."""
PACE_ROWS, PACE_ROUNDS, PACE_SHARE = 32, 4, 0.25
"""The pace is an average in which recent rows count more: after as many further rows as the half-life, a row
counts half. The half-life is the largest of PACE_ROWS rows, PACE_ROUNDS times the rows in flight, and
PACE_SHARE of the rows that have ended before. The last makes the pace smooth in long runs."""


CONTRADICTION, LATE_SHARE = 0.5, 0.05
"""An estimate is dropped if two things hold. The mean time of a row differs from the estimate by at least the
fraction CONTRADICTION, and the run is late or early by more than the fraction LATE_SHARE of its estimate. One
of these alone is normal, since a run begins slowly."""
CHANCE = 3.0
"""A deviation of the mean row time by up to this many standard errors counts as chance. The standard
deviation of a single row's time is assumed to equal the mean."""


class Rates:
    """Rates of several counts over the last 30 s."""

    def __init__(self, now: float, counts: int) -> None:
        """Start with `counts` counts that are all 0 at `now`."""
        self._points: deque[tuple[float, tuple[int, ...]]] = deque([(now, (0,) * counts)])

    def update(self, now: float, counts: tuple[int, ...]) -> list[float]:
        """Add the counts so far; return the rate of each, per second."""
        self._points.append((now, counts))
        while len(self._points) > 2 and self._points[1][0] <= now - SPAN_S:  # noqa: PLR2004
            self._points.popleft()
        then, counts_then = self._points[0]
        span = max(now - then, 1e-9)
        return [(count - before) / span for count, before in zip(counts, counts_then, strict=True)]


class TimeLeft:
    """Remaining time of an attempt, by the pace of the rows that ended recently.

    Until enough rows have ended, the time comes from an estimate of the run, if there is one. The estimate is
    dropped as soon as the rows contradict it.
    """

    def __init__(self, now: float, row_s: float | None = None) -> None:
        """Start without ended rows; `row_s` is the estimated time of a row in seconds."""
        self._rows = self._seconds = 0.0  # the older a row, the less it counts
        self._done, self._began, self._ended = 0, now, now
        self._expected_s, self._trust = row_s or 0.0, 1.0 if row_s else 0.0

    def update(self, now: float, done: int, in_flight: int, remaining: int) -> float | None:
        """Record the rows that ended so far; return the seconds until the remaining rows have ended.

        Without an estimate the time is None until as many rows have ended as are in flight, because the first
        rows to end are the quick ones. While no further row ends, the time counts down. It is None once it
        would be negative.
        """
        if not done and not in_flight:  # the input is still being read or sorted
            self._began = self._ended = now
        if ended := done - self._done:
            half_life = max(PACE_ROWS, PACE_ROUNDS * in_flight, PACE_SHARE * self._done)
            weight = 0.5 ** (ended / half_life)
            self._rows = self._rows * weight + ended
            self._seconds = self._seconds * weight + now - self._ended
            self._done, self._ended = done, now
            self._trust *= weight
        if self._trust and self._contradicts_estimate(now - self._began, done, in_flight, done + remaining):
            self._trust = 0.0
        if done >= max(1, in_flight):
            row_s = self._trust * self._expected_s + (1 - self._trust) * self._seconds / self._rows
            left_s = remaining * row_s - (now - self._ended)
        elif self._trust:
            left_s = (done + remaining) * self._expected_s - (now - self._began)
        else:
            return None
        return round(left_s, 1) if left_s >= 0 else None

    def _contradicts_estimate(self, elapsed_s: float, done: int, in_flight: int, total: int) -> bool:
        """Tell whether rows are much slower or quicker than estimated, and by more than chance explains."""
        material_s = LATE_SHARE * total * self._expected_s
        # By the estimate, all ended rows and all rows in flight would have ended by this time.
        latest_s = (done + in_flight) * self._expected_s
        is_late = elapsed_s > max(latest_s * _tolerance(done + in_flight), latest_s + material_s)
        if done < max(1, in_flight):  # the first rows to end are the quick ones
            return is_late
        expected_s = done * self._expected_s
        is_early = elapsed_s < min(expected_s / _tolerance(done, in_flight), expected_s - material_s)
        return is_late or is_early


def _tolerance(done: int, in_flight: int = 0) -> float:
    """Return the factor by which the mean time of the rows that ended may differ from the true mean.

    Rows in flight add to the difference: time was spent on them, and they are not among the ended rows.
    """
    done = max(1, done)
    return 1 + max(CONTRADICTION, CHANCE / math.sqrt(done), in_flight / done)


class LoadSummary:
    """How healthy the queues were during the run.

    A scheduler's steady time begins when its window leaves the state `start`, and ends with the state `tail`.
    """

    def __init__(self, concurrency: ConcurrencyLimits) -> None:
        self._concurrency = concurrency
        self._last: float | None = None
        self._sums: defaultdict[str, float] = defaultdict(float)  # sums of values times seconds

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Add a load sample, weighted by the time since the last one."""
        span = 0.0 if self._last is None else now - self._last
        self._last = now
        sums, schedulers = self._sums, self._concurrency.schedulers
        sums["all"] += span
        sums["tail"] += span * any(scheduler.controller.state == "tail" for scheduler in schedulers.values())
        for load in loads:
            controller = schedulers[load.scheduler].controller
            if self._concurrency.is_background:
                total = load.running + load.queue
                users = min(1.0, cast("BackgroundController", controller).users / max(1, total))
                sums["users"] += span * users
                sums["ours"] += span * (1 - users) * bool(total)
                sums["served"] += span
                continue
            if controller.state in {"start", "tail"}:
                continue
            band = controller.band
            sums["steady"] += span
            sums["in_band"] += span * (band.low <= load.queue <= band.high)
            sums["empty"] += span * (load.queue == 0)
            sums["usage"] += span * load.token_usage
            sums["queue"] += span * load.queue
            if controller.corner is not None:
                sums[controller.corner] += span

    @property
    def background(self) -> dict[str, Any]:
        """Our share and the users' share of a live server's time, and the preempted rows.

        Empty if the run is not a background run.
        """
        whole = self._sums["served"]
        if not whole:
            return {}
        return {
            "our_share": round(self._sums["ours"] / whole, 4),
            "users_share": round(self._sums["users"] / whole, 4),
            "rows_given_back": self._concurrency.returned_rows,
            "tokens_lost": self._concurrency.tokens_lost,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `load`; shares are of steady time, None if there was none."""
        steady = self._sums["steady"]

        def share(name: str, whole: float = steady) -> float | None:
            return round(self._sums[name] / whole, 4) if whole else None

        return {
            "background": self.background or None,
            "steady_s": round(steady, 1),
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
    """Progress of an attempt: builds samples of its state, and report.json's `load` and `incidents`."""

    rows: RowSource
    done: DoneRows
    """Rows that ended in earlier attempts."""
    counts: RowCounts
    """Counts of the rows and tokens of this attempt."""
    routes: Routes
    concurrency: ConcurrencyLimits
    backlog: Backlog
    engine: Engine
    events: EventLog
    began: float
    """Start of the attempt, in seconds of the monotonic clock."""
    task: str
    """Task of the job."""
    rollouts: Rollouts | None = None
    """Rollouts of the attempt; None if each row is one request."""
    row_s: float | None = None
    """Estimated seconds per row; None without an estimate of the run."""

    def __post_init__(self) -> None:
        """Count nothing yet."""
        self.load = LoadSummary(self.concurrency)
        self._rates = Rates(self.began, counts=4)
        self._time_left = TimeLeft(self.began, self.row_s)
        self._token_rates = defaultdict[str, Rates](lambda: Rates(self.began, counts=1))  # by scheduler
        self.incidents: list[dict[str, Any]] = []
        """Deaths, hangs and healing of the engine's servers, for report.json."""

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> RunSample:
        """Take a load sample; return the state of the run."""
        self.load.polled(loads, now)
        self.write_incidents()
        return self.sample(loads, now)

    def write_incidents(self) -> None:
        """Write the incidents of the engine's servers since the last call to the event log."""
        for incident in self.engine.incidents():
            values = {"who": incident.who, "why": incident.why, **incident.facts}
            self.events.write(f"engine_{incident.what}", **values)
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
        left_s = self._time_left.update(now, counts.own, in_flight, total - done)
        earlier = self.done.counts_of_failed, self.done.counts_of_answered
        background = self.load.background
        bands = {}
        if not background:
            for name, scheduler in concurrency.schedulers.items():
                bands[name] = (scheduler.controller.band.low, scheduler.controller.band.high)
        return RunSample(
            rows_total=total,
            rows_done=done,
            rows_failed=sum(part.failed for part in earlier) + counts.failed,
            rows_reused=sum(part.reused for part in earlier) + counts.reused,
            rows_per_s=round(rows_s, 2),
            time_left_s=left_s if total and not stopping else None,
            stopping=stopping,
            output_tokens_per_s=round(output_s, 1),
            prompt_tokens_per_s=round(prompt_s, 1),
            cached_tokens_per_s=round(cached_s, 1),
            output_tokens=counts.output_tokens,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
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
        """Return each scheduler's load, window and load state.

        If the route of a scheduler has no other scheduler, its token rate and retractions are included.
        """
        concurrency = self.concurrency
        samples = {load.scheduler: SchedulerSample.of(load) for load in loads}
        for name, scheduler in concurrency.schedulers.items():
            sample, route = samples.get(name), scheduler.route
            is_alone = route.only_scheduler is scheduler
            tokens_s = (
                self._token_rates[name].update(now, (route.ended.output_tokens,))[0] if is_alone else 0.0
            )
            if sample is None:
                continue
            if concurrency.fixed is None:
                sample.window = min(scheduler.controller.window, concurrency.window_of(route))
            if scheduler.controller.corner is not None:
                sample.corner = str(scheduler.controller.corner)
            if is_alone:
                sample.output_tokens_per_s = round(tokens_s, 1)
                sample.retractions = route.ended.retractions
        return [*samples.values()]
