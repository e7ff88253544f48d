"""Environment variables of the server among the flags that are tuned."""

from __future__ import annotations

from batchrunner.tune.space import CLIP, arguments_in, as_typed, numbers_in, variables_in


def test_arguments_and_variables_go_their_own_ways() -> None:
    """What the server reads from its environment is told by its name, and printed as a shell takes it."""
    args = {"max-running-requests": 8, CLIP: 256, "enable-metrics": True}
    assert arguments_in(args) == {"max-running-requests": 8, "enable-metrics": True}
    assert variables_in(args) == {CLIP: "256"}
    assert as_typed(args) == f"{CLIP}=256 --max-running-requests 8 --enable-metrics"
    assert as_typed({}) == ""
    assert numbers_in({CLIP: "256", "HF_HUB_OFFLINE": "1"}) == {CLIP: 256}
    assert numbers_in({CLIP: "many"}) == {}
