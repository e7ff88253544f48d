"""Whether weights fit into the memory of a card or a machine."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.core.timing import TIMING
from tests.conftest import batchrun, job_of, write_job
from tests.support.hungry_engine import hungry

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result
from batchrunner.core.errors import EngineStartError, JobError
from batchrunner.engines.model_memory import CardMemory, ModelNeed, choose_tp, need_of
from batchrunner.job.load import load_job
from batchrunner.tune.tuner import engine_to_tune
from tests.support.model_configs import LLAMA_8B
from tests.support.model_kinds import KINDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restarts without the pauses that are for real engines; nothing learned from another test."""
    monkeypatch.setattr(TIMING, "first_restart", 0.01)
    monkeypatch.setattr(TIMING, "first_retry", 0.01)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(job: dict[str, Any], directory: Path) -> Result:
    return batchrun(write_job(job, directory), "--fresh")


def with_weights(directory: Path, total_bytes: float, **config: Any) -> dict[str, Any]:
    """Return an engine whose model says that it has so many bytes of weights."""
    engine = hungry(directory, "")
    model = directory / "model"
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
    return engine


def give_card(directory: Path, monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Put an `nvidia-smi` first on the path that tells of one card."""
    tool = directory / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, {mib}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("args", "config", "fits"),
    [
        ({}, {}, False),
        ({"tp-size": 2}, {}, True),
        ({"pipeline-parallel-size": 2}, {}, True),
        ({"quantization": "fp8"}, {}, True),
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, False),  # it is already
        (
            {"quantization": "fp8"},
            {"quantization_config": {"quant_method": "fp8"}, "text_config": {"torch_dtype": "bfloat16"}},
            False,
        ),
        ({"dtype": "float32", "tp-size": 2}, {}, False),
        ({}, {"torch_dtype": "float32"}, True),  # SGLang loads it in 16 bits
        ({"dtype": "float32"}, {"torch_dtype": "float32"}, False),
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
    give_card(tmp_path, monkeypatch, 81559)
    engine = {**with_weights(tmp_path, 141.1e9, **config), "args": args}
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert (result.exit_code == 0) == fits, result.stderr
    if not fits:
        assert result.exit_code == 2
        assert not (tmp_path / "starts").exists()
        assert "its weights do not fit: " in result.stderr
        assert "and NVIDIA H100 80GB HBM3 has 79.6 GiB: set tp-size to " in result.stderr


@pytest.mark.parametrize("revision", [None, "pinned", "0123abc"])
def test_weights_in_the_hubs_cache_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """A hub's name is looked up in Hugging Face's cache: the snapshot of `main`, a branch or a commit."""
    give_card(tmp_path, monkeypatch, 81559)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    engine = with_weights(tmp_path, 141.1e9)
    repository = tmp_path / "hf" / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "pinned"):
        (repository / "refs" / name).write_text("0123abc" if name == (revision or "main") else "456def")
    shutil.copytree(tmp_path / "model", repository / "snapshots" / "0123abc")
    engine |= {"model": "org/name", "args": {"revision": revision} if revision else {}}
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert result.exit_code == 2
    assert "its weights do not fit: 131.4 GiB" in result.stderr


def test_weights_without_files_are_counted_by_their_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--load-format dummy` there are no files: config.json's parameters are counted (Llama 3 70B)."""
    give_card(tmp_path, monkeypatch, 81559)
    llama = {
        "hidden_size": 8192, "num_hidden_layers": 80, "vocab_size": 128256, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "torch_dtype": "bfloat16",
    }  # fmt: skip
    engine = hungry(tmp_path, "")
    (tmp_path / "model" / "config.json").write_text(json.dumps(llama))
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert result.exit_code == 2
    assert "131.4 GiB (70.6 billion parameters by config.json) over 1 rank is 131.4 GiB each" in result.stderr
    assert "set tp-size to 2" in result.stderr


def test_weights_are_measured_against_a_machine_without_a_card(tmp_path: Path) -> None:
    """On a CPU the machine's memory counts, its cgroup's limit included."""
    engine = {**with_weights(tmp_path, 1e15), "device": "cpu"}
    result = run(job_of(tmp_path, engine, rows=5), tmp_path)
    assert result.exit_code == 2
    assert "this machine has" in result.stderr
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


GIB = 2**30
H100, L4 = CardMemory(8, "NVIDIA H100 80GB HBM3", 81559 << 20), CardMemory(8, "NVIDIA L4", 23034 << 20)
LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "vocab_size": 128256, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "torch_dtype": "bfloat16",
}  # fmt: skip


