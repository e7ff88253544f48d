"""Jobs with `task: rerank`, `reward` and `classify`, on the server that stands in for SGLang."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import batchrun, job_of, results_of, write_job
from tests.support.answers import HEAD, logprob_for
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTS = [["a", "b"], ["c"], ["a", "a", "d"]]


@pytest.fixture
def reranker() -> Iterator[FakeSGLang]:
    """A server of a model with a head for scores."""
    with FakeSGLang(arguments=HEAD) as fake:
        yield fake


def rerank_job(directory: Path, engine: Any, documents: Any = DOCUMENTS, **changes: Any) -> dict[str, Any]:
    kind = pa.string() if isinstance(documents[0], str) else pa.list_(pa.string())
    queries = [f"q{n}" for n in range(len(documents))]
    table = pa.table({"query": queries, "documents": pa.array(documents, kind)})
    pq.write_table(table, directory / "input.parquet")
    prompt = {"text": "query", "documents": "documents"}
    return job_of(directory, engine, **{"task": "rerank", "prompt": prompt, **changes})


def run(job: dict[str, Any], directory: Path, *options: str) -> Any:
    return batchrun(write_job(job, directory), *options)


def pair(query: str, document: str) -> float:
    return logprob_for(str([query, document]), 0)


@pytest.mark.usefixtures("full_requests")
def test_pairs_as_rows(tmp_path: Path, reranker: FakeSGLang) -> None:
    """A column of texts has one document a row, and rows go in lists."""
    documents = [f"d{n}" for n in range(24)]
    job = rerank_job(tmp_path, reranker, documents, bundle=8)
    assert run(job, tmp_path).exit_code == 0
    assert [row["scores"] for row in results_of(job)] == [
        [pytest.approx(pair(f"q{n}", each))] for n, each in enumerate(documents)
    ]
    assert reranker.requests < 24


def test_bad_documents_and_scores(tmp_path: Path, reranker: FakeSGLang) -> None:
    """An empty list, a null and a score that is no number fail their rows alone."""
    odd = str(["q4", "n"])
    reranker.logprob = lambda prompt, at: math.nan if prompt == odd else logprob_for(prompt, at)
    limits = {"max_failed_rows": 5, "abort_failed_share": 1, "max_attempts": 1}
    job = rerank_job(tmp_path, reranker, [["a"], [], None, ["", "a"], ["n"]], limits=limits)
    assert run(job, tmp_path).exit_code == 0
    errors = [row["error"] for row in results_of(job)]
    assert errors[0] is None
    assert errors[1:4] == ["prompt.documents: column 'documents' is null or empty, or has such an item"] * 3
    assert errors[4]


def test_rewards(tmp_path: Path, reranker: FakeSGLang) -> None:
    """One number a row; a model with several classes fails them."""
    reranker.classes = 1
    job = job_of(tmp_path, reranker, task="reward", rows=4)
    assert run(job, tmp_path).exit_code == 0
    assert [row["score"] for row in results_of(job)] == [
        pytest.approx(logprob_for(sent, 0)) for sent in sorted(reranker.prompts)
    ]
    reranker.classes = 2
    other = {**job, "output": {"path": str(tmp_path / "two")}, "limits": {"max_failed_rows": 4}}
    run(other, tmp_path)
    assert {row["error"] for row in results_of(other)} == {
        "the model gives 2 numbers, and task: reward takes a single one"
    }


@pytest.mark.parametrize("softmax", [False, True])
def test_classes(tmp_path: Path, reranker: FakeSGLang, softmax: bool) -> None:
    """The scores of all classes, and the name of the highest one."""
    job = job_of(tmp_path, reranker, task="classify", rows=4, output={"softmax": softmax})
    assert run(job, tmp_path).exit_code == 0
    for row in results_of(job):
        assert row["label"] == f"LABEL_{row['scores'].index(max(row['scores']))}"
        assert (sum(row["scores"]) == pytest.approx(1)) == softmax


def test_the_function_and_the_job(tmp_path: Path, reranker: FakeSGLang) -> None:
    """The library, and the job that we ship."""
    rows = [{"query": "q0", "documents": ["a", "b"]}]
    table = batchrunner.rerank(rows, prompt="{{ query }}", documents="documents", engine=reranker.url)
    assert table.column("scores").to_pylist() == [pytest.approx([pair("q0", "a"), pair("q0", "b")])]
    overrides = [f"output.path={tmp_path / 'run'}", "input.limit=6"]
    root = Path(__file__).parents[2]
    texts = [f"text {n}" for n in range(6)]
    pq.write_table(pa.table({"id": texts, "title": texts, "text": texts}), tmp_path / "docs.parquet")
    overrides.append(f"input.path={tmp_path / 'docs.parquet'}")
    with batchrunner.open_engine(reranker.url, task="rerank") as engine:
        report = batchrunner.run(root / "jobs" / "rerank.yaml", engine=engine, overrides=overrides)
    assert (report.exit_code, report.rows_ok) == (0, 6)
