"""The state of a run, by the load samples and the answers: for the display, the event log and report.json."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchrunner.core.engine_info import Corner, SchedulerLoad
from batchrunner.dispatch.bundles import BundleTotals
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import Backlog, RowSource, Slots
from batchrunner.engines.base import Engine
from batchrunner.job.tasks import GENERATE
from batchrunner.output.counts import RowCounts
from batchrunner.output.events import EventLog
from batchrunner.output.resume import DoneRows
from batchrunner.report.report import duration

MOST_NAMED = 8
"""Schedulers whose figures are shown one by one; of more, the sum and the range."""
MOST_POINTS = 200
"""Points of the window over time; with more, every second one is dropped."""
REPORTED = frozenset({"recalled", "died", "hangs", "healed", "lost"})
"""Kinds of incidents that report.json lists; changes of a gateway's workers are in the event log only."""
SPAN_S = 30.0
"""Seconds over which a rate is taken."""


class Rates:
    """Rates of several counts over the last 30 s."""

    def __init__(self, now: float, counts: int) -> None:
        """There are so many `counts`, all of them 0 now."""
        self._points: deque[tuple[float, tuple[int, ...]]] = deque([(now, (0,) * counts)])

    def update(self, now: float, *counts: int) -> list[float]:
        """Add the counts so far; return the rate of each, per second."""
        self._points.append((now, counts))
        while len(self._points) > 2 and self._points[1][0] <= now - SPAN_S:  # noqa: PLR2004
            self._points.popleft()
        then, counts_then = self._points[0]
        span = max(now - then, 1e-9)
        return [(count - before) / span for count, before in zip(counts, counts_then, strict=True)]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment."""

    rows_total: int
    rows_done: int
    """Rows that ended in this and earlier attempts, failed ones included."""
    rows_failed: int
    rows_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    """Prompt tokens a second that came from the prefix cache."""
    window: int
    """Slots of all routes."""
    in_flight: int
    waiting: int
    """Rows that wait for another attempt."""
    retractions: int
    loads: tuple[SchedulerLoad, ...]
    bands: dict[str, tuple[int, int]]
    """Healthy `#queue-req` of each scheduler, by its name."""
    by_scheduler: dict[str, dict[str, Any]]
    """Window of each scheduler and, if known, its corner, its output tokens a second and its retractions."""
    simulated: bool
    rows_per_request: float = 0.0
    """Rows that shared a request on average, over the last 30 s; 0 before the first request."""
    output_tokens: int = 0
    """Generated tokens of this attempt so far."""
    prompt_tokens: int = 0
    """Prompt tokens of this attempt so far."""
    cached_tokens: int = 0
    """Those of `prompt_tokens` that came from the prefix cache."""
    task: str = GENERATE
    """`task` of the job."""

    @property
    def time_left_s(self) -> float | None:
        """Seconds to the end at the present rate; None before there is a rate."""
        left = self.rows_total - self.rows_done
        return left / self.rows_per_s if self.rows_per_s > 0 else None

    def line(self) -> str:
        """Return the state in one line."""
        return f"{'[simulated] ' if self.simulated else ''}{sample_line(self.as_sample())}"

    def as_sample(self) -> dict[str, Any]:
        """Return the values of a `sample` event."""
        return {
            "rows_total": self.rows_total,
            "rows_done": self.rows_done,
            "rows_failed": self.rows_failed,
            "rows_per_s": round(self.rows_per_s, 2),
            "output_tokens_per_s": round(self.output_tokens_per_s, 1),
            "prompt_tokens_per_s": round(self.prompt_tokens_per_s, 1),
            "cached_tokens_per_s": round(self.cached_tokens_per_s, 1),
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "rows_per_request": round(self.rows_per_request, 2),
            "window": self.window,
            "in_flight": self.in_flight,
            "resting": self.waiting,
            "retractions": self.retractions,
            "signals": [asdict(load) | self.by_scheduler.get(load.scheduler, {}) for load in self.loads],
            "bands": self.bands,
            "task": self.task,
        }


def sample_line(sample: Mapping[str, Any]) -> str:
    """Return a `sample` event in one line."""
    rate, left = sample["rows_per_s"], sample["rows_total"] - sample["rows_done"]
    return (
        f"{sample['rows_done']}/{sample['rows_total']} rows, {rate:.1f} rows/s, "
        f"{', '.join(engine_parts(sample))}, {sample['rows_failed']} failed, "
        f"{duration(left / rate) if rate else '?'} left"
    )


def engine_parts(sample: Mapping[str, Any]) -> list[str]:
    """Return the engine's state in a `sample` event, the most important part first.

    `#running-req` and `#queue-req` are sums over the schedulers; the queue's band is that of each.
    """
    loads = sample["signals"]
    parts = ["load unknown"]
    if loads:
        band = sample["bands"].get(loads[0]["scheduler"])
        each = " each" if len(loads) > 1 else ""
        healthy = f" ({band[0]:,}-{band[1]:,}{each})" if band else ""
        shares = sorted({f"{load['token_usage']:.2f}" for load in loads})
        parts = [
            f"#running-req {sum(load['running'] for load in loads):,}",
            f"#queue-req {sum(load['queue'] for load in loads):,}{healthy}",
            f"usage {'-'.join(dict.fromkeys((shares[0], shares[-1])))}",
        ]
        counts = Counter(load["corner"] for load in loads if load.get("corner") in set(Corner))
        for corner, count in counts.most_common():
            some = "" if count == len(loads) else f" ({count} of {len(loads)})"
            parts.append(f"{Corner(corner).words}{some}")
    if sample["prompt_tokens_per_s"] > 0:
        parts.append(f"cache {min(1.0, sample['cached_tokens_per_s'] / sample['prompt_tokens_per_s']):.0%}")
    if sample["resting"]:
        parts.append(f"{sample['resting']:,} to retry")
    parts.append(f"{sample['in_flight']:,}/{sample['window']:,} in flight")
    if sample["retractions"]:
        parts.append(f"{sample['retractions']:,} retracted")
    counted = "output" if sample["task"] == GENERATE else "prompt"
    return [*parts, f"{sample[f'{counted}_tokens_per_s']:,.0f} {counted} tok/s"]


class LoadSummary:
    """How healthy the queues were during the run.

    Steady time begins for a scheduler when its window leaves the state `start`, and ends with the tail.
    """

    def __init__(self, limits: ConcurrencyLimits, slots: Slots) -> None:
        self._limits = limits
        self._slots = slots
        self._last: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._corners: defaultdict[str, float] = defaultdict(float)
        self._usage = 0.0
        self._queue = 0.0
        self._running: defaultdict[str, float] = defaultdict(float)
        self._points: list[tuple[float, int]] = []
        self._began = 0.0
        self._point_every_s = 0.0
        self._window_min: int | None = None
        self._window_max: int | None = None

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> None:
        """Add a sample, for the time since the one before."""
        if self._last is None:
            self._last = self._began = now
        span, self._last = now - self._last, now
        self._seconds["all"] += span
        self._add_point(now, self._slots.window)
        states, bands, corners = self._limits.states, self._limits.bands, self._limits.corners
        if "tail" in states.values():
            self._seconds["tail"] += span
        for load in loads:
            if states.get(load.scheduler) in {None, "start", "tail"}:
                continue
            band = bands[load.scheduler]
            self._seconds["steady"] += span
            self._seconds["in_band"] += span * (band.low <= load.queue <= band.high)
            self._seconds["empty"] += span * (load.queue == 0)
            if load.scheduler in corners:
                self._corners[corners[load.scheduler]] += span
            self._usage += span * load.token_usage
            self._queue += span * load.queue
            self._running[load.scheduler] += span * load.running

    def as_dict(self, *, retractions: int) -> dict[str, Any]:
        """Return report.json's `load`; shares are of steady time, None if there was none."""
        steady = self._seconds["steady"]

        def share(value: float, whole: float) -> float | None:
            return round(value / whole, 4) if whole else None

        return {
            "steady_s": round(steady, 1),
            "in_band_share": share(self._seconds["in_band"], steady),
            "empty_queue_share": share(self._seconds["empty"], steady),
            "corner_shares": {str(name): share(self._corners[name], steady) for name in Corner},
            "mean_queue": share(self._queue, steady),
            "mean_token_usage": share(self._usage, steady),
            "tail_share": share(self._seconds["tail"], self._seconds["all"]),
            "imbalance": self._imbalance(),
            "retractions": retractions,
            "window_min": self._window_min,
            "window_max": self._window_max,
            "window_over_time": [[round(at - self._began, 1), window] for at, window in self._points],
        }

    def _imbalance(self) -> float | None:
        """Return how much less the idlest scheduler ran than the busiest, as a share of the latter."""
        means = list(self._running.values())
        return round((max(means) - min(means)) / max(means), 4) if len(means) > 1 and max(means) else None

    def _add_point(self, now: float, window: int) -> None:
        self._window_min = min(window, self._window_min or window)
        self._window_max = max(window, self._window_max or window)
        if self._points and now - self._points[-1][0] < self._point_every_s:
            return
        self._points.append((now, window))
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._point_every_s = (now - self._began) / len(self._points)


