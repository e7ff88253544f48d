"""`batchrun status` tells how far a run is, from its files."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.output import liveness
from batchrunner.output.events import read_events
from batchrunner.output.holder import this_process
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.status import status
from tests.conftest import (
    batchrun,
    eventually,
    job_of,
    started,
    write_job,
)
from tests.support.runs import status_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


def test_an_old_sample_is_not_shown(tmp_path: Path) -> None:
    """While a later start loads its engine nothing is said of a speed that was yesterday's."""
    batchrunner.run(job_of(tmp_path))
    run_dir = RunDir(tmp_path / "run")
    with hold_task(run_dir):
        assert status(run_dir.path)["tasks"][0]["last_sample"]["rows_done"] == 10
        events = [{**event, "time": event["time"] - 86400} for event in read_events(run_dir.events)]
        run_dir.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        state = status(run_dir.path)
    assert (state["tasks"][0]["last_sample"], state["rows_per_s"]) == (None, 0)
    assert state["running"]


@pytest.mark.parametrize(("off_s", "beats"), [(-3600, True), (3600, False)])
def test_another_machine_with_another_clock(
    tmp_path: Path, off_s: int, beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat tells whether it runs, not the time in its log; the page says the same."""
    run = tmp_path / "run"
    batchrunner.run(job_of(tmp_path))
    events = [{**event, "time": event["time"] + off_s} for event in read_events(run / "events.jsonl")]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    held_by = asdict(replace(this_process(), host="elsewhere", pid=7))
    task = RunDir(run).task_directory
    task.mkdir(parents=True, exist_ok=True)
    (task / "owner").write_text(json.dumps(held_by))
    (task / "heartbeat").write_text("1")
    clock = SimpleNamespace(time=time.time, sleep=lambda _: beats and (task / "heartbeat").write_text("2"))
    monkeypatch.setattr(liveness, "time", clock)
    running = "batchrun with pid 7 on elsewhere" if beats else None
    assert status(run)["running"] == running
    (task / "heartbeat").write_text("1")
    assert batchrun("report", run).exit_code == 0
    assert ("Running: batchrun with pid 7" in (run / "report.html").read_text()) is beats


def test_while_the_engine_starts(tmp_path: Path) -> None:
    """Before the first row `status` says for how long the engine has been starting, also in a later start."""
    job = job_of(tmp_path, rows=20)
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
    late = f"engine={{kind: attach, urls: ['http://127.0.0.1:{silent.getsockname()[1]}']}}"
    file = write_job(job, tmp_path)
    for limit in (10, 20):
        with silent.dup(), started(file, "--set", late, "--set", f"input.limit={limit}") as loading:
            eventually(lambda: any(task["starting"] for task in _tasks(tmp_path / "run")))
            eventually(lambda: "engine" in [_step(task) for task in _tasks(tmp_path / "run")])
            shown = batchrun("status", tmp_path / "run")
            assert shown.exit_code == 0
            assert re.search(r"^engine starting, \d+ s$", shown.stdout, re.MULTILINE)
            assert "running: batchrun with pid" in shown.stdout
            assert not json.loads(batchrun("status", tmp_path / "run", "--json").stdout)["finished"]
            loading.process.kill()
            loading.process.wait()
        assert "not running: run the same command again" in batchrun("status", tmp_path / "run").stdout or (
            limit == 20
        )
        assert not any(task["starting"] for task in _tasks(tmp_path / "run"))
        assert batchrun(file, "--set", f"input.limit={limit}").exit_code == 0
    silent.close()


def _tasks(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = status_of(run).get("tasks", [])
    return found


def _step(task: dict[str, Any]) -> str | None:
    return task["starting"]["what"] if task["starting"] else None


@pytest.mark.parametrize("parts", [0, 1])
def test_merge_of_a_run_at_work(tmp_path: Path, server: FakeSGLang, parts: int) -> None:
    """`merge` says how many rows are in journals and how many are missing, and what to do; exit code 1."""
    server.script = lambda sent: "hold" if int(sent.prompt.split()[1]) >= 30 else "answer"
    part_rows = 20 if parts else 10_000
    job = job_of(tmp_path, server, rows=40, output={"part_rows": part_rows, "durable": 0.1}, window=10)
    file = write_job(job, tmp_path)
    with started(file) as process:
        eventually(lambda: status_of(tmp_path / "run").get("rows_on_disk") == 30)
        merged = batchrun("merge", tmp_path / "run")
        assert merged.exit_code == 1
        if parts:
            assert (
                "merged: 20 of 40 rows, 20 are missing (10 of them are done, in journals of tasks at work): "
                "wait for the run's end, then merge again"
            ) in merged.stderr
        else:
            assert "no part is written yet, 30 rows are in journals: wait for the run's end" in merged.stderr
        process.process.kill()
        process.process.wait()
    merged = batchrun("merge", tmp_path / "run")
    assert merged.exit_code == 1
    assert "merged: 30 of 40 rows, 10 are missing: run the same command again, then merge" in merged.stderr
    server.answer_held()
    assert batchrun(file).exit_code == 0
    assert batchrun("merge", tmp_path / "run").exit_code == 0
