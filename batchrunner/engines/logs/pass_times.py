"""How long a scheduler's passes take, from its own log: a fixed and a variable part for each kind. Pure.

SGLang logs a decode line every `--decode-log-interval` steps, with the tokens a second since the last one,
and a line for every prefill pass. So a decode line tells the seconds of its interval, and the lines before it
what was done in them. Least squares over many intervals parts these seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from batchrunner.engines.logs.records import LoggedBatch

STEPS_A_LINE = 40
"""Decode steps between two lines: SGLang's default of `--decode-log-interval`."""
MOST_INTERVALS = 512
"""Most intervals kept; when there are more, every second one is dropped."""
LEAST_INTERVALS = 8
"""Fewest intervals that are fitted."""
OUTLIER = 4.0
"""Intervals that are off by so many times the median deviation are left out of the second fit: in them the
server waited for requests, or the machine did something else."""
ROUNDS = 400
"""Most rounds of coordinate descent; four unknowns settle within some hundred."""
SETTLED = 1e-6
"""Relative change of a round after which the parts have settled."""
TOLD_APART = 1.02
"""Factor by which leaving a part out must raise the sum of squares; a smaller one does not tell it apart."""


LEAST_OFF_S = 1e-3
"""Least deviation in seconds that counts as one: rates are logged with two decimals."""
_STEP, _PASS = 0, 2
"""Places of `step_s` and `pass_s` among the parts."""


class DecodeInterval(NamedTuple):
    """Seconds between two decode lines of a scheduler, and what it did in them."""

    seconds: float
    steps: float
    """Decode steps."""
    decoded: float
    """Tokens decoded: steps times running requests."""
    passes: float
    """Prefill passes."""
    new_tokens: float
    """Prompt tokens computed in them."""
    filled: float
    """Prefill passes that took a whole chunk."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of each kind of work, and how much of it there was in the intervals."""

    step_s: float
    """Seconds of a decode step beside those that its requests take."""
    decoded_s: float
    """Seconds of a request in a decode step."""
    pass_s: float
    """Seconds of a prefill pass beside those that its tokens take."""
    new_token_s: float
    """Seconds of a prompt token that is computed."""
    step_known: bool
    """Whether the intervals tell `step_s` from `decoded_s`; they do where the batch size changes."""
    pass_known: bool
    """Whether they tell `pass_s` from `new_token_s`; they do where the passes' sizes differ."""
    total: DecodeInterval
    """Sums over all intervals."""

    @property
    def fixed_s(self) -> float:
        """Seconds of a prefill pass beside its tokens; those of a decode step, where they are not known.

        Both read the weights once. A prefill pass takes no more than all its seconds.
        """
        if self.pass_known:
            return self.pass_s
        total = self.total
        step_s = (
            self.step_s if self.step_known else self.step_s + self.decoded_s * total.decoded / total.steps
        )
        prefill_s = self.pass_s * total.passes + self.new_token_s * total.new_tokens
        return min(step_s, prefill_s / max(1.0, total.passes))

    def seconds_of(self, work: DecodeInterval) -> float:
        """Return the seconds that this work takes."""
        parts = (self.step_s, self.decoded_s, self.pass_s, self.new_token_s)
        return _seconds(parts, work)


@dataclass(slots=True)
class PassClock:
    """Collects the intervals of one scheduler."""

    intervals: list[DecodeInterval] = field(default_factory=list)
    _every: int = 1
    _counted: int = 0
    _passes: int = 0
    _new_tokens: int = 0
    _filled: int = 0

    def prefilled(self, batch: LoggedBatch, *, full: bool) -> None:
        """Count a prefill pass; `full` says whether it took a whole chunk."""
        self._passes += 1
        self._new_tokens += batch.new_tokens
        self._filled += full

    def decoded(self, batch: LoggedBatch, steps: int) -> None:
        """End an interval of so many decode steps."""
        tokens = float(steps * batch.running)
        if batch.throughput and tokens:
            self._keep(
                DecodeInterval(
                    tokens / batch.throughput, steps, tokens, self._passes, self._new_tokens,
                    self._filled,
                )
            )  # fmt: skip
        self._passes = self._new_tokens = self._filled = 0

    def _keep(self, interval: DecodeInterval) -> None:
        if self._counted % self._every == 0:
            self.intervals.append(interval)
            if len(self.intervals) > MOST_INTERVALS:
                self.intervals = self.intervals[::2]
                self._every *= 2
        self._counted += 1


def fit_pass_times(intervals: Sequence[DecodeInterval]) -> PassTimes | None:
    """Fit the times of passes to intervals; None where they are too few."""
    found = _fit(intervals)
    if found is None:
        return None
    off = [abs(one.seconds - _seconds(found, one)) for one in intervals]
    most = OUTLIER * max(median(off), LEAST_OFF_S)
    usual = [one for one, error in zip(intervals, off, strict=True) if error <= most]
    again = _fit(usual)
    if again is None:
        return None
    total = DecodeInterval(*(sum(values) for values in zip(*usual, strict=True)))
    step_s, decoded_s, pass_s, new_token_s = again
    return PassTimes(
        step_s, decoded_s, pass_s, new_token_s,
        _is_known(usual, again, _STEP), _is_known(usual, again, _PASS), total,
    )  # fmt: skip


def _work(interval: DecodeInterval) -> tuple[float, ...]:
    return interval[1:5]


def _seconds(parts: Sequence[float], interval: DecodeInterval) -> float:
    return sum(part * amount for part, amount in zip(parts, _work(interval), strict=True))


def _fit(intervals: Sequence[DecodeInterval], without: int | None = None) -> list[float] | None:
    """Return the parts, none below 0, with the least sum of squares; the part `without` stays 0."""
    if len(intervals) < LEAST_INTERVALS:
        return None
    scales = [max(values) or 1.0 for values in zip(*map(_work, intervals), strict=True)]
    rows = [[value / scale for value, scale in zip(_work(one), scales, strict=True)] for one in intervals]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(4)]
    vector = [sum(row[i] * one.seconds for row, one in zip(rows, intervals, strict=True)) for i in range(4)]
    parts = [0.0] * 4
    for _ in range(ROUNDS):
        before = list(parts)
        for i in range(4):
            if i != without and matrix[i][i]:
                others = sum(matrix[i][j] * parts[j] for j in range(4) if j != i)
                parts[i] = max(0.0, (vector[i] - others) / matrix[i][i])
        if all(math.isclose(one, other, rel_tol=SETTLED) for one, other in zip(parts, before, strict=True)):
            break
    return [part / scale for part, scale in zip(parts, scales, strict=True)]


def _is_known(intervals: Sequence[DecodeInterval], parts: Sequence[float], part: int) -> bool:
    """Tell whether the fit needs a part, or does about as well without it."""
    other = _fit(intervals, without=part)
    return other is not None and _squares(intervals, other) > TOLD_APART * _squares(intervals, parts)


def _squares(intervals: Sequence[DecodeInterval], parts: Sequence[float]) -> float:
    return sum((one.seconds - _seconds(parts, one)) ** 2 for one in intervals)
