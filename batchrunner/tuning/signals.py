"""What counts as a full, idle or overloaded server: the signs of its load, with their thresholds. No I/O.

A sign is an observation in one reading of a scheduler's load, such as an empty queue. It is frequent if at
least a quarter of the readings show it. The concurrency limits, advice, flag tuning during a run and
`batchrun tune` share these definitions, so they never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from batchrunner.core.console import counted

if TYPE_CHECKING:
    from batchrunner.sglang.logs.series import LoadSample, Series


@dataclass(slots=True)
class Thresholds:
    """Thresholds for a server's load, mostly from SGLang's tuning guides. Tests change some values."""

    frequent: float = 0.25
    """An observation is frequent if at least this fraction of the load samples show it. SGLang's guides only
    say "frequently"."""
    span_s: float = 10.0
    """Minimum number of seconds of work that the load samples must cover for advice."""
    samples: float = 8
    """Minimum number of load samples for advice."""
    queue_low: float = 100
    """Minimum length of a healthy queue, `#queue-req`, in requests. SGLang's guides say 100, one of them
    50."""
    queue_deep: float = 2000
    """Maximum length of a healthy queue, `#queue-req`, in requests. SGLang's guides say 2000, one of them
    1000."""
    usage_good: float = 0.9
    """Minimum token usage at which the KV pool counts as well used, by SGLang's guides."""
    peaks: float = 0.1
    """Memory is the limit if the KV pool is full in at least this fraction of the load samples. It is not
    full all the time, because outputs that begin together also end together."""
    retractions_per_min: float = 1.0
    """Maximum number of retractions per minute that is fine. SGLang's guides say "about one"."""
    overfull: float = 3.0
    """The KV pool is overfull if the count of recent retractions is at least this. The count halves each
    minute. At one retraction a minute it averages 1.4, and two retractions in a row are no pattern yet."""
    recomputed: float = 0.25
    """Running fewer requests may pay if retractions lose at least this fraction of the generated tokens.
    Retractions cost little: a prefill computes the lost tokens again, and SGLang itself admits fewer requests
    after each retraction. With fewer requests, a real SGLang was slower at a loss of 21 %, and no faster at 1
    % (benchmarks/results/advice.json)."""
    memory_low_gb: float = 5.0
    """Minimum `available_gpu_mem` of a ready server, by SGLang's guides. With less, memory may run out."""
    memory_good_gb: float = 6.5
    """`available_gpu_mem` of a ready server at which advice aims: the middle of the 5-8 GB in SGLang's
    guides."""
    memory_high_gb: float = 10.0
    """Maximum `available_gpu_mem` of a ready server, by SGLang's guides. With more, memory is left unused."""
    at_cap: float = 0.95
    """`max_running_requests` counts as reached if running requests are at least this fraction of it."""
    far_below: float = 0.5
    """Few requests run if they are fewer than this fraction of `max_running_requests`. SGLang's guides expect
    a number "close to" it."""
    short_output: float = 0.5
    """SGLang reserves too much memory if the mean output is below this fraction of `max_new_tokens`."""
    graph_batch: float = 512
    """A CUDA graph matters for batches of at most this many requests. SGLang's guides say 512 or 768."""
    graph_batch_small: float = 4096
    """A CUDA graph matters for batches of at most this many requests, if the model is small (`launched_gb`).
    On an H200, a decode pass of SmolLM2-135M with about 2,000 rows takes 23 to 28 ms with a graph, and 53 to
    96 ms without. SGLang's issue 33483 reports a factor of four on an L40."""
    launched_gb: float = 2.0
    """If a model's weights take at most this many GB, its kernels take less time than their launch."""
    graph_batch_tp: float = 768
    """A CUDA graph matters for batches of at most this many requests, if the tensor parallelism is 4 or
    more."""
    long_prompt: float = 2048
    """Prompts are long if their mean is at least this many tokens, so that a few fill a prefill pass."""
    small_pass: float = 0.25
    """A prefill pass is small if it fills at most this fraction of the chunk."""
    small_batch: float = 32
    """torch.compile pays up to this many running requests. SGLang's guides say "small batch sizes"."""
    small_model_gb: float = 10.0
    """A model is small if its weights take at most this many GB: 5 billion parameters of 16 bits."""
    shared: float = 0.1
    """Prompts share prefixes if at least this fraction of the prompt tokens come from the prefix cache, or
    could come from it."""
    cached_well: float = 0.6
    """The order of the rows is good if at least this fraction of the prompt tokens come from the prefix
    cache."""
    lpm_queue: float = 128
    """Longest queue at which `lpm` still matches prefixes; above it SGLang takes requests in order of
    arrival."""


GUIDES = Thresholds()
"""The thresholds in use, mostly from SGLang's tuning guides."""


class Gauges(Protocol):
    """A reading of one scheduler's load, from a poll or a log line."""

    @property
    def running(self) -> int:
        """Number of requests that decode, SGLang's `#running-req`."""

    @property
    def queue(self) -> int:
        """Number of requests that wait, SGLang's `#queue-req`."""

    @property
    def usage(self) -> float:
        """Token usage: the fraction of the KV pool in use."""

    @property
    def state_usage(self) -> float:
        """Fraction of a hybrid model's state pool that running requests take; 0 without a state pool."""

    @property
    def max_running(self) -> int | None:
        """Maximum number of requests that the scheduler runs at once; None if unknown."""


