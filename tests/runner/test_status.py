"""`batchrun status` tells how far a run is, from its files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import batchrunner
from batchrunner.output.events import read_events
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.status import status
from tests.conftest import (
    batchrun,
    eventually,
    job_of,
    parts_of,
    results_of,
    started,
    write_job,
)

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


def test_parts_can_be_read_at_any_moment(tmp_path: Path, server: FakeSGLang) -> None:
    """A reader that looks into a running run finds whole parts, and `status` tells how far it is."""
    server.script = lambda sent: "hold" if int(sent.prompt.split()[1]) >= 10 else "answer"
    job = job_of(tmp_path, server, rows=12, output={"part_rows": 5}, window=4)
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(12)
        eventually(lambda: len(parts_of(tmp_path / "run")) == 2)
        assert sorted(row["row"] for row in results_of(job)) == list(range(10))
        state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
        assert str(process.process.pid) in state["running"]
        assert (state["rows_on_disk"], state["rows_total"], state["finished"]) == (10, 12, False)
        server.answer_held()
        assert process.end() == 0
    state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
    assert (state["rows_on_disk"], state["running"], state["finished"]) == (12, None, True)
