"""The load of schedulers over time in bounded memory: their newest samples, and the signs that these show."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from batchrunner.core.console import counted
from batchrunner.sglang.logs.lines import LoggedBatch


@dataclass(slots=True)
class Thresholds:
    """Where a sign begins. "The guides" are SGLang's tuning guides. Tests change some."""

    frequent: float = 0.25
    """Fraction of the samples from which a sign is frequent; the guides only say "frequently"."""
    span_s: float = 10.0
    """Least seconds of work that samples must cover for advice."""
    samples: float = 8
    """Least number of samples for advice."""
    queue_low: float = 100
    """Least healthy queue, `#queue-req` (the guides: 100, one of them 50)."""
    queue_deep: float = 2000
    """Longest healthy queue, `#queue-req` (the guides: 2000, one of them 1000)."""
    usage_good: float = 0.9
    """Token usage from which the KV pool is well used (the guides)."""
    peaks: float = 0.1
    """Fraction of samples with a full pool from which memory is the limit. It need not be full all the time:
    outputs that begin together end together, so token usage rises and falls in waves."""
    retractions_per_min: float = 1.0
    """Most retractions per minute that are fine (the guides: about one)."""
    recomputed: float = 0.25
    """Tokens lost to retractions, as a fraction of those generated, above which fewer requests may pay. With
    fewer, a real SGLang was slower where 21 % were lost, and no faster where 1 % were
    (benchmarks/results/advice.json): lost tokens are computed again as prefill, which is cheaper, and SGLang
    itself admits fewer requests after each retraction."""
    memory_low_gb: float = 5.0
    """`available_gpu_mem` at ready below which memory may run out (the guides)."""
    memory_good_gb: float = 6.5
    """`available_gpu_mem` at ready that advice aims at: the middle of the guides' 5-8 GB."""
    memory_high_gb: float = 10.0
    """`available_gpu_mem` at ready above which memory is unused (the guides)."""
    at_cap: float = 0.95
    """Running requests, as a fraction of `max_running_requests`, from which that is the limit."""
    far_below: float = 0.5
    """Fraction of `max_running_requests` below which few run; under load the guides expect "close to" it."""
    short_output: float = 0.5
    """Mean output, as a fraction of `max_new_tokens`, below which SGLang reserves too much memory."""
    graph_batch: float = 512
    """Largest batch at which a CUDA graph matters (the guides: 512 or 768)."""
    graph_batch_small: float = 4096
    """Largest batch at which a CUDA graph matters for a model of `launched_gb`: on an H200 a decode pass of
    SmolLM2-135M with about 2,000 rows takes 23 to 28 ms with a graph, 53 to 96 without; SGLang's issue 33483
    tells of four times on an L40."""
    launched_gb: float = 2.0
    """Weights in GB, at most, of a model whose kernels take less time than their launch."""
    graph_batch_tp: float = 768
    """Largest batch at which a CUDA graph matters with a tensor parallelism of 4 or more."""
    long_prompt: float = 2048
    """Mean prompt, in tokens, from which prompts are long: a few fill a prefill pass."""
    small_batch: float = 32
    """Most running requests with which torch.compile pays (the guides: "small batch sizes")."""
    small_model_gb: float = 10.0
    """Weights of a small model at most, in GB: 5 billion parameters of 16 bits."""
    shared: float = 0.1
    """Fraction of prompt tokens found in the cache from which prompts share prefixes."""
    cached_well: float = 0.6
    """Fraction of prompt tokens found in the cache from which the order of the rows is good."""
    lpm_queue: float = 128
    """Most waiting requests with which `lpm` looks for prefixes (SGLang's schedule_policy)."""


GUIDES = Thresholds()
WHOLE = 0.9
"""Fraction of its limit in tokens from which a prefill pass counts as full."""
FEW = 2
"""Most prompts in a full pass that counts as filled by long prompts."""


@dataclass(slots=True)
class Prefills:
    """Sums over the prefill passes of all schedulers."""

    passes: int = 0
    prompts: int = 0
    new_tokens: int = 0
    """Prompt tokens computed."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    retracted_tokens: int = 0
    """Tokens computed and then lost to a retraction."""
    filled: int = 0
    """Passes that took a whole chunk."""
    filled_waiting: int = 0
    """Such passes after which requests still waited."""
    few_long: int = 0
    """Passes that one or two prompts filled."""

    def add(self, batch: LoggedBatch, chunk: int) -> None:
        """Count one pass; `chunk` is `chunked_prefill_size`, 0 where that is not known."""
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
        """Fraction of prompt tokens that were in the cache."""
        return self.cached_tokens / max(1, self.cached_tokens + self.new_tokens)

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt; each chunk of a long one counts as a prompt."""
        return (self.cached_tokens + self.new_tokens) / max(1, self.prompts)


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


def _underused(sample: LoadSample) -> bool:
    """Tell whether requests wait though the KV pool has room."""
    return sample.queue > 0 and sample.usage < GUIDES.usage_good


def _far_below(sample: LoadSample) -> bool | None:
    if not sample.max_running:
        return None
    return _underused(sample) and sample.running < GUIDES.far_below * sample.max_running


def _no_graph(sample: LoadSample, most: float) -> bool | None:
    return None if sample.graph is None or sample.running > most else not sample.graph


def _at_cap(sample: LoadSample) -> bool:
    """Tell whether as many requests run as may, or one less: the place of one that ended is being filled."""
    most = sample.max_running or 0
    return most > 0 and sample.running >= max(1, min(GUIDES.at_cap * most, most - 1))


