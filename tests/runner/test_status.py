"""`batchrun status` tells how far a run is, `batchrun check` what it would do."""

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.output.samples import LoggedSample
from batchrunner.runner.status import TaskStatus, time_left_s
from tests.conftest import (
    batchrun,
    ended,
    eventually,
    job_of,
    printed,
    started,
    write_job,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.runs import status_of


def test_while_the_engine_starts(tmp_path: Path) -> None:
    """Before the first row `status` says for how long the engine has been starting."""
    file, run = write_job(job_of(tmp_path, rows=20), tmp_path), tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        late = f"engine={{kind: attach, urls: ['http://127.0.0.1:{silent.getsockname()[1]}']}}"
        with started(file, "--set", late) as loading:
            eventually(lambda: "engine" in [step.get("what") for step in steps(run)])
            shown = batchrun("status", run)
            assert shown.exit_code == 0
            assert re.search(r"^engine starting, \d+ s$", shown.stdout, re.MULTILINE)
            assert "running: batchrun with pid" in shown.stdout
            assert not status_of(run)["finished"]
            loading.process.kill()
            loading.process.wait()
    assert "not running: run the same command again" in batchrun("status", run).stdout
    assert not any(steps(run))
    assert batchrun(file).exit_code == 0


_FIRST_LOOKS = """
import os, sys
import batchrunner.runner.status
sys.setswitchinterval(1e-6)
codes = set()
for _ in range(40):
    child = os.fork()
    if child == 0:
        state = batchrunner.runner.status.status(sys.argv[1])
        os._exit(state.rows_on_disk != 40)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*codes)
"""
"""Looks at a run in 40 processes that have read no part yet, whose threads take turns all the time."""


def test_the_first_look_of_a_process(tmp_path: Path) -> None:
    """Four threads read parts at once, and each may be the first to read counts; none ends the process."""
    job = job_of(tmp_path, rows=40, output={"part_rows": 2})
    batchrunner.run(job)
    looks = ended(sys.executable, "-c", _FIRST_LOOKS, tmp_path / "run")
    assert looks.stdout.split() == ["0"], looks.stderr


def steps(run: Path) -> list[dict[str, Any]]:
    """Return what each task of a run does before its first row."""
    return [task["starting"] or {} for task in status_of(run).get("tasks", [])]


@pytest.mark.parametrize("parts", [0, 1])
def test_merge_of_a_run_at_work(tmp_path: Path, server: FakeSGLang, parts: int) -> None:
    """`merge` writes what is done, says how many rows are missing, and what to do; exit code 1."""
    missing = (
        "merged: 30 of 40 rows, 10 are missing: wait for workers that still run, or run the same command"
    )
    server.script = lambda sent: "hold" if sent.row >= 30 else "answer"
    part_rows = 20 if parts else 10_000
    job = job_of(tmp_path, server, rows=40, output={"part_rows": part_rows, "durable": 0.1}, window=10)
    file = write_job(job, tmp_path)
    with started(file) as process:
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk") == 30)
        merged = batchrun("merge", tmp_path / "run")
        assert merged.exit_code == 1
        assert missing in merged.stderr
        # A second start of the running run would be refused, so it is only one of two ways.
        assert merged.stderr.count("run the same command") == 1
        assert len(list((tmp_path / "run").glob("parts/*"))) == parts
        process.process.kill()
        process.process.wait()
    merged = batchrun("merge", tmp_path / "run")
    assert merged.exit_code == 1
    assert missing in merged.stderr
    server.answer_held()
    assert batchrun(file).exit_code == 0
    assert batchrun("merge", tmp_path / "run").exit_code == 0


def test_check_sends_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """`check` shows three prompts, what is to do and what is done, and touches neither server nor disk."""
    job = job_of(tmp_path, server, prompt={"user": "Say {{ text }}"}, input={"limit": 5})
    found = printed("check", write_job(job, tmp_path))
    assert (found["rows_total"], found["rows_done"], found["rows_to_do"]) == (5, 0, 5)
    assert [prompt["prompt"][0]["content"] for prompt in found["prompts"]] == [
        f"Say row {i}" for i in range(3)
    ]
    assert server.sent == []
    assert not (tmp_path / "run").exists()
    batchrunner.run(job)
    later = printed("check", write_job(job, tmp_path), "--set", "input.limit=7")
    assert (later["rows_total"], later["rows_done"], later["rows_to_do"]) == (7, 5, 2)


def test_check_counts_what_cannot_be_sent(tmp_path: Path) -> None:
    """Rows behind the shown ones count too: null and empty prompts, and templates that fail."""
    texts = ["a", "b", "c", None, "", "d", None, "e", "f", "g"]
    pq.write_table(pa.table({"text": texts, "n": range(10)}), tmp_path / "input.parquet")
    file = write_job(job_of(tmp_path), tmp_path)
    shown = batchrun("check", file)
    assert shown.exit_code == 0
    assert "3 of the first 10 rows cannot be sent; nothing was sent" in shown.stdout
    assert "cannot be sent: 2 rows: prompt: column 'text' is null (row 3)" in shown.stdout
    assert "cannot be sent: 1 row: prompt: column 'text' is empty (row 4)" in shown.stdout
    found = printed("check", file, "--set", "prompt.text={{ 6 // (n - 5) }}")
    assert (found["rows_looked_at"], found["rows_not_sendable"]) == (10, 1)
    assert found["not_sendable"][0]["example"].startswith("template: ZeroDivisionError: ")
    assert found["prompts"][2]["error"] is None


def test_check_says_what_it_does_not_know(tmp_path: Path) -> None:
    """A model whose files are elsewhere may not exist."""
    file = write_job(job_of(tmp_path), tmp_path)
    for engine, unknown in [
        ("Qwen/Qwen9-99B", "engine.model Qwen/Qwen9-99B: its files"),
        ("http://a:1", "the servers"),
    ]:
        shown = batchrun("check", file, "--set", f"engine={engine}")
        assert shown.exit_code == 0
        assert f"not checked: {unknown}" in shown.stdout
        assert "everything else is fine; nothing was sent" in shown.stdout
    assert "the job is fine; nothing was sent" in batchrun("check", file).stdout


def worker_at_work(name: str, *, done: int, on_disk: int, total: int, left_s: float | None) -> TaskStatus:
    """Return the state of a running worker."""
    usual: dict[str, Any] = dict.fromkeys(LoggedSample.__struct_fields__, 0)
    usual |= {"signals": [], "bands": {}, "task": "generate"}
    del usual["rollouts"], usual["background"]
    sample = LoggedSample(**usual | {"rows_done": done, "rows_total": total, "time_left_s": left_s})
    return TaskStatus(
        task=name,
        running=name,
        rows_on_disk=on_disk,
        rows_failed=0,
        rows_cut=0,
        output_tokens=0,
        starting=None,
        last_sample=sample,
    )


def test_the_time_left_counts_rows_that_are_in_no_part_yet() -> None:
    """Finished rows count, although they come into a part file later; workers' speeds are added up."""
    alone = worker_at_work("main", done=900, on_disk=700, total=1000, left_s=50.0)
    assert time_left_s([alone], missing=300) == 50.0
    # 2 rows/s and 4 rows/s; 1,500 of the 3,000 rows are finished, of which 1,200 are in parts.
    slow = worker_at_work("a", done=500, on_disk=400, total=900, left_s=200.0)
    fast = worker_at_work("b", done=1000, on_disk=800, total=2000, left_s=250.0)
    assert time_left_s([slow, fast], missing=1800) == 250.0
    assert time_left_s([worker_at_work("main", done=5, on_disk=0, total=9, left_s=None)], missing=9) is None
