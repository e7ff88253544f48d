"""Tasks without decoding: each row has its own numbers, whatever happens on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import batchrun, batchrun_merge, job_of, parts_of, report_of, results_of, write_job
from tests.support.answers import HEAD, logprob_for, vector_for
from tests.support.fake_sglang import FakeSGLang

ROWS = 24
LABELS = [12, 3, 11]


class Kind(NamedTuple):
    """A task: its job and input, what its server gets first of a row, and what the row has in the end."""

    fields: dict[str, Any]
    input: Callable[[int], dict[str, Any]]
    sent: Callable[[int], str]
    column: str
    value: Callable[[int], Any]
    arguments: dict[str, Any]


def ids(row: int) -> list[int]:
    return [row, row + 1, 7]


def documents(row: int) -> list[str]:
    return [f"d{row} {number}" for number in range(1 + row % 3)]


KINDS = {
    "embed": Kind(
        {"prompt": {"input_ids": "ids"}},
        lambda row: {"ids": ids(row)},
        lambda row: str(ids(row)),
        "embedding",
        lambda row: vector_for(str(ids(row))),
        {"is_generation": False},
    ),
    "score": Kind(
        {"prompt": {"input_ids": "ids"}, "labels": LABELS},
        lambda row: {"ids": ids(row)},
        lambda row: str(ids(row)),
        "scores",
        lambda row: pytest.approx([math.exp(logprob_for(str(ids(row)), label)) for label in LABELS]),
        {},
    ),
    "rerank": Kind(
        {"prompt": {"text": "query", "documents": "documents"}},
        lambda row: {"query": f"q{row}", "documents": documents(row)},
        lambda row: str([f"q{row}", f"d{row} 0"]),
        "scores",
        lambda row: pytest.approx([logprob_for(str([f"q{row}", each]), 0) for each in documents(row)]),
        HEAD,
    ),
}


def job_for(task: str, directory: Path, server: Any, **changes: Any) -> dict[str, Any]:
    rows = [{"id": row, **KINDS[task].input(row)} for row in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "input.parquet")
    more = {"task": task, "bundle": 8, "window": ROWS, **KINDS[task].fields, **changes}
    return job_of(directory, server, **more)


def run(job: dict[str, Any], directory: Path, *options: str) -> None:
    result = batchrun(write_job(job, directory), *options)
    assert result.exit_code == 0, result.stderr


@pytest.mark.usefixtures("full_requests")
@pytest.mark.parametrize("task", KINDS)
def test_rows_share_requests(tmp_path: Path, task: str) -> None:
    """Each has its own values all the same, and the columns of its task only."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        job = job_for(task, tmp_path, server, input={"columns": ["id"]})
        run(job, tmp_path)
        assert server.requests < ROWS
    rows = results_of(job)
    assert [row[kind.column] for row in rows] == [kind.value(row) for row in range(ROWS)]
    assert {row["attempts"] for row in rows} == {1}
    assert parts_of(job["output"]["path"])[0].schema.names == [
        *("row", "id", "prompt_tokens", "cached_tokens", "latency_s", "attempts", "error", kind.column),
    ]
    assert report_of(job)["bundles"]["most_rows"] > 1


@pytest.mark.parametrize("task", KINDS)
def test_a_bad_row_of_a_list_fails_alone(tmp_path: Path, task: str) -> None:
    """The server refuses a list for one row: that row fails, and the others have had one try."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        server.script = lambda sent: "too long" if sent.prompt == kind.sent(5) else "answer"
        job = job_for(task, tmp_path, server, limits={"max_failed_rows": 1})
        run(job, tmp_path)
    rows = results_of(job)
    assert [row["row"] for row in rows if row["error"]] == [5]
    assert "longer than the model's context length" in rows[5]["error"]
    assert [row[kind.column] for row in rows] == [None if n == 5 else kind.value(n) for n in range(ROWS)]
    assert {row["attempts"] for row in rows} == {1}


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(
    ("task", "what"),
    [
        ("embed", "disconnect"), ("score", "busy 503"), ("rerank", "broken 500"),
        ("embed", "not json"), ("score", "no answer"),
    ],
)  # fmt: skip
def test_odd_ends_of_lists(tmp_path: Path, task: str, what: Any) -> None:
    """What goes wrong once with each row's first try is tried again."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        server.script = lambda sent: what if sent.tries == 1 else "answer"
        job = job_for(task, tmp_path, server)
        run(job, tmp_path)
    assert [row[kind.column] for row in results_of(job)] == [kind.value(row) for row in range(ROWS)]


