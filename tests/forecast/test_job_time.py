"""What is told of a job by its sample, beside what a scheduler then does."""

import random
from itertools import islice

import pytest

from batchrunner.engines.simulation.replica import CostModel
from batchrunner.engines.simulation.scheduler import Scheduler, SchedulerConfig, SimulatedRequest
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
            began[row] = at_s
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
    """Where prompts tell outputs, the sample has two parts, and also where rows end with their prefill."""
    luck = random.Random(5)
    rows = [JobRow(n, luck.randint(20, 300), 0, 10 * output) for n in range(3000)]
    outputs = [max(1, round(output * row.prompt / 160 + luck.uniform(-1, 1))) for row in rows]
    first = choose(rows, 60)
    second = choose([row for row in rows if row not in first], 90)
    assert len({row.row // 500 for row in first}) == 6
    attempts = answered(first, outputs, 30)
    attempts += answered(second, outputs, 45, attempts[-1].ended)
    left = [row for row in rows if row not in first and row not in second]
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
    assert told.passes == pytest.approx(passes.prefill_passes + passes.decode_passes, rel=0.06)
    ten = forecast(attempts, setting, setting, left, 10 * len(left))
    assert ten.seconds.median == pytest.approx(10 * (told.seconds.median - 7), rel=0.03)
    many = forecast(attempts, setting, Setting(CONFIG, 10), left, 10 * len(left))
    assert many.seconds.median == pytest.approx(told.seconds.median - 7, rel=0.03)
