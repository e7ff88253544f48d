"""Tasks without decoding: each row has its own numbers, whatever happens on the way."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import (
    batchrun,
    batchrun_merge,
    job_of,
    parts_of,
    report_of,
    results_of,
    run_job,
    write_job,
)
from tests.support.answers import HEAD, logprob_for, vector_for
from tests.support.blocks import ROOT
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
    run_job(job, directory, *options)


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


SHIPPED = [path for path in sorted((ROOT / "jobs").glob("*.yaml")) if "docs.parquet" in path.read_text()]


@pytest.mark.parametrize("job", SHIPPED, ids=lambda path: path.stem)
def test_the_jobs_that_we_ship(tmp_path: Path, job: Path) -> None:
    """Each does its rows, here on a simulated engine; the neighbours of a vector are shown."""
    titles = ["json (module)", *(f"text {n}" for n in range(1, 8))]
    pq.write_table(pa.table({"id": titles, "title": titles, "text": titles}), tmp_path / "docs.parquet")
    changes = {
        "input.path": tmp_path / "docs.parquet",
        "output.path": tmp_path / "run",
        "prompt.truncate": "null",  # the simulated engine has no tokenizer
        "engine": "{kind: simulated, step_s: 0, dimensions: 16}",
    }
    done = batchrun(job, "--json", *(f"--set={name}={value}" for name, value in changes.items()))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rows_ok"] == 8
    if job.stem == "embed":
        command = [sys.executable, str(ROOT / "jobs" / "show_nearest.py"), str(tmp_path / "run")]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "8 vectors of 16 numbers" in shown
        assert "nearest to json (module):" in shown
