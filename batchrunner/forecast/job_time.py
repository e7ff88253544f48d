"""Time of a job, computed from the answers to a sample. Pure, so that tests try it on thousands of jobs.

First the sample is simulated, with its rows in the order in which they were sent. The simulation gives the
work of the passes up to the end of each row. This work, compared with the time at which the row really ended,
gives the cost of a pass. So the cost includes what the simulation leaves out. Then the job is simulated. Each
of its rows gets the output lengths of the sampled row that is most like it.
"""

import contextlib
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import fmean, stdev
from typing import NamedTuple

from batchrunner.engines.simulation.replica import CostModel, PassWork, fit_spans
from batchrunner.engines.simulation.scheduler import DECAY_STEPS, Scheduler, SchedulerConfig, SimulatedRequest
from batchrunner.input.spread import GOLDEN

MOST_SIMULATED = 10_000
"""Maximum number of rows that are simulated for a scheduler."""
MOST_SPANS = 24
"""Maximum number of stretches of passes of a scheduler to which costs are fitted."""
FEW = 10
"""Because it lacks rare rows, a sample of this many rows is assumed to vary half as much as all rows do."""
FOLDS = 8
"""Number of parts of the sample. Each is left out in turn, to see how much the costs depend on it."""
BETWEEN_RUNS, UNKNOWN_COSTS = 0.02, 0.3
"""Relative standard deviations of pass times: between two runs on the same machine, and the one that is
assumed if the sample is too small to measure it."""
TAIL = 1.645
"""Number of standard deviations from the median to either end of a 90 % interval."""
LEAST_S = 1e-6
"""Minimum of the time of all rows in seconds, because an engine of tests may answer at once."""


class JobRow(NamedTuple):
    """A row of the job before its answer."""

    row: int
    prompt: float
    """Prompt tokens."""
    cached: float
    """Prompt tokens that come from the prefix cache."""
    asked: int
    """`max_new_tokens`."""
    fixed: bool = False
    """Whether it ignores the end of the text (`ignore_eos`)."""


class Attempt(NamedTuple):
    """An answer to a row of the sample."""

    row: JobRow
    """The row, with the numbers of tokens that the engine reported."""
    began: float
    ended: float
    outputs: tuple[int, ...]
    """Output tokens of each completion; 1 if the task does not decode."""
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
    """Concurrency limit of a scheduler if the job fixes it; None if enough rows are always in flight."""


class Forecast(NamedTuple):
    """The time and the tokens of the pending rows; see `Estimate`."""

    seconds: Interval
    tokens: dict[str, Interval]
    passes: int
    limited_by: str
    why: tuple[str, ...]


Drawn = Sequence[tuple[JobRow, Sequence[int]]]
"""Rows, each with the output tokens of its completions."""


def by_length(row: JobRow) -> tuple[float, ...]:
    """Sort key that puts rows that may have long outputs last, and mixes rows that are otherwise equal."""
    return row.asked, row.prompt, row.row * GOLDEN % 1


