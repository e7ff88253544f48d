"""Which flags are tried, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.engines.flags import Flags
from batchrunner.tune.measurement import TrialResult, TrialSigns
from batchrunner.tune.search import Search
from batchrunner.tune.space import TUNED_FLAGS, FlagChange, TuningState
from tests.support.tuned import CARD, ROWS, tuned
from tests.support.tuning_lab import CPU, Lab

if TYPE_CHECKING:
    from batchrunner.tune.space import Args
from batchrunner.tune.space import CLIP, LEVERS, arguments_in, as_typed, numbers_in, variables_in

BUSY = TrialSigns(running=30, max_running=256, queue=100, empty_share=0, usage=0.5, prefill_limit=2048)
PUT = "schedule-conservativeness"


@pytest.mark.parametrize(
    ("tuned_flag", "signs", "expected"),
    [
        (PUT, {}, [{PUT: 0.3}]),
        (PUT, {"usage": 0.95}, "the pool is full"),
        (PUT, {"empty_share": 0.9}, "no request waits"),
        (PUT, {"running": 250}, "at max-running-requests 256"),
        (PUT, {"usage": 0.98, "retractions_per_min": 9.0}, [{PUT: 1.3}, {PUT: 1.43}]),
        (PUT, {"usage": 0.98, "retractions_per_min": 0.5}, "the pool is full"),
        ("memory", {"running": 250}, "at max-running-requests"),
        ("memory", {}, "the log lacks mem_fraction_static"),
        (
            "memory",
            {"usage": 0.97, "spare_gb": 13.5, "mem_fraction": 0.83},
            [{"mem-fraction-static": 0.91}, {"mem-fraction-static": 0.84}],
        ),
        ("memory", {"usage": 0.97, "spare_gb": 6.0, "mem_fraction": 0.83}, [{"mem-fraction-static": 0.84}]),
        ("memory", {"usage": 0.97, "spare_gb": 4.6, "mem_fraction": 0.83}, [{"mem-fraction-static": 0.84}]),
        ("memory", {"usage": 0.97, "spare_gb": 1.7, "mem_fraction": 0.83}, "no more can be taken"),
        ("memory", {"usage": 0.97, "spare_gb": 9.9, "mem_fraction": 0.83}, [{"mem-fraction-static": 0.84}]),
        ("chunked-prefill-size", {"prefill_per_pass": 1900.0}, [{"chunked-prefill-size": 4096}]),
        ("chunked-prefill-size", {"prefill_per_pass": 300.0}, "does not bind"),
        (
            "max-running-requests",
            {"running": 250, "usage": 0.3},
            [{"max-running-requests": 1024}, {"max-running-requests": 512}],
        ),
        ("max-running-requests", {"running": 250, "usage": 0.95}, "the pool holds no more"),
        ("max-running-requests", {}, "stays under 256"),
        (
            "cuda-graph-max-bs",
            {"running": 300, "graph_off_share": 0.6, "mem_fraction": 0.83},
            [
                {"cuda-graph-max-bs-decode": 512},
                {"cuda-graph-max-bs-decode": 512, "mem-fraction-static": 0.81},
            ],
        ),
        ("cuda-graph-max-bs", {"graph_off_share": 0.02}, "2% of the decode passes"),
        ("schedule-policy", {}, "0% of the prompt tokens are shared"),
        ("schedule-policy", {"cached_share": 0.6, "queue": 60}, [{"schedule-policy": "lpm"}]),
        ("schedule-policy", {"cached_share": 0.6, "queue": 300}, "above 128 lpm works like fcfs"),
        ("schedule-policy", {"cached_share": 0.09, "queue": 60}, "9% of the prompt tokens"),
        ("attention-backend", {"attention_backend": "fa3"}, [{"attention-backend": "flashinfer"}]),
        ("torch-compile", {}, "--allow torch-compile"),
        ("quantization", {}, "--allow quantization"),
        ("parallelism", {}, "one device"),
    ],
)
def test_each_flag_is_tried_when_it_can_matter(
    tuned_flag: str, signs: dict[str, Any], expected: list[dict[str, Any]] | str
) -> None:
    """The guides' rules: by the signs of the best trial a flag has values to try, or a reason to be left."""
    (candidates_of,) = (k.candidates for k in TUNED_FLAGS if k.name == tuned_flag)
    candidates = candidates_of(TuningState({}, replace(BUSY, **signs), CARD))
    if isinstance(expected, str):
        assert isinstance(candidates, str)
        assert expected in candidates
    else:
        assert not isinstance(candidates, str), candidates
        assert [change.args for change in candidates] == expected


