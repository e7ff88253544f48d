"""Time of a job, computed from the answers to a sample. Pure, so that tests try it on thousands of jobs.

First the sample is simulated in the order in which it was sent. The work of the simulated passes until a row
ended, beside the time at which it really ended, gives the cost of a pass. So the costs include what the
simulation leaves out. Then the job is simulated. Each of its rows gets output lengths from the row of the
sample that is most like it.
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
"""A sample of so many rows looks half as varied as all rows are, because rare rows are not in it."""
FOLDS = 8
"""Parts of the sample that are left out in turn, to see how much the costs depend on them."""
BETWEEN_RUNS, UNKNOWN_COSTS = 0.02, 0.3
"""Relative deviation of pass times between two runs on the same machine: the least, and the one assumed where
the sample is too small to measure it."""
TAIL = 1.645
"""Deviations from the middle to either end of a 90 % interval."""
LEAST_S = 1e-6
"""Seconds that rows take at least: an engine of tests may answer at once."""


class JobRow(NamedTuple):
    """A row of the job before its answer."""

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
        """Return `factor` times the figure, plus `more`."""
        figures = (self.median, self.low, self.high)
        return Interval(*(round(factor * figure + more, 6) for figure in figures))


class Setting(NamedTuple):
    """The schedulers that rows run on."""

    config: SchedulerConfig
    """Flags of each scheduler."""
    schedulers: int
    window: int | None = None
    """Rows in flight at a scheduler, where the job fixes it; None: always enough."""


class Forecast(NamedTuple):
    """The time and the tokens of the pending rows; see `Estimate`."""

    seconds: Interval
    tokens: dict[str, Interval]
    passes: int
    limited_by: str
    why: tuple[str, ...]


Drawn = Sequence[tuple[JobRow, Sequence[int]]]
"""Rows, each with the output tokens of its samples."""


def by_length(row: JobRow) -> tuple[float, ...]:
    """Sort key by the signs of a long output. Rows with equal signs come from all over the input."""
    return row.asked, row.prompt, row.row * GOLDEN % 1


def choose(rows: Iterable[JobRow], count: int) -> list[JobRow]:
    """Return `count` rows of all lengths, from all over the input."""
    ordered = sorted(rows, key=by_length)
    count = min(count, len(ordered))
    return [ordered[len(ordered) * (2 * at + 1) // (2 * count)] for at in range(count)]


def simulate(
    config: SchedulerConfig, rows: Drawn, is_due: Callable[[Scheduler, int, int], bool]
) -> tuple[list[PassWork], int, float]:
    """Return the work of one scheduler until each of its rows ended, in the order of their ends.

    `is_due` tells whether to send the next row; it gets the scheduler and the numbers of rows that were sent
    and that ended. The cache has the prompt of all completions of a row but the first. The second value is
    the number of rows that had ended when the last row began to run, the third the share of the decode
    passes in which rows waited for the KV pool.
    """
    scheduler, work, next_row, waits, full = Scheduler(config), PassWork(), 0, 0, 0
    open_completions = Counter[int]()  # by row
    marks = [work]
    while True:
        while next_row < len(rows) and is_due(scheduler, next_row, len(marks) - 1):
            row, outputs = rows[next_row]
            prompt = max(1, round(row.prompt))
            for number, tokens in enumerate(outputs):
                cached = prompt - 1 if number else min(round(row.cached), prompt - 1)
                prefix = (("shared", cached),) if cached > 0 else ()
                most_tokens = max(row.asked, tokens)  # a row may ask again for more
                request = SimulatedRequest(
                    prompt_tokens=prompt,
                    output_tokens=tokens,
                    max_new_tokens=most_tokens,
                    ignore_eos=row.fixed,
                    prefix=prefix,
                    payload=next_row,
                )
                with contextlib.suppress(ValueError):  # longer than the pool: it is not sent
                    scheduler.submit(request)
                    open_completions[next_row] += 1
            next_row += 1
        if scheduler.queue or next_row < len(rows):
            full = len(marks) - 1
        step = scheduler.step()
        if step is None:
            return marks, full, waits / max(work.passes - work.prefills, 1)
        work = work.plus(step, 0)
        if step.kind == "decode" and step.queue and step.running < config.most_running - 1:
            waits += step.steps
        for request in step.finished:
            open_completions[request.payload] -= 1
            if not open_completions[request.payload]:
                marks.append(work)


def whole_work(setting: Setting, drawn: Drawn, count: float) -> tuple[PassWork, float]:
    """Return the work of a scheduler for `count` rows; those `drawn` come from all over the job.

    The second value is the share of the decode passes in which rows waited for the KV pool.
    """
    most = setting.config.most_running  # as many rows wait as a pass without decoding may take

    def is_due(scheduler: Scheduler, sent: int, ended: int) -> bool:
        return sent - ended < setting.window if setting.window else scheduler.queue < most

    marks, full, waits = simulate(setting.config, drawn, is_due)
    work, more = marks[-1], count / len(drawn) - 1
    # Rows beyond those drawn run in an engine that has filled up and does not empty.
    third = len(marks) // 3
    begin, end = min(bisect_right(marks, PassWork(DECAY_STEPS)), third), max(full, 2 * third)
    steady = _plus(marks[end], marks[begin], -1)
    passes = round(work.samples * steady.passes / max(steady.samples, 1))
    return _plus(work, work._replace(passes=passes), more), waits


def sample_spans(attempts: Sequence[Attempt], setting: Setting) -> list[tuple[PassWork, float]]:
    """Return the work of the sample's passes in some stretches of time, each with its seconds."""
    routes = defaultdict[str, list[Attempt]](list)
    for attempt in sorted(attempts, key=attrgetter("began")):
        routes[attempt.route].append(attempt)
    per_route = max(1, setting.schedulers // len(routes))  # the schedulers of a server take turns
    parts = [
        attempts_of_route[at::per_route] for attempts_of_route in routes.values() for at in range(per_route)
    ]
    return [span for part in parts for span in _scheduler_spans(part, setting.config)]


def _scheduler_spans(attempts: Sequence[Attempt], config: SchedulerConfig) -> list[tuple[PassWork, float]]:
    """Simulate one scheduler's part of a sample; rows are sent after the same ends as in the sample."""
    ends = sorted(attempt.ended for attempt in attempts)
    ended_before = [bisect_right(ends, attempt.began) for attempt in attempts]
    marks, *_ = simulate(
        config,
        [(attempt.row, attempt.outputs) for attempt in attempts],
        lambda scheduler, sent, ended: ended_before[sent] <= ended or not scheduler.in_flight,
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
    """Fit the cost of passes. Few stretches give only the mean time of a pass."""
    passes = sum(work.passes for work, _ in spans)
    mean = CostModel(sum(seconds for _, seconds in spans) / max(passes, 1), 0.0, 0.0, 0.0)
    return fit_spans(spans) or mean


def draw(attempts: Sequence[Attempt], rows: Sequence[JobRow]) -> tuple[Drawn, float]:
    """Return rows, in input order, with output lengths of the rows of the sample that are most like them.

    The second value is the standard deviation of the mean output of the sample's rows.
    """
    outputs: dict[int, tuple[JobRow, list[int]]] = {}
    for attempt in attempts:
        outputs.setdefault(attempt.row.row, (attempt.row, []))[1].extend(attempt.outputs)
    sample = sorted(outputs.values(), key=lambda answered: by_length(answered[0]))
    drawn = [
        (row, _scaled(sample[place * len(sample) // len(rows)], row))
        for place, row in enumerate(sorted(rows, key=by_length))
    ]
    drawn.sort(key=lambda row_and_outputs: row_and_outputs[0].row)
    errors = [(sum(_scaled(one, two[0])) - sum(two[1])) ** 2 / 2 for one, two in pairwise(sample)]
    return drawn, math.sqrt(fmean(errors or [0]) / len(sample))


def _scaled(answered: tuple[JobRow, Sequence[int]], row: JobRow) -> list[int]:
    """Scale the output lengths of an answered row to `row`; a truncated output stays truncated."""
    limit, outputs = answered[0].asked, answered[1]
    return [
        round(tokens * row.asked / limit) if tokens >= limit else min(tokens, row.asked) for tokens in outputs
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
    """Forecast `total` rows, of which `rows` are some, in the order of sending.

    The sample ran with the setting `sampled`. `start_s` are the seconds beside the sending, `client_s` the
    seconds of the client's core for a row.
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
    longer = [(row, [math.ceil(factor * tokens) for tokens in lengths]) for row, lengths in drawn]
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
        seconds=_around(seconds, math.hypot(by_outputs, by_cost)).times(1, start_s),
        tokens=tokens_of(rows, total, _around(outputs, deviation)),
        passes=round(work.passes),
        limited_by=limited_by,
        why=tuple(_cause(what, math.expm1(TAIL * part)) for part, what in why),
    )


def _cause(what: str, share: float) -> str:
    return f"{what}: ±{100 * share:.0f} %" if share <= 1 else f"{what}: too few rows to say"


def _around(median: float, deviation: float) -> Interval:
    factor = math.exp(TAIL * deviation)
    return Interval(median, median / factor, median * factor)


def tokens_of(rows: Sequence[JobRow], total: int, outputs: Interval) -> dict[str, Interval]:
    """Return the tokens of `total` rows, of which `rows` are some, by the output tokens of one row."""
    prompt, cached = (fmean(row[at] for row in rows) for at in (1, 2))
    of_a_row = {"prompt": Interval(*[prompt] * 3), "cached": Interval(*[cached] * 3), "output": outputs}
    return {name: tokens.times(total) for name, tokens in of_a_row.items()}
