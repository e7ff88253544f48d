"""Vectors, pairs and classes of the real SGLang on the CPU, beside what transformers computes."""

# ruff: noqa: PLC0415 - torch takes seconds to import: only tests that need the engine pay
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import CreateEmbeddingResponse

import batchrunner
from batchrunner.engines.launched.fleet import LaunchedFleet
from tests.conftest import ROOT, SMALL_MODEL, require_engine, require_modules, skip_without
from tests.e2e.test_serve import serving

MODEL = ROOT / "data" / "all-minilm-l6-v2"
TEXTS = [
    "json.dumps serialises an object as text", "a cat sleeps", "Zürich 東京 Ελλάδα", "x",
    *(f"{'word ' * (17 * n)} and number {n}" for n in range(20)),
]  # fmt: skip
"""Texts of up to 330 tokens."""

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    require_modules("sglang")
    skip_without([] if MODEL.exists() else ["data/all-minilm-l6-v2 (make test)"])


@pytest.fixture(scope="module")
def minilm(_prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """The real embedding model on a launched server."""
    spec = {"kind": "server", "model": str(MODEL), "device": "cpu"}
    with batchrunner.open_engine(spec, log_dir=tmp_path_factory.mktemp("minilm"), task="embed") as engine:
        yield engine


def mean_pooling(texts: list[str]) -> Any:
    """Return the vectors as the model's authors compute them: the mean over all tokens, of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL)
    found = []
    with torch.no_grad():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            mean = states.mean(dim=0)
            found.append((mean / mean.norm()).numpy())
    return np.stack(found)


def matrix_of(table: Any) -> Any:
    vectors = table.column("embedding").combine_chunks()
    return vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(vectors), -1)


def test_vectors_are_those_of_transformers(minilm: batchrunner.OpenEngine) -> None:
    """Each vector has the direction that transformers computes, and the prompt its number of tokens."""
    table = batchrunner.embed(TEXTS, engine=minilm, normalize=True)
    assert table.column("error").null_count == len(TEXTS)
    found, wanted = matrix_of(table), mean_pooling(TEXTS)
    assert found.shape == wanted.shape == (len(TEXTS), 384)
    assert ((found * wanted).sum(axis=1) >= 0.9999).all()
    assert table.column("prompt_tokens").to_pylist()[3] == 3  # [CLS] x [SEP]
    assert minilm.info.caches_prefixes is False


def test_a_batch_of_embeddings(
    minilm: batchrunner.OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batchrun serve` before the engine: OpenAI's type of answers, and the usage is their sum."""
    fleet = minilm.shared.engine
    assert isinstance(fleet, LaunchedFleet)
    monkeypatch.setenv("SGLANG_API_KEY", fleet._key)
    endpoint, text = "/v1/embeddings", TEXTS[0]
    inputs: list[dict[str, Any]] = [
        {"input": text}, {"input": [text, "x"]}, {"input": text, "encoding_format": "base64"},
        {"input": "word " * 2000},
    ]  # fmt: skip
    lines = [
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {"model": "any", **body}}
        for number, body in enumerate(inputs)
    ]
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    (address,) = fleet._replicas
    with serving(tmp_path / "state", "--task", "embed", engine=address) as server:
        with pytest.raises(openai.BadRequestError, match="supported are /v1/embeddings"):
            server.begin(server.upload(content))
        batch = server.ended(server.begin(server.upload(content), endpoint=endpoint))
        answers = {
            line["custom_id"]: line["response"]["body"] for line in server.lines_of(batch.output_file_id)
        }
        (failed,) = server.lines_of(batch.error_file_id)
    assert (batch.status, sorted(answers), failed["custom_id"]) == ("completed", ["0", "1", "2"], "3")
    assert failed["response"]["status_code"] == 400
    (alone,) = CreateEmbeddingResponse.model_validate(answers["0"]).data
    first, other = CreateEmbeddingResponse.model_validate(answers["1"]).data
    decoded = np.frombuffer(base64.b64decode(answers["2"]["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(first.embedding, alone.embedding, atol=1e-5)
    np.testing.assert_allclose(decoded, alone.embedding, atol=1e-5)
    assert len(other.embedding) == 384
    assert batch.usage is not None
    used = sum(answer["usage"]["prompt_tokens"] for answer in answers.values())
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (used, 0)


DOCUMENTS = [["a cat sleeps", "json.dumps writes text"], ["x"], ["Zürich", "word " * 40, "a cat sleeps"]]


def run(directory: Path, engine: Any, columns: dict[str, Any], **job: Any) -> Any:
    pq.write_table(pa.table(columns), directory / "rows.parquet")
    whole = {"input": {"path": str(directory / "rows.parquet")}, "output": {"path": str(directory / "run")}}
    report = batchrunner.run({**whole, **job}, engine=engine)
    assert (report.exit_code, report.rows_failed) == (0, 0)
    return pq.read_table(directory / "run" / "parts").sort_by("row")


def made(directory: Path, model: Any, tokenizer_from: Path) -> Path:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


@pytest.mark.long
def test_cross_encoder(tmp_path: Path) -> None:
    """A random BERT with one number: the scores of pairs are its logits."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, num_labels=1, initializer_range=0.3, position_embedding_type="absolute",
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    spec = {"kind": "server", "model": str(made(tmp_path / "model", model, MODEL)), "device": "cpu"}
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


@pytest.mark.long
def test_classifier(tmp_path: Path) -> None:
    """A random Llama with three classes: scores are its logits, and labels the names of its config."""
    require_engine("sglang")
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    names = {0: "bad", 1: "fair", 2: "good"}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, initializer_range=0.2, id2label=names,
        label2id={name: number for number, name in names.items()},
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    spec = {"kind": "server", "model": str(made(tmp_path / "model", model, SMALL_MODEL)), "device": "cpu"}
    texts = [f"{'word ' * (5 * n)}text {n}" for n in range(8)]
    with batchrunner.open_engine(spec, log_dir=tmp_path, task="classify") as engine:
        found = run(tmp_path, engine, {"text": texts}, task="classify", prompt={"text": "text"})
    with torch.no_grad():
        wanted = [model(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in texts]
    np.testing.assert_allclose(found["scores"].to_pylist(), wanted, rtol=1e-3, atol=1e-3)
    assert found["label"].to_pylist() == [names[int(np.argmax(logits))] for logits in wanted]
