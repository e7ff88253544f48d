"""Flags that are tried under a rare sign only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.tune.measurement import TrialSigns
from batchrunner.tune.space import LEVERS, TuningState
from tests.support.tuned import CARD

if TYPE_CHECKING:
    from batchrunner.tune.space import Args

BUSY = TrialSigns(running=30, max_running=256, queue=100, empty_share=0, usage=0.5)
TWO: Args = {"tp-size": 2}
MIXTURE, LATENT = {"num_experts": 64}, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("lever", "args", "signs", "config", "expected"),
    [
        (
            "cuda-graph-backend-prefill", {}, {"prefill_per_pass": 80.0}, {},
            [{"cuda-graph-backend-prefill": "breakable"}, {"cuda-graph-backend-prefill": "full"}],
        ),
        ("cuda-graph-backend-prefill", {}, {"prefill_per_pass": 6000.0}, {}, "computing takes longer"),
        ("cuda-graph-backend-prefill", {}, {}, {}, "the log lacks prefill passes"),
        ("page-size", {}, {"attention_backend": "fa3"}, {}, [{"page-size": 16}, {"page-size": 64}]),
        ("page-size", {"page-size": 16}, {"attention_backend": "fa3"}, {}, [{"page-size": 64}]),
        ("page-size", {}, {"attention_backend": "fa3", "cached_share": 0.5}, {}, "pages find fewer"),
        ("page-size", {}, {"attention_backend": "triton"}, {}, "not of this backend"),
        (
            "hierarchical-cache", {}, {"cached_share": 0.5, "usage": 0.98}, {},
            [{"enable-hierarchical-cache": True}],
        ),
        ("hierarchical-cache", {}, {"cached_share": 0.5}, {}, "at token usage 0.50"),
        (
            "hierarchical-cache", {"enable-hierarchical-cache": True}, {"cached_share": 0.5, "usage": 0.98},
            {}, "on already",
        ),
        ("tokenizer-worker-num", {}, {"empty_share": 0.9}, {}, [{"tokenizer-worker-num": 4}]),
        ("tokenizer-worker-num", {}, {}, {}, "the scheduler is fed"),
        ("gc-threshold", {}, {"queue": 3000}, {}, [{"gc-threshold": [20_000, 50, 50]}]),
        ("gc-threshold", {}, {}, {}, "130 requests in flight"),
        ("expert-parallelism", TWO, {}, MIXTURE, [{"ep-size": 2}]),
        ("expert-parallelism", {}, {}, MIXTURE, "no experts on several GPUs"),
        ("expert-parallelism", TWO, {}, {}, "no experts on several GPUs"),
        ("dp-attention", TWO, {}, LATENT, [{"attn-dp-size": 2}]),
        ("dp-attention", {**TWO, "attn-dp-size": 2}, {}, LATENT, "on already"),
        ("dp-attention", TWO, {}, {}, "no compressed KV cache"),
    ],
)  # fmt: skip
def test_each_lever_has_its_sign(
    lever: str, args: Args, signs: dict[str, Any], config: dict[str, Any], expected: list[Args] | str
) -> None:
    """A lever is tried where its sign is seen; where it is not, the table says what was seen instead."""
    (candidates_of,) = (found.candidates for found in LEVERS if found.name == lever)
    found = candidates_of(TuningState(args, replace(BUSY, **signs), replace(CARD, config=config)))
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert expected in found
    else:
        assert [change.args for change in found if not isinstance(change, str)] == expected


def test_none_needs_a_gpu_to_be_left_alone() -> None:
    """On a CPU each has a word of its own, whatever the signs."""
    cpu = replace(CARD, cpu=True)
    assert all(isinstance(lever.candidates(TuningState({}, BUSY, cpu)), str) for lever in LEVERS)