def need(directory: Path, config: dict[str, Any], total_bytes: float = 0, **args: Any) -> ModelNeed:
    """Return what a model of this config needs; with the size of its files, or by its parameters."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
    if total_bytes:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": {}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    found = need_of(str(directory), {name.replace("_", "-"): value for name, value in args.items()})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "args", "card", "tp"),
    [
        (LLAMA_8B, {}, H100, 1),
        (LLAMA_8B, {}, L4, 2),  # 15 GiB of weights and 4 GiB of pool, of 18.7 GiB
        (LLAMA_8B, {"quantization": "fp8"}, L4, 1),
        (LLAMA_8B, {"kv_cache_dtype": "fp8_e5m2"}, L4, 1),
        (LLAMA_8B, {"mem_fraction_static": 0.9}, L4, 1),
        (LLAMA_8B, {"context_length": 1_000_000}, H100, 4),  # 122 GiB of pool
        (LLAMA_70B, {}, H100, 4),  # 131 GiB and 10 GiB: on two it is 70.6 of 66.1
        (LLAMA_70B, {"quantization": "fp8"}, H100, 2),
        (LLAMA_70B, {"pp_size": 2}, H100, 2),
        (QWEN_7B, {}, L4, 1),
    ],
)  # fmt: skip
def test_the_fewest_that_have_room(
    config: dict[str, Any], args: dict[str, Any], card: CardMemory, tp: int, tmp_path: Path
) -> None:
    """Weights are divided, and so is the KV pool; what each card gets stays below SGLang's share of it."""
    chosen, why = choose_tp(need(tmp_path / "model", config, **args), card)
    assert chosen == tp
    assert f"on each of {tp} {card.name}" in why
    assert "billion parameters by config.json" in why


def test_the_cache_of_latent_attention_is_not_divided(tmp_path: Path) -> None:
    """Each card keeps the whole compressed cache, which is small: 61 layers of 576 numbers."""
    config = {**KINDS["DeepSeek-V3"][0], "qk_rope_head_dim": 64}
    found = need(tmp_path / "model", config, total_bytes=688e9)
    assert (found.kv_heads, found.token_bytes) == (1, 61 * 576 * 2)
    assert found.on_each(8, 1)[1] == found.on_each(16, 1)[1] == 32_768 * 61 * 576 * 2
    assert choose_tp(found, CardMemory(16, "NVIDIA H100 80GB HBM3", 81559 << 20))[0] == 16


def test_kv_heads_are_not_divided_further(tmp_path: Path) -> None:
    """Beyond the number of KV heads cards hold copies of them."""
    found = need(tmp_path / "model", QWEN_7B)
    assert found.on_each(8, 1)[1] == found.on_each(4, 1)[1] == found.on_each(1, 1)[1] / 4


def test_heads_must_be_divisible(tmp_path: Path) -> None:
    """28 heads go over 4 cards and not over 8: then no number of cards is enough."""
    tiny = CardMemory(8, "a small card", 4 * GIB)
    with pytest.raises(EngineStartError, match="need more than 64 cards like a small card"):
        choose_tp(need(tmp_path / "model", QWEN_7B), tiny)


