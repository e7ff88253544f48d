"""Memory of cards and machines, and what a model takes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchrunner.sglang.device import gpus, oom_kills
from batchrunner.sglang.model_files import kv_bytes
from tests.support.sglang_logs import LogWriter, changes, judged


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


@pytest.mark.parametrize(
    ("hybrid", "layers"),
    [
        ({}, 8),
        ({"full_attention_interval": 4}, 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 4}, 4),
        ({"layer_types": ["mamba"] * 7 + ["attention"]}, 1),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, 8),
        ({"hybrid_override_pattern": "M-M*-M*-"}, 2),
    ],
)
def test_layers_with_states_have_no_kv_cache(hybrid: dict[str, Any], layers: int) -> None:
    """A token of a hybrid model takes KV cache only in its layers with attention."""
    config = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
    assert kv_bytes(config | hybrid, 2) == 2 * 2 * layers * 2 * 64
