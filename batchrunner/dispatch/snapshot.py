"""The state of a run at one moment, as the display and the event log have it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from batchrunner.core.console import counted
from batchrunner.core.engine_info import Corner, SchedulerLoad
from batchrunner.dispatch.bundles.totals import BundleTotals
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.queue import Backlog
from batchrunner.dispatch.route_totals import Rates, RouteTotals
from batchrunner.dispatch.slots import Slots
from batchrunner.job.tasks import GENERATE
from batchrunner.output.counts import RowCounts
from batchrunner.output.resume import DoneRows
from batchrunner.report.report import duration

MOST_NAMED = 8
"""Schedulers whose figures are shown one by one; of more, the sum and the range."""


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
    loads = [(s["scheduler"], s["running"], s["queue"], s["token_usage"]) for s in sample["signals"]]
    load = load_line(loads, sample["bands"], sample["retractions"])
    corners = corners_line([s["corner"] for s in sample["signals"] if s.get("corner")], len(loads))
    load += f", {corners}" if corners else ""
    rate, left = sample["rows_per_s"], sample["rows_total"] - sample["rows_done"]
    waiting = f", {sample['resting']} wait for a retry" if sample["resting"] else ""
    return (
        f"{sample['rows_done']}/{sample['rows_total']} rows, {rate:.1f} rows/s, "
        f"{_tokens(sample)}{load}, "
        f"{sample['in_flight']}/{sample['window']} in flight, "
        f"{sample['rows_failed']} failed{waiting}, {duration(left / rate) if rate else '?'} left"
    )


def _tokens(sample: Mapping[str, Any]) -> str:
    """Return the tokens a second that count: without decoding those of the prompts, where they are told."""
    if sample.get("task", GENERATE) == GENERATE:
        return f"{sample['output_tokens_per_s']:,.0f} output tok/s, "
    prompt = sample["prompt_tokens_per_s"]
    return f"{prompt:,.0f} input tok/s, " if prompt else ""


def load_line(
    loads: Sequence[tuple[str, int, int, float]],
    bands: Mapping[str, Sequence[int]],
    retractions: int,
) -> str:
    """Return `#running-req`, `#queue-req` with its band, and token usage in one line.

    `loads` are (scheduler, `#running-req`, `#queue-req`, token usage from 0 to 1); up to 8 schedulers are
    shown one by one.
    """
    if not loads:
        return "load unknown"
    _, running, queue, usage = zip(*loads, strict=True)
    band = bands.get(loads[0][0])
    healthy = f" ({band[0]}-{band[1]})" if band else ""
    retracted = f", {counted(retractions, 'retraction')}" if retractions else ""
    shares = [f"{share:.2f}" for share in usage]
    each = "/".join(shares) if len(loads) <= MOST_NAMED else f"{min(shares)}-{max(shares)}"
    counts = f"#running-req {_counts(running)}, #queue-req {_counts(queue)}{healthy}"
    return f"{counts}, token usage {each}{retracted}"


def corners_line(corners: Sequence[str], schedulers: int) -> str:
    """Return in a few words in which corners the schedulers are, the commonest first; "" if in none."""
    counts = Counter(corner for corner in corners if corner in set(Corner))
    each = [
        f"{Corner(corner).words}{'' if count == schedulers else f' ({count} of {schedulers})'}"
        for corner, count in counts.most_common()
    ]
    return ", ".join(each)


def _counts(values: Sequence[int]) -> str:
    if len(values) <= MOST_NAMED:
        return "+".join(map(str, values))
    return f"{sum(values)} ({min(values)}-{max(values)} each)"


class RowTotal(Protocol):
    """What knows how many rows this task has."""

    @property
    def total(self) -> int:
        """Number of rows, those that earlier attempts ended included; with leases an estimate."""


class Monitor:
    """Makes snapshots of a run."""

    def __init__(
        self,
        rows: RowTotal,
        done: DoneRows,
        counts: RowCounts,
        slots: Slots,
        limits: ConcurrencyLimits,
        backlog: Backlog,
        totals: RouteTotals,
        bundles: BundleTotals,
        *,
        now: float,
        simulated: bool,
        task: str = GENERATE,
    ) -> None:
        """`done` are the rows of earlier attempts, `counts` those of this one, which began `now`."""
        self._rows = rows
        self._done = done
        self._counts = counts
        self._slots = slots
        self._limits = limits
        self._backlog = backlog
        self._totals = totals
        self._bundles = bundles
        self._rates = Rates(now, counts=6)
        self._simulated = simulated
        self._task = task

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
            retractions=self._totals.retractions,
            loads=tuple(loads),
            bands={name: (band.low, band.high) for name, band in self._limits.bands.items()},
            by_scheduler=self._by_scheduler(now),
            simulated=self._simulated,
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
        for route, returned in self._totals.sample(now).items():
            if scheduler := self._limits.only_scheduler_on(route):
                known.setdefault(scheduler, {}).update(returned)
        return known
