"""Embeddings of the real SGLang on the CPU: all-MiniLM-L6-v2, beside what transformers computes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import ROOT, require_modules, skip_without

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    import torch  # noqa: PLC0415 - only where there is an engine
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

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


@pytest.mark.usefixtures("full_requests")
def test_lists_make_the_same_vectors(minilm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """The job that we ship, in lists of 8 and in 16 bits; and its nearest neighbours."""
    overrides = [f"output.path={tmp_path / 'run'}", "input.limit=24", "bundle=8", "output.dtype=float16"]
    overrides += [f"input.path={ROOT / 'data' / 'docs.parquet'}"]
    report = batchrunner.run(ROOT / "jobs" / "embed.yaml", engine=minilm, overrides=overrides)
    assert (report.exit_code, report.rows_ok) == (0, 24)
    assert report.bundles["most_rows"] > 1
    table = pq.read_table(tmp_path / "run" / "parts").sort_by("row")
    docs = pq.read_table(ROOT / "data" / "docs.parquet")
    assert "json (module)" in docs.column("title").to_pylist()[:2000]
    texts = docs.column("text").to_pylist()[:24]
    short = [n for n, count in enumerate(table.column("prompt_tokens").to_pylist()) if count < 400]
    assert len(short) > 10
    products = (matrix_of(table)[short].astype(np.float32) * mean_pooling([texts[n] for n in short])).sum(
        axis=1
    )
    assert (products >= 0.999).all()
    title = table.column("title")[5].as_py()
    shown = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "show_nearest.py"), str(tmp_path / "run"), title],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "24 vectors of 384 numbers" in shown
    assert f"nearest to {title}:" in shown
