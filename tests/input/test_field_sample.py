"""The first start of a run decides the order of its fields, and the run keeps it."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.input import field_sample
from tests.conftest import batchrun, eventually, job_of, results_of, started, write_job
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, rows: int, *, first: int = 0, groups: int = 4, swap: bool = False) -> None:
    """Write rows with a key, a kind of few values and a plot of each kind; `swap` makes the key the kind."""
    numbers = range(first, first + rows)
    few, many = [n % groups for n in numbers], list(numbers)
    key, kind = (few, many) if swap else (many, few)
    plot = [f"A long plot of number {value}, told at length. " * 3 for value in kind]
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"key": key, "kind": kind, "plot": plot}), path, row_group_size=50)


def a_job(directory: Path, server: FakeSGLang, **changes: Any) -> dict[str, Any]:
    prompt = {"text": "{{ fields }}", "fields": {"columns": ["key", "plot", "kind"]}}
    return job_of(
        directory, server, **{"input": {"path": str(directory / "in")}, "prompt": prompt, **changes}
    )


def orders(server: FakeSGLang) -> set[str]:
    """Return the orders of the columns in the prompts that were sent."""
    return {",".join(line.split(":")[0] for line in sent.prompt.split("\n")) for sent in server.sent}


def test_what_rows_share_comes_first(tmp_path: Path, server: FakeSGLang) -> None:
    """The key goes last, in every prompt; the log says what that saves, and run.json has the order."""
    write(tmp_path / "in" / "a.parquet", 200)
    ran = batchrun(write_job(a_job(tmp_path, server), tmp_path))
    assert ran.exit_code == 0, ran.stderr
    assert orders(server) == {"plot,kind,key"}
    assert "prompt.fields: plot, kind, key (9" in ran.stderr
    assert "of their bytes can come from the cache; as written 0%; from 200 rows)" in ran.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["job"]["prompt"]["fields"]["columns"] == ["plot", "kind", "key"]


def test_a_resumed_run_keeps_its_order(tmp_path: Path, server: FakeSGLang) -> None:
    """Added files may have made another order the best: prompts of one run are of one form all the same."""
    write(tmp_path / "in" / "a.parquet", 100)
    job = a_job(tmp_path, server, input={"path": str(tmp_path / "in"), "limit": 50})
    batchrunner.run(job)
    write(tmp_path / "in" / "b.parquet", 3000, first=100, swap=True)
    del job["input"]["limit"]
    batchrunner.run(job)
    assert orders(server) == {"plot,kind,key"}
    job["prompt"]["fields"]["columns"] = ["kind", "key", "plot"]  # the same columns, written otherwise
    write(tmp_path / "in" / "c.parquet", 5, first=9000)
    batchrunner.run(job)
    assert orders(server) == {"plot,kind,key"}
    assert len(results_of(job)) == 3105
    refused = batchrun(
        write_job({**job, "prompt": {**job["prompt"], "fields": {"columns": ["kind"]}}}, tmp_path)
    )
    assert refused.exit_code == 2
    assert "holds another run: prompt.fields was" in refused.stderr
    server.sent.clear()
    batchrunner.run(job, fresh=True)
    assert orders(server) == {"key,plot,kind"} or orders(server) == {"key,kind,plot"}


def test_tasks_keep_the_order_of_their_plan(tmp_path: Path, server: FakeSGLang) -> None:
    """The first task planned and died before it sent a row: a later one finds more files, and keeps it."""
    write(tmp_path / "in" / "a.parquet", 100)
    file = write_job(a_job(tmp_path, server), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        url = f"engine={{kind: attach, urls: ['http://127.0.0.1:{silent.getsockname()[1]}']}}"
        with started(file, "--join", "--set", url) as first:
            eventually(lambda: [*(tmp_path / "run" / "leases").glob("plan-*")])
            first.process.kill()
            first.process.wait()
    assert not (tmp_path / "run" / "run.json").exists()
    write(tmp_path / "in" / "b.parquet", 3000, first=100, swap=True)
    assert batchrun(file, "--join").exit_code == 0
    assert orders(server) == {"plot,kind,key"}


def test_as_written(tmp_path: Path, server: FakeSGLang) -> None:
    """`order: written` leaves the order to the job, and reads no sample."""
    write(tmp_path / "in" / "a.parquet", 30)
    job = a_job(tmp_path, server)
    job["prompt"]["fields"]["order"] = "written"
    batchrunner.run(job)
    assert orders(server) == {"key,plot,kind"}


@pytest.mark.parametrize(("selected", "order"), [("key < 100", "plot,kind,key"), ("key >= 100", "key,")])
def test_only_selected_rows_count(selected: str, order: str, tmp_path: Path, server: FakeSGLang) -> None:
    """What the filter leaves out has no say."""
    write(tmp_path / "in" / "a.parquet", 100)
    numbers = range(100, 200)
    table = {"key": [100] * 100, "kind": [*numbers], "plot": [f"{n} is told" for n in numbers]}
    pq.write_table(pa.table(table), tmp_path / "in" / "b.parquet")
    job = a_job(tmp_path, server, input={"path": str(tmp_path / "in"), "filter": selected})
    batchrunner.run(job)
    assert all(found.startswith(order) for found in orders(server))


def test_a_sample_of_a_large_input(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken from all over the input: the first rows, which are alike here, do not decide alone."""
    monkeypatch.setattr(field_sample, "SAMPLED_ROWS", 80)
    pq.write_table(
        pa.table({"key": [7] * 2000 + [*range(8000)], "kind": [n % 3 for n in range(10_000)],
                  "plot": [f"plot {n % 3} " * 9 for n in range(10_000)]}),
        tmp_path / "input.parquet", row_group_size=500,
    )  # fmt: skip
    job = a_job(tmp_path, server, input={"path": str(tmp_path / "input.parquet"), "filter": "key < 9"})
    checked = batchrun("check", write_job(job, tmp_path), "--json")
    assert checked.exit_code == 0, checked.stderr
    job["input"]["filter"] = None
    shown = json.loads(batchrun("check", write_job(job, tmp_path), "--json").stdout)
    assert shown["prompts"][0]["prompt"].startswith("kind: 0") or shown["prompts"][0]["prompt"].startswith(
        "plot: "
    )
    assert server.sent == []
