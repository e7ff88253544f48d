"""How many decode passes follow a prefill pass with `--prefill-decode-interval`."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.engines.simulation.config import SchedulerConfig
from batchrunner.engines.simulation.sample import SimulatedRequest
from batchrunner.engines.simulation.scheduler import Scheduler


def passes(limit: int, rows: list[tuple[int, int]], **config: Any) -> str:
    """Return the passes of a run, `P` for a prefill and `d` for a decode."""
    scheduler = Scheduler(SchedulerConfig(**{"max_running": 4, "max_total_tokens": 10_000, **config}))
    for prompt_tokens, outputs in rows:
        scheduler.submit(SimulatedRequest(prompt_tokens, outputs))
    found = ""
    while (step := scheduler.step(limit)) is not None:
        found += "P" if step.kind == "prefill" else "d" * step.steps
    return found


@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, "PdPdPdddd"),
        ({"decode_interval": 3}, "PdddPddd"),
        ({"decode_interval": 3, "decode_interval_samples": 4}, "PdPdPdddd"),
    ],
)
def test_a_prefill_waits_for_the_decodes_owed(limit: int, config: dict[str, int], wanted: str) -> None:
    """Rows that end meanwhile are replaced together; a batch below the least size fills at once."""
    rows = [(10, 2), (10, 3), (10, 4), (10, 5), (10, 5), (10, 5)]
    assert passes(limit, rows, **config)[: len(wanted)] == wanted


@pytest.mark.parametrize("limit", [1, 1000])
def test_chunks_of_a_prompt_wait_too(limit: int) -> None:
    """A prompt in chunks is continued after the decodes owed; with nothing to decode it is at once."""
    assert passes(limit, [(10, 9), (250, 1)], decode_interval=2, chunked_prefill_tokens=100) == "PddPddPdddd"
    assert passes(limit, [(250, 1)], decode_interval=2, chunked_prefill_tokens=100) == "PPP"


def test_fewer_and_larger_prefills() -> None:
    """The same rows in a few large prefill passes, with more decode passes."""
    rows = [(50, 20 + 37 * i % 61) for i in range(300)]
    often, seldom = (passes(1, rows, max_running=32, decode_interval=n) for n in (0, 8))
    assert seldom.count("P") < 0.5 * often.count("P")
    assert often.count("d") < seldom.count("d") < 1.5 * often.count("d")