def choose(rows: Iterable[JobRow], count: int) -> list[JobRow]:
    """Return `count` rows of all lengths, from all over the input."""
    ordered = sorted(rows, key=by_length)
    count = min(count, len(ordered))
    return [ordered[len(ordered) * (2 * at + 1) // (2 * count)] for at in range(count)]


class Simulated(NamedTuple):
    """What one simulated scheduler did with a list of rows."""

    work_at_ends: list[PassWork]
    """Work done when each row ended, in the order of the ends. The first entry is no work, before any row."""
    ended_before_last: int
    """Rows that had ended when the last row began to run."""
    waiting_share: float
    """Fraction of the decode passes in which rows waited for the KV pool."""


def simulate(
    config: SchedulerConfig, rows: Drawn, is_due: Callable[[Scheduler, int, int], bool]
) -> Simulated:
    """Run the rows on one simulated scheduler.

    `is_due` tells whether to send the next row. It gets the scheduler, the number of rows sent and the number
    of rows ended.
    """
    scheduler, work = Scheduler(config), PassWork()
    work_at_ends = [work]
    next_row = ended_before_last = waiting_passes = 0
    open_completions = Counter[int]()  # by row
    while True:
        while next_row < len(rows) and is_due(scheduler, next_row, len(work_at_ends) - 1):
            for request in _requests_of(*rows[next_row], number=next_row):
                with contextlib.suppress(ValueError):  # longer than the pool: it is not sent
                    scheduler.submit(request)
                    open_completions[next_row] += 1
            next_row += 1
        if scheduler.queue or next_row < len(rows):
            ended_before_last = len(work_at_ends) - 1
        step = scheduler.step()
        if step is None:
            decode_passes = max(work.passes - work.prefills, 1)
            return Simulated(work_at_ends, ended_before_last, waiting_passes / decode_passes)
        work = work.plus(step, 0)
        if step.kind == "decode" and step.queue and step.running < config.most_running - 1:
            waiting_passes += step.steps
        for request in step.finished:
            open_completions[request.payload] -= 1
            if not open_completions[request.payload]:
                work_at_ends.append(work)


def _requests_of(row: JobRow, outputs: Sequence[int], *, number: int) -> Iterator[SimulatedRequest]:
    """Yield a request for each completion of a row; `number` is the row's place in the simulation.

    From the second completion on, the prefix cache has the row's prompt.
    """
    prompt = max(1, round(row.prompt))
    cached = min(round(row.cached), prompt - 1)
    for tokens in outputs:
        yield SimulatedRequest(
            prompt_tokens=prompt,
            output_tokens=tokens,
            max_new_tokens=max(row.asked, tokens),  # a row may ask again with a higher limit
            ignore_eos=row.fixed,
            prefix=(("shared", cached),) if cached > 0 else (),
            payload=number,
        )
        cached = prompt - 1


def whole_work(setting: Setting, drawn: Drawn, count: float) -> tuple[PassWork, float]:
    """Return the work of a scheduler for `count` rows, by a simulation of the rows in `drawn`.

    The rows in `drawn` come from all over the job. The second value is the fraction of the decode passes in
    which rows waited for the KV pool.
    """
    most_waiting = setting.config.most_running  # a pass without decoding may take as many waiting rows

    def is_due(scheduler: Scheduler, sent: int, ended: int) -> bool:
        if setting.window:
            return sent - ended < setting.window
        return scheduler.queue < most_waiting

    simulated = simulate(setting.config, drawn, is_due)
    work = simulated.work_at_ends[-1]
    # The rows that are not simulated run in the steady state: a pass has as many of them as in the steady
    # part of the simulation.
    steady = _steady_work(simulated)
    passes = round(work.samples * steady.passes / max(steady.samples, 1))
    further_rows = count / len(drawn) - 1  # relative to the simulated ones
    return _plus(work, work._replace(passes=passes), further_rows), simulated.waiting_share


def _steady_work(simulated: Simulated) -> PassWork:
    """Return the work between ramp-up and drain, at least that of the middle third of the rows."""
    work_at_ends = simulated.work_at_ends
    third = len(work_at_ends) // 3
    ramp_up_end = min(bisect_right(work_at_ends, PassWork(DECAY_STEPS)), third)
    drain_begin = max(simulated.ended_before_last, 2 * third)
    return _plus(work_at_ends[drain_begin], work_at_ends[ramp_up_end], -1)


def sample_spans(attempts: Sequence[Attempt], setting: Setting) -> list[tuple[PassWork, float]]:
    """Divide the sample's passes into stretches; return the work and the seconds of each stretch."""
    routes = defaultdict[str, list[Attempt]](list)
    for attempt in sorted(attempts, key=attrgetter("began")):
        routes[attempt.route].append(attempt)
    schedulers = max(1, setting.schedulers // len(routes))  # of each route
    spans: list[tuple[PassWork, float]] = []
    for attempts_of_route in routes.values():
        for scheduler in range(schedulers):  # a server's schedulers get rows in turn
            spans += _scheduler_spans(attempts_of_route[scheduler::schedulers], setting.config)
    return spans


def _scheduler_spans(attempts: Sequence[Attempt], config: SchedulerConfig) -> list[tuple[PassWork, float]]:
    """Return the stretches of one scheduler, by a simulation of its part of the sample.

    A row is sent once as many rows have ended as when it was really sent.
    """
    ends = sorted(attempt.ended for attempt in attempts)
    ended_before = [bisect_right(ends, attempt.began) for attempt in attempts]
    simulated = simulate(
        config,
        [(attempt.row, attempt.outputs) for attempt in attempts],
        lambda scheduler, sent, ended: ended_before[sent] <= ended or not scheduler.in_flight,
    )
    work = simulated.work_at_ends
    times = [*(attempt.began for attempt in attempts[:1]), *ends]
    cuts = sorted({(len(work) - 1) * at // MOST_SPANS for at in range(MOST_SPANS + 1)})
    return [
        (_plus(work[end], work[begin], -1), times[end] - times[begin])
        for begin, end in pairwise(cuts)
        if work[end].passes > work[begin].passes
    ]


def _plus(work: PassWork, other: PassWork, factor: float) -> PassWork:
    return PassWork._make(a + factor * b for a, b in zip(work, other, strict=True))


def cost_of(spans: Sequence[tuple[PassWork, float]]) -> CostModel:
    """Fit the cost of a pass. With too few stretches for a fit, the cost is the mean time of a pass."""
    passes = sum(work.passes for work, _ in spans)
    mean = CostModel(sum(seconds for _, seconds in spans) / max(passes, 1), 0.0, 0.0, 0.0)
    return fit_spans(spans) or mean


def draw(attempts: Sequence[Attempt], rows: Sequence[JobRow]) -> tuple[Drawn, float]:
    """Return the rows in input order, each with the output lengths of the sampled row that is most like it.

    The second value is the standard deviation of the mean output of the sample's rows.
    """
    answered_rows: dict[int, tuple[JobRow, list[int]]] = {}
    for attempt in attempts:
        _, outputs = answered_rows.setdefault(attempt.row.row, (attempt.row, []))
        outputs.extend(attempt.outputs)
    sample = sorted(answered_rows.values(), key=lambda answered: by_length(answered[0]))
    drawn = []
    for place, row in enumerate(sorted(rows, key=by_length)):
        most_alike = sample[place * len(sample) // len(rows)]
        drawn.append((row, _scaled(most_alike, row)))
    drawn.sort(key=lambda row_and_outputs: row_and_outputs[0].row)
    # Neighbours in the order of lengths predict each other; half the squared error is a row's variance.
    variances = []
    for answered, (row, outputs) in pairwise(sample):
        error = sum(_scaled(answered, row)) - sum(outputs)
        variances.append(error**2 / 2)
    return drawn, math.sqrt(fmean(variances or [0]) / len(sample))


def _scaled(answered: tuple[JobRow, Sequence[int]], row: JobRow) -> list[int]:
    """Scale the output lengths of an answered row to `row`; a truncated output stays truncated."""
    answered_row, outputs = answered
    scaled = []
    for tokens in outputs:
        is_truncated = tokens >= answered_row.asked
        length = round(tokens * row.asked / answered_row.asked) if is_truncated else min(tokens, row.asked)
        scaled.append(length)
    return scaled


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
    """Forecast `total` rows with `setting`; `rows` are some of them, in the order of sending.

    The sample ran with the setting `sampled`. `start_s` are the seconds of the run without the sending, and
    `client_s` are the client's CPU seconds for a row.
    """
    spans = sample_spans(attempts, sampled)
    cost = cost_of(spans)
    rows_of_scheduler = max(1, round(total / setting.schedulers))
    count = min(rows_of_scheduler, MOST_SIMULATED)
    drawn, deviation = draw(attempts, [rows[at * len(rows) // count] for at in range(count)])
    work, waiting_share = whole_work(setting, drawn, rows_of_scheduler)
    seconds = max(cost.work_s(work), LEAST_S)

    # How far the time may be off, as a standard deviation of its logarithm.
    of_few = 1 + FEW / len(attempts)
    output_tokens = fmean(sum(tokens) for _, tokens in drawn)
    deviation *= of_few * math.sqrt(1 + len(attempts) / total) / output_tokens
    factor = math.exp(deviation)
    longer = [(row, [math.ceil(factor * tokens) for tokens in lengths]) for row, lengths in drawn]
    longer_work, _ = whole_work(setting, longer, rows_of_scheduler)
    by_outputs = math.log(max(cost.work_s(longer_work) / seconds, 1.0))
    by_cost = math.hypot(_deviation_of_costs(spans, work, seconds, of_few), BETWEEN_RUNS)

    prefill_s = cost._replace(sample_s=0, kv_token_s=0).work_s(work._replace(passes=work.prefills))
    limited_by = "decode"
    if waiting_share > 1 / 2:
        limited_by = "pool"
    if prefill_s > seconds / 2:
        limited_by = "prefill"
    if client_s * total > seconds:
        seconds, limited_by = client_s * total, "client"
    causes = sorted([(by_outputs, "output lengths"), (by_cost, "pass times")], reverse=True)
    return Forecast(
        seconds=_around(seconds, math.hypot(by_outputs, by_cost)).times(1, start_s),
        tokens=tokens_of(rows, total, _around(output_tokens, deviation)),
        passes=round(work.passes),
        limited_by=limited_by,
        why=tuple(_cause(name, math.expm1(TAIL * part)) for part, name in causes),
    )


def _deviation_of_costs(
    spans: Sequence[tuple[PassWork, float]], work: PassWork, seconds: float, of_few: float
) -> float:
    """Return the relative deviation of the time of `work`, `seconds`, by the costs of a pass alone.

    It is a jackknife: the costs are fitted again without each of FOLDS parts of the sample. `of_few` widens
    the deviation for a small sample.
    """
    if len(spans) <= FOLDS:
        return UNKNOWN_COSTS
    times = []
    for fold in range(FOLDS):
        other_spans = [span for number, span in enumerate(spans) if number % FOLDS != fold]
        times.append(cost_of(other_spans).work_s(work) / seconds)
    return of_few * stdev(times) * (FOLDS - 1) / math.sqrt(FOLDS)


def _cause(name: str, share: float) -> str:
    return (
        f"{name}: ±{100 * share:.0f} %"
        if share <= 1
        else f"{name}: too few sampled rows to estimate its error"
    )


def _around(median: float, deviation: float) -> Interval:
    factor = math.exp(TAIL * deviation)
    return Interval(median, median / factor, median * factor)


def tokens_of(rows: Sequence[JobRow], total: int, outputs: Interval) -> dict[str, Interval]:
    """Estimate the tokens of `total` rows from some of them; `outputs` are the output tokens of a row."""
    prompt = fmean(row.prompt for row in rows)
    cached = fmean(row.cached for row in rows)
    tokens_of_row = {
        "prompt": Interval(prompt, prompt, prompt),
        "cached": Interval(cached, cached, cached),
        "output": outputs,
    }
    return {name: tokens.times(total) for name, tokens in tokens_of_row.items()}
