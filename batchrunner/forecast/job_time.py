"""From a sample's answers to the time of a job: pure, so that it can be tried on thousands of jobs.

The sample is simulated first, in its own order: what the simulated passes had to do until a row ended, beside
the time at which it did end, tells what passes cost. So what the simulation leaves out is in the costs. Then
the job is simulated, with output lengths like those of the sample's rows that are most like each row.
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from operator import attrgetter
from statistics import fmean, stdev, variance
from typing import NamedTuple

from batchrunner.engines.simulation.replica import WAITING, CostModel, PassWork, fit_spans
from batchrunner.engines.simulation.scheduler import Scheduler, SchedulerConfig, SimulatedRequest

MOST_SIMULATED, FEW_SIMULATED = 20_000, 5_000
"""Rows of a scheduler that are simulated at most, as the steady part of a larger job is longer; and to see
what other output lengths would change."""
MOST_SPANS = 24
"""Stretches of passes that costs are fitted to."""
BIN_ROWS = 12
"""Rows of the sample in a bin of like rows at least."""
MOST_BINS = 8
FOLDS = 8
"""Parts of the sample that are left out in turn, to see how much the costs depend on them."""
BETWEEN_RUNS = 0.02
"""Deviation of pass times from one time to another on the same machine, as a share, at the least."""
TAIL = 1.645
"""Deviations from the middle to either end of a 90 % interval."""
LEAST_S = 1e-6
"""Seconds that rows take at least: an engine of tests may answer at once."""
POOL_FULL = 0.85
"""Share of the KV pool in use from which it is what limits, where rows wait and slots are free."""


class Attempt(NamedTuple):
    """An answer to a row of the sample."""

    row: int
    began: float
    ended: float
    prompt: int
    """Prompt tokens."""
    cached: int
    """Prompt tokens that the cache had."""
    outputs: tuple[int, ...]
    """Output tokens of each sample; 1 where the engine does not decode."""
    asked: int
    """`max_new_tokens`."""
    fixed: bool
    """Whether it ignores the end of the text (`ignore_eos`)."""
    route: str


class JobRow(NamedTuple):
    """A row that is still to be done."""

    row: int
    prompt: float
    """Prompt tokens."""
    cached: float
    """Prompt tokens that the cache will have in the order of sending."""
    asked: int
    fixed: bool = False


class Interval(NamedTuple):
    """A figure with its 90 % interval."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Interval":
        """Return the figure in another unit."""
        return Interval(*(value * factor for value in self))


@dataclass(frozen=True, slots=True)
class Setting:
    """What the job runs on."""

    config: SchedulerConfig
    """Flags of each scheduler."""
    schedulers: int
    window: int | None = None
    """Rows in flight at a scheduler, where the job fixes it; None: always enough."""
    workers: int = 1
    """Tasks that share the rows, each with so many schedulers."""


@dataclass(frozen=True, slots=True)
class SendingForecast:
    """What the sending of rows takes."""

    seconds: Interval
    output_tokens: Interval
    prompt_tokens: float
    cached_tokens: float
    passes: float
    """Forward passes of each scheduler."""
    limited_by: str
    """prefill, decode, pool or client."""
    why: tuple[str, ...]
    """Causes of the interval, the largest first."""


def requests_of(
    prompt: float, cached: float, outputs: Sequence[int], asked: int, *, fixed: bool
) -> list[SimulatedRequest]:
    """Return the samples of a row as a scheduler gets them; the cache has the prompt of all but the first."""
    whole = max(1, round(prompt))
    known = [min(round(cached), whole - 1), *[whole - 1] * (len(outputs) - 1)]
    return [
        SimulatedRequest(
            whole, max(1, tokens), max(asked, 1), fixed, (("shared", had),) if had > 0 else ()
        )
        for tokens, had in zip(outputs, known, strict=True)
    ]  # fmt: skip


