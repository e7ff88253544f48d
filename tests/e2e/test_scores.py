"""Jobs with `task: score`, `rerank`, `reward` and `classify`, on the server that stands in for SGLang."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    ROOT,
    batchrun,
    job_of,
    results_of,
    write_job,
    write_rows,
)
from tests.support.answers import HEAD, logprob_for
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from collections.abc import Iterator


SCORE: dict[str, Any] = {"task": "score", "labels": [" yes", " no"]}
TOKENS = {" yes": [11], " no": [12], "yes": [11], "perhaps": [7, 8]}
"""Tokens of the labels; others are refused."""
ROWS = 40


def tokens_of(body: dict[str, Any]) -> list[int]:
    assert body["add_special_tokens"] is False
    if body["prompt"] not in TOKENS:
        raise ValueError("not a text")
    return TOKENS[body["prompt"]]


@pytest.fixture
def scorer() -> Iterator[FakeSGLang]:
    """A server of a model that generates texts, which tells its tokens."""
    with FakeSGLang(tokenize=tokens_of) as fake:
        yield fake


def ids_job(directory: Path, engine: Any, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """A job whose prompts are token ids, which go in lists of 8."""
    path = directory / "input.parquet"
    if not path.exists():
        write_rows(path, rows, ids=[[n, n + 1, 7] for n in range(rows)])
    more = {**SCORE, "prompt": {"input_ids": "ids"}, "bundle": 8, "window": 32, **changes}
    return job_of(directory, engine, **more)


def run(job: dict[str, Any], directory: Path, *options: str) -> Any:
    return batchrun(write_job(job, directory), *options)


def scores_of(job: dict[str, Any]) -> list[Any]:
    return [row["scores"] for row in results_of(job)]


def test_softmax(tmp_path: Path, scorer: FakeSGLang) -> None:
    """Among the labels the probabilities have the sum 1, and the same proportions."""
    plain = ids_job(tmp_path, scorer, rows=6)
    assert run(plain, tmp_path).exit_code == 0
    whole = scores_of(plain)
    job = ids_job(tmp_path, scorer, rows=6, output={"path": str(tmp_path / "among"), "softmax": True})
    assert run(job, tmp_path).exit_code == 0
    for found, (yes, no) in zip(scores_of(job), whole, strict=True):
        assert found == pytest.approx([yes / (yes + no), no / (yes + no)])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["perhaps"], "labels: 'perhaps' is 2 tokens of the model (7, 8): a label is a single token"),
        ([" yes", "yes"], "labels: ' yes' and 'yes' are the same token, 11"),
        ([" yes", 11], "labels: ' yes' and 11 are the same token, 11"),
        (["??"], "labels: the engine's tokenizer refuses '??'"),
    ],
)
def test_labels_that_are_no_tokens(
    tmp_path: Path, scorer: FakeSGLang, labels: list[Any], message: str
) -> None:
    """One line before anything is sent."""
    result = run(ids_job(tmp_path, scorer, labels=labels), tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert scorer.requests == 0


def test_a_server_that_does_not_tell_its_tokens(tmp_path: Path, scorer: FakeSGLang) -> None:
    """Then labels are given as ids."""
    scorer.tokenize = None
    result = run(ids_job(tmp_path, scorer), tmp_path)
    assert result.exit_code == 2
    assert "labels: the engine does not tell its tokens" in result.stderr
    assert "give the token ids of the labels" in result.stderr
    assert scorer.requests == 0


def test_bad_rows_and_odd_probabilities(tmp_path: Path, scorer: FakeSGLang) -> None:
    """A row that is refused, and one without a number, fail alone; nothing is lost."""
    bad, odd = str([5, 6, 7]), str([9, 10, 7])
    scorer.script = lambda sent: "too long" if sent.prompt == bad else "answer"
    scorer.logprob = lambda prompt, token: None if prompt == odd else logprob_for(prompt, token)
    limits = {"max_failed_rows": 2, "abort_failed_share": 1, "max_attempts": 1}
    job = ids_job(tmp_path, scorer, limits=limits)
    assert run(job, tmp_path).exit_code == 0
    errors = {row["row"]: row["error"] for row in results_of(job) if row["error"]}
    assert list(errors) == [5, 9]
    assert "longer than the model's context length" in errors[5]
    assert "the probability of a label is not a number" in errors[9]
    assert [row["scores"] for row in results_of(job) if row["row"] in {5, 9}] == [None, None]


def test_the_job_that_we_ship(tmp_path: Path, scorer: FakeSGLang) -> None:
    """Each row has two probabilities, which are 1 together."""
    texts = [f"text {n}" for n in range(6)]
    pq.write_table(pa.table({"id": texts, "title": texts, "text": texts}), tmp_path / "docs.parquet")
    changes = {
        "input.path": tmp_path / "docs.parquet",
        "output.path": tmp_path / "run",
        "engine": f"{{kind: attach, urls: ['{scorer.url}']}}",
    }
    done = batchrun(
        ROOT / "jobs" / "score.yaml", *(f"--set={name}={value}" for name, value in changes.items())
    )
    assert done.exit_code == 0
    for row in results_of({"output": {"path": tmp_path / "run"}}):
        assert row["id"] == row["title"] == texts[row["row"]]
        assert sum(row["scores"]) == pytest.approx(1)


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
    texts = [f"text {n}" for n in range(6)]
    pq.write_table(pa.table({"id": texts, "title": texts, "text": texts}), tmp_path / "docs.parquet")
    overrides.append(f"input.path={tmp_path / 'docs.parquet'}")
    with batchrunner.open_engine(reranker.url, task="rerank") as engine:
        report = batchrunner.run(ROOT / "jobs" / "rerank.yaml", engine=engine, overrides=overrides)
    assert (report.exit_code, report.rows_ok) == (0, 6)
