"""Measures a trial of flags: its steady speed, its load, and when to stop it.

The caller reports each row that ends and each reading of the load, from a real or a simulated engine. The
module itself does no I/O and reads no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from batchrunner.core.console import counted
from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.timing import TIMING
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.logs.series import sample_of_load
from batchrunner.tuning.signals import is_frequent, share

MOST_STEADY_S = 120.0
"""Maximum number of seconds of a trial's warm-up, and of its steady time after that. Only slow rows take so
long."""
GENERATIONS = 2
"""Number of generations to measure: a generation is as many rows as run at once. Before them, one generation
is left out, because its rows began together."""
WAVE = 0.5
"""A trial counts as slow only if it lags by more than this number of generations (as many rows as run at
once). Rows that began together end together, so output comes in waves."""
LEAST_GAIN = 0.02
"""Minimum relative gain in speed by which a change of flags counts as faster. A smaller gain is noise."""
NEARLY_ALL = 0.99
"""Quantile of the output lengths that counts as the longest output."""
MEASURED = ("empty", "waiting", "conservative", "capped", "at_cap", "full", "kv_bound", "states")
"""Observations about the load that a trial counts."""

Ended = Literal["measured", "behind", "died", "cut"]
"""How a trial ended: it was measured, was too slow, lost its server, or had no time left."""
End = tuple[Ended, str]
"""How a trial ended, and the reason in a sentence."""


@dataclass(frozen=True, slots=True)
class TrialSigns:
    """Load statistics of a trial: means and fractions over its steady time. None means unknown."""

    running: float = 0.0
    """Number of requests that decode, SGLang's `#running-req`."""
    max_running: int | None = None
    """Maximum number of requests that may decode at once."""
    queue: float = 0.0
    """Number of requests that wait, SGLang's `#queue-req`."""
    shares: dict[str, float] = field(default_factory=dict)
    """Fraction of the load samples that showed each sign (such as an empty queue)."""
    usage: float = 0.0
    """Fraction of the KV pool in use."""
    pool_tokens: int | None = None
    """Size of the KV pool in tokens."""
    retractions_per_min: float = 0.0
    cached_share: float = 0.0
    """Share of the prompt tokens that were in the cache."""
    tokens_per_pass: float | None = None
    """Output tokens per forward pass. The scheduler counts passes, so this has no noise of time
    measurement."""
    prefill_per_pass: float | None = None
    """Mean number of prompt tokens in a prefill pass."""
    decodes_per_prefill: float | None = None
    """Number of decode passes per prefill pass."""
    graph_off_share: float | None = None
    """Share of the decode passes that ran without a CUDA graph, on a GPU that captured some graphs."""
    schedulers: int = 1
    """Number of schedulers over which the counts are summed."""
    output_tokens: float = 0.0
    """Mean number of tokens in an output."""
    longest_output: int | None = None
    """Number of tokens that nearly all outputs stay below."""
    repeated: float = 1.0
    """Mean words per decode step that n-gram speculation from earlier answers would yield."""

    def shows(self, sign: str) -> bool:
        """Tell whether many load samples of the trial showed this sign."""
        return is_frequent(self.shares.get(sign, 0.0))


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of one trial."""

    ended: Ended
    """How the trial ended: `behind` if it was stopped as too slow, `cut` if the time budget ran out."""
    why: str
    """Reason of the end, in a sentence."""
    cost_s: float
    """Wall time in seconds, including the launch of the server."""
    tokens_per_s: float = 0.0
    """Output tokens per second in steady time."""
    failed_share: float = 0.0
    """Share of the finished rows that failed."""
    signs: TrialSigns = field(default_factory=TrialSigns)
    facts: Facts = field(default_factory=Facts)
    """Facts about the server, from its log and its arguments."""

    @property
    def is_speed(self) -> bool:
        """Whether the speed is valid: the trial was measured to its end, and rows were answered."""
        return self.ended == "measured" and self.tokens_per_s > 0


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best trial so far, which a challenger has to beat."""

    tokens_per_s: float
    margin: float
    """Fraction by which a challenger may fall behind before it is stopped. It is larger than the noise."""


class TrialProgress(NamedTuple):
    """Counts of a trial at one point in time."""

    at_s: float
    tokens: int
    rows: int
    log_bytes: int = 0
    """Size of the server's log at this time, in bytes."""