@pytest.mark.parametrize(
    ("card", "model", "expected"),
    [
        ("NVIDIA B200", "LlamaForCausalLM", ["trtllm_mha", "flashinfer"]),
        ("NVIDIA B200", "DeepseekV3ForCausalLM", ["trtllm_mla", "flashinfer"]),
        ("NVIDIA L4", None, ["flashinfer", "triton"]),
        ("NVIDIA L4", "DeepseekV3ForCausalLM", "SGLang chooses the backend for DeepseekV3ForCausalLM"),
        ("NVIDIA B200", "GptOssForCausalLM", "SGLang chooses the backend for GptOssForCausalLM"),
        ("NVIDIA Q1", None, "no choice"),
    ],
)
def test_the_backend_is_that_of_card_and_model(
    card: str, model: str | None, expected: list[str] | str
) -> None:
    """What is tried is what advice would say, and the first general one beside it."""
    (candidates_of,) = (k.candidates for k in TUNED_FLAGS if k.name == "attention-backend")
    candidates = candidates_of(TuningState({}, replace(BUSY, model=model), replace(CARD, card=card)))
    if isinstance(expected, str):
        assert isinstance(candidates, str)
        assert expected in candidates
    else:
        assert [
            change.args["attention-backend"] for change in candidates if isinstance(change, FlagChange)
        ] == expected


@pytest.mark.parametrize(("spare_gb", "fraction"), [(1.2, None), (2.9, 0.81), (4.5, 0.81), (6.5, 0.9)])
def test_a_small_card_has_smaller_figures(spare_gb: float, fraction: float | None) -> None:
    """A card of 24 GB turns the guides' 5, 6.5 and 10 GB into 3, 3.9 and 6, as advice does."""
    (candidates_of,) = (k.candidates for k in TUNED_FLAGS if k.name == "memory")
    signs = replace(BUSY, usage=0.97, spare_gb=spare_gb, mem_fraction=0.8)
    candidates = candidates_of(TuningState({}, signs, replace(CARD, card="NVIDIA L4", card_gb=24)))
    found = None if isinstance(candidates, str) else candidates[0].args["mem-fraction-static"]
    assert found == fraction


@pytest.mark.parametrize(
    ("tuned_flag", "args", "signs", "machine", "note"),
    [
        (PUT, {PUT: 1.43}, {"usage": 0.98, "retractions_per_min": 9.0}, {}, "1.43 reserves all"),
        ("memory", {}, {"pool_tokens": 20_000}, {"cpu": True}, "is not known"),
        ("memory", {}, {}, {"cpu": True, "most_pool_tokens": 9000}, "is not known"),
        ("memory", {"mem-fraction-static": 0.995}, {"spare_gb": 6.0}, {}, "the whole card"),
        ("max-running-requests", {}, {"running": 250, "empty_share": 0.9}, {}, "no request waits"),
        ("chunked-prefill-size", {}, {}, {}, "the log lacks prefill passes"),
        ("chunked-prefill-size", {}, {"prefill_limit": 32_768, "prefill_per_pass": 3e4}, {}, "than 16384"),
        ("chunked-prefill-size", {}, {"prefill_limit": -1, "prefill_per_pass": 300.0}, {}, "is off"),
        ("max-running-requests", {}, {"running": 7.0, "max_running": 8, "usage": 0.89}, {}, "holds 8"),
    ],
)
def test_what_is_left_alone_has_its_reason(
    tuned_flag: str, args: Args, signs: dict[str, Any], machine: dict[str, Any], note: str
) -> None:
    """Where nothing is left to try, or too little is known, the table has a true word on it."""
    (candidates_of,) = (k.candidates for k in TUNED_FLAGS if k.name == tuned_flag)
    candidates = candidates_of(TuningState(args, replace(BUSY, **signs), replace(CARD, **machine)))
    assert isinstance(candidates, str)
    assert note in candidates


def test_flags_that_are_null_and_a_server_that_runs_one() -> None:
    """A flag that the job takes back with null is at its default; a mean of no running row is no failure."""
    by_name = {tuned_flag.name: tuned_flag.candidates for tuned_flag in TUNED_FLAGS}
    bolder = by_name[PUT](TuningState({PUT: None}, BUSY, CARD))
    more = by_name["max-running-requests"](
        TuningState({}, replace(BUSY, running=0, max_running=1, usage=0), CARD)
    )
    assert isinstance(bolder, list)
    assert isinstance(more, list)
    assert [change.args for change in bolder] == [{PUT: 0.3}]
    assert [change.args["max-running-requests"] for change in more] == [32, 6]


