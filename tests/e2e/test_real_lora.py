"""LoRA adapters by row on a real SGLang: each row has the answer of the weights that its adapter makes."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from tests.conftest import SMALL_MODEL, require_engine
from tests.support.engine_site.sitecustomize import UNPINNED
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")
TOKENS = 8
PROMPT = "one two three four"
ADAPTERS = ("first", "second")


def _write_adapter(directory: Path, base: Path, seed: int) -> None:
    """Write an adapter of random weights, as peft does."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base)
    wide = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            out = wide[target] * config.head_dim
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, config.hidden_size, generator=random) / 4
            weights[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=random) / 4
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    settings |= {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": list(TARGETS)}
    (directory / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model and two adapters."""
    require_engine("sglang")
    directory = tmp_path_factory.mktemp("lora")
    base = make_tiny_llama(directory / "base", SMALL_MODEL)
    for seed, name in enumerate(ADAPTERS, 1):
        _write_adapter(directory / name, base, seed)
    return directory


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """The model on a launched server, with its adapters."""
    args = {
        "enable-lora": True,
        "lora-paths": [f"{name}={models / name}" for name in ADAPTERS],
        "lora-backend": "torch_native",
        "max-lora-rank": RANK,
    }
    spec = {"kind": "server", "model": str(models / "base"), "device": "cpu", "args": args}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNPINNED, "1")
        with batchrunner.open_engine(spec, log_dir=tmp_path_factory.mktemp("logs")) as opened:
            yield opened


def _by_transformers(models: Path, adapter: str | None) -> list[int]:
    """Return the tokens of the model whose weights have an adapter's added."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32).eval()
    if adapter is not None:
        weights = load_file(models / adapter / "adapter_model.safetensors")
        for name in [key.removesuffix(".lora_A.weight") for key in weights if "lora_A" in key]:
            change = weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"] * (ALPHA / RANK)
            model.get_submodule(name.removeprefix("base_model.model.")).weight.data += change
    ids = AutoTokenizer.from_pretrained(models / "base")(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return list(out[0, ids.shape[1] :].tolist())


def _answers(engine: batchrunner.OpenEngine, adapters: list[str | None]) -> list[dict[str, Any]]:
    rows = [{"text": PROMPT, "adapter": name} for name in adapters]
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    sampling["lora_path"] = {"column": "adapter"}
    table = batchrunner.generate(
        rows, prompt={"text": "text"}, engine=engine, sampling=sampling, answers=["output_ids"]
    )
    return list(table.to_pylist())


def test_adapters_by_row(models: Path, engine: batchrunner.OpenEngine) -> None:
    """Rows of one run have different adapters, or none; equal rows with other adapters are not equal."""
    adapters: list[str | None] = [None, *ADAPTERS, *ADAPTERS, None]
    rows = _answers(engine, adapters)
    assert [row["error"] for row in rows] == [None] * len(rows)
    expected = {name: _by_transformers(models, name) for name in (None, *ADAPTERS)}
    assert len({tuple(ids) for ids in expected.values()}) == 3
    assert [row["output_ids"] for row in rows] == [expected[name] for name in adapters]
    assert [row["attempts"] for row in rows] == [1, 1, 1, 0, 0, 0]


def test_unknown_adapter(engine: batchrunner.OpenEngine) -> None:
    """A row whose adapter the server does not have fails, and the others are answered."""
    rows = _answers(engine, ["nowhere", "first", None])
    assert "nowhere" in rows[0]["error"]
    assert [row["error"] for row in rows[1:]] == [None, None]
