"""The load over time in bounded memory: what is counted, what is left of it, and where signs begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchrunner.engines.logs.lines import LoggedBatch
from batchrunner.engines.logs.series import LoadSample, PassLimits, Series, Thresholds

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


def test_a_scheduler_that_was_thinned_out_weighs_as_much() -> None:
    """Every second sample of the longer log is kept, and each of them counts for two."""
    series = Series(Thresholds())
    for at in range(1100):
        name, usage = ("a", 0.2) if at < 600 else ("b", 0.95)
        series.add(name, LoadSample(float(at), running=8, queue=5, usage=usage))
    assert len(series.tracks["a"].samples) < len(series.tracks["b"].samples)
    assert series.median("usage") == 0.2


@pytest.mark.parametrize(("queues", "middle"), [([1, 3, 9], 3), ([9, 1, 3, 4], 3.5), ([7], 7), ([], 0)])
def test_a_median_is_in_the_middle(queues: list[int], middle: float) -> None:
    """It is that of all samples, whatever their order."""
    assert series_of(queues).median("queue") == middle


def test_the_largest_is_not_thinned_away() -> None:
    """A peak of one sample counts, whether that sample is kept or not."""
    assert series_of(9000 if at == 301 else 5 for at in range(600)).longest_queue == 9000


LONG, TWO = (1, 2000), (2, 2000)
DECODES = None


@pytest.mark.parametrize(
    ("passes", "mean"),
    [
        ([("a", LONG)] * 8, 16_000),
        ([("a", TWO)] * 8, 2000),
        ([("a", TWO), ("a", LONG), ("a", LONG)] * 8, 6000),
        ([("a", LONG), ("a", LONG), ("a", DECODES)] * 8, 4000),
        ([("a", LONG), ("b", LONG), ("a", LONG), ("b", LONG), ("a", DECODES), ("b", DECODES)] * 8, 4000),
        ([("a", LONG), ("a", LONG), ("a", (9, 2000))] * 8, 4000),
    ],
)
def test_passes_of_one_prompt_follow_each_other(
    passes: list[tuple[str, tuple[int, int] | None]], mean: float
) -> None:
    """Other prompts, a decode batch and another scheduler's passes are not part of a long prompt."""
    series = Series(Thresholds())
    for at, (scheduler, prompts) in enumerate(passes):
        if prompts:
            batch = LoggedBatch(False, 8, 5, 0.5, new_seqs=prompts[0], new_tokens=prompts[1])
            series.prefills.add(batch, PassLimits(2048), scheduler)
        else:
            series.add(scheduler, LoadSample(float(at), running=8, queue=5, usage=0.5))
    assert series.prefills.mean_streak == mean
