"""A CPU's KV pool that holds too few requests is found, and made as large as there is use and memory for."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.advise.rules import apply_all
from batchrunner.advise.situation import ClientActivity, Situation
from batchrunner.engines.flags import of_arguments
from batchrunner.engines.logs.reader import LogReader
from tests.support.advice import QUICK
from tests.support.sglang_logs import LogWriter

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
"""A token of its KV pool takes 2 · 2 · 2 · 16 numbers of 4 bytes: 512 bytes."""


def pool_named(
    log: LogWriter, *, free_gb: float = 8.0, ignore_eos: bool = False, known: bool = True
) -> int | None:
    """Return the size that is advised for a pool of 2,000 tokens of at most 128 requests."""
    reader = LogReader(QUICK)
    for line in log.lines:
        ready = line.replace("max_total_num_tokens=450000", "max_total_num_tokens=2000")
        reader.take(ready.replace("available_gpu_mem=7.20", f"available_cpu_mem={free_gb}"))
    reader.facts.config = LLAMA if known else {}
    situation = Situation(
        reader.series,
        reader.series,
        reader.facts,
        ClientActivity(kind="server", ignore_eos=ignore_eos, outputs=600, output_tokens=600 * 60),
    )
    flags = of_arguments("0.5.23", reader.facts.arguments)
    found = {advice.rule: advice.args for advice in apply_all(situation, flags) if advice.change}
    return found.get("pool-small", {}).get("max-total-tokens")


def on_cpu() -> LogWriter:
    return LogWriter().started(device="cpu", most=128, max_total_tokens=2000)


@pytest.mark.parametrize(
    ("log", "given", "pool"),
    [
        (on_cpu().decode(30, r=32, u=0.95), {}, 8000),
        (on_cpu().decode(30, r=8, u=0.95), {}, 16_000),
        (on_cpu().decode(30, r=8, u=0.95), {"free_gb": 0.01}, 2000 + int(0.01 * 2**30 / 4 / 512)),
        (on_cpu().decode(30, r=8, u=0.95), {"known": False}, 4000),
        (on_cpu().prefill(9, n=1, new=24).decode(30, r=32, u=0.64), {"ignore_eos": True}, 8000),
    ],
    ids=[
        "for all places",
        "eight times at most",
        "for the memory",
        "of an unknown model",
        "reserved in full",
    ],
)
def test_a_small_pool_is_made_larger(log: LogWriter, given: dict[str, Any], pool: int) -> None:
    """By places that are empty, memory that is free, and at most eight times at once."""
    assert pool_named(log, **given) == pool


@pytest.mark.parametrize(
    ("log", "given"),
    [
        (on_cpu().decode(30, r=32, u=0.64), {}),
        (on_cpu().prefill(9, n=1, new=24).decode(30, r=8, u=0.26), {"ignore_eos": True}),
        (on_cpu().decode(30, r=32, u=0.95, q=0), {}),
        (on_cpu().decode(30, r=127, u=0.95), {}),
        (on_cpu().decode(30, r=32, u=0.95), {"free_gb": 0.0001}),
        (LogWriter().started(most=128, max_total_tokens=2000).decode(30, r=32, u=0.95), {}),
    ],
    ids=["not full", "not reserved", "nothing waits", "all places taken", "no memory", "a GPU"],
)
def test_others_are_left_alone(log: LogWriter, given: dict[str, Any]) -> None:
    """Where the pool is not the limit, or cannot grow."""
    assert pool_named(log, **given) is None
