"""Forecasts a job's time from the answers to a sample of its rows. No I/O.

First the sample is simulated, with its rows in the order in which they were sent. The simulation gives the
work of the forward passes up to the end of each row. The times at which the rows really ended then give the
cost of a pass, including everything that the simulation leaves out. Then the job is simulated. Each of its
rows gets the output lengths of the sampled row that is most like it.
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
"""Maximum number of spans (stretches of forward passes) of a scheduler to which costs are fitted."""
FEW = 10
"""A sample of this many rows is assumed to vary only half as much as all rows, because it lacks rare rows."""
FOLDS = 8
"""Number of parts of the sample's measurements. Each part is left out in turn, to see how much the costs
vary."""
BETWEEN_RUNS = 0.02
"""Relative standard deviation of pass times between two runs on the same machine."""
UNKNOWN_COSTS = 0.3
"""Assumed relative standard deviation of pass times, if the sample is too small to measure it."""
TAIL = 1.645
"""Half-width of a 90 % interval, in standard deviations."""
LEAST_S = 1e-6
"""Minimum time of all rows in seconds. The simulated engine of tests may answer in no time."""


class JobRow(NamedTuple):
    """The lengths of a row before it has its answer."""

    row: int
    """Number of the row in the input."""
    prompt: float
    """Number of prompt tokens."""
    cached: float
    """Number of prompt tokens that come from the prefix cache."""
    asked: int
    """`max_new_tokens` of the row."""
    fixed: bool = False
    """Whether the output always has `max_new_tokens` (`ignore_eos`)."""


class Attempt(NamedTuple):
    """An answer to a row of the sample."""

    row: JobRow
    """The row, with the numbers of tokens that the engine reported."""
    began: float
    """Monotonic time at which the row was sent, in seconds."""
    ended: float
    """Monotonic time at which the answer ended, in seconds."""
    outputs: tuple[int, ...]
    """Number of output tokens of each completion; 1 if the task does not decode."""
    route: str
    """URL of the server that answered."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 90 % interval. The figure is the median."""

    median: float
    low: float
    high: float

    def times(self, factor: float, plus: float = 0.0) -> "Interval":
        """Return the interval with all three figures multiplied by `factor`, then increased by `plus`."""
        figures = (self.median, self.low, self.high)
        return Interval(*(round(factor * figure + plus, 6) for figure in figures))


class Setting(NamedTuple):
    """The schedulers on which rows run."""

    config: SchedulerConfig
    """Flags of each scheduler."""
    schedulers: int
    window: int | None = None
    """Concurrency limit of a scheduler, if the job sets it. None means that enough rows are always in flight.
    """


class Forecast(NamedTuple):
    """The forecast time and tokens of the pending rows. `Estimate` explains the fields."""

    seconds: Interval
    tokens: dict[str, Interval]
    passes: int
    limited_by: str
    why: tuple[str, ...]


Drawn = Sequence[tuple[JobRow, Sequence[int]]]
"""Rows, each with the numbers of output tokens of its completions."""


def by_length(row: JobRow) -> tuple[float, ...]:
    """Return a sort key that puts rows with possibly long outputs last.

    Rows of equal lengths are mixed, so that neighbours in this order come from different places of the input.
    """
    return row.asked, row.prompt, row.row * GOLDEN % 1


