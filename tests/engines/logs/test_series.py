"""The load over time in bounded memory: what is counted, what is left of it, and where signs begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchrunner.engines.logs.series import LoadSample, Series, Thresholds

if TYPE_CHECKING:
    from collections.abc import Iterable


def series_of(queues: Iterable[int], limits: Thresholds | None = None) -> Series:
    """Return the load of one scheduler that had these queues, a second apart."""
    series = Series(limits or Thresholds())
    for at, queue in enumerate(queues):
        series.add("s", LoadSample(float(at), running=8, queue=queue, usage=0.5))
    return series


@pytest.mark.parametrize(("low", "share"), [(100, 0.0), (0, 1.0)])
def test_the_drain_is_neither_empty_nor_in_the_band(low: int, share: float) -> None:
    """What ran dry at the end counts nowhere, also where an empty queue is healthy."""
    series = series_of([30] * 10 + [0] * 10, Thresholds(queue_low=low))
    series.settle()
    assert series.share("in_band") == share
    assert series.share("empty") == 0


@pytest.mark.parametrize(("queues", "middle"), [([1, 3, 9], 3), ([9, 1, 3, 4], 3.5), ([7], 7), ([], 0)])
def test_a_median_is_in_the_middle(queues: list[int], middle: float) -> None:
    """It is that of all samples, whatever their order."""
    assert series_of(queues).median("queue") == middle