@pytest.mark.parametrize("task", KINDS)
def test_resumed_joined_merged(tmp_path: Path, task: str) -> None:
    """The next start does only what is left; tasks join; files of all formats have the lists."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        job = job_for(task, tmp_path, server, input={"limit": 10}, output={"part_rows": 4})
        run(job, tmp_path, "--join")
        assert not set(server.prompts) & {kind.sent(row) for row in range(10, ROWS)}
        server.forget()
        job["input"]["limit"] = ROWS
        run(job, tmp_path, "--join")
        assert not set(server.prompts) & {kind.sent(row) for row in range(10)}
    found = [row[kind.column] for row in results_of(job)]
    assert found == [kind.value(row) for row in range(ROWS)]
    merged = pq.read_table(batchrun_merge(Path(job["output"]["path"])))
    assert merged.column(kind.column).to_pylist() == found
    for ending in ("jsonl", "csv", "arrow"):
        assert batchrun("merge", job["output"]["path"], tmp_path / f"out.{ending}").exit_code == 0
    with pa.ipc.open_file(tmp_path / "out.arrow") as arrow:
        assert arrow.read_all().column(kind.column).to_pylist() == found
    assert str(found[0][0]) in (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("embed", {}, "serves fake/model, which generates text: start it with"),
        ("generate", {"is_generation": False}, "serves fake/model, which does not generate text"),
        ("score", {"is_generation": False}, "serves fake/model, which does not generate text"),
        ("rerank", {}, "which generates text: start it with"),
        (
            "rerank",
            {"is_generation": False, "architectures": ["BertModel"]},
            "BertModel has no head for task",
        ),
    ],
)
def test_a_model_for_another_task(tmp_path: Path, task: str, arguments: dict[str, Any], message: str) -> None:
    """One line before anything is sent."""
    with FakeSGLang(arguments=arguments) as fake:
        job = job_for(task, tmp_path, fake) if task in KINDS else job_of(tmp_path, fake, task=task)
        result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert fake.requests == 0


LABELLED = {"task": "score", "labels": [" yes"], "prompt": {"text": "text"}}
CHOSEN = {"task": "score", "prompt": {"text": "text", "choices": ["a", "b"]}}
RERANKED = {"task": "rerank", "prompt": {"text": "text", "documents": "text"}}
EMBEDDED = {"task": "embed", "prompt": {"text": "text"}}


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (EMBEDDED, {"sampling": {"n": 2}}, "sampling.n: does not go with task: embed"),
        (EMBEDDED, {"output": {"columns": ["logprobs"]}}, "output.columns: does not go with task: embed"),
        (EMBEDDED, {"prompt": {"user": "x"}}, "prompt.user: does not go with task: embed"),
        (EMBEDDED, {"task": "generate", "output": {"dtype": "float16"}}, "goes with task: embed"),
        (
            EMBEDDED,
            {"input": {"columns": ["text"], "rename": {"text": "embedding"}}},
            "a column 'embedding' of its own",
        ),
        (LABELLED, {"labels": []}, "labels"),
        (LABELLED, {"task": "generate"}, "labels: goes with task: score"),
        (
            LABELLED,
            {"engine": {"kind": "gateway", "url": "http://gw:1"}},
            "task: score: the gateway does not pass it on",
        ),
        ({**LABELLED, "labels": None}, {}, "task: score: takes either labels"),
        (CHOSEN, {"output": {"softmax": True}}, "output.softmax: does not go with task: score"),
        (RERANKED, {"prompt": {"text": "text"}}, "task: rerank: prompt.documents is missing"),
        (RERANKED, {"prompt": {"text": "text", "documents": "id"}}, "must hold texts or lists of texts"),
        (RERANKED, {"tokenize": "client"}, "tokenize: does not go with task: rerank"),
    ],
)
def test_jobs_that_cannot_be(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """Each field without effect, or that is missing, is told by its name, in one line."""
    job = {**job_of(tmp_path, **{**fields, **{n: v for n, v in changes.items() if n != "engine"}}), **changes}
    job["input"] = {"path": str(tmp_path / "input.parquet"), **changes.get("input", {})}
    job["output"] = {"path": str(tmp_path / "run"), **changes.get("output", {})}
    result = batchrun("check", write_job({n: v for n, v in job.items() if v is not None}, tmp_path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
