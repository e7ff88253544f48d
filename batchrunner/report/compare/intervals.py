"""The confidence interval of a ratio of two rates. Pure.

A rate over time is correlated with itself: rows that begin together end together. So each run's time is cut
into equal stretches that are much longer than a row, whose mean rates are nearly independent: the method of
nonoverlapping batch means (Law, Simulation Modeling and Analysis, 5th edition, section 9.5.3), which asks for
few long batches rather than many short ones (Schmeiser 1982: 10 to 30). The logarithm of the ratio then has
the variance of both means together (the delta method), and the degrees of freedom of Welch and Satterthwaite.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

MOST_BATCHES = 20
LEAST_BATCHES = 5
"""With fewer stretches there is no interval."""
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's 97.5 % quantiles for 1, 2, … 30 degrees of freedom; the last serves for more."""


class RatioInterval(NamedTuple):
    """A ratio, and the ends of its 95 % confidence interval."""

    ratio: float
    low: float
    high: float


def batches_of(length_s: float, row_s: float, least_s: float) -> int:
    """Return into how many stretches `length_s` seconds are cut; 0 where there are too few.

    Each is at least twice as long as a row (`row_s`, the median latency), and at least `least_s`.
    """
    count = min(MOST_BATCHES, int(length_s / max(2 * row_s, least_s)))
    return count if count >= LEAST_BATCHES else 0


def ratio_interval(rates: Sequence[float], base: Sequence[float]) -> RatioInterval | None:
    """Return by how much the mean of `rates` is that of `base`; both are mean rates of stretches of a run.

    None where a run has too few stretches, or nothing was done in it.
    """
    if min(len(rates), len(base)) < LEAST_BATCHES or not (fmean(rates) > 0 and fmean(base) > 0):
        return None
    shares = [variance(of) / len(of) / fmean(of) ** 2 for of in (rates, base)]
    ratio, total = fmean(rates) / fmean(base), sum(shares)
    if not total:
        return RatioInterval(ratio, ratio, ratio)
    spent = sum(share**2 / (len(of) - 1) for share, of in zip(shares, (rates, base), strict=True))
    half = _quantile(total**2 / spent) * math.sqrt(total)
    return RatioInterval(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def _quantile(freedom: float) -> float:
    return _T975[min(max(int(freedom), 1), len(_T975)) - 1]
