"""How long a forward pass takes: a + b·samples + c·context tokens + d·prefilled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from batchrunner.engines.least_squares import LeastSquares
from batchrunner.engines.simulation.scheduler import StepResult
from batchrunner.engines.simulation.steady import PassWork

PARTS = 5
"""Parts of a model."""
RIDGE = 1e-3
"""Weight against large parts when a model is fitted to stretches of passes, which are much alike."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a forward pass, linear in its content."""

    base_s: float
    """Seconds to read the weights, launch the kernels and run the scheduler."""
    sample_s: float
    """Seconds for each sample: its row in the matrix products, sampling, and the scheduler's bookkeeping."""
    kv_token_s: float
    """Seconds for each context token that attention reads."""
    prefill_token_s: float
    """Seconds for each prompt token that is computed."""
    prefill_base_s: float = 0.0
    """Seconds by which a pass with prompt tokens takes longer than one without, whatever its content: its
    kernels are launched one by one, where a decode pass replays a CUDA graph."""

    def pass_s(self, samples: float, kv_tokens: float, prefill_tokens: float) -> float:
        """Return the seconds of one pass."""
        return (
            self.base_s
            + self.sample_s * samples
            + self.kv_token_s * kv_tokens
            + self.prefill_token_s * prefill_tokens
        )

    def step_s(self, step: StepResult) -> float:
        """Return the seconds of all passes of a scheduler's step."""
        samples = step.admitted + step.decoded if step.kind == "prefill" else step.running
        extra_s = self.prefill_base_s if step.kind == "prefill" else 0.0
        return step.steps * (extra_s + self.pass_s(samples, step.kv_tokens, step.prefill_tokens))

    def work_s(self, work: PassWork) -> float:
        """Return the seconds of several passes."""
        return (
            self.base_s * (work.decodes + work.prefills)
            + self.sample_s * work.samples
            + self.kv_token_s * work.kv_tokens
            + self.prefill_token_s * work.prefill_tokens
            + self.prefill_base_s * work.prefills
        )

    def steps_within(self, seconds: float, samples: int, kv_tokens: int) -> int:
        """Return how many decode passes end within `seconds`; each reads `samples` tokens more than the last.

        `kv_tokens` is the context before the first of them.
        """
        if seconds <= 0:
            return 0
        low, high = 0, int(seconds / max(self.pass_s(samples, kv_tokens + samples, 0), 1e-9))
        while low < high:  # later passes take longer, so `high` is an upper bound
            middle = (low + high + 1) // 2
            mean_kv_tokens = kv_tokens + samples * (middle + 1) / 2
            if middle * self.pass_s(samples, mean_kv_tokens, 0) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


H100_8B = CostModel(base_s=6.0e-3, sample_s=1.6e-5, kv_token_s=4.9e-8, prefill_token_s=2.9e-5)
"""Llama-3.1-8B in bf16 on one H100 SXM: an estimate from data sheets, not a measurement.

The card: 3.35 TB/s of HBM3, 989 TFLOP/s dense bf16 (NVIDIA's H100 data sheet). The model: 8.03e9 parameters,
32 layers, 8 key-value heads of 128 (its config.json).
- base: 16.06 GB of weights / 3.35 TB/s = 4.8 ms, read at four fifths of the peak.
- sample: 2 · 8.03e9 FLOP / 989 TFLOP/s = 16 µs. The weights' read hides it in small batches.
- context token: 2 · 32 · 8 · 128 · 2 B = 131,072 B / 3.35 TB/s = 39 ns, read at four fifths of the peak.
- prefilled token: the sample's 16 µs at 55 % of the peak.
"""


def fit_spans(spans: Sequence[tuple[PassWork, float]]) -> CostModel | None:
    """Fit a model without negative parts to the work and the seconds of stretches of passes.

    Parts that the stretches cannot tell apart share what they cost together, so the model is good for work
    that is not too unlike theirs. None where there are fewer stretches than parts.
    """
    if len(spans) < PARTS:
        return None
    rows = [
        (float(w.decodes + w.prefills), w.samples, w.kv_tokens, w.prefill_tokens, float(w.prefills))
        for w, _ in spans
    ]
    return CostModel(*LeastSquares(rows, [seconds for _, seconds in spans]).parts(ridge=RIDGE))
