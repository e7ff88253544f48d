"""Memory of cards and machines, what a model takes of it, and the number of cards that `auto` is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchrunner.core.timing import TIMING
from batchrunner.engines.device import Gpu, gpus, oom_kills
from batchrunner.engines.model_files import with_tp
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import load_job, parse_engine
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import batchrun, job_of, write_job
from tests.support.launchable import hungry
from tests.support.sglang_logs import LogWriter, changes, judged

GIB = 2**30
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
H100, L4 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20), Gpu("NVIDIA L4", 23034 << 20)
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restarts without the pauses that are for real engines; nothing learned from another test."""
    monkeypatch.setattr(TIMING, "first_restart", 0.01)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_weights(directory: Path, total_bytes: float, **config: Any) -> dict[str, Any]:
    """Return an engine whose model says that it has so many bytes of weights."""
    engine = hungry(directory, "pass")
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {}}
    (directory / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model" / "config.json").write_text(
        json.dumps({**LLAMA_8B, "torch_dtype": "bfloat16", **config})
    )
    return engine


def give_cards(directory: Path, monkeypatch: pytest.MonkeyPatch, card: Gpu, count: int = 1) -> None:
    """Put an `nvidia-smi` first on the path that tells of some cards."""
    tool = directory / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    lines = "\n".join(f"{card.name}, {card.memory_bytes >> 20}" for _ in range(count))
    tool.write_text(f"#!/bin/sh\necho '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))


@pytest.mark.parametrize(
    ("args", "config", "fits"),
    [
        ({}, {}, False),
        ({"quantization": "fp8"}, {}, True),
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, False),  # it is already
        ({"dtype": "float32", "tp-size": 2}, {}, False),
        ({}, {"torch_dtype": "float32"}, True),  # SGLang loads it in 16 bits
        ({"quantization": "bitsandbytes"}, {}, True),  # nobody knows: the server is asked
    ],
)
def test_weights_that_do_not_fit_are_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: dict[str, Any],
    config: dict[str, Any],
    *,
    fits: bool,
) -> None:
    """Before the first launch, with the arithmetic and what would help; what is not certain is launched."""
    give_cards(tmp_path, monkeypatch, H100)
    engine = {**with_weights(tmp_path, 141.1e9, **config), "args": args}
    result = batchrun(write_job(job_of(tmp_path, engine, rows=5), tmp_path))
    assert (result.exit_code == 0) == fits, result.stderr
    if not fits:
        assert result.exit_code == 2
        assert not (tmp_path / "starts").exists()
        assert "its weights do not fit: " in result.stderr
        assert "of NVIDIA H100 80GB HBM3, which has 79.6 GiB: a larger tp-size" in result.stderr


@pytest.mark.parametrize(
    ("gib", "config", "args", "card", "tp"),
    [
        (15, {}, {}, H100, 1),
        (15, {}, {}, L4, 2),  # 14 of the 18.7 GiB are for weights
        (131, LLAMA_70B, {}, H100, 4),
        (131, LLAMA_70B, {"pp-size": 2}, H100, 2),
        (131, LLAMA_70B, {"quantization": "fp8"}, H100, 2),
        (15, {"num_attention_heads": 7}, {}, H100, 1),
        (688, {"num_attention_heads": 128}, {}, H100, 16),
    ],
)  # fmt: skip
def test_the_fewest_that_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    gib: float, config: dict[str, Any], args: dict[str, Any], card: Gpu, tp: int,
) -> None:  # fmt: skip
    """Weights are divided; what each card gets leaves a quarter of SGLang's share of it for the KV pool."""
    give_cards(tmp_path, monkeypatch, card, 16)
    engine = {**with_weights(tmp_path, gib * GIB, **config), "tp": "auto", "args": args}
    spec = parse_engine(engine)
    assert isinstance(spec, ServerEngine)
    assert with_tp(spec).args.get("tp-size") == tp