def choose(rows: Iterable[JobRow], count: int) -> list[JobRow]:
    """Return `count` rows of all lengths, from all over the input."""
    ordered = sorted(rows, key=by_length)
    count = min(count, len(ordered))
    # Divide the order into `count` equal parts, and take the middle row of each part.
    return [ordered[len(ordered) * (2 * part + 1) // (2 * count)] for part in range(count)]


class Simulated(NamedTuple):
    """The result of a simulation of one scheduler."""

    work_at_ends: list[PassWork]
    """Work of all passes up to the end of each row, in the order in which rows ended. The first entry is 0:
    no work before any row ended."""
    ended_before_last: int
    """Number of rows that had ended when the last row began to run."""
    waiting_share: float
    """Fraction of the decode passes in which rows waited for the KV pool."""


def simulate(
    config: SchedulerConfig, rows: Drawn, is_due: Callable[[Scheduler, int, int], bool]
) -> Simulated:
    """Simulate one scheduler that runs the rows.

    `is_due` tells whether to send the next row. Its arguments are the scheduler, the number of rows sent and
    the number of rows ended.
    """
    scheduler, work = Scheduler(config), PassWork()
    work_at_ends = [work]
    next_row = ended_before_last = waiting_passes = 0
    open_completions = Counter[int]()  # Number of completions that have not ended, by row.
    while True:
        while next_row < len(rows) and is_due(scheduler, next_row, len(work_at_ends) - 1):
            for request in _requests_of(*rows[next_row], number=next_row):
                # `submit` raises ValueError for a request that does not fit into the KV pool. Such a request
                # is left out.
                with contextlib.suppress(ValueError):
                    scheduler.submit(request)
                    open_completions[next_row] += 1
            next_row += 1
        # As long as rows wait, the last row has not begun to run.
        if scheduler.queue or next_row < len(rows):
            ended_before_last = len(work_at_ends) - 1
        step = scheduler.step()
        if step is None:  # all rows have ended
            decode_passes = max(work.passes - work.prefills, 1)
            return Simulated(work_at_ends, ended_before_last, waiting_passes / decode_passes)
        work = work.plus(step, 0)
        # Rows wait although more requests may run, so they wait for the KV pool.
        if step.kind == "decode" and step.queue and step.running < config.most_running - 1:
            waiting_passes += step.steps
        for request in step.finished:
            open_completions[request.payload] -= 1
            if not open_completions[request.payload]:
                work_at_ends.append(work)


def _requests_of(row: JobRow, outputs: Sequence[int], *, number: int) -> Iterator[SimulatedRequest]:
    """Yield a request for each completion of a row; `number` identifies the row in the simulation.

    From the second completion on, the prefix cache has the row's prompt.
    """
    prompt = max(1, round(row.prompt))
    # SGLang always computes the last token of a prompt, even if the whole prompt is in the cache.
    cached = min(round(row.cached), prompt - 1)
    for tokens in outputs:
        yield SimulatedRequest(
            prompt_tokens=prompt,
            output_tokens=tokens,
            max_new_tokens=max(row.asked, tokens),  # a retry may have had a higher limit
            ignore_eos=row.fixed,
            prefix=(("shared", cached),) if cached > 0 else (),
            payload=number,
        )
        cached = prompt - 1


def whole_work(setting: Setting, drawn: Drawn, count: float) -> tuple[PassWork, float]:
    """Return the work of one scheduler for `count` rows, from a simulation of the rows `drawn`.

    These rows come from all over the job. The second value is the fraction of the decode passes in which rows
    waited for the KV pool.
    """
    # Without a limit set by the job, the queue is always long enough for a full prefill pass. A pass of a
    # task without decoding may run `most_running` rows.
    most_waiting = setting.config.most_running

    def is_due(scheduler: Scheduler, sent: int, ended: int) -> bool:
        if setting.window:
            return sent - ended < setting.window
        return scheduler.queue < most_waiting

    simulated = simulate(setting.config, drawn, is_due)
    work = simulated.work_at_ends[-1]
    # The rows that were not simulated extend only the steady state, in which passes are fuller than at the
    # beginning and the end.
    steady = _steady_work(simulated)
    # The work of the simulated rows, in fewer passes, each as full as in the steady state.
    passes = round(work.samples * steady.passes / max(steady.samples, 1))
    ratio_of_other_rows = count / len(drawn) - 1
    return _plus(work, work._replace(passes=passes), ratio_of_other_rows), simulated.waiting_share


def _steady_work(simulated: Simulated) -> PassWork:
    """Return the work in the steady state: at least that of the middle third of the rows."""
    work_at_ends = simulated.work_at_ends
    third = len(work_at_ends) // 3
    # The steady state begins after DECAY_STEPS passes (PassWork is compared by its passes), and ends when no
    # row waits any more.
    ramp_up_end = min(bisect_right(work_at_ends, PassWork(DECAY_STEPS)), third)
    drain_begin = max(simulated.ended_before_last, 2 * third)
    return _plus(work_at_ends[drain_begin], work_at_ends[ramp_up_end], -1)


def sample_spans(attempts: Sequence[Attempt], setting: Setting) -> list[tuple[PassWork, float]]:
    """Divide the sample's forward passes into spans; return work and measured seconds of each span."""
    routes = defaultdict[str, list[Attempt]](list)
    for attempt in sorted(attempts, key=attrgetter("began")):
        routes[attempt.route].append(attempt)
    schedulers_of_route = max(1, setting.schedulers // len(routes))
    spans: list[tuple[PassWork, float]] = []
    for attempts_of_route in routes.values():
        # A server gives rows to its schedulers in turn, so every nth row ran on the same scheduler.
        for scheduler in range(schedulers_of_route):
            spans += _scheduler_spans(attempts_of_route[scheduler::schedulers_of_route], setting.config)
    return spans


def _scheduler_spans(attempts: Sequence[Attempt], config: SchedulerConfig) -> list[tuple[PassWork, float]]:
    """Return work and measured seconds of the spans of one scheduler.

    A span lasts from the end of one row to the end of another.

    The work comes from a simulation of the scheduler's sampled rows. It sends each row when as many rows have
    ended as when the row was really sent.
    """
    ends = sorted(attempt.ended for attempt in attempts)
    ended_before = [bisect_right(ends, attempt.began) for attempt in attempts]

    def is_due(scheduler: Scheduler, sent: int, ended: int) -> bool:
        # An empty scheduler always gets a row, so that the simulation goes on.
        return ended_before[sent] <= ended or not scheduler.in_flight

    rows = [(attempt.row, attempt.outputs) for attempt in attempts]
    work = simulate(config, rows, is_due).work_at_ends
    # The time at which 0, 1, 2 … rows had ended.
    times = [*(attempt.began for attempt in attempts[:1]), *ends]
    # The borders between spans, as numbers of ended rows.
    borders = sorted({(len(work) - 1) * span // MOST_SPANS for span in range(MOST_SPANS + 1)})
    return [
        (_plus(work[end], work[begin], -1), times[end] - times[begin])
        for begin, end in pairwise(borders)
        if work[end].passes > work[begin].passes  # rows of the same pass make an empty span
    ]


def _plus(work: PassWork, other: PassWork, factor: float) -> PassWork:
    return PassWork._make(a + factor * b for a, b in zip(work, other, strict=True))


def cost_of(spans: Sequence[tuple[PassWork, float]]) -> CostModel:
    """Fit the cost of a pass to the spans; with too few spans for a fit, return the mean time of a pass."""
    passes = sum(work.passes for work, _ in spans)
    mean = CostModel(sum(seconds for _, seconds in spans) / max(passes, 1), 0.0, 0.0, 0.0)
    return fit_spans(spans) or mean


def draw(attempts: Sequence[Attempt], rows: Sequence[JobRow]) -> tuple[Drawn, float]:
    """Return the rows in input order, each with the output lengths of the most similar sampled row.

    `attempts` are the answers to the sample. The second value is the standard error of the mean output length
    of the sampled rows.
    """
    answered_rows: dict[int, tuple[JobRow, list[int]]] = {}
    for attempt in attempts:
        _, outputs = answered_rows.setdefault(attempt.row.row, (attempt.row, []))
        outputs.extend(attempt.outputs)
    sample = sorted(answered_rows.values(), key=lambda answered: by_length(answered[0]))
    drawn = []
    for rank, row in enumerate(sorted(rows, key=by_length)):
        most_alike = sample[rank * len(sample) // len(rows)]  # the row at the same quantile of lengths
        drawn.append((row, _scaled(most_alike, row)))
    drawn.sort(key=lambda row_and_outputs: row_and_outputs[0].row)
    # Rows are drawn by length, so only the variance between rows of similar lengths counts. The difference of
    # two neighbours has twice the variance of one row, so its square is halved.
    variances = []
    for answered, (row, outputs) in pairwise(sample):
        error = sum(_scaled(answered, row)) - sum(outputs)
        variances.append(error**2 / 2)
    variance = fmean(variances or [0])
    return drawn, math.sqrt(variance / len(sample))


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
    """Forecast the time and tokens of `total` rows on the schedulers of `setting`.

    `rows` are examples of these rows, in the order of sending. `attempts` are the answers to a sample, which
    ran on the schedulers of `sampled`. `start_s` are the seconds of the run in which no rows are sent, such
    as the start of the engine. `client_s` are the client's CPU seconds per row.
    """
    spans = sample_spans(attempts, sampled)
    cost = cost_of(spans)
    rows_of_scheduler = max(1, round(total / setting.schedulers))
    count = min(rows_of_scheduler, MOST_SIMULATED)
    evenly_spread_rows = [rows[number * len(rows) // count] for number in range(count)]
    drawn, standard_error = draw(attempts, evenly_spread_rows)
    work, waiting_share = whole_work(setting, drawn, rows_of_scheduler)
    seconds = max(cost.work_s(work), LEAST_S)
    output_tokens = fmean(sum(tokens) for _, tokens in drawn)

    # From here on, a deviation is a standard deviation of a figure's logarithm. For a small one, that is
    # nearly the standard deviation as a fraction of the figure.
    small_sample_factor = 1 + FEW / len(attempts)
    # The mean of the sample is uncertain by its standard error. The mean of the rows that will be sent varies
    # too: its variance is that of the sample's mean times (rows in the sample / rows to send).
    output_deviation = standard_error * (
        small_sample_factor * math.sqrt(1 + len(attempts) / total) / output_tokens
    )
    # The uncertainty of the time has two causes: the output lengths, and the cost of a forward pass.
    longer_work = _work_of_longer_outputs(setting, drawn, rows_of_scheduler, math.exp(output_deviation))
    by_outputs = math.log(max(cost.work_s(longer_work) / seconds, 1.0))
    if len(spans) > FOLDS:
        cost_deviation = small_sample_factor * _deviation_of_costs(spans, work, seconds)
    else:
        cost_deviation = UNKNOWN_COSTS
    # The cost of a pass also varies from run to run. The two deviations are independent.
    by_cost = math.hypot(cost_deviation, BETWEEN_RUNS)

    # Time of the prefill passes alone: the costs of decoding are left out.
    prefill_s = cost._replace(sample_s=0, kv_token_s=0).work_s(work._replace(passes=work.prefills))
    client_total_s = client_s * total
    limited_by = _bottleneck(
        seconds=seconds, prefill_s=prefill_s, client_s=client_total_s, waiting_share=waiting_share
    )
    seconds = max(seconds, client_total_s)
    causes = sorted([(by_outputs, "output lengths"), (by_cost, "pass times")], reverse=True)
    return Forecast(
        seconds=_around(seconds, math.hypot(by_outputs, by_cost)).times(1, plus=start_s),
        tokens=tokens_of(rows, total, _around(output_tokens, output_deviation)),
        passes=round(work.passes),
        limited_by=limited_by,
        why=tuple(_cause(name, math.expm1(TAIL * deviation)) for deviation, name in causes),
    )


def _work_of_longer_outputs(setting: Setting, drawn: Drawn, count: float, factor: float) -> PassWork:
    """Return what `whole_work` returns as work, with all output lengths multiplied by `factor`."""
    longer_outputs = []
    for row, lengths in drawn:
        longer_outputs.append((row, [math.ceil(factor * tokens) for tokens in lengths]))
    work, _ = whole_work(setting, longer_outputs, count)
    return work


def _deviation_of_costs(spans: Sequence[tuple[PassWork, float]], work: PassWork, seconds: float) -> float:
    """Return the relative standard deviation of the time of `work` that comes from the fitted costs.

    `seconds` is that time. The deviation is measured by a jackknife: the costs are fitted again, each time
    without one of FOLDS parts of the spans. There must be more spans than parts.
    """
    times = []
    for fold in range(FOLDS):
        other_spans = [span for number, span in enumerate(spans) if number % FOLDS != fold]
        times.append(cost_of(other_spans).work_s(work) / seconds)
    # The fits share most of their spans, so a jackknife scales their deviation up.
    return stdev(times) * (FOLDS - 1) / math.sqrt(FOLDS)


def _cause(name: str, share: float) -> str:
    """Return a text about a cause of uncertainty.

    `share` is the half-width of the interval from this cause alone, as a fraction of the time.
    """
    if share <= 1:
        return f"{name}: ±{100 * share:.0f} %"
    return f"{name}: too few sampled rows to estimate the error"


def _bottleneck(*, seconds: float, prefill_s: float, client_s: float, waiting_share: float) -> str:
    """Return the bottleneck of a run, as in `Estimate.limited_by`.

    `seconds` is the time of all passes, `prefill_s` that of the prefill passes alone, and `client_s` the CPU
    time of the client. In `waiting_share` of the decode passes, rows wait for the KV pool.
    """
    if client_s > seconds:
        return "client"
    if prefill_s > seconds / 2:
        return "prefill"
    if waiting_share > 1 / 2:
        return "pool"
    return "decode"


def _around(median: float, deviation: float) -> Interval:
    """Return the 90 % interval of a figure whose logarithm has this standard deviation."""
    factor = math.exp(TAIL * deviation)
    return Interval(median, median / factor, median * factor)


def tokens_of(rows: Sequence[JobRow], total: int, outputs: Interval) -> dict[str, Interval]:
    """Return the numbers of prompt, cached and output tokens of `total` rows, of which `rows` are examples.

    `outputs` is the number of output tokens of one row.
    """
    prompt = fmean(row.prompt for row in rows)
    cached = fmean(row.cached for row in rows)
    tokens_of_row = {
        "prompt": Interval(prompt, prompt, prompt),
        "cached": Interval(cached, cached, cached),
        "output": outputs,
    }
    return {name: tokens.times(total) for name, tokens in tokens_of_row.items()}