SIGNS: dict[str, Callable[[LoadSample], bool | None]] = {
    "empty": lambda s: None if s.unsent == 0 else s.queue == 0,
    "in_band": lambda s: None if s.unsent == 0 else GUIDES.queue_low <= s.queue <= GUIDES.queue_deep,
    "deep": lambda s: s.queue > GUIDES.queue_deep,
    "conservative": lambda s: _underused(s) and not _at_cap(s),
    "capped": lambda s: _underused(s) and _at_cap(s),
    "far_below": _far_below,
    "full": lambda s: s.usage >= GUIDES.usage_good,
    "kv_bound": lambda s: s.usage >= GUIDES.usage_good and s.queue > 0 and not _at_cap(s),
    "no_graph": lambda s: _no_graph(s, GUIDES.graph_batch),
    "no_graph_small": lambda s: _no_graph(s, GUIDES.graph_batch_small),
    "no_graph_tp": lambda s: _no_graph(s, GUIDES.graph_batch_tp),
    "small_batch": lambda s: s.running <= GUIDES.small_batch,
}
"""The test for each sign; None where the sign does not apply to the sample."""


MOST_SAMPLES = 16_384
"""Newest samples kept of a scheduler."""
PAUSE_S = 30.0
"""A gap of more seconds between two samples is a pause: it counts as no work, and the job before it ended.
So does time that runs backwards by as much: an older log follows a newer one."""


@dataclass(slots=True)
class Track:
    """The samples of one scheduler."""

    samples: deque[LoadSample] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    """The newest, oldest first."""
    busy_s: float = 0.0
    """Seconds under load, without pauses."""

    def add(self, sample: LoadSample) -> None:
        """Count a sample."""
        last = self.samples[-1].at if self.samples else None
        gap_s = 0.0 if sample.at is None or last is None else sample.at - last
        if abs(gap_s) > PAUSE_S:
            self.settle()
        else:
            self.busy_s += max(0.0, gap_s)
        self.samples.append(sample)

    def settle(self) -> None:
        """End a stretch of work: the empty queue at its end is no sign, as no rows were left to send."""
        samples = self.samples
        dry = list(takewhile(lambda sample: not sample.queue and sample.unsent is None, reversed(samples)))
        if len(dry) < len(samples) and samples[-len(dry) - 1].queue:
            for at, sample in enumerate(dry, 1):
                samples[-at] = sample._replace(unsent=0)


@dataclass(slots=True)
class Series:
    """The samples of all schedulers of one source."""

    tracks: dict[str, Track] = field(default_factory=dict)
    prefills: Prefills = field(default_factory=Prefills)
    retractions: int = 0
    """Retractions of all schedulers."""

    def add(self, scheduler: str, sample: LoadSample) -> None:
        """Count a sample."""
        self.tracks.setdefault(scheduler, Track()).add(sample)

    def settle(self) -> None:
        """End the series: the source has no more samples."""
        for track in self.tracks.values():
            track.settle()

    @property
    def samples(self) -> list[LoadSample]:
        """The newest samples of all schedulers."""
        return [sample for track in self.tracks.values() for sample in track.samples]

    @property
    def counted(self) -> int:
        """Number of these samples."""
        return sum(len(track.samples) for track in self.tracks.values())

    @property
    def busy_s(self) -> float:
        """Seconds under load of the scheduler that was under load for longest."""
        return max((track.busy_s for track in self.tracks.values()), default=0.0)

    @property
    def retractions_per_min(self) -> float:
        """Retractions per minute of a scheduler, on average; less than a minute counts as one."""
        return self.retractions / max(1, len(self.tracks)) / max(1.0, self.busy_s / 60)

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
        often = self.retractions_per_min > GUIDES.retractions_per_min
        return often and (share is None or share >= GUIDES.recomputed)

    @property
    def enough(self) -> bool:
        """Whether there are enough samples over enough time to judge."""
        return self.counted >= GUIDES.samples and self.busy_s >= GUIDES.span_s

    def share(self, sign: str) -> float:
        """Return the fraction of samples with a sign, among those that it applies to; 0 without any."""
        shows = SIGNS[sign]
        found = [has for sample in self.samples if (has := shows(sample)) is not None]
        return sum(found) / len(found) if found else 0.0

    def frequent(self, sign: str) -> bool:
        """Tell whether a sign is in a large enough fraction of enough samples."""
        return self.enough and self.share(sign) >= GUIDES.frequent

    def median(self, name: str) -> float:
        """Return the median of a field over the newest samples, 0 if none of them has it."""
        values = [getattr(sample, name) for sample in self.samples]
        return float(statistics.median([value for value in values if value is not None] or [0]))

    @property
    def longest_queue(self) -> int:
        """The longest queue of a scheduler."""
        return max((sample.queue for sample in self.samples), default=0)

    @property
    def max_running(self) -> int:
        """The largest limit on the running requests of a scheduler; 0 where it is not known."""
        return max((sample.max_running or 0 for sample in self.samples), default=0)

    def over(self) -> str:
        """Return, in words, how many samples there are and over how many seconds.

        Too short a time is rounded down: it never reads as long enough.
        """
        short = self.busy_s < GUIDES.span_s
        seconds = f"{math.floor(self.busy_s * 10) / 10:g}" if short else f"{self.busy_s:.0f}"
        several = f" of {len(self.tracks)} schedulers" if len(self.tracks) > 1 else ""
        return f"{counted(self.counted, 'sample')}{several} over {seconds} s"
