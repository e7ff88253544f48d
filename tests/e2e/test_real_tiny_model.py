"""A tiny random model on one real SGLang: adapters by row, scores, and tokens made here or there."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.engines.launched.fleet import LaunchedFleet
from tests.conftest import SMALL_MODEL, require_engine
from tests.support.engine_site.sitecustomize import UNPINNED
from tests.support.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")
TOKENS = 8
PROMPT = "one two three four"
ADAPTERS = ("first", "second")
LABELS = [" yes", " no"]
TEXTS = [f"{'word ' * (9 * n)}Is {n} a number? Answer:" for n in range(8)]
CHOICES = [" Paris", " the city of Rome", ", I think, Zürich", "s"]


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


@pytest.fixture(scope="module")
def scoring(engine: batchrunner.OpenEngine) -> Iterator[batchrunner.OpenEngine]:
    """The same server, for another task."""
    fleet = engine.shared.engine
    assert isinstance(fleet, LaunchedFleet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_API_KEY", fleet._key)
        spec = {"kind": "attach", "urls": [*fleet._replicas]}
        with batchrunner.open_engine(spec, task="score") as opened:
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


def test_loops_are_stopped(engine: batchrunner.OpenEngine) -> None:
    """A random model soon repeats itself: its requests are aborted long before their end."""
    texts = [f"Tell me about {number} things" for number in range(6)]
    sampling = {"temperature": 0, "max_new_tokens": 3000}
    going_on, stopped = (
        batchrunner.generate(
            texts, prompt={"text": "text"}, engine=engine, sampling=sampling, on_repetition=mode
        ).to_pylist()
        for mode in ("keep", "stop")
    )
    loops = [row for row in stopped if row["finish_reason"] == "repetition"]
    assert loops
    for row in loops:
        (whole,) = [other["output"] for other in going_on if other["row"] == row["row"]]
        assert whole.startswith(row["output"])
        assert len(row["output"]) < len(whole) / 2
        assert 256 <= row["completion_tokens"] < 3000
    assert {row["error"] for row in stopped} == {None}


class Reference:
    """What transformers computes."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model)

    def logprobs(self, ids: list[int]) -> Any:
        """Return the log probabilities of all tokens after each of these."""
        import torch

        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0].double()
        return torch.log_softmax(logits, dim=-1).numpy()

    def likelihood(self, prompt: str, choice: str) -> float:
        """Return the log likelihood of a choice, as evaluation harnesses compute it."""
        whole, begin = self.tokenizer(prompt + choice).input_ids, len(self.tokenizer(prompt).input_ids)
        found = self.logprobs(whole)
        return float(sum(found[at - 1][whole[at]] for at in range(begin, len(whole))))


def test_labels(models: Path, scoring: batchrunner.OpenEngine) -> None:
    """The probabilities over all tokens, in lists and alone, and those among the labels."""
    reference = Reference(models / "base")
    ids = [reference.tokenizer(label).input_ids for label in LABELS]
    assert [len(each) for each in ids] == [1, 1]
    wanted = [
        [
            float(np.exp(reference.logprobs(reference.tokenizer(text).input_ids)[-1][number]))
            for (number,) in ids
        ]
        for text in TEXTS
    ]
    table = batchrunner.score(TEXTS, labels=LABELS, engine=scoring)
    assert table.column("error").null_count == len(TEXTS)
    np.testing.assert_allclose(table.column("scores").to_pylist(), wanted, rtol=2e-3)
    assert table.column("prompt_tokens").to_pylist() == [len(reference.tokenizer(t).input_ids) for t in TEXTS]
    among = batchrunner.score(TEXTS, labels=[ids[1][0], " yes"], engine=scoring, softmax=True)
    for found, (yes, no) in zip(among.column("scores").to_pylist(), wanted, strict=True):
        np.testing.assert_allclose(found, [no / (yes + no), yes / (yes + no)], rtol=2e-3)


def test_choices(models: Path, scoring: batchrunner.OpenEngine) -> None:
    """The log likelihoods are those of transformers; the prompt of a row is computed once."""
    reference = Reference(models / "base")
    texts = [f"{text} Then" for text in TEXTS[4:]]
    table = batchrunner.score(texts, choices=CHOICES, engine=scoring)
    assert table.column("error").null_count == len(texts)
    wanted = [[reference.likelihood(text, choice) for choice in CHOICES] for text in texts]
    np.testing.assert_allclose(table.column("scores").to_pylist(), wanted, rtol=1e-3)
    for text, cached in zip(texts, table.column("cached_tokens").to_pylist(), strict=True):
        prompt = len(reference.tokenizer(text).input_ids)
        assert cached >= (len(CHOICES) - 1) * (prompt - 1)


SAME = ("output", "finish_reason", "prompt_tokens", "completion_tokens")


def test_tokens_made_here_give_the_same_answers(
    models: Path, engine: batchrunner.OpenEngine, tmp_path: Path
) -> None:
    """Wherever tokens are made: the same prompts to the token, answers to the byte; cuts fit."""
    texts = [
        "Zürich is", "日本の首都は", "  def f(x):\n\treturn", "👩\u200d👧 <|im_end|> &amp;", "word " * 5000,
    ]  # fmt: skip
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")

    def results(name: str, **changes: Any) -> dict[str, list[Any]]:
        job: dict[str, Any] = {
            "input": {"path": str(tmp_path / "rows.parquet")},
            "sampling": {"max_new_tokens": 24, "temperature": 0},
            "output": {"path": str(tmp_path / name)},
            "limits": {"max_failed_rows": 1},
            **changes,
        }
        assert batchrunner.run(job, engine=engine).exit_code == 0
        table: pa.Table = pq.read_table(tmp_path / name / "parts").sort_by("row")
        return {name: table[name].to_pylist() for name in (*SAME, "error")}

    for kind in ("user", "text"):
        prompt = {kind: "{{ text }} "}
        ours = results(f"client-{kind}", prompt=prompt, tokenize="client")
        theirs = results(f"server-{kind}", prompt=prompt, tokenize="server")
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        for found in (ours, theirs):
            assert [error is None for error in found["error"]] == [True] * 4 + [False]
            assert "longer than the model's context length (4096 tokens)" in found["error"][4]
        cut = results(f"cut-{kind}", prompt={**prompt, "truncate": "middle"})
        assert cut["error"] == [None] * 5
        assert 4060 <= cut["prompt_tokens"][4] <= 4096 - 24
        assert cut["output"][:4] == ours["output"][:4]
