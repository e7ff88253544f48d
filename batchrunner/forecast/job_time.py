"""From a sample's answers to the time of a job: pure, so that it can be tried on thousands of jobs.

The sample is simulated first, in its own order: what the simulated passes had to do until a row ended, beside
the time at which it did end, tells what passes cost. So what the simulation leaves out is in the costs. Then
the job is simulated, with outputs like those of the sample's rows that are most like each row.
"""

import contextlib
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import fmean, stdev
from typing import NamedTuple

from batchrunner.engines.simulation.replica import CostModel, PassWork, fit_spans
from batchrunner.engines.simulation.scheduler import DECAY_STEPS, Scheduler, SchedulerConfig, SimulatedRequest

MOST_SIMULATED = 10_000
"""Rows of a scheduler that are simulated at most."""
MOST_SPANS = 24
"""Stretches of passes that costs are fitted to."""
GOLDEN = 0.618033988749895
"""The golden ratio: numbers whose multiples of it have the smallest fractions are spread evenly."""
FEW = 10
"""A sample of so many rows looks half as varied as all rows are: what is rare is not among them."""
FOLDS = 8
"""Parts of the sample that are left out in turn, to see how much the costs depend on them."""
BETWEEN_RUNS, UNKNOWN_COSTS = 0.02, 0.3
"""Deviation of pass times from one time to another on the same machine, as a share, at the least; and where
the sample is too small to tell."""
TAIL = 1.645
"""Deviations from the middle to either end of a 90 % interval."""
LEAST_S = 1e-6
"""Seconds that rows take at least: an engine of tests may answer at once."""


class JobRow(NamedTuple):
    """A row of the job, as far as it is known before its answer."""

    row: int
    prompt: float
    """Prompt tokens."""
    cached: float
    """Prompt tokens that the cache has."""
    asked: int
    """`max_new_tokens`."""
    fixed: bool = False
    """Whether it ignores the end of the text (`ignore_eos`)."""


class Attempt(NamedTuple):
    """An answer to a row of the sample."""

    row: JobRow
    """With the tokens as the engine counted them."""
    began: float
    ended: float
    outputs: tuple[int, ...]
    """Output tokens of each sample; 1 where the engine does not decode."""
    route: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 90 % interval."""

    median: float
    low: float
    high: float

    def times(self, factor: float, more: float = 0.0) -> "Interval":
        """Return the figure times a factor, and something more."""
        return Interval(*(round(factor * each + more, 6) for each in (self.median, self.low, self.high)))


class Setting(NamedTuple):
    """What rows run on."""

    config: SchedulerConfig
    """Flags of each scheduler."""
    schedulers: int
    window: int | None = None
    """Rows in flight at a scheduler, where the job fixes it; None: always enough."""


class Forecast(NamedTuple):
    """What the rows that are to be done take; see `Estimate`."""

    seconds: Interval
    tokens: dict[str, Interval]
    passes: int
    limited_by: str
    why: tuple[str, ...]


Drawn = Sequence[tuple[JobRow, Sequence[int]]]
"""Rows, each with the output tokens of its samples."""


def by_length(row: JobRow) -> tuple[float, ...]:
    """Sort key: what may tell how long a row's output is; equal ones are mixed from all over the input."""
    return row.asked, row.prompt, row.row * GOLDEN % 1


