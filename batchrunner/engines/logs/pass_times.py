"""How long a scheduler's passes take, from its own log: a fixed and a variable part for each kind. Pure.

SGLang logs a decode line every `--decode-log-interval` steps, with the tokens a second since the last one,
and a line for every prefill pass. So a decode line tells the seconds of its interval, and the lines before it
what was done in them. Least squares over many intervals parts these seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from batchrunner.engines.least_squares import LeastSquares
from batchrunner.engines.logs.records import LoggedBatch
from batchrunner.engines.logs.thinned import Thinned

STEPS_A_LINE = 40
"""Decode steps between two lines: SGLang's default of `--decode-log-interval`."""
MOST_INTERVALS = 512
"""Most intervals kept of a scheduler."""
LEAST_INTERVALS = 8
"""Fewest intervals that are fitted."""
OUTLIER = 4.0
"""Intervals that are off by so many times the median deviation are left out of the second fit: in them the
server waited for requests, or the machine did something else."""
USUAL_SHARE = 0.5
"""Least share of the prefill passes in the intervals that are not left out: those have to stand for all."""
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
    """Tokens decoded: steps times running requests, times those of a request in a step with speculation."""
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

    kept: Thinned[DecodeInterval] = field(default_factory=lambda: Thinned[DecodeInterval](MOST_INTERVALS))
    """Some of the intervals, evenly thinned out."""
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
        tokens = steps * batch.running * batch.accepted
        if batch.throughput and tokens:
            self.kept.add(
                DecodeInterval(
                    tokens / batch.throughput, steps, tokens, self._passes, self._new_tokens,
                    self._filled,
                )
            )  # fmt: skip
        self._passes = self._new_tokens = self._filled = 0


def fit_pass_times(intervals: Sequence[DecodeInterval]) -> PassTimes | None:
    """Fit the times of passes to intervals; None where they are too few, or do not agree."""
    if len(intervals) < LEAST_INTERVALS:
        return None
    found = _sums(intervals).parts()
    off = [abs(one.seconds - _seconds(found, one)) for one in intervals]
    most = OUTLIER * max(median(off), LEAST_OFF_S)
    usual = [one for one, error in zip(intervals, off, strict=True) if error <= most]
    if len(usual) < LEAST_INTERVALS or _passes(usual) < USUAL_SHARE * _passes(intervals):
        return None
    again = _sums(usual)
    parts = again.parts()
    step_s, decoded_s, pass_s, new_token_s = parts
    squares = max(_squares(usual, parts), len(usual) * LEAST_OFF_S**2)
    step_known, pass_known = (
        _squares(usual, again.parts(without={part})) > TOLD_APART * squares for part in (_STEP, _PASS)
    )
    total = DecodeInterval(*(sum(values) for values in zip(*usual, strict=True)))
    return PassTimes(step_s, decoded_s, pass_s, new_token_s, step_known, pass_known, total)


def of_counts(steps: float, decoded: float, passes: float, filled: float) -> PassTimes:
    """Return times of 1 for each decode step and prefill pass, whatever is in it: for counts of passes."""
    total = DecodeInterval(steps + passes, steps, decoded, passes, 0, filled)
    return PassTimes(1.0, 0.0, 1.0, 0.0, step_known=True, pass_known=True, total=total)


def _sums(intervals: Sequence[DecodeInterval]) -> LeastSquares:
    return LeastSquares([_work(one) for one in intervals], [one.seconds for one in intervals])


def _passes(intervals: Sequence[DecodeInterval]) -> float:
    return sum(one.passes for one in intervals)


def _work(interval: DecodeInterval) -> tuple[float, ...]:
    return interval[1:5]


def _seconds(parts: Sequence[float], interval: DecodeInterval) -> float:
    return sum(part * amount for part, amount in zip(parts, _work(interval), strict=True))


def _squares(intervals: Sequence[DecodeInterval], parts: Sequence[float]) -> float:
    return sum((one.seconds - _seconds(parts, one)) ** 2 for one in intervals)
