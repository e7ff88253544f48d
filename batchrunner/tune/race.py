"""Which of two settings is faster, where times are noisy. Pure.

A race after Maron and Moore (Hoeffding races, NIPS 1994): whoever cannot be the best any more is dropped,
and what is left is measured again, in turn with the best, until an interval parts the two. The interval is
Student's, of the mean log ratio, one-sided 95 %; its variance is pooled over all settings that were measured
more than once and starts from a guess, since two trials of one setting say little of it.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchrunner.tune.measure import Signs

GUESS, GUESS_WEIGHT = 0.05, 4
"""Standard deviation of a trial's log speed before any was repeated, and how many repetitions it counts for:
5 % is what a shared 2-core machine shows; a machine of one's own about 1 %, which is soon known."""
WORTH = 0.02
"""A gain of less is not worth a further trial."""
MOST_TURNS = 3
"""Trials of each of the two."""
SAME_WORK = 0.01
"""Passes and batches that differ by less are the same work, which takes the same time."""
_T95 = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761)
"""Student's quantiles for 4, 5, … 14 degrees of freedom; the last is taken for more too: the safe side."""

Verdict = Literal["faster", "no faster", "again"]


def compare(
    mine: Sequence[float],
    best: Sequence[float],
    spread: tuple[float, int],
    *,
    more_a_pass: bool = False,
    worth: float = WORTH,
) -> tuple[Verdict, str]:
    """Say whether a challenger's speeds are above the best's, and by which interval of the ratio.

    `spread` is what `spread_of` returned. "again" until both were measured three times; then what is not
    shown to be faster is not. With `more_a_pass` the scheduler's own count says already that it does more
    in each pass: then the times have only to agree, to be ahead by `worth`, and get a second turn else.
    """
    deviation, freedom = spread
    gain = fmean(map(math.log, mine)) - fmean(map(math.log, best))
    half = _quantile(freedom) * deviation * math.sqrt(1 / len(mine) + 1 / len(best))
    text = f"{math.exp(gain):.3f} [{math.exp(gain - half):.3f}, {math.exp(gain + half):.3f}] x the best"
    if gain - half > 0:
        return "faster", text
    if more_a_pass and gain > worth:
        return "faster", f"{text}, and more output tokens a pass"
    if gain + half < 0 or (gain < worth and not more_a_pass):
        return "no faster", text
    turns = min(len(mine), len(best))
    if turns >= MOST_TURNS or (more_a_pass and turns > 1):
        return "no faster", f"{text}: no real difference in {turns} turns"
    return "again", text


def spread_of(settings: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation of one trial's log speed and its degrees of freedom.

    `settings` are the speeds of each setting's trials; those of one trial say nothing.
    """
    total, freedom = GUESS_WEIGHT * GUESS**2, GUESS_WEIGHT
    for speeds in settings:
        logs = [math.log(speed) for speed in speeds]
        mean = fmean(logs)
        total += sum((value - mean) ** 2 for value in logs)
        freedom += len(logs) - 1
    return math.sqrt(total / freedom), freedom


def margin_of(spread: tuple[float, int]) -> float:
    """Return by which share a trial has to be behind the best to be given up: thrice the noise of a ratio.

    Curves count rows that ended, which is a rougher measure than a whole trial's: a fifth at least.
    """
    return min(0.5, max(0.2, 3 * math.sqrt(2) * spread[0]))


def same_work(mine: Signs, best: Signs) -> bool:
    """Tell whether two trials gave the engine the same passes and batches; False where it is not known."""
    more = _more(mine.tokens_per_pass, best.tokens_per_pass)
    apart = (more, _more(mine.running, best.running), mine.cached_share - best.cached_share)
    return more is not None and all(abs(difference or 0.0) <= SAME_WORK for difference in apart)


def more_a_pass(mine: Signs, best: Signs) -> bool:
    """Tell whether a trial put out more tokens in each forward pass; False where it is not known."""
    return (_more(mine.tokens_per_pass, best.tokens_per_pass) or 0.0) > SAME_WORK


def _more(mine: float | None, best: float | None) -> float | None:
    """Return by which share one is more than the other."""
    return mine / best - 1 if mine is not None and best else None


def _quantile(freedom: int) -> float:
    return _T95[min(freedom - GUESS_WEIGHT, len(_T95) - 1)]
