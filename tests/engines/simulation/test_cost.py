"""How long a forward pass takes, fitted to measurements."""

from __future__ import annotations

import random

import pytest

from batchrunner.engines.simulation.cost import H100_8B, PARTS, fit_spans
from batchrunner.engines.simulation.steady import PassWork


def test_a_fit_tells_the_time_of_like_work() -> None:
    """Stretches of passes of a known model say how long others take; too few say nothing."""
    made = random.Random(2)
    works = [
        PassWork(
            decodes=made.randint(10, 100),
            prefills=made.randint(0, 20),
            samples=made.randint(1_000, 30_000),
            kv_tokens=made.randint(10**5, 10**8),
            prefill_tokens=made.randint(0, 10**5),
        )
        for _ in range(60)
    ]
    spans = [(work, H100_8B.work_s(work)) for work in works]
    found = fit_spans(spans[:40])
    assert found is not None
    for work, seconds in spans[40:]:
        assert found.work_s(work) == pytest.approx(seconds, rel=0.1)
    assert fit_spans(spans[: PARTS - 1]) is None
