"""Cross-encoders and classifiers of the real SGLang on the CPU, beside transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import ROOT, SMALL_MODEL, require_engine

if TYPE_CHECKING:
    from pathlib import Path

MINILM = ROOT / "data" / "all-minilm-l6-v2"
DOCUMENTS = [["a cat sleeps", "json.dumps writes text"], ["x"], ["Zürich", "word " * 40, "a cat sleeps"]]

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def run(directory: Path, engine: Any, columns: dict[str, Any], **job: Any) -> Any:
    pq.write_table(pa.table(columns), directory / "rows.parquet")
    whole = {"input": {"path": str(directory / "rows.parquet")}, "output": {"path": str(directory / "run")}}
    report = batchrunner.run({**whole, **job}, engine=engine)
    assert (report.exit_code, report.rows_failed) == (0, 0)
    return pq.read_table(directory / "run" / "parts").sort_by("row")


def made(directory: Path, model: Any, tokenizer_from: Path) -> Path:
    from transformers import AutoTokenizer  # noqa: PLC0415 - only with an engine

    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def test_cross_encoder(tmp_path: Path) -> None:
    """A random BERT with one number: the scores of pairs are its logits."""
    require_engine("sglang")
    if not MINILM.exists():
        pytest.skip("missing: data/all-minilm-l6-v2 (make test)")
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification  # noqa: PLC0415

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, num_labels=1, initializer_range=0.3, position_embedding_type="absolute",
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    spec = {"kind": "server", "model": str(made(tmp_path / "model", model, MINILM)), "device": "cpu"}
    queries = ["what does a cat do?", "x", "where?"]
    with batchrunner.open_engine(spec, log_dir=tmp_path, task="rerank") as engine:
        found = run(
            tmp_path, engine, {"query": queries, "documents": DOCUMENTS},
            task="rerank", prompt={"text": "query", "documents": "documents"},
        )  # fmt: skip
    for query, documents, scores in zip(queries, DOCUMENTS, found["scores"].to_pylist(), strict=True):
        with torch.no_grad():
            pairs = [tokenizer(query, document, return_tensors="pt") for document in documents]
            wanted = [model(**pair).logits[0, 0].item() for pair in pairs]
        np.testing.assert_allclose(scores, wanted, rtol=1e-3, atol=1e-4)


def llama_with_head(**head: Any) -> tuple[Any, Any]:
    """Return a tokenizer and a random Llama with a head of so many `num_labels`, or names of them."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification  # noqa: PLC0415

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, initializer_range=0.2, **head,
    )  # fmt: skip
    return tokenizer, LlamaForSequenceClassification(config).eval()


def logits_of(tokenizer: Any, model: Any, texts: list[str]) -> list[list[float]]:
    import torch  # noqa: PLC0415

    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in texts]


def test_classifier(tmp_path: Path) -> None:
    """A random Llama with three classes: scores are its logits, and labels the names of its config."""
    require_engine("sglang")
    names = {0: "bad", 1: "fair", 2: "good"}
    head = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    tokenizer, model = llama_with_head(**head)
    spec = {"kind": "server", "model": str(made(tmp_path / "model", model, SMALL_MODEL)), "device": "cpu"}
    texts = [f"{'word ' * (5 * n)}text {n}" for n in range(8)]
    with batchrunner.open_engine(spec, log_dir=tmp_path, task="classify") as engine:
        found = run(tmp_path, engine, {"text": texts}, task="classify", prompt={"text": "text"})
    wanted = logits_of(tokenizer, model, texts)
    np.testing.assert_allclose(found["scores"].to_pylist(), wanted, rtol=1e-3, atol=1e-3)
    assert found["label"].to_pylist() == [names[int(np.argmax(logits))] for logits in wanted]
