"""How long a forward pass takes, fitted to measurements."""

from __future__ import annotations

import random

import pytest

from batchrunner.engines.simulation.cost import H100_8B, MeasuredPass, fit

# Seconds


def test_a_fit_finds_the_parts() -> None:
    """Exact passes give the model back; passes that are all alike do not tell the parts apart."""
    made = random.Random(2)
    passes = []
    for _ in range(50):
        samples, kv_tokens, prefill = (
            made.randint(1, 500),
            made.randint(1, 10**6),
            made.choice([0, made.randint(1, 8192)]),
        )
        passes.append(MeasuredPass(samples, kv_tokens, prefill, H100_8B.pass_s(samples, kv_tokens, prefill)))
    found = fit(passes)
    for name in ("base_s", "sample_s", "kv_token_s", "prefill_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(H100_8B, name), rel=1e-4)
    with pytest.raises(ValueError, match="apart"):
        fit(passes[:1] * 9)
