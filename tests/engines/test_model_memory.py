"""Whether weights fit into the memory of a card or a machine, and the number of cards that `auto` is."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.core.errors import EngineStartError, JobError
from batchrunner.core.timing import TIMING
from batchrunner.engines.device import Gpu
from batchrunner.engines.model_memory import ModelWeights, choose_tp
from batchrunner.job.load import load_job
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import batchrun, job_of, write_job
from tests.support.launchable import hungry
from tests.support.model_kinds import LLAMA_8B

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
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
        ({"pipeline-parallel-size": 2}, {}, True),
        ({"quantization": "fp8"}, {}, True),
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, False),  # it is already
        ({"dtype": "float32", "tp-size": 2}, {}, False),
        ({}, {"torch_dtype": "float32"}, True),  # SGLang loads it in 16 bits
        ({"cpu-offload-gb": 100}, {}, True),
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


@pytest.mark.parametrize("revision", [None, "pinned", "0123abc"])
def test_weights_in_the_hubs_cache_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """A hub's name is looked up in Hugging Face's cache: the snapshot of `main`, a branch or a commit."""
    give_cards(tmp_path, monkeypatch, H100)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    engine = with_weights(tmp_path, 141.1e9)
    repository = tmp_path / "hf" / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "pinned"):
        (repository / "refs" / name).write_text("0123abc" if name == (revision or "main") else "456def")
    shutil.copytree(tmp_path / "model", repository / "snapshots" / "0123abc")
    engine |= {"model": "org/name", "args": {"revision": revision} if revision else {}}
    result = batchrun(write_job(job_of(tmp_path, engine, rows=5), tmp_path))
    assert result.exit_code == 2
    assert "its weights do not fit: 131.4 GiB" in result.stderr


def test_weights_are_measured_against_a_machine_without_a_card(tmp_path: Path) -> None:
    """On a CPU the machine's memory counts, its cgroup's limit included."""
    engine = {**with_weights(tmp_path, 1e15), "device": "cpu"}
    result = batchrun(write_job(job_of(tmp_path, engine, rows=5), tmp_path))
    assert result.exit_code == 2
    assert "of this machine, which has" in result.stderr


@pytest.mark.parametrize(
    ("gib", "config", "args", "card", "tp"),
    [
        (15, LLAMA_8B, {}, H100, 1),
        (15, LLAMA_8B, {}, L4, 2),  # 15 GiB of weights and 4 GiB of pool, of 18.7 GiB
        (15, LLAMA_8B, {"kv-cache-dtype": "fp8_e5m2"}, L4, 1),
        (15, LLAMA_8B, {"mem-fraction-static": 0.9}, L4, 1),
        (15, LLAMA_8B, {"context-length": 1_000_000}, H100, 4),  # 122 GiB of pool
        (131, LLAMA_70B, {}, H100, 4),  # 131 GiB and 10 GiB: on two it is 70.5 of 66.1
        (131, LLAMA_70B, {"pp-size": 2}, H100, 2),
        (60, {"architectures": ["QuiteNewForCausalLM"]}, {}, H100, 2),  # a quarter is left for its pool
        (688, {"kv_lora_rank": 512, "num_attention_heads": 128}, {}, H100, 16),
    ],
)  # fmt: skip
def test_the_fewest_that_have_room(
    gib: float, config: dict[str, Any], args: dict[str, Any], card: Gpu, tp: int
) -> None:
    """Weights are divided, and so is the KV pool; what each card gets stays below SGLang's share of it."""
    chosen, why = choose_tp(ModelWeights(gib * GIB, "by its files"), config, args, card, 16)
    assert chosen == tp
    assert f"on each of {tp} {card.name}" in why


@pytest.mark.parametrize(
    ("config", "args", "told"),
    [
        (LLAMA_70B, {}, "need 4 cards like NVIDIA H100 80GB HBM3 (79.6 GiB), and a replica can have 2"),
        (LLAMA_70B, {"dp-size": 4}, "need 16 cards"),
        (
            {**LLAMA_70B, "num_attention_heads": 30},
            {},
            "need more than 64 cards",
        ),  # 30: over 2
    ],
)
def test_too_few_cards(config: dict[str, Any], args: dict[str, Any], told: str) -> None:
    """The error has the arithmetic: what is needed, of which cards, and how many there are."""
    with pytest.raises(EngineStartError) as refused:
        choose_tp(ModelWeights(131 * GIB, "by its files"), config, args, H100, 2)
    assert "weights of 131.0 GiB (by its files) and a KV pool of 32,768 tokens" in str(refused.value)
    assert told in str(refused.value)


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


@pytest.mark.parametrize("kind", ["server", "gateway"])
def test_what_cannot_be_decided_is_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few cards, a model that is not here, no card: exit code 2, and no server is started."""
    more = {"replicas": 2} if kind == "gateway" else {}
    engine = {**with_weights(tmp_path, 80e9), "kind": kind, "tp": "auto", "device": "cuda", **more}
    file = write_job(job_of(tmp_path, engine, rows=5), tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    none = batchrun(file)
    give_cards(tmp_path, monkeypatch, L4, 2)
    few = batchrun(file)
    unknown = batchrun(file, "--set", "engine.model=org/none")
    assert [result.exit_code for result in (none, few, unknown)] == [2, 2, 2]
    assert "engine.tp auto: nvidia-smi tells of no GPU here: give a number" in none.stderr
    have = 2 if kind == "server" else 1
    assert f"need 8 cards like NVIDIA L4 (22.5 GiB), and a replica can have {have}; take" in few.stderr
    assert "how much memory the weights of org/none take is not known here: give" in unknown.stderr
    assert not (tmp_path / "starts").exists()


@pytest.mark.parametrize("kind", ["server", "gateway"])
def test_the_number_stands_once(kind: str, tmp_path: Path) -> None:
    """`engine.tp` and an argument of the server for the same are refused together."""
    engine = {"kind": kind, "model": "org/name", "tp": 2, "args": {"tp_size": 2}}
    with pytest.raises(JobError, match=r"say engine\.tp instead of --tp-size"):
        load_job(job_of(tmp_path, engine))
