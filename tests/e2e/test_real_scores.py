"""Scores of the real SGLang on the CPU: labels and choices, beside what transformers computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import batchrunner
from tests.conftest import SMALL_MODEL, require_engine
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LABELS = [" yes", " no"]
TEXTS = [f"{'word ' * (9 * n)}Is {n} a number? Answer:" for n in range(8)]
CHOICES = [" Paris", " the city of Rome", ", I think, Zürich", "s"]

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random causal model."""
    require_engine("sglang")
    return make_tiny_llama(tmp_path_factory.mktemp("llama") / "model", SMALL_MODEL)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """It, on a launched server."""
    spec = {"kind": "server", "model": str(model), "device": "cpu"}
    with batchrunner.open_engine(spec, log_dir=tmp_path_factory.mktemp("logs"), task="score") as engine:
        yield engine


class Reference:
    """What transformers computes."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - only with an engine

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model)

    def logprobs(self, ids: list[int]) -> Any:
        """Return the log probabilities of all tokens after each of these."""
        import torch  # noqa: PLC0415

        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0].double()
        return torch.log_softmax(logits, dim=-1).numpy()

    def likelihood(self, prompt: str, choice: str) -> float:
        """Return the log likelihood of a choice, as evaluation harnesses compute it."""
        whole, begin = self.tokenizer(prompt + choice).input_ids, len(self.tokenizer(prompt).input_ids)
        found = self.logprobs(whole)
        return float(sum(found[at - 1][whole[at]] for at in range(begin, len(whole))))


def test_labels(engine: batchrunner.OpenEngine, model: Path) -> None:
    """The probabilities over all tokens, in lists and alone, and those among the labels."""
    reference = Reference(model)
    ids = [reference.tokenizer(label).input_ids for label in LABELS]
    assert [len(each) for each in ids] == [1, 1]
    wanted = [
        [
            float(np.exp(reference.logprobs(reference.tokenizer(text).input_ids)[-1][number]))
            for (number,) in ids
        ]
        for text in TEXTS
    ]
    table = batchrunner.score(TEXTS, labels=LABELS, engine=engine)
    assert table.column("error").null_count == len(TEXTS)
    np.testing.assert_allclose(table.column("scores").to_pylist(), wanted, rtol=2e-3)
    assert table.column("prompt_tokens").to_pylist() == [len(reference.tokenizer(t).input_ids) for t in TEXTS]
    among = batchrunner.score(TEXTS, labels=[ids[1][0], " yes"], engine=engine, softmax=True)
    for found, (yes, no) in zip(among.column("scores").to_pylist(), wanted, strict=True):
        np.testing.assert_allclose(found, [no / (yes + no), yes / (yes + no)], rtol=2e-3)


def test_choices(engine: batchrunner.OpenEngine, model: Path) -> None:
    """The log likelihoods are those of transformers; the prompt of a row is computed once."""
    reference = Reference(model)
    texts = [f"{text} Then" for text in TEXTS[4:]]
    table = batchrunner.score(texts, choices=CHOICES, engine=engine)
    assert table.column("error").null_count == len(texts)
    wanted = [[reference.likelihood(text, choice) for choice in CHOICES] for text in texts]
    np.testing.assert_allclose(table.column("scores").to_pylist(), wanted, rtol=1e-3)
    for text, cached in zip(texts, table.column("cached_tokens").to_pylist(), strict=True):
        prompt = len(reference.tokenizer(text).input_ids)
        assert cached >= (len(CHOICES) - 1) * (prompt - 1)


def test_a_label_of_several_tokens(engine: batchrunner.OpenEngine) -> None:
    """One line, with the tokens of the real tokenizer."""
    with pytest.raises(batchrunner.JobError, match="' yes, of course' is 4 tokens of the model"):
        batchrunner.score(TEXTS[:1], labels=[" yes, of course", " no"], engine=engine)
