"""Jobs with `task: score`, of labels and choices, `rerank`, `reward` and `classify`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    job_of,
    results_of,
    run_job,
    write_job,
    write_rows,
)
from tests.support.answers import HEAD, logprob_for
from tests.support.fake_sglang import FakeSGLang

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
    run_job(plain, tmp_path)
    whole = scores_of(plain)
    job = ids_job(tmp_path, scorer, rows=6, output={"path": str(tmp_path / "among"), "softmax": True})
    run_job(job, tmp_path)
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


def test_odd_probabilities(tmp_path: Path, scorer: FakeSGLang) -> None:
    """A row without a number fails alone; nothing is lost."""
    odd = str([9, 10, 7])
    scorer.logprob = lambda prompt, token: None if prompt == odd else logprob_for(prompt, token)
    limits = {"max_failed_rows": 1, "max_attempts": 1}
    job = ids_job(tmp_path, scorer, limits=limits)
    run_job(job, tmp_path)
    assert scores_of(job).count(None) == 1
    assert "the probability of a label is not a number" in results_of(job)[9]["error"]


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
    run_job(job, tmp_path)
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
    run_job(job, tmp_path)
    errors = [row["error"] for row in results_of(job)]
    assert errors[0] is None
    assert errors[1:4] == ["prompt.documents: column 'documents' is null or empty, or has such an item"] * 3
    assert errors[4]


def test_rewards(tmp_path: Path, reranker: FakeSGLang) -> None:
    """One number a row; a model with several classes fails them."""
    reranker.classes = 1
    job = job_of(tmp_path, reranker, task="reward", rows=4)
    run_job(job, tmp_path)
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
    run_job(job, tmp_path)
    for row in results_of(job):
        assert row["label"] == f"LABEL_{row['scores'].index(max(row['scores']))}"
        assert (sum(row["scores"]) == pytest.approx(1)) == softmax


def test_the_function_rerank(reranker: FakeSGLang) -> None:
    """The library scores the documents of each row."""
    rows = [{"query": "q0", "documents": ["a", "b"]}]
    table = batchrunner.rerank(rows, prompt="{{ query }}", documents="documents", engine=reranker.url)
    assert table.column("scores").to_pylist() == [pytest.approx([pair("q0", "a"), pair("q0", "b")])]


CHOICES = [" Rome", " Paris, I think", " é"]
BEGIN, MERGED = 1, 900
"""The token that begins a prompt, and the one of `xy`."""


def tokens_in(text: str) -> list[int]:
    """Return the tokens of a text: the first one, one for `xy`, and one for each other character."""
    return [BEGIN, *(MERGED if part == "\0" else ord(part) for part in text.replace("xy", "\0"))]


def likelihood(text: str, begin: int) -> float:
    """Return the log likelihood of the tokens of a text from one on."""
    ids = tokens_in(text)
    return sum(logprob_for(str(ids[:at]), ids[at]) for at in range(begin, len(ids)))


@pytest.fixture
def chooser() -> Iterator[FakeSGLang]:
    """A server of a model that generates texts, which tells the tokens of them."""
    with FakeSGLang(tokenize=lambda body: tokens_in(body["prompt"])) as fake:
        yield fake


def choice_job(directory: Path, engine: Any, texts: list[str], choices: Any = None, **changes: Any) -> Any:
    """A job with these prompts; `choices` is a list for each row, or None for CHOICES in the job."""
    columns: dict[str, Any] = {"id": [*range(len(texts))], "text": texts}
    if choices is not None:
        columns["mine"] = pa.array(choices, pa.list_(pa.string()))
    pq.write_table(pa.table(columns), directory / "input.parquet")
    prompt = {"text": "{{ text }}", "choices": CHOICES if choices is None else "mine"}
    return job_of(directory, engine, **{"task": "score", "prompt": prompt, **changes})


@pytest.mark.usefixtures("full_requests")
def test_likelihoods_of_choices(tmp_path: Path, chooser: FakeSGLang) -> None:
    """Sums, and sums by token and by byte; the prompt goes first with one choice, then with the others."""
    job = choice_job(tmp_path, chooser, ["The capital is", "Where?"])
    run_job(job, tmp_path)
    for row, text in zip(results_of(job), ["The capital is", "Where?"], strict=True):
        sums = [likelihood(text + choice, len(text) + 1) for choice in CHOICES]
        assert row["scores"] == pytest.approx(sums)
        assert row["scores_per_token"] == pytest.approx(
            [total / len(choice) for total, choice in zip(sums, CHOICES, strict=True)]
        )
        assert row["scores_per_byte"] == pytest.approx(
            [total / len(choice.encode()) for total, choice in zip(sums, CHOICES, strict=True)]
        )
        assert row["prompt_tokens"] == sum(len(text) + 1 + len(choice) for choice in CHOICES)
    assert chooser.requests == 4
    for text in ("The capital is", "Where?"):
        first, *others = (
            sent for sent in chooser.sent if sent.prompt.startswith(str(tokens_in(text))[:-1] + ",")
        )
        assert first.together == 1
        assert first.body["input_ids"] == tokens_in(text + CHOICES[0])
        assert [sent.together for sent in others] == [2, 2]
        assert {sent.body["logprob_start_len"] for sent in (first, *others)} == {len(text)}


def test_a_token_across_the_boundary(tmp_path: Path, chooser: FakeSGLang) -> None:
    """Where the prompt's end and a choice's beginning are one token, all choices begin before it."""
    job = choice_job(tmp_path, chooser, ["say x"], [["y", "z"]])
    run_job(job, tmp_path)
    (row,) = results_of(job)
    assert row["scores"] == pytest.approx([likelihood("say xy", 5), likelihood("say xz", 5)])
    assert [total / count for total, count in zip(row["scores"], [1, 2], strict=True)] == pytest.approx(
        row["scores_per_token"]
    )


def test_lists_of_rows_and_bad_ones(tmp_path: Path, chooser: FakeSGLang) -> None:
    """Each row has choices of its own; bad lists fail their rows with the reason."""
    lists = [[" a"], [" a", " b"], [], None, ["", " a"], [None], [" a", " b", " c"]]
    limits = {"max_failed_rows": "100%", "abort_failed_share": 1}
    job = choice_job(tmp_path, chooser, [f"row {n}" for n in range(7)], lists, limits=limits)
    run_job(job, tmp_path)
    rows = results_of(job)
    why = "prompt.choices: column 'mine' is null or empty, or has such an item"
    assert {row["row"]: row["error"] for row in rows if row["error"]} == dict.fromkeys(range(2, 6), why)
    assert [row["scores"] and len(row["scores"]) for row in rows] == [1, 2, None, None, None, None, 3]


@pytest.mark.usefixtures("full_requests")
def test_choices_of_several_rows_share_requests(tmp_path: Path, chooser: FakeSGLang) -> None:
    """The choices of several rows go in one list; a bad one, or one without a number, fails its row alone."""
    texts = [f"{chr(97 + n)}" for n in range(24)]
    expected = [[likelihood(text + choice, 2) for choice in CHOICES] for text in texts]
    chooser.script = lambda sent: "too long" if sent.prompt == str(tokens_in("b Rome")) else "answer"
    chooser.logprob = lambda prompt, token: (
        None if prompt == str(tokens_in("c R")) else logprob_for(prompt, token)
    )
    limits = {"max_failed_rows": 2, "abort_failed_share": 1, "max_attempts": 1}
    job = choice_job(tmp_path, chooser, texts, limits=limits, bundle=8, window=24)
    run_job(job, tmp_path)
    rows = results_of(job)
    assert [row["row"] for row in rows if row["error"]] == [1, 2]
    assert "longer than the model's context length" in rows[1]["error"]
    assert "the log likelihood of a choice is not a number" in rows[2]["error"]
    for row, scores in zip(rows, expected, strict=True):
        assert row["error"] or row["scores"] == pytest.approx(scores)
    assert max(sent.together for sent in chooser.sent) > len(CHOICES)