@pytest.mark.parametrize(("args", "told"), [({}, "4 cards"), ({"dp_size": 4}, "16 cards")])
def test_too_few_cards(args: dict[str, Any], told: str, tmp_path: Path) -> None:
    """The error has the arithmetic: what is needed, of which cards, and how many there are."""
    two = CardMemory(2, H100.name, H100.memory_bytes)
    with pytest.raises(EngineStartError) as refused:
        choose_tp(need(tmp_path / "model", LLAMA_70B, **args), two)
    assert str(refused.value) == (
        "engine.tp auto: weights of 131.4 GiB (70.6 billion parameters by config.json) and a KV pool of "
        f"32,768 tokens (10.0 GiB) need {told} like NVIDIA H100 80GB HBM3 (79.6 GiB), and a replica can have "
        "2; take a smaller or a quantised model, or larger cards"
    )


def test_a_model_whose_cache_is_not_known(tmp_path: Path) -> None:
    """A quarter of the memory is left for its KV pool."""
    found = need(tmp_path / "model", {"architectures": ["QuiteNewForCausalLM"]}, total_bytes=60 * GIB)
    assert found.token_bytes is None
    tp, why = choose_tp(found, H100)
    assert tp == 2
    assert "a KV pool of 25%" in why


def cards_here(directory: Path, monkeypatch: pytest.MonkeyPatch, *mib: int) -> None:
    """Put an `nvidia-smi` first on the path that tells of cards with this memory."""
    tool = directory / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    lines = "\n".join(f"NVIDIA L4, {memory}" for memory in mib)
    tool.write_text(f"#!/bin/sh\necho '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(mib)))))


def an_engine(directory: Path, total_bytes: float, **more: Any) -> dict[str, Any]:
    engine = hungry(directory, "pass")
    need(directory / "model", LLAMA_8B, total_bytes)
    return {**engine, "tp": "auto", **more}


def test_the_server_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts its server with the number, logs why, and leaves it in the report."""
    cards_here(tmp_path, monkeypatch, 23034, 23034, 23034, 23034)
    job = job_of(tmp_path, an_engine(tmp_path, 16.1e9), rows=5)
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
    engine = an_engine(tmp_path, 80e9, kind=kind)
    file = write_job(job_of(tmp_path, engine, rows=5), tmp_path)
    told = {"no card": "engine.tp auto: nvidia-smi tells of no GPU here: give a number"}
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = {"no card": batchrun(file)}
    cards_here(tmp_path, monkeypatch, 23034, 23034)
    told["too few"] = "need 8 cards like NVIDIA L4 (22.5 GiB), and a replica can have 2; take a smaller"
    found["too few"] = batchrun(file)
    told["not here"] = "engine.tp auto: how much memory the weights of org/none take is not known here: give"
    found["not here"] = batchrun(file, "--set", "engine.model=org/none")
    for case, refused in found.items():
        assert refused.exit_code == 2, case
        assert told[case] in refused.stderr
    assert not (tmp_path / "starts").exists()


def test_one_replica_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway with a number of replicas has so many cards less for each."""
    cards_here(tmp_path, monkeypatch, 23034, 23034)
    engine = an_engine(tmp_path, 16.1e9, kind="gateway", replicas=2)
    refused = batchrun(write_job(job_of(tmp_path, engine, rows=5), tmp_path))
    assert refused.exit_code == 2
    assert "need 2 cards like NVIDIA L4 (22.5 GiB), and a replica can have 1" in refused.stderr


def test_a_cpu_is_one_device(tmp_path: Path) -> None:
    """There is nothing to divide among; the model need not be known."""
    engine = {**an_engine(tmp_path, 16.1e9), "device": "cpu"}
    assert engine_to_tune(load_job(job_of(tmp_path, engine))).args["tp-size"] == 1


@pytest.mark.parametrize("kind", ["server", "gateway"])
def test_the_number_stands_once(kind: str, tmp_path: Path) -> None:
    """`engine.tp` and an argument of the server for the same are refused together."""
    engine = {"kind": kind, "model": "org/name", "tp": 2, "args": {"tp_size": 2}}
    with pytest.raises(JobError, match=r"say engine\.tp instead of --tp-size"):
        load_job(job_of(tmp_path, engine))
