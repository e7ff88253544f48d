"""How long passes take, from the lines of a log."""

from __future__ import annotations

import pytest

from batchrunner.engines.logs.pass_times import STEPS_A_LINE, PassTimes
from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.logs.thresholds import Thresholds
from tests.support.sglang_logs import LogWriter

STEP_S = 0.02


def times_of(accepted: float | None, lines: int = 30) -> PassTimes:
    """Return the times in a log whose decode steps take STEP_S, with so many tokens accepted a step."""
    reader, log = LogReader(Thresholds()), LogWriter().started(most=64)
    told = "" if accepted is None else f"accept len: {accepted:.2f}, block accept len: 9.00, "
    for number in range(lines):
        running = 8 + number % 16
        log.decode(1, r=running, p=running * (accepted or 1.0) / STEP_S)
    for line in log.lines:
        reader.take(line.replace("cuda graph", f"{told}cuda graph"))
    found = reader.series.pass_times()
    assert found is not None
    return found


@pytest.mark.parametrize("accepted", [None, 1.0, 2.5])
def test_a_step_with_speculation_has_several_tokens(accepted: float | None) -> None:
    """A line's tokens a second are of accepted tokens; seconds are those of the steps all the same."""
    found = times_of(accepted)
    assert found.total.seconds == pytest.approx(30 * STEPS_A_LINE * STEP_S, rel=1e-3)
    assert found.step_s == pytest.approx(STEP_S, rel=0.01)
