"""Signs: what one sample of a scheduler's load shows. Pure."""

from collections.abc import Callable
from typing import NamedTuple

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


def _empty(sample: LoadSample, _: Thresholds) -> bool | None:
    return None if sample.unsent == 0 else sample.queue == 0


def _conservative(sample: LoadSample, limit: Thresholds) -> bool | None:
    if sample.prefill:
        return None
    return sample.queue > 0 and sample.usage < limit.usage_good and not _at_cap(sample, limit)


def _capped(sample: LoadSample, limit: Thresholds) -> bool | None:
    if sample.prefill:
        return None
    return sample.queue > 0 and sample.usage < limit.usage_good and _at_cap(sample, limit)


def _far_below(sample: LoadSample, limit: Thresholds) -> bool | None:
    if not sample.max_running or sample.prefill:
        return None
    below = sample.running < limit.far_below * sample.max_running
    return sample.queue > 0 and below and sample.usage < limit.usage_good


def _no_graph(sample: LoadSample, most: float) -> bool | None:
    return None if sample.graph is None or sample.running > most else not sample.graph


def _at_cap(sample: LoadSample, limit: Thresholds) -> bool:
    return bool(sample.max_running) and sample.running >= limit.at_cap * (sample.max_running or 0)


SIGNS: dict[str, Callable[[LoadSample, Thresholds], bool | None]] = {
    "empty": _empty,
    "in_band": lambda s, limit: None if s.unsent == 0 else limit.queue_low <= s.queue <= limit.queue_deep,
    "deep": lambda s, limit: s.queue > limit.queue_deep,
    "conservative": _conservative,
    "capped": _capped,
    "far_below": _far_below,
    "full": lambda s, limit: s.usage >= limit.usage_good,
    "kv_bound": lambda s, limit: s.usage >= limit.usage_good and s.queue > 0 and not _at_cap(s, limit),
    "no_graph": lambda s, limit: _no_graph(s, limit.graph_batch),
    "no_graph_tp": lambda s, limit: _no_graph(s, limit.graph_batch_tp),
    "slow": lambda s, limit: None if not s.rate else s.running / s.rate > limit.latency_s,
    "small_batch": lambda s, limit: None if s.prefill else s.running <= limit.small_batch,
}
"""The test for each sign; None where the sign does not apply to the sample."""
