"""The physical limit of a run is that of control.md's formulas, and what is not known is not guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchrunner.advise.roofline import (
    CARDS,
    RooflineSetting,
    TokenWork,
    UnknownLimitError,
    limit,
    model_of_config,
)
from tests.support.model_configs import LLAMA_8B

MIXTRAL: dict[str, Any] = {
    **LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
H100 = RooflineSetting(CARDS["NVIDIA H100 80GB HBM3"], 1, 1, pool_tokens=380_000, max_running=2048)
PROMPT, OUTPUT = 246, 322
"""Mean lengths of ShareGPT (NanoFlow, arXiv:2408.12757, table 4)."""


def sharegpt(rows: int) -> TokenWork:
    """Return rows of ShareGPT's mean lengths, of which nothing is cached."""
    read = rows * (PROMPT * OUTPUT + OUTPUT**2 / 2)
    return TokenWork(rows * (PROMPT + OUTPUT), rows * PROMPT**2, read, rows * OUTPUT, OUTPUT)


def test_llama_8b_on_an_h100() -> None:
    """The check value: ShareGPT's lengths give a roof near 34.6k and 20k without overlap, output tok/s."""
    model = model_of_config(LLAMA_8B)
    assert model.parameters == model.active == pytest.approx(8.03e9, rel=0.001)
    assert model.kv_bytes(2) == 131_072
    found = limit(sharegpt(100_000), model, H100)
    assert found.roof_tokens_per_s == pytest.approx(34_600, rel=0.01)
    assert found.sequential_tokens_per_s == pytest.approx(20_000, rel=0.01)


def test_more_cards_do_it_sooner() -> None:
    """Two replicas take half as long; one replica on two cards less than that, for its weights are split."""
    model, work = model_of_config(LLAMA_8B), sharegpt(100_000)
    alone = limit(work, model, H100)
    two = limit(work, model, replace(H100, replicas=2))
    split = limit(work, model, replace(H100, cards=2, pool_tokens=2 * H100.pool_tokens, max_running=4096))
    assert two.sequential_s == pytest.approx(alone.sequential_s / 2)
    assert split.sequential_s < two.sequential_s


def test_few_rows_wait_for_the_longest() -> None:
    """Where few rows run, each pass reads all weights: the longest output sets the least number of passes."""
    model = model_of_config(LLAMA_8B)
    one = limit(sharegpt(1), model, H100)
    assert one.memory_s == pytest.approx(OUTPUT * model.parameters * 2 / 3.35e12, rel=0.01)
    assert one.roof_s == one.memory_s


def test_a_mixture_of_experts() -> None:
    """All experts are held and read, two of them are computed: Mixtral 8x7B is 46.7B with 12.9B active."""
    model = model_of_config(MIXTRAL)
    assert model.parameters == pytest.approx(46.7e9, rel=0.005)
    assert model.active == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of several kinds"),
        ({"hidden_size": None}, "config.json lacks"),
    ],
)
def test_what_the_formulas_do_not_describe(change: dict[str, Any], why: str) -> None:
    """A model of another kind has no figure rather than a wrong one."""
    with pytest.raises(UnknownLimitError, match=why):
        model_of_config({**LLAMA_8B, **change})


def test_no_fp8_no_figure() -> None:
    """An FP8 limit is not computed for a card without FP8, nor one for rows without outputs."""
    model = model_of_config(LLAMA_8B)
    a100 = replace(H100, card=CARDS["NVIDIA A100-SXM4-80GB"], weight_width=1.0)
    with pytest.raises(UnknownLimitError, match="FP8"):
        limit(sharegpt(1), model, a100)
    with pytest.raises(UnknownLimitError, match="no output tokens"):
        limit(TokenWork(), model, H100)