class AttemptProgress:
    """What a run has done so far: snapshots of it, and what report.json says of load and incidents."""

    def __init__(
        self,
        rows: RowSource,
        done: DoneRows,
        counts: RowCounts,
        slots: Slots,
        limits: ConcurrencyLimits,
        backlog: Backlog,
        bundles: BundleTotals,
        engine: Engine,
        events: EventLog,
        *,
        began: float,
        task: str = GENERATE,
    ) -> None:
        """`done` are the rows of earlier attempts, `counts` those of this one."""
        self._rows = rows
        self._done = done
        self._counts = counts
        self._slots = slots
        self._limits = limits
        self._backlog = backlog
        self._bundles = bundles
        self._engine = engine
        self._events = events
        self._task = task
        self._load = LoadSummary(limits, slots)
        self._rates = Rates(began, counts=6)
        self._token_rates = {route: Rates(began, counts=1) for route in limits.info.routes}
        self.incidents: list[dict[str, Any]] = []
        """Deaths, hangs and healing of the engine's servers, for report.json."""

    def polled(self, loads: Sequence[SchedulerLoad], now: float) -> Snapshot:
        """Take a load sample; return the state of the run."""
        self._load.polled(loads, now)
        self.write_incidents()
        return self.snapshot(loads, now)

    def write_incidents(self) -> None:
        """Write what happened to the engine's servers since the last call to the event log."""
        for incident in self._engine.incidents():
            values = {"who": incident.who, "why": incident.why, **incident.facts}
            self._events.write(f"engine_{incident.what}", **values)
            if incident.what in REPORTED:
                self.incidents.append({"what": incident.what, **values})

    def load_report(self) -> dict[str, Any]:
        """Return report.json's `load`."""
        return self._load.as_dict(retractions=self._limits.retractions)

    def snapshot(self, loads: Sequence[SchedulerLoad], now: float) -> Snapshot:
        """Return the state of the run; `loads` is the newest load sample."""
        counts, sent = self._counts, self._bundles
        rows_s, output_s, prompt_s, cached_s, requests_s, sent_s = self._rates.update(
            now,
            *(counts.done, counts.output_tokens, counts.prompt_tokens, counts.cached_tokens),
            *(sent.requests, sent.rows),
        )
        return Snapshot(
            rows_total=self._rows.total,
            rows_done=len(self._done.rows) + counts.done,
            rows_failed=self._done.counts.failed + counts.failed,
            rows_per_s=rows_s,
            output_tokens_per_s=output_s,
            prompt_tokens_per_s=prompt_s,
            cached_tokens_per_s=cached_s,
            window=self._slots.window,
            in_flight=self._slots.in_flight,
            waiting=self._backlog.waiting,
            retractions=self._limits.retractions,
            loads=tuple(loads),
            bands={name: (band.low, band.high) for name, band in self._limits.bands.items()},
            by_scheduler=self._by_scheduler(now),
            simulated=self._limits.info.simulated,
            rows_per_request=sent_s / requests_s if requests_s else 0.0,
            output_tokens=counts.output_tokens,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            task=self._task,
        )

    def _by_scheduler(self, now: float) -> dict[str, dict[str, Any]]:
        """Return each scheduler's window, its corner, and what came back on a route of its own."""
        known: dict[str, dict[str, Any]] = {
            name: {"window": window} for name, window in self._limits.windows_of_schedulers.items()
        }
        for name, corner in self._limits.corners.items():
            known.setdefault(name, {})["corner"] = str(corner)
        for route, rates in self._token_rates.items():
            ends = self._limits.ends[route]
            (tokens_s,) = rates.update(now, ends.output_tokens)
            if scheduler := self._limits.only_scheduler_on(route):
                known.setdefault(scheduler, {}).update(
                    output_tokens_per_s=round(tokens_s, 1), retractions=ends.retractions
                )
        return known
