"""The load of schedulers over time, in bounded memory: exact counts of signs, and a few samples of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from batchrunner.engines.logs.signs import SIGNS, LoadSample

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchrunner.engines.logs.lines import LoggedBatch
    from batchrunner.engines.logs.thresholds import Thresholds

MOST_SAMPLES = 512
"""Kept of a scheduler; when there are more, every second one is dropped."""
MOST_TRACKS = 256
"""Schedulers that are told apart; those of a larger log share the last place."""
PAUSE_S = 30.0
"""A silence that is longer is no work: it is not counted, and what ran dry before it was the end of a job.
So is time that runs backwards by as much: an older log follows a newer one."""
DAY_S = 86_400.0
"""A stamp without a date is less: when it begins again, it is midnight."""
WHOLE = 0.9
"""Share of a prefill chunk from which it is full."""
FEW = 2
"""Prompts that fill it alone."""
PEAKS = ("queue", "max_running")
"""Fields of which the largest value is kept."""
STEPS_A_LINE = 40
"""Decode steps between two lines (`--decode-log-interval`), for logs without times."""


@dataclass(slots=True)
class Track:
    """One scheduler."""

    samples: list[LoadSample] = field(default_factory=list)
    """Thinned out evenly, oldest first."""
    every: int = 1
    """Of how many samples one is kept."""
    largest: Counter[str] = field(default_factory=Counter)
    """Of the fields in PEAKS, over all samples."""
    counted: int = 0
    busy_s: float = 0.0
    """Time under load, pauses left out."""
    timed: bool = False
    """Whether it is measured; else it is worked out from the throughput."""
    yes: Counter[str] = field(default_factory=Counter)
    """Samples that show a sign, exactly."""
    silent: Counter[str] = field(default_factory=Counter)
    """Samples that a sign does not apply to."""
    retractions: int = 0
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
            told = shows(sample, limits)
            if told:
                self.yes[name] += 1
            elif told is None:
                self.silent[name] += 1
        self._dry = 0 if sample.queue else self._dry + 1
        self._queued |= sample.queue > 0
        self._last = sample
        for name in PEAKS:
            self.largest[name] = max(self.largest[name], getattr(sample, name) or 0)
        self._keep(sample)

    def settle(self, limits: Thresholds) -> None:
        """Take note that work has ended: its drain is no empty queue, unless rows were left to send."""
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

    def _keep(self, sample: LoadSample) -> None:
        if self.counted % self.every == 0:
            self.samples.append(sample)
            if len(self.samples) > MOST_SAMPLES:
                self.samples = self.samples[::2]
                self.every *= 2
        self.counted += 1


def spread(retractions: int, tracks: Collection[Track]) -> None:
    """Count retractions of which it is not known whose they were evenly."""
    for number, track in enumerate(tracks):
        track.retractions += (retractions + number) // len(tracks)


@dataclass(slots=True)
class Prefills:
    """What prefill passes took, over all schedulers."""

    passes: int = 0
    prompts: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    retracted_tokens: int = 0
    """Those that were computed, and lost to a retraction."""
    filled: int = 0
    """Passes that took a whole chunk …"""
    few_long: int = 0
    """… which was one or two prompts; of these …"""
    streaks: int = 0
    """… how many began, where the pass before was another: a long prompt takes one pass after another, and
    alone but for the first."""
    long_tokens: int = 0
    """Tokens of all of these passes."""
    _in_streak: set[str] = field(default_factory=set)
    """Schedulers whose last pass it was."""

    def add(self, batch: LoggedBatch, chunk: int | None, scheduler: str) -> None:
        """Count one pass; `chunk` is `chunked_prefill_size` in tokens."""
        self.passes += 1
        self.prompts += batch.new_seqs
        self.new_tokens += batch.new_tokens
        self.cached_tokens += batch.cached_tokens
        full = bool(chunk and chunk > 0 and batch.new_tokens >= WHOLE * chunk)
        few = full and batch.new_seqs <= FEW
        self.filled += full
        self.few_long += few
        self.streaks += few and not (batch.new_seqs == 1 and scheduler in self._in_streak)
        self.long_tokens += batch.new_tokens if few else 0
        (self._in_streak.add if few else self._in_streak.discard)(scheduler)

    def decoded(self, scheduler: str) -> None:
        """Take note of a decode batch: a prompt's passes come one after the other."""
        self._in_streak.discard(scheduler)

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that were in the cache, 0-1."""
        return self.cached_tokens / max(1, self.cached_tokens + self.new_tokens)

    @property
    def mean_streak(self) -> float:
        """Mean tokens that one or two prompts took in passes one after the other."""
        return self.long_tokens / max(1, self.streaks)

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt; a chunk counts as a prompt."""
        return (self.cached_tokens + self.new_tokens) / max(1, self.prompts)


@dataclass(slots=True)
class Series:
    """All schedulers of one source."""

    limits: Thresholds
    tracks: dict[str, Track] = field(default_factory=dict)
    prefills: Prefills = field(default_factory=Prefills)

    def complete(self, others: Series) -> None:
        """Take the looks of another series at schedulers of which there are none here."""
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
        """Take note that the source has ended."""
        for track in self.tracks.values():
            track.settle(self.limits)

    @property
    def counted(self) -> int:
        """Samples, over all schedulers."""
        return sum(track.counted for track in self.tracks.values())

    @property
    def busy_s(self) -> float:
        """Seconds under load, of the scheduler that had the longest."""
        return max((track.busy_s for track in self.tracks.values()), default=0.0)

    @property
    def retractions(self) -> int:
        """Over all schedulers."""
        return sum(track.retractions for track in self.tracks.values())

    @property
    def retractions_per_min(self) -> float:
        """Of the scheduler that has most; a span under a minute counts as one."""
        tracks = self.tracks.values()
        return max((track.retractions / max(1.0, track.busy_s / 60) for track in tracks), default=0.0)

    @property
    def recomputed_share(self) -> float | None:
        """Tokens that retractions lost, as a share of those generated; None where the log tells not both."""
        generated = self.median("rate") * sum(track.busy_s for track in self.tracks.values())
        again = self.prefills.retracted_tokens
        return again / generated if again and generated else None

    @property
    def retractions_cost(self) -> bool:
        """Whether they are more than the guides call fine, and lose much, as far as the log tells."""
        share = self.recomputed_share
        often = self.retractions_per_min > self.limits.retractions_per_min
        return often and (share is None or share >= self.limits.recomputed)

    @property
    def enough(self) -> bool:
        """Whether there is more than a reading."""
        return self.counted >= self.limits.samples and self.busy_s >= self.limits.span_s

    def share(self, sign: str) -> float:
        """Return the share of samples with a sign, of those that it applies to; 0 without any."""
        of = self.counted - sum(track.silent[sign] for track in self.tracks.values())
        return sum(track.yes[sign] for track in self.tracks.values()) / of if of > 0 else 0.0

    def frequent(self, sign: str) -> bool:
        """Tell whether enough samples over enough time have a sign."""
        return self.enough and self.share(sign) >= self.limits.frequent

    def median(self, name: str) -> float:
        """Return the median of a field, where a kept sample stands for those dropped; 0 where none has it."""
        found = sorted(
            (value, track.every)
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
        """Say how many samples there are, and of how long."""
        several = f" of {len(self.tracks)} schedulers" if len(self.tracks) > 1 else ""
        timed = any(track.timed for track in self.tracks.values())
        return f"{self.counted} samples{several} over {'' if timed else 'about '}{self.busy_s:.0f} s"
