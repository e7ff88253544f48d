"""Where a sign begins: every number that the rules of advice compare with, and where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from batchrunner.core.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Each can be set: `--threshold NAME=VALUE`. "The guides" are SGLang's tuning guides."""

    frequent: float = 0.25
    """Share of the samples that makes a sign frequent; the guides only say "frequently"."""
    span_s: float = 10.0
    """Seconds of work that samples must cover: less is a reading, not advice."""
    samples: float = 8
    """Samples that there must be."""
    queue_low: float = 100
    """`#queue-req` is healthy from here (the guides: 100, one of them 50) …"""
    queue_deep: float = 2000
    """… to here (the guides: 2000, one of them 1000)."""
    usage_good: float = 0.9
    """Token usage from which the KV pool is used well (the guides)."""
    peaks: float = 0.1
    """Share of samples with a full pool from which memory limits, though it is not full all the time: outputs
    that begin together end together, and token usage goes up and down in waves."""
    retractions_per_min: float = 1.0
    """Retractions a minute that are fine (the guides: about one)."""
    recomputed: float = 0.25
    """Tokens that retractions lose, as a share of those generated, from which fewer at once may pay: a real
    SGLang was slower with it at 21%, and no faster at 1% (benchmarks/results/advice.json). As prefill they
    cost less than they did, and SGLang itself takes in fewer after each retraction."""
    memory_low_gb: float = 5.0
    """`available_gpu_mem` at ready below which memory may run out (the guides)."""
    memory_good_gb: float = 6.5
    """What is aimed at: the middle of the guides' 5-8 GB."""
    memory_high_gb: float = 10.0
    """`available_gpu_mem` above which memory lies idle (the guides)."""
    at_cap: float = 0.95
    """Share of `max_running_requests` from which that is what limits."""
    far_below: float = 0.5
    """Share of it under which the batch is small; the guides say "close to" it under load."""
    short_output: float = 0.5
    """Mean output as a share of `max_new_tokens` below which SGLang reserves too much."""
    graph_batch: float = 512
    """Largest batch at which a CUDA graph matters (the guides: 512 or 768) …"""
    graph_batch_tp: float = 768
    """… at a tensor parallelism of 4 or more."""
    long_prompt: float = 2048
    """Mean prompt, in tokens, that is long: a few fill a prefill pass."""
    latency_s: float = 0.2
    """Seconds between two tokens of a request that a reader would notice."""
    small_batch: float = 32
    """Running requests up to which torch.compile pays (the guides: "small batch sizes")."""
    small_model_gb: float = 10.0
    """Weights up to which a model is small: 5 billion parameters of 16 bits."""
    shared: float = 0.1
    """Share of prompt tokens found in the cache from which prompts share beginnings."""
    cached_well: float = 0.6
    """Share above which their order is good."""
    lpm_queue: float = 128
    """Waiting requests up to which `lpm` looks for prefixes (SGLang's schedule_policy)."""

    def with_values(self, settings: Sequence[str]) -> Thresholds:
        """Return these with `NAME=VALUE` settings applied.

        Raises JobError for one that is none, or that leaves no room between low and high.
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
                raise JobError(f"--threshold {setting}: give a number from 0 on")
            if name in _SHARES and changes[name] > 1:
                raise JobError(f"--threshold {setting}: it is a share: give a number from 0 to 1")
        changed = replace(self, **changes)
        for names in _ASCENDING:
            values = [getattr(changed, name) for name in names]
            if values != sorted(values):
                told = ", ".join(f"{name} {value:g}" for name, value in zip(names, values, strict=True))
                raise JobError(f"--threshold: {told}: none may be above the next")
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