def is_full(load: Gauges) -> bool:
    """Tell whether the KV pool is so full that a fuller pool would gain nothing."""
    return load.usage >= GUIDES.usage_good


def reaches_cap(running: float, max_running: int | None) -> bool:
    """Tell whether so many requests run that `max_running_requests` is the limit.

    With only one free slot, the limit counts as reached, because the scheduler is about to fill the slot.
    """
    most = max_running or 0
    return most > 0 and running >= max(1, min(GUIDES.at_cap * most, most - 1))


def is_at_cap(load: Gauges) -> bool:
    """Tell whether the running requests reach `max_running_requests`."""
    return reaches_cap(load.running, load.max_running)


def fills_states(load: Gauges) -> bool:
    """Tell whether a hybrid model's state pool has no room for more requests.

    SGLang may set `max_running_requests` to the number of states in the pool. So the pool also counts as full
    if that limit is reached and no more states fit. `running / state_usage` estimates how many fit.
    """
    if load.state_usage >= GUIDES.usage_good:
        return True
    if load.state_usage <= 0 or not is_at_cap(load):
        return False
    most_by_states = load.running / load.state_usage
    return most_by_states <= (load.max_running or 0) + ROUNDING


ROUNDING = 1e-6
"""Maximum rounding error of a computed number of requests."""


def waits_for_states(load: Gauges) -> bool:
    """Tell whether requests wait for room in the state pool, while the KV pool has room."""
    return load.queue > 0 and fills_states(load) and not is_full(load)


def waits_beside_room(load: Gauges) -> bool:
    """Tell whether requests wait although the KV pool, and a hybrid model's state pool, have room."""
    return load.queue > 0 and not is_full(load) and not fills_states(load)


def holds_back(load: Gauges) -> bool:
    """Tell whether requests wait although neither the pools nor `max_running_requests` are the limit."""
    return waits_beside_room(load) and not is_at_cap(load)


def _is_in_band(sample: LoadSample) -> bool | None:
    """Tell whether the queue has a healthy length; None if no row remains to be sent."""
    if sample.unsent == 0:
        return None
    return GUIDES.queue_low <= sample.queue <= GUIDES.queue_deep


def _runs_far_below(sample: LoadSample) -> bool | None:
    """Tell whether requests wait although far fewer run than allowed; None if the maximum is unknown."""
    if not sample.max_running:
        return None
    return waits_beside_room(sample) and sample.running < GUIDES.far_below * sample.max_running


def _lacks_graph(sample: LoadSample, largest_batch: float) -> bool | None:
    """Tell whether a decode pass ran without a CUDA graph; None if unknown, or if the batch is larger."""
    if sample.graph is None or sample.running > largest_batch:
        return None
    return not sample.graph


SIGNS: dict[str, Callable[[LoadSample], bool | None]] = {
    "empty": lambda s: None if s.unsent == 0 else s.queue == 0,
    "waiting": lambda s: s.queue > 0,
    "in_band": _is_in_band,
    "deep": lambda s: s.queue > GUIDES.queue_deep,
    "conservative": holds_back,
    "capped": lambda s: waits_beside_room(s) and is_at_cap(s),
    "at_cap": is_at_cap,
    "far_below": _runs_far_below,
    "states": waits_for_states,
    "full": is_full,
    "kv_bound": lambda s: s.queue > 0 and is_full(s) and not is_at_cap(s),
    "no_graph": lambda s: _lacks_graph(s, GUIDES.graph_batch),
    "no_graph_small": lambda s: _lacks_graph(s, GUIDES.graph_batch_small),
    "no_graph_tp": lambda s: _lacks_graph(s, GUIDES.graph_batch_tp),
    "small_batch": lambda s: s.running <= GUIDES.small_batch,
}
"""For each sign, the test whether a load sample shows it; None if the sign does not apply."""


def share(samples: Iterable[LoadSample], sign: str) -> float:
    """Return the fraction of the load samples that show a sign.

    Samples to which the sign does not apply are left out. If none remain, the result is 0.
    """
    shows = SIGNS[sign]
    results = [result for sample in samples if (result := shows(sample)) is not None]
    return sum(results) / len(results) if results else 0.0


def is_frequent(share_of_readings: float) -> bool:
    """Tell whether a sign is frequent, from the fraction of the readings that show it."""
    return share_of_readings >= GUIDES.frequent


def has_enough(series: Series) -> bool:
    """Tell whether there are enough load samples, over enough time, to judge a server."""
    return series.counted >= GUIDES.samples and series.busy_s >= GUIDES.span_s


def frequent(series: Series, sign: str) -> bool:
    """Tell whether a sign is frequent, and was judged on enough load samples."""
    return has_enough(series) and is_frequent(share(series.samples, sign))


def retracts_often(per_min: float) -> bool:
    """Tell whether a scheduler retracts more requests per minute than SGLang's guides call fine."""
    return per_min > GUIDES.retractions_per_min


