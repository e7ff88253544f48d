"""Memory of cards and machines, and what a model takes of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchrunner.core.timing import TIMING
from batchrunner.engines.device import Gpu, gpus, oom_kills
from tests.conftest import batchrun, job_of, write_job
from tests.support.launchable import hungry
from tests.support.sglang_logs import LogWriter, changes, judged

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
H100, L4 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20), Gpu("NVIDIA L4", 23034 << 20)


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


def test_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, seen in [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("0,-1,1", ["0"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus() == seen


def test_kills_by_the_kernel(tmp_path: Path) -> None:
    """Where it tells nothing (not Linux) nothing is known, and nothing fails."""
    assert oom_kills(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 3\noom_kill 7\n")
    assert oom_kills(tmp_path) == 7


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
