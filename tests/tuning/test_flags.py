"""The table of flags: the next value that a sign calls for, on a server that has what the flag needs."""

from typing import Any

import pytest

from batchrunner.sglang.flags import Flags, StatePool
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.tuning.flags import (
    DECODING_SIGNS,
    FLAGS,
    STATE_STRATEGY,
    Server,
    next_setting,
    with_companions,
    with_memory,
)
from batchrunner.tuning.signals import FLAG_SIGNS


def server(device: str = "cuda", spare_gb: float = 13.5, **arguments: Any) -> Server:
    """Return a server on an H100, or on a CPU, on which 64 of at most 64 requests run."""
    ready = ServerReady(20_000, 8192, 64, 4096, spare_gb if device == "cuda" else None)
    facts = Facts(
        arguments={"device": device, "mem_fraction_static": 0.83, **arguments}, ready=ready, card="H100",
        card_gb=80.0, weights_gb=16.0, quantised="", idle_gpus=2,
    )  # fmt: skip
    return Server(
        facts, 64, 0.3, output_tokens=200, longest_output=340, most_pool_tokens=60_000, repeated=2.0
    )


def test_a_server_must_have_what_a_flag_needs() -> None:
    """A GPU's flags do not fit a CPU, nor signs of decoding a task without it."""
    on_cpu = server("cpu", max_total_tokens=20_000)
    assert next_setting("full", "max-total-tokens", on_cpu, Flags()) == {"max-total-tokens": 40_000}
    assert next_setting("full", "max-total-tokens", server(), Flags()) == {}
    for flag in FLAGS.values():
        for sign in flag.moves:
            assert sign in FLAG_SIGNS
            assert flag.fits(sign, on_cpu) == (flag.needs in {None, "a CPU"})
            embedding = Server(server().facts, decodes=False)
            assert flag.fits(sign, embedding) == (flag.needs != "a CPU" and sign not in DECODING_SIGNS)


@pytest.mark.parametrize(
    ("tp", "idle", "weights_gb", "heads", "sizes"),
    [
        (1, 7, 16.0, 32, [2]),
        (2, 6, 16.0, 32, [1, 4]),
        (8, 0, 16.0, 32, [4]),
        (2, 0, 39.0, 32, []),
        (1, 0, 16.0, 32, []),
        (2, 6, 16.0, 14, [1]),
    ],
)
def test_gpus_are_shared_out_in_other_ways(
    tp: int, idle: int, weights_gb: float, heads: int, sizes: list[int]
) -> None:
    """Half or twice as many for a replica, where weights fit, heads divide, and the GPUs are there."""
    found = server(tp_size=tp)
    found.facts.idle_gpus, found.facts.weights_gb = idle, weights_gb
    found.facts.config = {"num_attention_heads": heads}
    assert list(FLAGS["tp-size"].values("layout", found)) == sizes


def test_memory_that_a_step_takes_comes_from_the_pool() -> None:
    """Only where it is not free, and only as far as weights and a pool allow."""
    chunk = "chunked-prefill-size"
    found = {gb: with_memory("chunk-full", chunk, server(spare_gb=gb), Flags()) for gb in (30.0, 6.0)}
    assert found == {30.0: {chunk: 16_384}, 6.0: {chunk: 16_384, "mem-fraction-static": 0.69}}
    full = server(spare_gb=6.0)
    full.facts.weights_gb = 60.0
    assert with_memory("chunk-full", chunk, full, Flags()) == {}


def test_companions_change_only_with_their_flag() -> None:
    """If the installed SGLang lacks a strategy for the state pool, the pool is not sized for it either."""
    hybrid = server(mamba_radix_cache_strategy="extra_buffer")
    hybrid.facts.states = StatePool(slots=490, per_request=5, gb=24.0, kv_gb=26.7)
    args = with_companions("states", STATE_STRATEGY, hybrid, Flags())
    assert args.keys() == {STATE_STRATEGY, "mamba-full-memory-ratio"}
    names = frozenset({STATE_STRATEGY, "mamba-full-memory-ratio"})
    earlier = Flags("0.5.9", names, choices={STATE_STRATEGY: frozenset({"no_buffer", "extra_buffer"})})
    assert with_companions("states", STATE_STRATEGY, hybrid, earlier) == {}
