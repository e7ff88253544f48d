"""Load of schedulers over time: a bounded number of load samples, and sums over prefill passes."""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.output.samples import SchedulerSample
from batchrunner.sglang.logs.lines import LoggedBatch

WHOLE = 0.9
"""Minimum fraction of the chunk size (`chunked_prefill_size`) that the tokens of a full prefill pass take."""
FEW = 2
"""A full prefill pass with at most this number of prompts has long prompts."""


@dataclass(slots=True)
class Prefills:
    """Sums over the prefill passes of all schedulers."""

    passes: int = 0
    prompts: int = 0
    new_tokens: int = 0
    """Number of prompt tokens that were computed."""
    cached_tokens: int = 0
    """Number of prompt tokens that hit the prefix cache."""
    retracted_tokens: int = 0
    """Number of tokens that were computed, and lost when their requests were retracted."""
    filled: int = 0
    """Number of full passes: their tokens took at least WHOLE of the chunk size."""
    filled_waiting: int = 0
    """Number of passes with a full prefill chunk (`filled`) that left requests in the queue."""
    few_long: int = 0
    """Number of full passes with at most FEW prompts, which were therefore long."""

    def add(self, batch: LoggedBatch, chunk: int) -> None:
        """Count one prefill pass; `chunk` is `chunked_prefill_size`, or 0 if unknown."""
        # If the chunk size is unknown (0), no pass counts as full.
        is_full = 0 < WHOLE * chunk <= batch.new_tokens
        self.passes += 1
        self.prompts += batch.new_seqs
        self.new_tokens += batch.new_tokens
        self.cached_tokens += batch.cached_tokens
        self.filled += is_full
        self.filled_waiting += is_full and batch.queue > 0
        self.few_long += is_full and batch.new_seqs <= FEW

    @property
    def cached_share(self) -> float:
        """Fraction of the prompt tokens that hit the prefix cache."""
        return self.cached_tokens / max(1, self.cached_tokens + self.new_tokens)

    @property
    def mean_prompt(self) -> float:
        """Mean number of tokens in a prompt; each chunk of a long prompt counts as a prompt."""
        return (self.cached_tokens + self.new_tokens) / max(1, self.prompts)


class LoadSample(NamedTuple):
    """The load of a busy scheduler at one time."""

    at: float | None
    """Time in seconds; None if the log has no times. Only differences have a meaning."""
    running: int
    """Number of running requests."""
    queue: int
    """Number of queued requests."""
    usage: float
    """Fraction of the KV pool in use."""
    max_running: int | None = None
    """Maximum number of running requests; None if unknown."""
    graph: bool | None = None
    """Whether a CUDA graph ran; None if unknown."""
    rate: float | None = None
    """Number of tokens generated per second."""
    unsent: int | None = None
    """Number of rows that the client had not sent yet; None if unknown."""
    state_usage: float = 0.0
    """Fraction of the pool of recurrent states (Mamba and such) that running requests take; 0 without such
    states."""


def sample_of_load(
    load: SchedulerLoad | SchedulerSample,
    at: float | None,
    graph: bool | None = None,
    rate: float | None = None,
    unsent: int | None = None,
) -> LoadSample:
    """Convert the load that a server reports to a LoadSample with the time `at`."""
    return LoadSample(
        at=at,
        running=load.running,
        queue=load.queue,
        usage=load.token_usage,
        max_running=load.max_running,
        graph=graph,
        rate=rate,
        unsent=unsent,
        state_usage=load.state_usage,
    )


MOST_SAMPLES = 16_384
"""Maximum number of samples that are kept for a scheduler. Older ones are dropped."""
PAUSE_S = 30.0
"""Minimum seconds between two samples that count as a pause, in which the scheduler had no work. If the time
falls by more than this, an older log follows, which counts as a pause too."""


@dataclass(slots=True)
class Track:
    """The samples of one scheduler."""

    samples: deque[LoadSample] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    """The newest samples, in the order of time."""
    busy_s: float = 0.0
    """Number of seconds under load, without pauses."""

    def add(self, sample: LoadSample) -> None:
        """Append a sample. The time since the previous one counts as busy unless it exceeds PAUSE_S."""
        previous_at = self.samples[-1].at if self.samples else None
        gap_s = 0.0 if sample.at is None or previous_at is None else sample.at - previous_at
        # If an older log follows, the time falls by more than PAUSE_S. A smaller fall counts as no time at
        # all.
        if abs(gap_s) > PAUSE_S:
            self.settle()
        else:
            self.busy_s += max(0.0, gap_s)
        self.samples.append(sample)

    def settle(self) -> None:
        """End a period of work: set `unsent` to 0 in its last samples, those with an empty queue.

        Their queue was empty because the client had no more rows. Without this, these samples would suggest
        that the client sends too few requests at a time.
        """
        samples = self.samples
        # `drain_begin` is the index of the first of these last samples. A sample with a known `unsent` needs
        # no change.
        drain_begin = len(samples)
        while drain_begin and not samples[drain_begin - 1].queue and samples[drain_begin - 1].unsent is None:
            drain_begin -= 1
        # If no requests waited before these samples, their empty queue does not show that the rows ran out.
        had_queue_before = drain_begin > 0 and samples[drain_begin - 1].queue > 0
        if had_queue_before:
            for index in range(drain_begin, len(samples)):
                samples[index] = samples[index]._replace(unsent=0)


@dataclass(slots=True)
class Series:
    """Load samples of several schedulers, and sums over their prefill passes."""

    tracks: dict[str, Track] = field(default_factory=dict)
    prefills: Prefills = field(default_factory=Prefills)
    retractions: int = 0
    """Number of retractions of all schedulers."""

    def add(self, scheduler: str, sample: LoadSample) -> None:
        """Append a sample of a scheduler."""
        self.tracks.setdefault(scheduler, Track()).add(sample)

    def settle(self) -> None:
        """End the series: no more samples follow; see `Track.settle`."""
        for track in self.tracks.values():
            track.settle()

    @property
    def samples(self) -> list[LoadSample]:
        """The newest samples of all schedulers."""
        return [sample for track in self.tracks.values() for sample in track.samples]

    @property
    def counted(self) -> int:
        """Number of samples kept, over all schedulers."""
        return sum(len(track.samples) for track in self.tracks.values())

    @property
    def busy_s(self) -> float:
        """Seconds under load of the scheduler that was busy longest."""
        return max((track.busy_s for track in self.tracks.values()), default=0.0)

    @property
    def retractions_per_min(self) -> float:
        """Mean number of retractions per scheduler and minute under load.

        Less than a minute counts as a minute.
        """
        return self.retractions / max(1, len(self.tracks)) / max(1.0, self.busy_s / 60)

    @property
    def recomputed_share(self) -> float | None:
        """Tokens lost to retractions, as a fraction of the generated tokens; None if either is unknown."""
        generated = self.median("rate") * sum(track.busy_s for track in self.tracks.values())
        retracted = self.prefills.retracted_tokens
        return retracted / generated if retracted and generated else None

    def median(self, name: str) -> float:
        """Return the median of a field over the newest samples; 0 if no sample has a value."""
        values = [getattr(sample, name) for sample in self.samples]
        return float(statistics.median([value for value in values if value is not None] or [0]))

    @property
    def longest_queue(self) -> int:
        """Length of the longest queue of any scheduler."""
        return max((sample.queue for sample in self.samples), default=0)

    @property
    def max_running(self) -> int:
        """Largest limit on the running requests of a scheduler; 0 if unknown."""
        return max((sample.max_running or 0 for sample in self.samples), default=0)
