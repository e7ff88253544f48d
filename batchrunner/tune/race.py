"""Decide which of two settings is faster although times are noisy. Pure.

A race after Maron and Moore (Hoeffding races, NIPS 1994): a challenger that cannot be the best any more is
dropped; else both are measured again, in turn, until a confidence interval separates them. The interval is
Student's, one-sided 95 %, of the mean log ratio. Its variance is pooled over all settings that were measured
more than once, and starts from a guess, since two trials of one setting say little about it.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from batchrunner.core.console import counted
from batchrunner.tune.measurement import TrialSigns

GUESS, GUESS_WEIGHT = 0.05, 4
"""Assumed standard deviation of a trial's log speed, and how many repetitions it counts as. A shared 2-core
machine shows 5 %; a machine without other users about 1 %, which repetitions soon show."""
WORTH = 0.02
"""A smaller gain, as a share, is not worth a further trial."""
MOST_TURNS = 3
"""Trials of each of the two settings at most."""
SAME_WORK = 0.01
"""Trials whose passes and batches differ by a smaller share do the same work, in the same time."""
_T95 = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761)
"""Student's 95 % quantiles for 4, 5, … 14 degrees of freedom; the last serves for more, on the safe side."""

RaceVerdict = Literal["faster", "no faster", "again"]


def compare(
    mine: Sequence[float],
    best: Sequence[float],
    spread: tuple[float, int],
    *,
    more_per_pass: bool = False,
    worth: float = WORTH,
) -> tuple[RaceVerdict, str]:
    """Return whether a challenger is faster than the best, and the interval of their ratio as text.

    `spread` is the result of `trial_noise`. The verdict is "again" until both were measured MOST_TURNS times;
    a challenger that is not shown to be faster by then is "no faster". With `more_per_pass` the scheduler's
    own count shows more output in each pass: then a gain above `worth` is enough, within two turns.
    """
    deviation, freedom = spread
    gain = fmean(map(math.log, mine)) - fmean(map(math.log, best))
    half = _quantile(freedom) * deviation * math.sqrt(1 / len(mine) + 1 / len(best))
    text = f"{math.exp(gain):.3f} [{math.exp(gain - half):.3f}, {math.exp(gain + half):.3f}] x the best"
    if gain - half > 0:
        return "faster", text
    if more_per_pass and gain > worth:
        return "faster", f"{text}, and more output tokens a pass"
    if gain + half < 0 or (gain < worth and not more_per_pass):
        return "no faster", text
    turns = min(len(mine), len(best))
    if turns >= MOST_TURNS or (more_per_pass and turns > 1):
        return "no faster", f"{text}: no real difference in {counted(turns, 'turn')}"
    return "again", text


def trial_noise(settings: Iterable[Sequence[float]]) -> tuple[float, int]:
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


def margin_to_stop(spread: tuple[float, int]) -> float:
    """Return the share by which a trial is behind the best when it is stopped: three times the noise.

    It is at least a fifth, since a curve of finished rows is a rougher measure than a whole trial.
    """
    return min(0.5, max(0.2, 3 * math.sqrt(2) * spread[0]))


def same_work(mine: TrialSigns, best: TrialSigns) -> bool:
    """Tell whether two trials had the same passes and batches; False where that is not known."""
    more = _more(mine.tokens_per_pass, best.tokens_per_pass)
    apart = (more, _more(mine.running, best.running), mine.cached_share - best.cached_share)
    return more is not None and all(abs(difference or 0.0) <= SAME_WORK for difference in apart)


def more_per_pass(mine: TrialSigns, best: TrialSigns) -> bool:
    """Tell whether a trial generated more tokens in each forward pass; False where that is not known."""
    return (_more(mine.tokens_per_pass, best.tokens_per_pass) or 0.0) > SAME_WORK


def _more(mine: float | None, best: float | None) -> float | None:
    """Return the share by which the first is more than the second."""
    return mine / best - 1 if mine is not None and best else None


def _quantile(freedom: int) -> float:
    return _T95[min(freedom - GUESS_WEIGHT, len(_T95) - 1)]
