"""What is changed after a death, by the guides."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.engines.flags import Flags, of_arguments
from batchrunner.engines.logs.facts import Facts
from batchrunner.engines.logs.lines import Phase, ServerReady
from batchrunner.engines.recovery.diagnosis import Death, Kind
from batchrunner.engines.recovery.safer_args import in_effect, safer

GPU = {
    "chunked_prefill_size": 8192, "max_running_requests": 4096, "mem_fraction_static": 0.83,
    "cuda_graph_max_bs": 256, "context_length": 4096,
}  # fmt: skip
CPU = {
    "device": "cpu", "chunked_prefill_size": 4096, "max_running_requests": 32, "max_total_tokens": 20_000,
    "context_length": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "now", "steps"),
    [
        ("prefill", GPU, [{"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048},
                          {"mem-fraction-static": 0.8}, {"mem-fraction-static": 0.7},
                          {"mem-fraction-static": 0.6}, {}]),
        ("prefill", {"chunked_prefill_size": -1}, [{"chunked-prefill-size": 4096}]),  # switched off
        ("decode", {"max_running_requests": 4096}, [{"max-running-requests": 225}]),  # 300 ran
        ("decode", {"max_running_requests": 6}, [{"max-running-requests": 4}, {"mem-fraction-static": 0.8}]),
        ("requests", {"max_running_requests": 100}, [{"max-running-requests": 75}]),
        ("graph", GPU, [{"cuda-graph-max-bs-decode": 128, "mem-fraction-static": 0.8},
                        {"cuda-graph-max-bs-decode": 64, "mem-fraction-static": 0.7},
                        {"cuda-graph-max-bs-decode": 32, "mem-fraction-static": 0.6},
                        {"cuda-graph-max-bs-decode": 16},
                        {"cuda-graph-backend-decode": "disabled"}, {}]),
        ("graph", GPU | {"cuda_graph_max_bs": 8}, [{"mem-fraction-static": 0.8}]),  # never larger graphs
        ("prefill-graph", GPU | {"mem_fraction_static": 0.7},
         [{"mem-fraction-static": 0.6}, {"cuda-graph-backend-prefill": "disabled"}, {}]),
        ("graph", {}, [{"cuda-graph-max-bs-decode": 64, "mem-fraction-static": 0.8}]),
        ("general", GPU | {"mem_fraction_static": 0.7},
         [{"mem-fraction-static": 0.6}, {"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048},
          {"max-running-requests": 225}]),
        ("pool", GPU, [{"mem-fraction-static": 0.88}, {"mem-fraction-static": 0.93}, {}]),
        ("killed", CPU, [{"max-total-tokens": 10_000}, {"max-total-tokens": 5_000},
                         {"max-running-requests": 24}]),
        ("killed", GPU, [{}]),  # the machine's memory, not the card's
        ("load", GPU, [{}]),
        ("crash", GPU, [{}]),
    ],
)  # fmt: skip
def test_the_guides_order_of_steps(
    kind: Phase | Kind, now: dict[str, Any], steps: list[dict[str, Any]]
) -> None:
    """Each death is followed by the next safer step, until there is none."""
    arguments = dict(now)
    for step in steps:
        facts = Facts(arguments=arguments)
        assert safer(Death(kind, "", running=300), facts, Flags()) == step
        arguments |= {name.replace("-", "_"): value for name, value in step.items()}


def test_what_the_server_chose_counts() -> None:
    """The limits that it says at ready come before what it was asked for, or not asked."""
    ready = ServerReady(20_000, 4096, 200, 4096, None)
    facts = Facts(arguments={"device": "cpu", "max_total_tokens": None}, ready=ready)
    assert safer(Death("prefill", ""), facts, Flags()) == {"chunked-prefill-size": 2048}
    assert safer(Death("requests", ""), facts, Flags()) == {"max-running-requests": 150}
    assert safer(Death("killed", ""), facts, Flags()) == {"max-total-tokens": 10_000}


def test_weights_keep_their_place() -> None:
    """The pool is not made smaller than the weights allow: then graphs are left away, or fewer run."""
    facts = Facts(arguments=GPU | {"cuda_graph_max_bs": 8}, card_gb=15, weights_gb=12)
    old = of_arguments(None, ["cuda_graph_max_bs", "disable_cuda_graph", "mem_fraction_static"])
    assert safer(Death("graph", ""), facts, Flags()) == {"cuda-graph-backend-decode": "disabled"}
    assert safer(Death("graph", ""), facts, old) == {"disable-cuda-graph": True}
    assert safer(Death("general", ""), facts, Flags()) == {"chunked-prefill-size": 4096}


def test_dp_attention_parts_the_limits() -> None:
    """Each rank says its own share of the limits: a flag is for all of them."""
    ready = ServerReady(20_000, 1024, 64, 4096, None)
    for ways in ({"attn_dp_size": 8}, {"enable_dp_attention": True, "dp_size": 8}):
        facts = Facts(arguments={"schedule_conservativeness": 0.39, **ways}, ready=ready)
        assert safer(Death("prefill", ""), facts, Flags()) == {"chunked-prefill-size": 4096}
        assert safer(Death("decode", "", running=60), facts, Flags()) == {"max-running-requests": 360}
        assert in_effect(facts, "schedule-conservativeness") == 1.3


def test_what_sglang_says_is_the_least_is_heeded() -> None:
    """A pool that does not fit gets more than the share that the message asks for, if there is so much."""
    least = "Raise --mem-fraction-static above {} (minimum viable = 1 - available/pre)"
    facts = Facts(arguments={"mem_fraction_static": 0.7})
    assert safer(Death("pool", least.format(0.873)), facts, Flags()) == {"mem-fraction-static": 0.923}
    assert safer(Death("pool", least.format(0.98)), facts, Flags()) == {}


def test_a_flag_is_changed_as_the_version_spells_it() -> None:
    """The log of a server names its arguments: the graph's batch is called as there, or left alone."""
    old, new = (of_arguments(None, ["mem_fraction_static", name]) for name in ("cuda_graph_max_bs", "x"))
    facts = Facts(arguments=GPU)
    graph = Death("graph", "")
    assert safer(graph, facts, old) == {"cuda-graph-max-bs": 128, "mem-fraction-static": 0.8}
    assert safer(graph, facts, new) == {"mem-fraction-static": 0.8}
    for name, off in (("enable_piecewise_cuda_graph", None), ("disable_piecewise_cuda_graph", True)):
        piecewise = of_arguments(None, [name])
        assert safer(Death("prefill-graph", ""), facts, piecewise) == {name.replace("_", "-"): off}
