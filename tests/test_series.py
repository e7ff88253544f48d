"""The load over time in bounded memory: what is counted, what is left of it, and where signs begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchrunner.care.series import Series
from batchrunner.care.signs import Sample
from batchrunner.care.thresholds import Thresholds
from batchrunner.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterable


def series_of(queues: Iterable[int], limits: Thresholds | None = None) -> Series:
    """Return the load of one scheduler that had these queues, a second apart."""
    series = Series(limits or Thresholds())
    for at, queue in enumerate(queues):
        series.add("s", Sample(float(at), running=8, queue=queue, usage=0.5))
    return series


@pytest.mark.parametrize(("low", "share"), [("100", 0.0), ("0", 1.0)])
def test_the_drain_is_neither_empty_nor_in_the_band(low: str, share: float) -> None:
    """What ran dry at the end counts nowhere, also where an empty queue is healthy."""
    series = series_of([30] * 10 + [0] * 10, Thresholds().with_values([f"queue_low={low}"]))
    series.settle()
    assert series.share("in_band") == share
    assert series.share("empty") == 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("frequent=25", "it is a share: give a number from 0 to 1"),
        ("usage_good=90", "it is a share"),
        ("shared=0.9", "shared 0.9, cached_well 0.6: none may be above the next"),
        ("graph_batch=1024", "graph_batch 1024, graph_batch_tp 768: none may be above the next"),
    ],
)
def test_a_threshold_that_would_silence_is_refused(setting: str, words: str) -> None:
    """Per cent instead of a share, or the wrong way round: no sign would ever reach it."""
    with pytest.raises(JobError, match=words):
        Thresholds().with_values([setting])
    assert Thresholds().with_values(["frequent=1"]).frequent == 1