def test_the_server_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts its server with the number, logs why, and leaves it in the report."""
    give_cards(tmp_path, monkeypatch, L4, 4)
    job = job_of(tmp_path, {**with_weights(tmp_path, 16.1e9), "tp": "auto"}, rows=5)
    ran = batchrun(write_job(job, tmp_path), "--json")
    assert ran.exit_code == 0, ran.stderr
    started = json.loads((tmp_path / "starts").read_text())
    assert started[started.index("--tp-size") + 1] == "2"
    assert "engine.tp auto: 2: weights of 15.0 GiB (model.safetensors.index.json) and a KV pool" in ran.stderr
    assert json.loads(ran.stdout)["engine"]["tp"] == 2
    tuned = engine_to_tune(load_job(job))
    assert (tuned.tp, tuned.args["tp-size"]) == (None, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_cannot_be_decided_is_one_line(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few cards, a model that is not here, no card: exit code 2, and no server is started."""
    engine = {**with_weights(tmp_path, 80e9), "replicas": replicas, "tp": "auto", "device": "cuda"}
    file = write_job(job_of(tmp_path, engine, rows=5), tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    none = batchrun(file)
    give_cards(tmp_path, monkeypatch, L4, 2)
    few = batchrun(file)
    unknown = batchrun(file, "--set", "engine.model=org/none")
    assert [result.exit_code for result in (none, few, unknown)] == [2, 2, 2]
    assert "engine.tp auto: nvidia-smi tells of no GPU here: give a number" in none.stderr
    assert (
        f"need 8 cards like NVIDIA L4 (22.5 GiB), and a replica can have {2 // replicas}: take" in few.stderr
    )
    assert "how much memory the weights of org/none take is not known here: give" in unknown.stderr
    assert not (tmp_path / "starts").exists()


def test_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, seen in [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("0,-1,1", ["0"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus() == seen


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
TASK = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"


@pytest.mark.parametrize(
    ("own_group", "files", "kills"),
    [
        ("", {}, 7),
        ("0::/\n", {f"{V2}/memory.events": "oom_kill 2\n"}, 2),  # v2, a container sees its own as the root
        (f"0::/{TASK}\n",  # v2, Slurm counts a task's kills
         {f"{V2}/{TASK}/memory.events": "oom 1\noom_kill 1\n",
          f"{V2}/system.slice/slurmstepd.scope/job_7/memory.events": "oom 3\noom_kill 5\n"}, 1),
        ("9:name=systemd:/\n4:memory:/slurm/job_7/task_0\n0::/\n",
         {f"{V1}/slurm/job_7/task_0/memory.oom_control": "under_oom 0\noom_kill 4\n"}, 4),
        ("4:memory:/docker/0123abcd\n0::/../../job\n",  # v1, a container whose path is the host's
         {f"{V1}/memory.oom_control": "oom_kill 1\n"}, 1),
        ("0::/\n", {f"{V2}/memory.max": "max\n"}, 7),
    ],
)  # fmt: skip
def test_kills_within_cgroups(tmp_path: Path, own_group: str, files: dict[str, str], kills: int) -> None:
    """The innermost cgroup's count, else the machine's."""
    for name, text in {"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": own_group, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == kills


def a_model(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


KINDS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "Llama-4-Scout": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1},
            "vision_config": {"hidden_size": 1408},
        },
        True, False,
    ),
    "DeepSeek-V3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256, "kv_lora_rank": 512},
        True, True,
    ),
    "GLM-5": (
        {
            "architectures": ["GlmMoeDsaForCausalLM"], "n_routed_experts": 256, "kv_lora_rank": 512,
            "index_topk": 2048, "index_n_heads": 32,
        },
        True, True,
    ),
    "DeepSeek-VL2-tiny, without MLA": (
        {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "language_config": {"n_routed_experts": 64, "kv_lora_rank": None, "use_mla": False},
        },
        True, False,
    ),
    "dbrx": ({"architectures": ["DbrxForCausalLM"], "ffn_config": {"moe_num_experts": 16}}, True, False),
    "Qwen3-8B": ({"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32}, False, False),
}  # fmt: skip
"""What a model's config.json says, whether it has experts, and whether its KV cache is compressed (MLA)."""


@pytest.mark.parametrize("name", KINDS)
def test_advice_goes_by_the_config(name: str, tmp_path: Path) -> None:
    """A class that nobody has heard of gets the advice of its kind; a dense one of any name gets none."""
    config, is_moe, is_mla = KINDS[name]
    model = a_model(tmp_path, config)
    log = LogWriter().started(tp_size=8, gpu_gb=7, model_path=str(model)).say(
        "Load weight end. elapsed=90 s, type=QuiteNewForCausalLM, avail mem=1.0 GB, mem usage=75.00 GB."
    )  # fmt: skip
    found = changes(judged(log.decode(30).text(), tmp_path))
    assert ("expert-parallel" in found, "dp-attention" in found) == (is_moe, is_mla)
