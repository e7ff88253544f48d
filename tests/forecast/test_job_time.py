"""What is told of a job by its sample, beside what a scheduler then does."""

import random
from itertools import islice

import pytest

from batchrunner.engines.simulation.replica import CostModel
from batchrunner.engines.simulation.scheduler import Scheduler, SchedulerConfig, SimulatedRequest
from batchrunner.forecast import job_time
from batchrunner.forecast.job_time import Attempt, JobRow, Setting, choose, forecast

CONFIG = SchedulerConfig(max_running=64, max_total_tokens=40_000)
COST = CostModel(5e-3, 1e-4, 1e-7, 5e-5, 2e-3)


def answered(rows: list[JobRow], outputs: list[int], window: int, at_s: float = 0.0) -> list[Attempt]:
    """Let a scheduler answer rows, so many in flight, with passes that take what COST says."""
    scheduler, coming = Scheduler(CONFIG), iter(rows)
    found: list[Attempt] = []
    began: dict[JobRow, float] = {}
    while True:
        for row in islice(coming, window - scheduler.in_flight):
            began[row] = at_s + 1e-9 * len(began)  # as they are sent
            request = SimulatedRequest(round(row.prompt), outputs[row.row], row.asked, payload=row)
            scheduler.submit(request)
        step = scheduler.step()
        if step is None:
            return found
        at_s += COST.step_s(step)
        found += [
            Attempt(request.payload, began[request.payload], at_s, (request.outputs,), "engine")
            for request in step.finished
        ]


@pytest.mark.parametrize("output", [1, 40])
def test_a_sample_tells_time_and_passes(output: int) -> None:
    """Where prompts tell outputs, and also where rows end with their prefill."""
    luck = random.Random(5)
    rows = [JobRow(n, luck.randint(20, 300), 0, 10 * output) for n in range(3000)]
    outputs = [max(1, round(output * row.prompt / 160 + luck.uniform(-1, 1))) for row in rows]
    sample = choose(rows, 150)
    assert len({row.row // 500 for row in sample}) == 6
    attempts = answered(sample, outputs, 75)
    left = [row for row in rows if row not in sample]
    setting = Setting(CONFIG, 1)
    told = forecast(attempts, setting, setting, left, len(left), start_s=7.0)
    ended = answered(left, outputs, 3000)
    assert told.seconds.median - 7 == pytest.approx(ended[-1].ended, rel=0.08)
    assert told.seconds.low - 7 <= ended[-1].ended <= told.seconds.high
    passes = Scheduler(CONFIG)
    for row in left:
        passes.submit(SimulatedRequest(round(row.prompt), outputs[row.row], row.asked))
    while passes.step():
        pass
    assert told.passes == pytest.approx(passes.prefill_passes + passes.decode_passes, rel=0.2)
    ten = forecast(attempts, setting, setting, left, 10 * len(left))
    assert ten.seconds.median == pytest.approx(10 * (told.seconds.median - 7), rel=0.06)  # filled once
    many = forecast(attempts, setting, Setting(CONFIG, 10), left, 10 * len(left))
    assert many.seconds.median == pytest.approx(told.seconds.median - 7, rel=0.03)


def test_the_end_of_a_long_input_is_unlike_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last tenth has long prompts, and not all rows are simulated, they count nevertheless."""
    monkeypatch.setattr(job_time, "MOST_SIMULATED", 1500)
    luck = random.Random(3)
    rows = [JobRow(n, luck.randint(20, 60) * (20 if n >= 5400 else 1), 0, 64) for n in range(6000)]
    outputs = [luck.randint(5, 30) for _ in rows]
    sample = choose(rows, 200)
    left = [row for row in rows if row not in sample]
    setting = Setting(CONFIG, 1)
    told = forecast(answered(sample, outputs, 100), setting, setting, left, len(left))
    assert told.seconds.median == pytest.approx(answered(left, outputs, 6000)[-1].ended, rel=0.08)


def test_what_a_row_asked_again_and_what_was_cut() -> None:
    """A row that asks again for more has the tokens of all its answers; a cut one is cut by its own limit."""
    known, more = JobRow(0, 10, 0, 16), JobRow(1, 10, 0, 16)
    attempts = [Attempt(known, 0, 1, (16,), "engine"), Attempt(known, 1, 3, (32,), "engine")]
    setting = Setting(CONFIG, 1)
    for asked, tokens in ((16, 48), (8, 24)):
        told = forecast(attempts, setting, setting, [more._replace(asked=asked)], 1)
        assert told.tokens["output"].median == tokens


def test_a_fixed_window_counts_rows() -> None:
    """Rows of several samples are in flight as many at once as the job says, not fewer."""
    row = JobRow(0, 10, 0, 16)
    attempts = [Attempt(row, 0, 1, (16,) * 4, "engine")]
    rows = [row._replace(row=number) for number in range(60)]
    told = forecast(attempts, Setting(CONFIG, 1), Setting(CONFIG, 1, window=4), rows, 60)
    assert told.passes == pytest.approx(15 * 16, rel=0.2)
