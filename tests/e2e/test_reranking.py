"""Jobs with `task: rerank`, `reward` and `classify`, on the server that stands in for SGLang."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import INSTANT, batchrun, batchrun_merge, job_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.scores import logprob_for

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = {"is_generation": False, "architectures": ["BertForSequenceClassification"]}
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


def test_documents_of_queries(tmp_path: Path, reranker: FakeSGLang) -> None:
    """Each document has its score, in the order of the documents; tokens are those of all pairs."""
    job = rerank_job(tmp_path, reranker)
    result = run(job, tmp_path)
    assert result.exit_code == 0, result.stderr
    rows = results_of(job)
    for number, documents in enumerate(DOCUMENTS):
        assert rows[number]["scores"] == pytest.approx([pair(f"q{number}", each) for each in documents])
        assert rows[number]["prompt_tokens"] == 5 * len(documents)


@pytest.mark.usefixtures("full_requests")
def test_rows_with_several_documents_share_requests(tmp_path: Path, reranker: FakeSGLang) -> None:
    """Lists of different lengths are one request, and each row has its own numbers."""
    documents = [[f"d{n} {at}" for at in range(1 + n % 3)] for n in range(24)]
    job = rerank_job(tmp_path, reranker, documents, bundle=8, window=24)
    assert run(job, tmp_path).exit_code == 0
    for n, (row, mine) in enumerate(zip(results_of(job), documents, strict=True)):
        assert row["scores"] == pytest.approx([pair(f"q{n}", each) for each in mine])
        assert row["prompt_tokens"] == 5 * len(mine)
    assert reranker.requests < 24


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


@pytest.mark.parametrize("task", ["rerank", "reward", "classify"])
def test_a_model_without_a_head(tmp_path: Path, task: str) -> None:
    """One line before anything is sent, for a model that generates, and for one that embeds."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"is_generation": True}, "which generates text: start it with"),
        ({"is_generation": False, "architectures": ["BertModel"]}, "BertModel has no head for task"),
    ]
    for arguments, message in cases:
        with FakeSGLang(arguments=arguments) as fake:
            job = rerank_job(tmp_path, fake, task=task)
            if task != "rerank":
                del job["prompt"]["documents"]
            result = run(job, tmp_path)
        assert result.exit_code == 2
        assert message in result.stderr
        assert fake.requests == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"text": "query"}}, "task: rerank: prompt.documents is missing"),
        (
            {"prompt": {"text": "query", "documents": "query", "truncate": "tail"}},
            "prompt.truncate: does",
        ),
        ({"tokenize": "client"}, "tokenize: does not go with task: rerank"),
        ({"task": "embed"}, "prompt.documents: goes with task: rerank"),
        ({"labels": ["a"]}, "labels: goes with task: score"),
    ],
)
def test_jobs_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Each is refused by name, in one line."""
    job = {**rerank_job(tmp_path, INSTANT), **changes}
    result = batchrun("check", write_job(job, tmp_path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_documents_of_a_wrong_type(tmp_path: Path) -> None:
    """The line names both types that a column may have."""
    job = rerank_job(tmp_path, INSTANT)
    pq.write_table(pa.table({"query": ["q"], "documents": [1.5]}), tmp_path / "input.parquet")
    told = batchrun("check", write_job(job, tmp_path)).stderr
    assert "column 'documents' must hold texts or lists of texts (got double)" in told


def test_resumed_joined_merged(tmp_path: Path) -> None:
    """The simulated engine: resume, join, merge and export hold for the lists."""
    job = rerank_job(tmp_path, INSTANT, DOCUMENTS * 4, input={"limit": 5})
    assert run(job, tmp_path, "--join").exit_code == 0
    job["input"]["limit"] = 12
    assert run(job, tmp_path, "--join").exit_code == 0
    rows = results_of(job)
    assert [len(row["scores"]) for row in rows] == [len(each) for each in DOCUMENTS * 4]
    merged = pq.read_table(batchrun_merge(Path(job["output"]["path"])))
    assert merged.column("scores").to_pylist() == [row["scores"] for row in rows]
    assert batchrun("merge", job["output"]["path"], tmp_path / "out.jsonl").exit_code == 0


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
