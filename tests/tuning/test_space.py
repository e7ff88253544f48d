"""Which flags are tried, and when."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.job.load import load_job
from batchrunner.runner.tune import engine_to_tune
from batchrunner.sglang.device import Gpu
from batchrunner.sglang.flags import CLIP, Flags, arguments_in, command_line, numbers_in, variables_in
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.tuning.flags import FLAGS
from batchrunner.tuning.measurement import TrialResult, TrialSigns, TrialWatch
from batchrunner.tuning.space import Args, machine_for
from batchrunner.tuning.space import candidates as candidates_of
from tests.conftest import job_of
from tests.support.tuning_lab import CARD, CPU, ROWS, Lab, tuned

BUSY = {"running": 30, "max_running": 256, "queue": 100, "usage": 0.5}
PUT = "schedule-conservativeness"
OF_SERVER = {
    "mem_fraction": 0.83, "spare_gb": None, "backend": None, "chunk": 2048, "model": None, "quantised": "",
    "weights_gb": None, "memory_caps_running": False,
}  # fmt: skip


def trial_signs(empty_share: float = 0.0, **figures: Any) -> TrialSigns:
    """The signs of a trial whose readings are all alike, but for those with an empty queue."""
    load: dict[str, Any] = {name: figures.get(name, value) for name, value in BUSY.items()}
    watch = TrialWatch()
    watch.rows = load["running"]
    for at in range(101):
        reading = SchedulerLoad(
            scheduler="one",
            source="simulated",
            running=load["running"],
            queue=0 if at <= 100 * empty_share else load["queue"],
            token_usage=load["usage"],
            max_running=load["max_running"],
        )
        watch.record_load(float(at), [reading])
    signs = watch.result("measured", "", at_s=101.0, cost_s=101.0).signs
    return replace(signs, **(load | figures))


def candidates(name: str, args: Args, told: dict[str, Any], machine: dict[str, Any]) -> list[Args] | str:
    """Return the flags that are tried after a trial with these signs and facts, or why none is."""
    own = OF_SERVER | {key: value for key, value in told.items() if key in OF_SERVER}
    signs = trial_signs(**{key: value for key, value in told.items() if key not in OF_SERVER})
    arguments = {"attention_backend": own["backend"], "mem_fraction_static": own["mem_fraction"]}
    given = {key.replace("-", "_"): value for key, value in args.items() if value is not None}
    facts = Facts(
        arguments=arguments | given,
        ready=ServerReady(
            None, own["chunk"], signs.max_running, gpu_gb=own["spare_gb"],
            memory_caps_running=own["memory_caps_running"],
        ),
        model=own["model"], quantised=own["quantised"], weights_gb=own["weights_gb"],
    )  # fmt: skip
    result = TrialResult("measured", "", 1.0, 100.0, signs=signs, facts=facts)
    found = candidates_of(FLAGS[name], result, replace(CARD, **machine))
    return found if isinstance(found, str) else [change.args for change in found]


FULL = {"usage": 0.97}
TRIED: list[tuple[str, Args, dict[str, Any], list[Args]]] = [
    (PUT, {}, {}, [{PUT: 0.3}]),
    (PUT, {}, {"usage": 0.98, "retractions_per_min": 9.0}, [{PUT: 1.3}, {PUT: 1.43}]),
    (
        "mem-fraction-static", {}, {**FULL, "spare_gb": 13.5},
        [{"mem-fraction-static": 0.91}, {"mem-fraction-static": 0.84}],
    ),
    (
        "chunked-prefill-size", {}, {"prefill_per_pass": 1900.0, "spare_gb": 60.0},
        [{"chunked-prefill-size": 4096}, {"chunked-prefill-size": 16_384}],
    ),
    (
        "max-running-requests", {}, {"running": 1, "max_running": 1, "usage": 0},
        [{"max-running-requests": 32}, {"max-running-requests": 6}],
    ),
    (
        "cuda-graph-max-bs-decode", {}, {"running": 300, "graph_off_share": 0.6, "mem_fraction": 0.83},
        [{"cuda-graph-max-bs-decode": 512}, {"cuda-graph-max-bs-decode": 512, "mem-fraction-static": 0.82}],
    ),
    ("schedule-policy", {}, {"cached_share": 0.6, "queue": 60}, [{"schedule-policy": "lpm"}]),
    ("attention-backend", {}, {"backend": "fa3"}, [{"attention-backend": "flashinfer"}]),
    (CLIP, {}, {"longest_output": 340}, [{CLIP: 340}]),
    (
        "prefill-decode-interval", {},
        {"decodes_per_prefill": 1.5, "prefill_per_pass": 60.0, "output_tokens": 72.0},
        [{"prefill-decode-interval": 12}],
    ),
    ("speculative-algorithm", {}, {"repeated": 3.0},
     [{"speculative-algorithm": "NGRAM", "max-running-requests": 32,
       "speculative-ngram-external-sam-budget": 8}]),
    (
        "enable-hierarchical-cache", {}, {"cached_share": 0.5, "usage": 0.98},
        [{"enable-hierarchical-cache": True}],
    ),
    ("tokenizer-worker-num", {}, {"empty_share": 0.9}, [{"tokenizer-worker-num": 4}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "signs", "expected"), TRIED)
def test_each_flag_is_tried_when_it_can_matter(
    name: str, args: Args, signs: dict[str, Any], expected: list[Args]
) -> None:
    """The guides' rules: by the signs of the best trial a flag has values to try."""
    assert candidates(name, args, signs, {}) == expected


