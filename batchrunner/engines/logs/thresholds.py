"""Thresholds: the numbers that the rules of advice compare with, and their sources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from batchrunner.core.errors import JobError


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where a sign begins; `--threshold NAME=VALUE` sets one. "The guides" are SGLang's tuning guides."""

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
    graph_batch_tp: float = 768
    """Largest batch at which a CUDA graph matters with a tensor parallelism of 4 or more."""
    long_prompt: float = 2048
    """Mean prompt, in tokens, from which prompts are long: a few fill a prefill pass."""
    latency_s: float = 0.2
    """Seconds between two tokens of a request that a reader would notice."""
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

    def with_values(self, settings: Sequence[str]) -> Self:
        """Return these thresholds with `NAME=VALUE` settings applied.

        Raises JobError for a setting that is none, or that puts a low threshold above a high one.
        """
        known = {field.name for field in fields(self)}
        changes = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in known:
                raise JobError(
                    f"--threshold {setting}: no such threshold; there are {', '.join(sorted(known))}"
                )
            try:
                changes[name] = float(value)
            except ValueError:
                raise JobError(f"--threshold {setting}: {value!r} is not a number") from None
            if not 0 <= changes[name] < math.inf:
                raise JobError(f"--threshold {setting}", hint="give a number from 0 on")
            if name in _SHARES and changes[name] > 1:
                raise JobError(f"--threshold {setting}: it is a share", hint="give a number from 0 to 1")
        changed = replace(self, **changes)
        for names in _ASCENDING:
            values = [getattr(changed, name) for name in names]
            if values != sorted(values):
                order = ", ".join(f"{name} {value:g}" for name, value in zip(names, values, strict=True))
                raise JobError(f"--threshold: {order}: none may be above the next")
        return changed


_ASCENDING = (
    ("queue_low", "queue_deep"),
    ("memory_low_gb", "memory_good_gb", "memory_high_gb"),
    ("shared", "cached_well"),
    ("graph_batch", "graph_batch_tp"),
)
_SHARES = (
    "frequent", "usage_good", "peaks", "recomputed", "at_cap", "far_below", "short_output", "shared",
    "cached_well",
)  # fmt: skip