def choose(rows: Iterable[JobRow], count: int) -> list[JobRow]:
    """Return so many rows of all lengths, and from all over the input."""
    ordered = sorted(rows, key=by_length)
    count = min(count, len(ordered))
    return [ordered[len(ordered) * (2 * at + 1) // (2 * count)] for at in range(count)]


def simulate(
    config: SchedulerConfig, rows: Drawn, is_due: Callable[[Scheduler, int, int], bool]
) -> tuple[list[PassWork], int, float]:
    """Return the work of one scheduler until each of its rows ended, in the order of their ends.

    The next row is sent when `is_due`, by the rows that were sent and that ended. The cache has the prompt of
    all samples of a row but the first. With the work comes how many rows had ended when the last one was no
    longer waiting, and the share of the decode passes in which rows waited for the pool.
    """
    scheduler, work, sent, left, waits, full = Scheduler(config), PassWork(), 0, Counter[int](), 0, 0
    marks = [work]
    while True:
        while sent < len(rows) and is_due(scheduler, sent, len(marks) - 1):
            row, outputs = rows[sent]
            prompt = max(1, round(row.prompt))
            for number, tokens in enumerate(outputs):
                had = prompt - 1 if number else min(round(row.cached), prompt - 1)
                prefix = (("shared", had),) if had > 0 else ()
                asked = max(row.asked, tokens)  # a row may ask again for more
                with contextlib.suppress(ValueError):  # longer than the pool: it is not sent
                    scheduler.submit(SimulatedRequest(prompt, tokens, asked, row.fixed, prefix, sent))
                    left[sent] += 1
            sent += 1
        if scheduler.queue or sent < len(rows):
            full = len(marks) - 1
        step = scheduler.step()
        if step is None:
            return marks, full, waits / max(work.passes - work.prefills, 1)
        work = work.plus(step, 0)
        if step.kind == "decode" and step.queue and step.running < config.max_running - 1:
            waits += step.steps
        for request in step.finished:
            left[request.payload] -= 1
            if not left[request.payload]:
                marks.append(work)


def whole_work(setting: Setting, drawn: Drawn, count: float) -> tuple[PassWork, float]:
    """Return the work of a scheduler that has so many rows, of which those drawn are some, all over the job.

    With it comes the share of the decode passes in which rows waited for the pool.
    """
    most = setting.config.max_running  # rows that wait: as many as a pass without decoding may take

    def is_due(scheduler: Scheduler, sent: int, ended: int) -> bool:
        return sent - ended < setting.window if setting.window else scheduler.queue < most

    marks, full, waits = simulate(setting.config, drawn, is_due)
    work, more = marks[-1], count / len(drawn) - 1
    # rows beyond those drawn run in an engine that has filled up, and does not empty
    third = len(marks) // 3
    begin, end = min(bisect_right(marks, PassWork(DECAY_STEPS)), third), max(full, 2 * third)
    steady = _plus(marks[end], marks[begin], -1)
    passes = round(work.samples * steady.passes / max(steady.samples, 1))
    return _plus(work, work._replace(passes=passes), more), waits


def sample_spans(attempts: Sequence[Attempt], setting: Setting) -> list[tuple[PassWork, float]]:
    """Return what the passes of the sample had to do in some stretches of time, and how long these were."""
    routes = defaultdict[str, list[Attempt]](list)
    for attempt in sorted(attempts, key=attrgetter("began")):
        routes[attempt.route].append(attempt)
    each = max(1, setting.schedulers // len(routes))  # those of a server take turns
    parts = [own[at::each] for own in routes.values() for at in range(each)]
    return [span for part in parts for span in _scheduler_spans(part, setting.config)]


def _scheduler_spans(attempts: Sequence[Attempt], config: SchedulerConfig) -> list[tuple[PassWork, float]]:
    """Simulate the part of a sample that one scheduler had, each row sent once as many had ended as did."""
    ends = sorted(attempt.ended for attempt in attempts)
    needed = [bisect_right(ends, attempt.began) for attempt in attempts]
    marks, *_ = simulate(
        config,
        [(attempt.row, attempt.outputs) for attempt in attempts],
        lambda scheduler, sent, ended: needed[sent] <= ended or not scheduler.in_flight,
    )
    times = [*(attempt.began for attempt in attempts[:1]), *ends]
    cuts = sorted({(len(marks) - 1) * at // MOST_SPANS for at in range(MOST_SPANS + 1)})
    return [
        (_plus(marks[end], marks[begin], -1), times[end] - times[begin])
        for begin, end in pairwise(cuts)
        if marks[end].passes > marks[begin].passes
    ]


def _plus(work: PassWork, other: PassWork, factor: float) -> PassWork:
    return PassWork._make(a + factor * b for a, b in zip(work, other, strict=True))


def cost_of(spans: Sequence[tuple[PassWork, float]]) -> CostModel:
    """Fit what passes cost; of few stretches only the time of a pass."""
    passes = sum(work.passes for work, _ in spans)
    mean = CostModel(sum(seconds for _, seconds in spans) / max(passes, 1), 0.0, 0.0, 0.0)
    return fit_spans(spans) or mean


def draw(attempts: Sequence[Attempt], rows: Sequence[JobRow]) -> tuple[Drawn, float]:
    """Return rows, in input order, with outputs of rows of the sample that are like them.

    With it comes the standard deviation of the mean output of the sample's rows.
    """
    found: dict[int, tuple[JobRow, list[int]]] = {}
    for attempt in attempts:
        found.setdefault(attempt.row.row, (attempt.row, []))[1].extend(attempt.outputs)
    known = sorted(found.values(), key=lambda each: by_length(each[0]))
    drawn = [
        (row, _like(known[place * len(known) // len(rows)], row))
        for place, row in enumerate(sorted(rows, key=by_length))
    ]
    drawn.sort(key=lambda each: each[0].row)
    unlike = [(sum(_like(one, two[0])) - sum(two[1])) ** 2 / 2 for one, two in pairwise(known)]
    return drawn, math.sqrt(fmean(unlike or [0]) / len(known))


def _like(known: tuple[JobRow, Sequence[int]], row: JobRow) -> list[int]:
    """Return the outputs of a known row as those of another, in which what was cut is cut too."""
    asked, outputs = known[0].asked, known[1]
    return [
        round(tokens * row.asked / asked) if tokens >= asked else min(tokens, row.asked) for tokens in outputs
    ]


def forecast(
    attempts: Sequence[Attempt],
    sampled: Setting,
    setting: Setting,
    rows: Sequence[JobRow],
    total: int,
    *,
    start_s: float = 0.0,
    client_s: float = 0.0,
) -> Forecast:
    """Return what `total` rows take, of which `rows` are some, in the order of sending.

    The sample ran with another setting perhaps. `start_s` are seconds beside the sending, `client_s` those of
    the client for a row.
    """
    spans = sample_spans(attempts, sampled)
    cost, share = cost_of(spans), max(1, round(total / setting.schedulers))
    count = min(share, MOST_SIMULATED)
    drawn, deviation = draw(attempts, [rows[at * len(rows) // count] for at in range(count)])
    outputs = fmean(sum(tokens) for _, tokens in drawn)
    few = 1 + FEW / len(attempts)
    deviation *= few * math.sqrt(1 + len(attempts) / total) / outputs
    work, waits = whole_work(setting, drawn, share)
    factor = math.exp(deviation)
    longer = [(row, [math.ceil(factor * tokens) for tokens in each]) for row, each in drawn]
    seconds = max(cost.work_s(work), LEAST_S)
    by_outputs = math.log(max(cost.work_s(whole_work(setting, longer, share)[0]) / seconds, 1.0))
    prefill_s = cost._replace(sample_s=0, kv_token_s=0).work_s(work._replace(passes=work.prefills))
    folds = [
        cost_of([span for at, span in enumerate(spans) if at % FOLDS != fold]).work_s(work) / seconds
        for fold in range(FOLDS)
        if len(spans) > FOLDS
    ]
    by_cost = few * stdev(folds) * (FOLDS - 1) / math.sqrt(FOLDS) if folds else UNKNOWN_COSTS
    by_cost = math.hypot(by_cost, BETWEEN_RUNS)
    limited_by = "prefill" if prefill_s > seconds / 2 else "pool" if waits > 1 / 2 else "decode"
    if client_s * total > seconds:
        seconds, limited_by = client_s * total, "client"
    why = sorted([(by_outputs, "output lengths"), (by_cost, "pass times")], reverse=True)
    return Forecast(
        _around(seconds, math.hypot(by_outputs, by_cost)).times(1, start_s),
        tokens_of(rows, total, _around(outputs, deviation)),
        round(work.passes),
        limited_by,
        tuple(_cause(what, math.expm1(TAIL * part)) for part, what in why),
    )


def _cause(what: str, share: float) -> str:
    return f"{what}: ±{100 * share:.0f} %" if share <= 1 else f"{what}: too few rows to say"


def _around(median: float, deviation: float) -> Interval:
    factor = math.exp(TAIL * deviation)
    return Interval(median, median / factor, median * factor)


def tokens_of(rows: Sequence[JobRow], total: int, outputs: Interval) -> dict[str, Interval]:
    """Return the tokens of so many rows, of which `rows` are some, by the outputs of one."""
    prompt, cached = (fmean(row[at] for row in rows) for at in (1, 2))
    known = {"prompt": Interval(*[prompt] * 3), "cached": Interval(*[cached] * 3), "output": outputs}
    return {name: each.times(total) for name, each in known.items()}