LEFT: list[tuple[str, Args, dict[str, Any], str]] = [
    (PUT, {}, {"usage": 0.95}, "its signs did not show: requests wait although"),
    ("mem-fraction-static", {}, {}, "the server does not report enough to choose one"),
    ("max-running-requests", {}, {"running": 250, "usage": 0.95}, "its signs did not show: as many requests"),
    ("max-running-requests", {}, {"running": 256, "memory_caps_running": True}, "no further value"),
    ("chunked-prefill-size", {}, {"prefill_per_pass": 300.0}, "did not show: prefill passes are as large"),
    ("cuda-graph-max-bs-decode", {}, {"graph_off_share": 0.02}, "did not show: decode passes run without"),
    ("speculative-algorithm", {}, {"repeated": 1.1}, "no further value"),
    ("speculative-algorithm", {}, {"repeated": 3.0, "running": 100}, "no further value"),
    ("quantization", {}, {}, "changes answers, so the flag is tried only with --allow fp8"),
    ("tp-size", {}, {}, "no further value"),
    ("enable-hierarchical-cache", {}, {"cached_share": 0.5}, "did not show: prompts share prefixes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "signs", "reason"), LEFT)
def test_what_is_left_alone_has_its_reason(name: str, args: Args, signs: dict[str, Any], reason: str) -> None:
    """Where nothing is left to try, or the server reports too little, the table has a true word on it."""
    found = candidates(name, args, signs, {})
    assert isinstance(found, str)
    assert reason in found


TWO: Args = {"tp-size": 2}
MIXTURE, LATENT = {"num_experts": 64}, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
ON_CARDS: list[tuple[str, Args, dict[str, Any], dict[str, Any], list[Args] | str]] = [
    (
        "attention-backend", {}, {"model": "DeepseekV3ForCausalLM"}, {"card": "NVIDIA B200"},
        [{"attention-backend": "trtllm_mla"}, {"attention-backend": "flashinfer"}],
    ),
    (
        "attention-backend", {}, {"model": "GptOssForCausalLM"}, {"card": "NVIDIA B200"},
        "no further value",
    ),
    # a card of 24 GB turns the guides' 5, 6.5 and 10 GB into 3, 3.9 and 6, as advice does
    ("mem-fraction-static", {}, {**FULL, "spare_gb": 4.5}, {"card_gb": 24}, [{"mem-fraction-static": 0.84}]),
    ("tp-size", TWO, {}, {"cards": 8}, [{"tp-size": 1}, {"tp-size": 4}]),
    (
        "tp-size", {}, {}, {"cards": 2, "config": MIXTURE},
        [{"tp-size": 2, "ep-size": 2}, {"tp-size": 2, "ep-size": 1}],
    ),
    ("quantization", {}, {}, {"allow_fp8": True}, [{"quantization": "fp8"}]),
    ("quantization", {}, {}, {"allow_fp8": True, "card": "NVIDIA A100"}, "it needs FP8"),
    ("kv-cache-dtype", {}, {}, {"allow_fp8": True}, [{"kv-cache-dtype": "fp8_e4m3"}]),
    ("ep-size", TWO, {}, {"config": MIXTURE}, [{"ep-size": 2}]),
    ("attn-dp-size", TWO, {}, {"config": LATENT}, [{"attn-dp-size": 2}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "signs", "machine", "expected"), ON_CARDS)
def test_the_machine_and_the_model_decide(
    name: str, args: Args, signs: dict[str, Any], machine: dict[str, Any], expected: list[Args] | str
) -> None:
    """Backends, memory and parallelism are those of the card and the model."""
    found = candidates(name, args, signs, machine)
    if isinstance(found, str):
        assert isinstance(expected, str)
        assert expected in found
    else:
        assert found == expected


def test_a_flag_that_the_version_lacks_is_not_tried() -> None:
    """The search asks for nothing that the installed version would refuse, and the table says so."""
    lacking = replace(CPU, flags=Flags("0.4.0", frozenset({"max-running-requests"})))
    found, search = tuned(Lab(ROWS), {"max-running-requests": 256}, machine=lacking)
    assert found.args == {}
    assert search.notes[PUT] == "this version has no --schedule-conservativeness 0.3"


def test_on_a_cpu_flags_of_gpus_are_left_alone() -> None:
    """Each has a word of its own, whatever the signs."""
    names = (
        "cuda-graph-max-bs-decode", "enable-hierarchical-cache", "tokenizer-worker-num", "attn-dp-size",
    )  # fmt: skip
    assert {candidates(name, {}, {}, {"cpu": True}) for name in names} == {"it needs a GPU"}


def test_arguments_and_variables_go_their_own_ways() -> None:
    """What the server reads from its environment is told by its name, and printed as a shell takes it."""
    args = {"max-running-requests": 8, CLIP: 256, "enable-metrics": True}
    assert arguments_in(args) == {"max-running-requests": 8, "enable-metrics": True}
    assert variables_in(args) == {CLIP: "256"}
    assert command_line(args) == f"{CLIP}=256 --max-running-requests 8 --enable-metrics"
    assert numbers_in({CLIP: "256", "HF_HUB_OFFLINE": "1"}) == {CLIP: 256}
    assert numbers_in({CLIP: "many"}) == {}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"tp": 2}, (4, 1, True)),
        ({"replicas": "auto", "tp": 2}, (4, 2, True)),
        (
            {"replicas": "auto", "args": {"tp-size": 2}, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}},
            (2, 1, False),
        ),
        ({"replicas": "auto", "device": "cpu"}, (1, 1, False)),
    ],
)
def test_the_gpus_that_a_job_may_take(
    engine: dict[str, Any], expected: tuple[int, int, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are visible, unless it says how many replicas it has."""
    visible = engine.get("env", {}).get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    for name, answer in {
        "on_cpu": lambda device: device == "cpu",
        "cards": lambda: [Gpu("NVIDIA H100", 80 << 30)] * 4,
        "gpus": lambda _: visible,
        "installed": lambda *_: Flags(),
    }.items():
        monkeypatch.setattr(f"batchrunner.tuning.space.{name}", answer)
    job = load_job(job_of(tmp_path, {"kind": "server", "model": "org/name", **engine}))
    machine = machine_for(job, engine_to_tune(job))
    assert (machine.cards, machine.replicas, machine.says_tp) == expected