@dataclass(slots=True)
class TrialWatch:
    """Collects the rows and load readings of one trial. Times are seconds since its first row was sent."""

    incumbent: Incumbent | None = None
    tokens: int = 0
    """Output tokens of the answered rows."""
    rows: int = 0
    """Number of answered rows."""
    _warm: TrialProgress | None = None
    """Progress when the steady time began; None during the warm-up."""
    _busy: TrialProgress | None = None
    """Progress at the last load sample in which a request waited."""
    _peak: int = 0
    """Maximum number of requests that have run at once."""
    _readings: list[SchedulerLoad] = field(default_factory=list)
    """Readings of the load in steady time."""
    _busy_readings: int = 0
    """Number of load samples up to the last one with a waiting request. Later ones say nothing about the
    flags, because the trial runs out of rows."""
    _outputs: list[int] = field(default_factory=list)
    _retractions: int = 0
    _prompt_tokens: int = 0
    _cached_tokens: int = 0

    def row_ended(self, prompt: int, cached: int, output: int, retractions: int = 0) -> None:
        """Count a row that was answered, and its tokens and retractions."""
        self.rows += 1
        self.tokens += output
        self._prompt_tokens += prompt
        self._cached_tokens += cached
        # Only retractions in steady time count.
        self._retractions += retractions if self._warm else 0
        self._outputs.append(output)

    def record_load(self, at_s: float, signals: Sequence[SchedulerLoad], log_bytes: int = 0) -> End | None:
        """Record a reading of the load; return the end of the trial and its reason, or None to go on."""
        if not signals:
            return None
        progress = TrialProgress(at_s, tokens=self.tokens, rows=self.rows, log_bytes=log_bytes)
        self._peak = max(self._peak, sum(signal.running for signal in signals))
        if self._warm is None:
            # Warm-up ends once as many rows have ended as run at once.
            if 0 < self._peak <= self.rows or at_s >= MOST_STEADY_S:
                self._warm = progress
                # The first outputs to end are the short ones, so their lengths are dropped.
                self._outputs.clear()
            return None
        self._readings += signals
        if any(signal.queue for signal in signals):
            # The measured span may extend to here. After the last waiting request, the trial runs out of
            # rows.
            self._busy = progress
            self._busy_readings = len(self._readings)
        return self._behind(at_s, self._warm) or self._measured(at_s, self._warm)

    def _behind(self, at_s: float, warm: TrialProgress) -> End | None:
        """If the trial can no longer beat the best one, return how it ends; otherwise None.

        The rows that end first have short outputs, so the output counted so far is too low. Therefore the
        output is estimated: the number of rows in steady time, times the mean output of all rows.
        """
        steady_s, rows = at_s - warm.at_s, self.rows - warm.rows
        if self.incumbent is None or steady_s < TIMING.trial_judged or rows < self._peak:
            return None
        tokens = rows * self.tokens / max(self.rows, 1)
        ratio = tokens / max(steady_s * self.incumbent.tokens_per_s, 1.0)
        # Rows that began together end together, in waves. The next wave may be about to end, so WAVE times
        # the rows that run at once are counted too.
        highest_ratio = ratio * (1 + WAVE * self._peak / rows)
        if highest_ratio >= 1 - self.incumbent.margin:
            return None
        rate = f"{ratio:.2f} x the output rate of the best trial"
        return "behind", f"{rate}, in {steady_s:.0f} s after the warm-up"

    def _measured(self, at_s: float, warm: TrialProgress) -> End | None:
        """If the trial has enough rows and time to judge its speed, return how it ends; otherwise None."""
        steady_s, rows = at_s - warm.at_s, self.rows - warm.rows
        is_enough = rows >= GENERATIONS * self._peak and steady_s >= TIMING.trial_steady
        if is_enough or steady_s >= MOST_STEADY_S:
            return "measured", f"{counted(rows, 'row')} in {steady_s:.0f} s after the warm-up"
        return None

    def measured_span(self, end: TrialProgress) -> tuple[TrialProgress, TrialProgress]:
        """Return the progress at the beginning and at the end of the measured span of a trial.

        The span is the steady time until the trial runs out of rows. If that is too short, it is the whole
        trial.
        """
        begin, until = self._warm or TrialProgress(0.0, 0, 0), self._busy or end
        if until.at_s - begin.at_s < TIMING.trial_judged or until.tokens <= begin.tokens:
            return TrialProgress(0.0, 0, 0), end
        return begin, until

    def result(self, ended: Ended, why: str, at_s: float, cost_s: float) -> TrialResult:
        """Return the result of a trial that has ended, with the speed in its measured span."""
        end = TrialProgress(at_s, self.tokens, self.rows)
        begin, until = self.measured_span(end)
        span_s = max(until.at_s - begin.at_s, 1e-9)
        return TrialResult(
            ended=ended,
            why=why,
            cost_s=round(cost_s, 1),
            tokens_per_s=round((until.tokens - begin.tokens) / span_s, 2),
            signs=self._signs(span_s),
        )

    def _signs(self, span_s: float) -> TrialSigns:
        """Return the load statistics of the trial; its steady rows took `span_s` seconds."""
        readings = self._readings
        if not readings:
            return TrialSigns(running=self._peak)
        schedulers = len({reading.scheduler for reading in readings})
        outputs = sorted(self._outputs)
        # Each poll has a reading of every scheduler.
        polls = len(readings) / schedulers

        def total(name: str) -> float:
            return float(sum(getattr(reading, name) for reading in readings))

        def limit(name: str) -> int | None:
            # Limits do not change, so the readings of the last poll suffice.
            limits = [getattr(reading, name) for reading in readings[-schedulers:]]
            return sum(limits) if None not in limits else None

        return TrialSigns(
            running=round(total("running") / polls, 1),
            max_running=limit("max_running"),
            queue=round(total("queue") / polls, 1),
            # Load samples after the last waiting request say nothing about flags.
            shares=_shares(readings[: self._busy_readings] or readings),
            usage=round(total("token_usage") / len(readings), 3),
            pool_tokens=limit("max_total_tokens"),
            retractions_per_min=round(60 * self._retractions / span_s, 1),
            cached_share=round(self._cached_tokens / max(self._prompt_tokens, 1), 3),
            schedulers=schedulers,
            output_tokens=round(fmean(outputs or [0]), 1),
            longest_output=outputs[int(NEARLY_ALL * (len(outputs) - 1))] if outputs else None,
        )


def _shares(readings: Sequence[SchedulerLoad]) -> dict[str, float]:
    """Return the fraction of the load samples that show each sign."""
    samples = [sample_of_load(load, at=None) for load in readings]
    return {sign: round(share(samples, sign), 3) for sign in MEASURED}
