"""A row that a replica refuses is asked of another one: so a wrong replica costs no rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from tests.conftest import events_of, job_of, results_of, run_job
from tests.e2e.test_bundles import bundled_job
from tests.e2e.test_embeddings import ids_job
from tests.support.answers import OnWire
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import rows_once

pytestmark = pytest.mark.usefixtures("quick_retries")

ROWS = 200


def says(status: int) -> OnWire:
    """A refusal with a status."""
    return OnWire(f"HTTP/1.1 {status} No\r\nConnection: close\r\nContent-Length: 2\r\n\r\nNo".encode())


@pytest.fixture
def wrong() -> Iterator[FakeSGLang]:
    """A server that refuses everything."""
    with FakeSGLang(lambda _: says(404)) as fake:
        yield fake


def attach(*servers: FakeSGLang) -> dict[str, Any]:
    return {"kind": "attach", "urls": [server.url for server in servers]}


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_replica_that_refuses_everything(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, status: int
) -> None:
    """All rows are answered by the other one, and one line says why."""
    wrong.script, server.delay_s = lambda _: says(status), 0.01
    job = job_of(tmp_path, attach(wrong, server), rows=ROWS)
    result = run_job(job, tmp_path)
    rows_once(job, ROWS)
    (line,) = (line for line in result.stderr.splitlines() if "gets no rows" in line)
    assert f"{wrong.url} gets no rows for 600 s: it refuses what others answer ({status}: No)" in line
    assert events_of(job, "route_out") == ["route_out"]
    assert len(wrong.sent) <= ROWS


@pytest.mark.parametrize("kind", ["bundles", "lists", "groups", "chats"])
def test_other_ways_of_sending(tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, kind: str) -> None:
    """Rows that share a request, or a prefix whose cache the wrong replica would have had."""
    server.delay_s = 0.01
    engine = attach(wrong, server)
    if kind == "bundles":
        job = bundled_job(tmp_path, engine, rows=ROWS)
    elif kind == "lists":
        server.arguments = wrong.arguments = {"is_generation": False}
        job = ids_job(tmp_path, engine, rows=ROWS)
    else:
        texts = [f"{'long beginning ' * 60} {row % 4} {'of a family ' * 60} {row}" for row in range(ROWS)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "input.parquet")
        prompt = {"text": "text"} if kind == "groups" else {"user": "{{ text }}"}
        job = job_of(tmp_path, engine, prompt=prompt, window=16)
    assert batchrunner.run(job).exit_code == 0
    rows_once(job, ROWS)


@pytest.mark.parametrize("bad", [0, 5])
def test_most_replicas_refuse_everything(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, bad: int
) -> None:
    """Their word counts for nothing while another one answers; but its own does."""
    server.delay_s = 0.01
    server.script = lambda sent: (
        "too long" if int(sent.prompt.split()[1]) in range(50, 50 + bad) else "answer"
    )
    with FakeSGLang(wrong.script) as another:
        job = job_of(tmp_path, attach(wrong, another, server), rows=ROWS)
        result = run_job(job, tmp_path, code=3 if bad else 0)
    results = results_of(job)
    assert [row["row"] for row in results if row["error"] is not None] == [*range(50, 50 + bad)]
    assert result.stderr.count("gets no rows") == 2


def test_a_replica_that_turns_wrong_and_right(
    tmp_path: Path, server: FakeSGLang, wrong: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families of rows that it has are no longer its own; after a while it is tried again."""
    monkeypatch.setattr("batchrunner.dispatch.queue.OUT_S", 0.3)
    wrong.script = lambda _: says(404) if 20 <= len(wrong.sent) < 60 else "answer"
    wrong.delay_s = server.delay_s = 0.02
    texts = [f"{'long beginning ' * 60} {row % 4} {'of a family ' * 60} {row}" for row in range(1000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "input.parquet")
    job = job_of(tmp_path, attach(wrong, server), window=16)
    assert batchrunner.run(job).exit_code == 0
    rows_once(job, 1000)
    assert len(wrong.sent) > 70
    assert events_of(job, "route_out")


def test_rows_that_are_bad(tmp_path: Path, server: FakeSGLang) -> None:
    """Two replicas say so: they fail, and no replica is taken out."""
    server.script = lambda sent: "too long" if int(sent.prompt.split()[1]) % 10 == 0 else "answer"
    with FakeSGLang(server.script) as other:
        job = job_of(tmp_path, attach(server, other), rows=ROWS, window=8)
        result = run_job(job, tmp_path, code=3)
    failed = [row for row in results_of(job) if row["error"] is not None]
    assert [row["row"] for row in failed] == list(range(0, ROWS, 10))
    assert {(row["error"][:16], row["attempts"]) for row in failed} == {("400: The input (", 2)}
    assert "gets no rows" not in result.stderr


@pytest.mark.parametrize("fate", ["die", "gateway 504", "too long"])
def test_bad_rows_and_no_other_replica(
    tmp_path: Path, server: FakeSGLang, fate: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word of a replica that answers rows is enough where the other one is away, busy or taken out."""
    monkeypatch.setattr("batchrunner.dispatch.queue.LONGEST_COOLDOWN_S", 0.5)
    monkeypatch.setattr(TIMING, "longest_retry", 0.1)
    server.delay_s = 0.01

    def script(sent: Sent) -> Behaviour:
        return "too long" if sent.prompt in {"row 5", "row 170"} else "answer"

    server.script = script
    with FakeSGLang(lambda _: fate) as other:
        job = job_of(tmp_path, attach(server, other), rows=ROWS, window=8)
        assert batchrunner.run(job).exit_code == 3
    results = results_of(job)
    assert len(results) == ROWS
    assert [row["row"] for row in results if row["error"] is not None] == [5, 170]
    assert results[5]["error"].startswith("400: ")


def test_all_replicas_refuse_all(tmp_path: Path, wrong: FakeSGLang) -> None:
    """Then it is the job that is wrong."""
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(FakeSGLang(wrong.script))
        job = job_of(tmp_path, attach(wrong, other))
        assert batchrunner.run(job).exit_code == 3
    assert {(row["error"], row["attempts"]) for row in results_of(job)} == {("404: No", 2)}
