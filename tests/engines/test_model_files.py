"""A model's kind is in the keys of its config.json, whatever its class is called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.engines.model_files import (
    UnknownShapeError,
    check_model,
    experts_of,
    has_experts,
    has_latent_attention,
    model_of_config,
    read_config,
    shape_of,
    weights_dtype,
)
from tests.support.advice import changes, judged
from tests.support.model_kinds import KINDS, MISTRAL_LARGE_3
from tests.support.sglang_logs import LogWriter

if TYPE_CHECKING:
    from pathlib import Path


def a_model(directory: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(config))
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
    renamed = log.text().replace("QuiteNew", "DeepseekV3")
    found = changes(judged(renamed, tmp_path))
    assert ("expert-parallel" in found, "dp-attention" in found) == (is_moe, is_mla)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("LongcatFlashForCausalLM", {"expert-parallel", "dp-attention"}),
        ("MistralLarge3ForCausalLM", {"expert-parallel", "dp-attention"}),
        ("GlmMoeDsaForCausalLM", {"expert-parallel", "dp-attention"}),
        ("Llama4ForConditionalGeneration", {"expert-parallel"}),
        ("Qwen3NextForCausalLM", {"expert-parallel"}),
        ("MiMoV2FlashForCausalLM", {"expert-parallel"}),
        ("Step3VLForConditionalGeneration", {"expert-parallel"}),
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


def test_a_model_in_mistrals_own_format(tmp_path: Path) -> None:
    """Its params.json says the same by other names; such a directory is a model's."""
    model = a_model(tmp_path, MISTRAL_LARGE_3, "params.json")
    check_model(str(model))
    config = read_config(str(model))
    assert (experts_of(config), has_latent_attention(config)) == (128, True)
    assert (config["num_hidden_layers"], config["hidden_size"]) == (61, 7168)
    assert weights_dtype(config) == "bfloat16"


@pytest.mark.parametrize(
    "config", [{}, {"text_config": 5}, {"num_experts": "8"}, {"moe": []}, {"ffn_config": 1}]
)
def test_odd_files(config: dict[str, Any], tmp_path: Path) -> None:
    """What no model has is no kind of model, and no error."""
    for name in ("config.json", "params.json"):
        found = read_config(str(a_model(tmp_path, config, name)))
        assert (has_experts(found), has_latent_attention(found)) == (False, False)


def test_experts_of_a_list() -> None:
    """ERNIE has experts for text and for images: the larger number counts."""
    assert experts_of({"moe_num_experts": [64, 32]}) == 64


def test_experts_count_as_parameters() -> None:
    """Mixtral's parameters are those of all its experts."""
    mixtral = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    assert shape_of(mixtral).parameters == pytest.approx(46.7e9, rel=0.005)
    assert shape_of({**mixtral, "num_local_experts": 1}).parameters == pytest.approx(7.24e9, rel=0.005)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in {"Qwen3-8B", "Hunyuan-7B"}])
def test_the_sizes_of_other_models_are_not_guessed(name: str, tmp_path: Path) -> None:
    """Only dense decoders and those with experts in each layer are known."""
    config = read_config(str(a_model(tmp_path, KINDS[name][0])))
    with pytest.raises(UnknownShapeError):
        model_of_config(config)