def is_overfull(recent_retractions: float) -> bool:
    """Tell whether the KV pool is overfull. The count of recent retractions halves each minute."""
    return recent_retractions >= GUIDES.overfull


def admits_too_few(*, share_held: float, retracts: bool) -> bool:
    """Tell whether the server admits too few requests: it often holds them back, and retracts few.

    `share_held` is the fraction of the readings in which requests queue although there is room.
    """
    return is_frequent(share_held) and not retracts


def retractions_cost(series: Series) -> bool:
    """Tell whether retractions are frequent and lose many tokens. An unknown loss counts as large."""
    lost_share = series.recomputed_share
    return retracts_often(series.retractions_per_min) and (
        lost_share is None or lost_share >= GUIDES.recomputed
    )


def span_in_words(series: Series) -> str:
    """Return the number of load samples and the seconds that they cover, in words.

    A time that is too short for advice is rounded down, so that it never reads as long enough.
    """
    is_short = series.busy_s < GUIDES.span_s
    seconds = f"{math.floor(series.busy_s * 10) / 10:g}" if is_short else f"{series.busy_s:.0f}"
    schedulers = f" of {len(series.tracks)} schedulers" if len(series.tracks) > 1 else ""
    return f"{counted(series.counted, 'sample')}{schedulers} over {seconds} s"


class Corner(StrEnum):
    """Load state of a scheduler, as users see it. The event log and report.json contain the values."""

    SHORT = "short"
    FULL = "full"
    GOOD = "good"
    STATES = "states"
    FILLING = "filling"
    HELD = "held"

    @property
    def words(self) -> str:
        """The load state in a few words, for the status line."""
        return _WORDS[self][0]

    @property
    def meaning(self) -> str:
        """What the load state means for the user, as a clause that follows the figures in the event log."""
        return _WORDS[self][1]


def corner_of(load: Gauges, *, overfull: bool, share_held: float) -> Corner | None:
    """Return the load state of a scheduler whose concurrency limit is used; None if no state fits.

    `overfull` tells whether requests are often retracted. `share_held` is the fraction of the readings in
    which requests queue although there is room.
    """
    # Several states may fit. The first one counts.
    if overfull:
        return Corner.FILLING
    if admits_too_few(share_held=share_held, retracts=overfull):
        return Corner.HELD
    if waits_for_states(load):
        return Corner.STATES
    if is_full(load):
        return Corner.GOOD if load.queue else Corner.FULL
    return None if load.queue else Corner.SHORT


ADMITS_TOO_FEW = "the server admits too few requests"
_WORDS = {
    Corner.SHORT: ("queue short", ": the queue is empty, so more rows are sent"),
    Corner.FULL: ("KV pool full", ": the KV pool is full, so a longer queue does not help"),
    Corner.GOOD: ("KV pool well used", ": the KV pool is well used and requests wait, as they should"),
    Corner.STATES: (
        "state pool full",
        ": the model's state pool limits the running requests, so sending more rows does not help",
    ),
    Corner.FILLING: (
        "KV pool fills up",
        ", more than about one retraction a minute: rows are sent only as fast as the KV pool has room",
    ),
    Corner.HELD: (
        "server holds back",
        f" for most of a minute: {ADMITS_TOO_FEW}, so sending more rows does not help",
    ),
}
"""For each load state, the words for the status line, and the clause that follows the figures in an event."""
FLAG_SIGNS = {
    "oom": "memory ran out",
    "no-pool": "the weights leave no room for a KV pool",
    "held": "requests wait although the KV pool has room",
    "retracting": "more than one retraction a minute from a full KV pool",
    "full": "requests wait for room in the KV pool",
    "memory-left": "memory of the GPU is unused",
    "memory-tight": "little memory of the GPU is free",
    "chunk-full": "prefill passes are as large as the chunk size allows",
    "capped": "as many requests run as are allowed, and the KV pool has room",
    "states": "requests wait for room in the model's state pool, and the KV pool has room",
    "no-states": "the state pool is too small",
    "graph-off": "decode passes run without a CUDA graph",
    "reordered": "the server does not take rows in the order in which they are sent",
    "shared": "prompts share prefixes, and few requests wait",
    "slow-backend": "the GPU has a faster attention backend",
    "evicted": "prompts share prefixes, and the KV pool is full",
    "starved": "no request waits, and fewer run than are allowed",
    "no-media": "the model takes images, sounds or videos, and the job has none",
    "speculates": "each step guesses a fixed number of tokens",
    "split-experts": "each expert is split over several GPUs",
    "kv-copies": "several GPUs keep the same KV cache",
    "layout": "another number of replicas would fit the GPUs",
    "wide-numbers": "weights or KV cache have 16-bit numbers",
    "repeated": "outputs repeat text of earlier outputs",
    "small-prefills": "decoding stops often for small prefill passes",
    "large-pages": "requests are short compared to a page of the KV cache",
    "cache-off": "the prefix cache is off, and prompts share prefixes",
    "small-model": "a small model runs small batches",
}
"""Observations (signs) that call for a change of a flag, in words, by their names in the table of flags."""