def test_what_needs_leave_is_tried_with_it() -> None:
    """Quantization and torch.compile are tried when allowed, FP8 only on a card that has it."""
    allowed = replace(CARD, allowed=frozenset({"quantization", "torch-compile"}))
    by_name = {tuned_flag.name: tuned_flag.candidates for tuned_flag in TUNED_FLAGS}
    quantized = by_name["quantization"](TuningState({}, BUSY, allowed))
    assert [change.args for change in quantized if not isinstance(change, str)] == [
        {"kv-cache-dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
    ]
    assert not isinstance(by_name["torch-compile"](TuningState({}, BUSY, allowed)), str)
    old = replace(allowed, card="NVIDIA A100-SXM4-80GB")
    assert "no FP8" in by_name["quantization"](TuningState({}, BUSY, old))


@pytest.mark.parametrize("name", ["tp-size", "tensor-parallel-size", "tp"])
def test_replicas_are_the_gateways(name: str) -> None:
    """On several cards no --dp-size is tried: the table says which gateway to take, by any name of tp."""
    (candidates_of,) = (k.candidates for k in TUNED_FLAGS if k.name == "parallelism")
    four = replace(CARD, cards=4)
    assert candidates_of(TuningState({}, BUSY, four)) == (
        "engine: {kind: gateway, tp: 1} has 4 replicas on 4 GPUs, each about as fast"
    )
    assert "{kind: gateway, tp: 2} has 2 replicas on 4 GPUs" in candidates_of(
        TuningState({name: 2}, BUSY, four)
    )
    assert "with a tp under 4 is faster" in candidates_of(TuningState({name: 4}, BUSY, four))
    assert candidates_of(TuningState({}, BUSY, replace(four, one_of_several=True))) == "one replica"


def test_what_a_machine_with_two_gpus_would_do() -> None:
    """One replica a GPU behind a gateway; a model that is split over both is told to try one GPU each."""
    (candidates_of,) = (k.candidates for k in TUNED_FLAGS if k.name == "parallelism")
    two = replace(CARD, cards=2)
    assert candidates_of(TuningState({}, BUSY, two)) == (
        "engine: {kind: gateway, tp: 1} has 2 replicas on 2 GPUs, each about as fast"
    )
    assert candidates_of(TuningState({"tp-size": 2}, BUSY, two)) == (
        "engine: {kind: gateway} with a tp under 2 is faster, where the weights fit fewer GPUs"
    )


def test_flags_go_by_the_names_that_are_there() -> None:
    """A flag is set under the name that the job has for it, else under that of the installed version."""
    card = replace(CARD, flags=Flags("0.5.2", frozenset({"cuda-graph-max-bs", "attention-backend"})))
    signs = replace(BUSY, graph_off_share=0.9)
    for own, name in (
        ({}, "cuda-graph-max-bs"),
        ({"cuda-graph-max-bs-decode": 8}, "cuda-graph-max-bs-decode"),
    ):
        (graphs,) = (tuned_flag for tuned_flag in TUNED_FLAGS if tuned_flag.name == "cuda-graph-max-bs")
        steps = Search(own, card, [graphs]).steps()
        next(steps)
        assert steps.send(TrialResult("measured", "", 1.0, 100.0, signs=signs)).args == {name: 256}


def test_a_flag_that_the_version_lacks_is_not_tried() -> None:
    """The search asks for nothing that the installed version would refuse, and the table says so."""
    lacking = replace(CPU, flags=Flags("0.4.0", frozenset({"max-running-requests"})))
    found, search = tuned(Lab(ROWS), {"max-running-requests": 256}, machine=lacking)
    assert found.args == {}
    assert search.notes[PUT] == "this version has no --schedule-conservativeness 0.3"


BUSY_CARD = TrialSigns(running=30, max_running=256, queue=100, empty_share=0, usage=0.5)
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
    found = candidates_of(TuningState(args, replace(BUSY_CARD, **signs), replace(CARD, config=config)))
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert expected in found
    else:
        assert [change.args for change in found if not isinstance(change, str)] == expected


def test_none_needs_a_gpu_to_be_left_alone() -> None:
    """On a CPU each has a word of its own, whatever the signs."""
    cpu = replace(CARD, cpu=True)
    assert all(isinstance(lever.candidates(TuningState({}, BUSY_CARD, cpu)), str) for lever in LEVERS)


def test_arguments_and_variables_go_their_own_ways() -> None:
    """What the server reads from its environment is told by its name, and printed as a shell takes it."""
    args = {"max-running-requests": 8, CLIP: 256, "enable-metrics": True}
    assert arguments_in(args) == {"max-running-requests": 8, "enable-metrics": True}
    assert variables_in(args) == {CLIP: "256"}
    assert as_typed(args) == f"{CLIP}=256 --max-running-requests 8 --enable-metrics"
    assert as_typed({}) == ""
    assert numbers_in({CLIP: "256", "HF_HUB_OFFLINE": "1"}) == {CLIP: 256}
    assert numbers_in({CLIP: "many"}) == {}