def sample_spans(attempts: Sequence[Attempt], setting: Setting) -> list[tuple[PassWork, float]]:
    """Return what the passes of the sample had to do in some stretches of time, and how long these were."""
    spans: list[tuple[PassWork, float]] = []
    for route in sorted({attempt.route for attempt in attempts}):
        own = sorted((a for a in attempts if a.route == route), key=lambda attempt: attempt.began)
        each = max(1, setting.schedulers // len({attempt.route for attempt in attempts}))
        for at in range(each):  # those of a gateway take turns
            spans += _scheduler_spans(own[at::each], setting.config)
    return spans


def _scheduler_spans(attempts: Sequence[Attempt], config: SchedulerConfig) -> list[tuple[PassWork, float]]:
    """Simulate the part of a sample that one scheduler had, each row sent once as many had ended as did."""
    ends = sorted(attempt.ended for attempt in attempts)
    due = deque((bisect_right(ends, attempt.began), attempt) for attempt in attempts)
    scheduler, work = Scheduler(config), PassWork()
    marks = [work]
    left = Counter[int]()
    while True:
        while due and (due[0][0] < len(marks) or not scheduler.in_flight):
            number, (_, attempt) = len(due), due.popleft()
            for request in requests_of(*attempt[3:7], fixed=attempt.fixed):
                request.payload = number
                left[number] += 1
                scheduler.submit(request)
        before = scheduler.generated_tokens
        step = scheduler.step()
        if step is None:
            break
        work = work.plus(step, scheduler.generated_tokens - before)
        for request in step.finished:
            left[request.payload] -= 1
            if not left[request.payload]:
                marks.append(work)
    times = [attempts[0].began if attempts else 0.0, *ends]
    cuts = sorted({round(len(ends) * at / MOST_SPANS) for at in range(MOST_SPANS + 1)})
    return [
        (_less(marks[end], marks[begin]), times[end] - times[begin])
        for begin, end in pairwise(cuts)
        if marks[end].passes > marks[begin].passes
    ]


def _less(work: PassWork, before: PassWork) -> PassWork:
    return PassWork._make(b - a for a, b in zip(before, work, strict=True))


def cost_of(spans: Sequence[tuple[PassWork, float]]) -> CostModel:
    """Fit what passes cost; of few stretches only the time of a pass."""
    passes = sum(work.passes for work, _ in spans)
    mean = CostModel(sum(seconds for _, seconds in spans) / max(passes, 1), 0.0, 0.0, 0.0)
    return fit_spans(spans) or mean


class LengthModel:
    """The outputs of rows, as far as what is known of a row beforehand tells them."""

    def __init__(self, attempts: Sequence[Attempt], rows: Sequence[JobRow]) -> None:
        """Learn from the sample; `rows` are those that are to be done, or stand for them."""
        outputs: dict[int, list[int]] = {}
        first: dict[int, Attempt] = {}
        for attempt in attempts:
            outputs.setdefault(attempt.row, []).extend(attempt.outputs)
            first.setdefault(attempt.row, attempt)
        self._key, self._ends, bins = attrgetter("row"), list[float](), [[*outputs.values()]]
        least = _variance(bins[0])
        count = max(1, min(MOST_BINS, len(first) // BIN_ROWS))
        for key in map(attrgetter, ("prompt", "row", "asked")):
            ordered = sorted(map(key, first.values()))
            ends = [float(ordered[len(ordered) * at // count]) for at in range(1, count)]
            groups: list[list[list[int]]] = [[] for _ in range(count)]
            for row, attempt in first.items():
                groups[bisect_right(ends, key(attempt))].append(outputs[row])
            if min(map(len, groups)) < BIN_ROWS // 2:  # many rows have one value
                continue
            within = fmean(map(_variance, groups))
            if within < least:
                least, self._key, self._ends, bins = within, key, ends, groups
        self._bins = bins
        counts = Counter(bisect_right(self._ends, self._key(row)) for row in rows)
        shares = [counts[at] / max(len(rows), 1) for at in range(len(bins))]
        self.mean = sum(share * fmean(map(sum, group)) for share, group in zip(shares, bins, strict=True))
        """Output tokens of a row."""
        spread = sum(
            share**2 * _variance(group) / len(group) * (1 + len(group) / max(share * len(rows), 1))
            for share, group in zip(shares, bins, strict=True)
        )
        self.deviation = math.sqrt(spread) / max(self.mean, 1e-9)
        """Standard deviation of the mean of all rows to be done, as a share of it."""

    def draw(self, rows: Sequence[JobRow], factor: float) -> Iterator[tuple[JobRow, list[int]]]:
        """Yield rows with outputs of the sample's rows that are like them, times a factor."""
        turns = [cycle(sorted(group, key=_mixed)) for group in self._bins]
        for row in rows:
            outputs = next(turns[bisect_right(self._ends, self._key(row))])
            scaled = 1.0 if row.fixed else factor
            yield row, [min(max(1, round(tokens * scaled)), max(row.asked, 1)) for tokens in outputs]


def _variance(outputs: Sequence[Sequence[int]]) -> float:
    return variance(map(sum, outputs)) if len(outputs) > 1 else 0.0


def _mixed(outputs: Sequence[int]) -> float:
    """Return a number that is the same in any process, and has no order to speak of."""
    return math.sin(1e4 * (sum(outputs) + 1)) % 1


class JobWork(NamedTuple):
    """What the passes of some rows have to do at one scheduler."""

    all: PassWork
    steady: PassWork
    """From when a third of the rows had begun until all had."""
    steady_rows: int
    pool_share: float
    """Share of the decode passes in which rows waited only for the pool."""

    def of(self, rows: int, simulated: int) -> PassWork:
        """Return the work of more rows than were simulated: the steady part is longer."""
        more = (rows - simulated) / max(self.steady_rows, 1)
        return PassWork._make(a + more * s for a, s in zip(self.all, self.steady, strict=True))


def job_work(setting: Setting, rows: Iterator[tuple[JobRow, list[int]]], count: int) -> JobWork:
    """Simulate one scheduler that gets so many rows; one that is too long for the pool is left out."""
    config, scheduler = setting.config, Scheduler(setting.config)
    work, sent = PassWork(), 0
    first = last = (0, PassWork())
    decodes = waits = 0
    while True:
        while scheduler.in_flight < setting.window if setting.window else scheduler.queue < WAITING:
            row, outputs = next(rows, (None, []))
            if row is None:
                break
            sent += 1
            for request in requests_of(*row[1:3], outputs, row.asked, fixed=row.fixed):
                try:
                    scheduler.submit(request)
                except ValueError:
                    break
            if sent == count // 3:
                first = (sent, work)
            last = (sent, work)
        before = scheduler.generated_tokens
        step = scheduler.step()
        if step is None:
            break
        work = work.plus(step, scheduler.generated_tokens - before)
        if step.kind == "decode":
            full = step.used_tokens >= POOL_FULL * config.max_total_tokens
            decodes += step.steps
            waits += step.steps * (step.queue > 0 and full and step.running < config.max_running - 1)
    return JobWork(work, _less(last[1], first[1]), last[0] - first[0], waits / max(decodes, 1))


def forecast(
    attempts: Sequence[Attempt],
    sampled: Setting,
    setting: Setting,
    rows: Sequence[JobRow],
    total: int,
    client_s: float = 0.0,
) -> SendingForecast:
    """Return what `total` rows take, of which `rows` are some, in the order of sending.

    The sample ran with another setting perhaps; `client_s` are the client's seconds for a row.
    """
    spans = sample_spans(attempts, sampled)
    lengths, cost = LengthModel(attempts, rows), cost_of(spans)
    share = max(1, round(total / setting.schedulers / setting.workers))
    count = min(share, MOST_SIMULATED)

    def work_of(count: int, deviations: float = 0.0) -> JobWork:
        chosen = [rows[at * len(rows) // count] for at in range(count)]
        factor = math.exp(deviations * lengths.deviation)
        return job_work(setting, lengths.draw(chosen, factor), count)

    whole, (less, more) = work_of(count), [work_of(min(count, FEW_SIMULATED), at).all for at in (-TAIL, TAIL)]
    work = whole.of(share, count)
    seconds = max(cost.work_s(work), LEAST_S)
    by_length = math.log(max(cost.work_s(more), LEAST_S) / max(cost.work_s(less), LEAST_S)) / (2 * TAIL)
    folds = [
        cost_of([span for at, span in enumerate(spans) if at % FOLDS != fold]).work_s(work) / seconds
        for fold in range(FOLDS)
        if len(spans) > FOLDS
    ]
    by_cost = stdev(folds) * (FOLDS - 1) / math.sqrt(FOLDS) if folds else 0.3
    by_cost = math.hypot(by_cost, BETWEEN_RUNS)
    client = client_s * total / setting.workers
    return SendingForecast(
        _around(max(seconds, client), math.hypot(by_length, by_cost)),
        _around(lengths.mean * total, lengths.deviation),
        fmean(row.prompt for row in rows) * total,
        fmean(row.cached for row in rows) * total,
        work.passes,
        "client" if client > seconds else _limit(cost, work, whole.pool_share),
        tuple(
            f"{what}: ±{100 * math.expm1(TAIL * part):.0f} %"
            for part, what in sorted([(by_length, "output lengths"), (by_cost, "pass times")], reverse=True)
        ),
    )


def _around(median: float, deviation: float) -> Interval:
    factor = math.exp(TAIL * deviation)
    return Interval(median, median / factor, median * factor)


def _limit(cost: CostModel, work: PassWork, pool_share: float) -> str:
    """Return what most of the time goes to, or that a larger pool would run more rows at once."""
    prefill = cost.prefill_token_s * work.prefill_tokens + (cost.base_s + cost.prefill_base_s) * work.prefills
    if prefill > cost.work_s(work) / 2:
        return "prefill"
    return "pool" if pool_share > 1 / 2 else "decode"
