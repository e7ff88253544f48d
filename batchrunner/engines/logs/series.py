"""The load of schedulers over time in bounded memory: exact counts of signs, and some samples of each."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Self

from batchrunner.core.console import counted
from batchrunner.engines.logs.pass_times import STEPS_A_LINE, PassClock, PassTimes, fit_pass_times
from batchrunner.engines.logs.prefills import Prefills
from batchrunner.engines.logs.thinned import Thinned
from batchrunner.engines.logs.thresholds import Thresholds


class LoadSample(NamedTuple):
    """The load of a scheduler that has work, at one time."""

    at: float | None
    """Seconds since an unknown time; None where the log has no times."""
    running: int
    queue: int
    usage: float
    """Fraction of the KV pool in use."""
    max_running: int | None = None
    graph: bool | None = None
    """Whether a CUDA graph ran; None where that is not known."""
    rate: float | None = None
    """Tokens generated per second."""
    unsent: int | None = None
    """Rows that the client had still to send; None where that is not known."""
    prefill: bool = False
    """Whether a prefill pass logged it: such a sample does not say how many requests decode."""


def _underused(sample: LoadSample, limit: Thresholds) -> bool | None:
    """Tell whether requests wait though the KV pool has room; a prefill pass does not show that."""
    return None if sample.prefill else sample.queue > 0 and sample.usage < limit.usage_good


def _far_below(sample: LoadSample, limit: Thresholds) -> bool | None:
    if not sample.max_running:
        return None
    return _underused(sample, limit) and sample.running < limit.far_below * sample.max_running


def _no_graph(sample: LoadSample, most: float) -> bool | None:
    return None if sample.graph is None or sample.running > most else not sample.graph


def _at_cap(sample: LoadSample, limit: Thresholds) -> bool:
    """Tell whether as many requests run as may, or one less: the place of one that ended is being filled."""
    most = sample.max_running or 0
    return most > 0 and sample.running >= max(1, min(limit.at_cap * most, most - 1))


SIGNS: dict[str, Callable[[LoadSample, Thresholds], bool | None]] = {
    "empty": lambda s, _: None if s.unsent == 0 else s.queue == 0,
    "in_band": lambda s, limit: None if s.unsent == 0 else limit.queue_low <= s.queue <= limit.queue_deep,
    "deep": lambda s, limit: s.queue > limit.queue_deep,
    "conservative": lambda s, limit: _underused(s, limit) and not _at_cap(s, limit),
    "capped": lambda s, limit: _underused(s, limit) and _at_cap(s, limit),
    "far_below": _far_below,
    "full": lambda s, limit: s.usage >= limit.usage_good,
    "kv_bound": lambda s, limit: s.usage >= limit.usage_good and s.queue > 0 and not _at_cap(s, limit),
    "no_graph": lambda s, limit: _no_graph(s, limit.graph_batch),
    "no_graph_tp": lambda s, limit: _no_graph(s, limit.graph_batch_tp),
    "slow": lambda s, limit: None if not s.rate else s.running / s.rate > limit.latency_s,
    "small_batch": lambda s, limit: None if s.prefill else s.running <= limit.small_batch,
}
"""The test for each sign; None where the sign does not apply to the sample."""


MOST_SAMPLES = 512
"""Most samples kept of a scheduler."""
MOST_TRACKS = 256
"""Most schedulers that have a track each; all others share one."""
PAUSE_S = 30.0
"""A gap of more seconds between two samples is a pause: it counts as no work, and the job before it ended.
So does time that runs backwards by as much: an older log follows a newer one."""
DAY_S = 86_400.0
"""Seconds in a day. Time stamps without a date are less, and begin again at midnight."""
PEAKS = ("queue", "max_running")
"""Fields of a sample whose largest value is kept."""


@dataclass(slots=True)
class Track:
    """The samples of one scheduler."""

    samples: Thinned[LoadSample] = field(default_factory=lambda: Thinned[LoadSample](MOST_SAMPLES))
    """Some of the samples, evenly thinned out, oldest first."""
    largest: Counter[str] = field(default_factory=Counter)
    """Largest values of the fields in PEAKS, over all samples."""
    busy_s: float = 0.0
    """Seconds under load, without pauses."""
    timed: bool = False
    """Whether `busy_s` comes from time stamps; otherwise it is computed from the throughput."""
    yes: Counter[str] = field(default_factory=Counter)
    """Number of samples that show each sign."""
    silent: Counter[str] = field(default_factory=Counter)
    """Number of samples that each sign does not apply to."""
    retractions: int = 0
    clock: PassClock = field(default_factory=PassClock)
    """Times of its passes, where the samples are lines of a log."""
    _last: LoadSample | None = None
    _dry: int = 0
    _queued: bool = False

    def add(self, sample: LoadSample, limits: Thresholds) -> None:
        """Count a sample."""
        gap_s = self._gap_s(sample)
        if abs(gap_s) > PAUSE_S:
            self.settle(limits)
            gap_s = 0.0
        self.busy_s += max(0.0, gap_s)
        for name, shows in SIGNS.items():
            has_sign = shows(sample, limits)
            if has_sign:
                self.yes[name] += 1
            elif has_sign is None:
                self.silent[name] += 1
        self._dry = 0 if sample.queue else self._dry + 1
        self._queued |= sample.queue > 0
        self._last = sample
        for name in PEAKS:
            self.largest[name] = max(self.largest[name], getattr(sample, name) or 0)
        self.samples.add(sample)

    @property
    def counted(self) -> int:
        """Number of all samples."""
        return self.samples.counted

    def settle(self, limits: Thresholds) -> None:
        """End a stretch of work: the empty queue at its end is no sign, unless rows were left to send."""
        if self._queued and self._last is not None and self._last.unsent is None:
            for sign in ("empty", "in_band"):
                self.yes[sign] -= self._dry if SIGNS[sign](self._last, limits) else 0
                self.silent[sign] += self._dry
        self._dry, self._queued = 0, False

    def _gap_s(self, sample: LoadSample) -> float:
        last = self._last
        if sample.at is None:
            return STEPS_A_LINE * sample.running / sample.rate if sample.rate else 0.0
        if last is None or last.at is None:
            return 0.0
        self.timed = True
        gap_s = sample.at - last.at
        return gap_s + DAY_S if gap_s < -DAY_S / 2 and last.at < DAY_S else gap_s


def spread(retractions: int, tracks: Collection[Track]) -> None:
    """Add retractions to tracks evenly, where it is not known which scheduler had them."""
    for number, track in enumerate(tracks):
        track.retractions += (retractions + number) // len(tracks)


@dataclass(slots=True)
class Series:
    """The samples of all schedulers of one source."""

    limits: Thresholds
    tracks: dict[str, Track] = field(default_factory=dict)
    prefills: Prefills = field(default_factory=Prefills)

    def complete(self, others: Self) -> None:
        """Take over the tracks of schedulers of which this series has no samples."""
        for name, other in others.tracks.items():
            track = self.track(name)
            if not track.counted:
                other.retractions += track.retractions
                self.tracks[name] = other

    def track(self, scheduler: str) -> Track:
        """Return the track of a scheduler, a new one at its first mention."""
        track = self.tracks.get(scheduler)
        if track is None:
            name = scheduler if len(self.tracks) < MOST_TRACKS else "others"
            track = self.tracks.setdefault(name, Track())
        return track

    def add(self, scheduler: str, sample: LoadSample) -> None:
        """Count a sample."""
        self.track(scheduler).add(sample, self.limits)
        if not sample.prefill:
            self.prefills.decoded(scheduler)

    def settle(self) -> None:
        """End the series: the source has no more samples."""
        for track in self.tracks.values():
            track.settle(self.limits)

    @property
    def counted(self) -> int:
        """Number of samples of all schedulers."""
        return sum(track.counted for track in self.tracks.values())

    @property
    def busy_s(self) -> float:
        """Seconds under load of the scheduler that was under load for longest."""
        return max((track.busy_s for track in self.tracks.values()), default=0.0)

    @property
    def retractions(self) -> int:
        """Number of retractions of all schedulers."""
        return sum(track.retractions for track in self.tracks.values())

    @property
    def retractions_per_min(self) -> float:
        """Retractions per minute of the scheduler that has most; less than a minute counts as one."""
        tracks = self.tracks.values()
        return max((track.retractions / max(1.0, track.busy_s / 60) for track in tracks), default=0.0)

    @property
    def recomputed_share(self) -> float | None:
        """Tokens lost to retractions, as a fraction of those generated; None if the log does not say both."""
        generated = self.median("rate") * sum(track.busy_s for track in self.tracks.values())
        again = self.prefills.retracted_tokens
        return again / generated if again and generated else None

    @property
    def retractions_cost(self) -> bool:
        """Whether retractions are more than the guides call fine, and lose much, as far as the log says."""
        share = self.recomputed_share
        often = self.retractions_per_min > self.limits.retractions_per_min
        return often and (share is None or share >= self.limits.recomputed)

    @property
    def enough(self) -> bool:
        """Whether there are enough samples over enough time to judge."""
        return self.counted >= self.limits.samples and self.busy_s >= self.limits.span_s

    def pass_times(self) -> PassTimes | None:
        """Return how long the passes of all schedulers take, None where the samples do not tell."""
        return fit_pass_times([one for track in self.tracks.values() for one in track.clock.kept])

    def share(self, sign: str) -> float:
        """Return the fraction of samples with a sign, among those that it applies to; 0 without any."""
        of = self.counted - sum(track.silent[sign] for track in self.tracks.values())
        return sum(track.yes[sign] for track in self.tracks.values()) / of if of > 0 else 0.0

    def frequent(self, sign: str) -> bool:
        """Tell whether a sign is in a large enough fraction of enough samples."""
        return self.enough and self.share(sign) >= self.limits.frequent

    def median(self, name: str) -> float:
        """Return the median of a field, 0 if no sample has it; a kept sample stands for those dropped."""
        found = sorted(
            (value, track.samples.every)
            for track in self.tracks.values()
            for sample in track.samples
            if (value := getattr(sample, name)) is not None
        )
        if not found:
            return 0.0
        ends = list(accumulate(every for _, every in found))
        middle = ends[-1] / 2
        return float(found[bisect_left(ends, middle)][0] + found[bisect_right(ends, middle)][0]) / 2

    def largest(self, name: str) -> int:
        """Return the largest value of a field in PEAKS."""
        return max((track.largest[name] for track in self.tracks.values()), default=0)

    def over(self) -> str:
        """Return, in words, how many samples there are and over how many seconds.

        Too short a time is rounded down: it never reads as long enough.
        """
        short = self.busy_s < self.limits.span_s
        seconds = f"{math.floor(self.busy_s * 10) / 10:g}" if short else f"{self.busy_s:.0f}"
        several = f" of {len(self.tracks)} schedulers" if len(self.tracks) > 1 else ""
        timed = any(track.timed for track in self.tracks.values())
        return f"{counted(self.counted, 'sample')}{several} over {'' if timed else 'about '}{seconds} s"
