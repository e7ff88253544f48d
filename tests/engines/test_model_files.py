"""A model's kind is in the keys of its config.json, whatever its class is called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.engines.model_files import (
    has_experts,
    has_latent_attention,
    read_config,
)
from tests.support.model_kinds import KINDS
from tests.support.sglang_logs import LogWriter, changes, judged

if TYPE_CHECKING:
    from pathlib import Path


def a_model(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_model(name: str, tmp_path: Path) -> None:
    """Experts and a compressed KV cache are found, also in the part of a model that reads images too."""
    config, is_moe, is_mla = KINDS[name]
    found = read_config(str(a_model(tmp_path, config)))
    assert (has_experts(found), has_latent_attention(found)) == (is_moe, is_mla)


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
    ("model", "expected"),
    [
        ("LongcatFlashForCausalLM", {"expert-parallel", "dp-attention"}),
        ("MistralLarge3ForCausalLM", {"expert-parallel", "dp-attention"}),
        ("Llama4ForConditionalGeneration", {"expert-parallel"}),
        ("Qwen3ForCausalLM", set()),
    ],
)
def test_a_log_from_elsewhere(model: str, expected: set[str], tmp_path: Path) -> None:
    """Where the model is not on this machine, the class that the log names is all that is known."""
    log = LogWriter().started(tp_size=8, gpu_gb=7, model_path="/not/here").say(
        f"Load weight end. elapsed=90 s, type={model}, avail mem=1.0 GB, mem usage=75.00 GB."
    )  # fmt: skip
    assert set(changes(judged(log.decode(30).text(), tmp_path))) - {"tensor-parallel"} == expected


def test_sparse_attention_has_backends_of_its_own(tmp_path: Path) -> None:
    """SGLang chooses the backend of a model with an indexer: the guides' would be refused."""
    log = LogWriter().started(attention_backend="triton", quantization="fp8", model_path=str(tmp_path))
    text = log.decode(30).text()
    plain, sparse = KINDS["DeepSeek-V3"][0], KINDS["GLM-5"][0]
    a_model(tmp_path, plain)
    assert "attention-backend" in changes(judged(text, tmp_path, card="H100"))
    a_model(tmp_path, sparse)
    assert "attention-backend" not in changes(judged(text, tmp_path, card="H100"))
