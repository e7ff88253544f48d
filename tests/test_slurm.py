"""Arrays on a real Slurm: whatever happens to a task, exactly the input's rows come out, once."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tests.conftest import batchrun, job_of, results_of, write_job
from tests.slurm_cluster import SlurmCluster, require_slurm, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slurm

ROWS_PER_S = 100
"""Of a task, at most. A task reads 512 rows ahead: an input has a few times as many, or one takes all."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """One cluster for all of these tests."""
    require_slurm()
    with slurm_cluster() as cluster:
        yield cluster


def job_for(directory: Path, task_s: float) -> dict[str, Any]:
    """Return a job that keeps one task busy for about so long."""
    engine = {"kind": "simulated", "step_s": 8 / 8 / ROWS_PER_S, "max_running": 8}
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    return job_of(directory, engine, rows=round(task_s * ROWS_PER_S), sampling=sampling)


def submit(job: dict[str, Any], directory: Path, *options: object) -> str:
    """Submit a job's array; return its ID."""
    done = batchrun("slurm", write_job(job, directory), "--submit", *options)
    assert done.exit_code == 0, done.stderr
    found = re.search(r"array (\d+) submitted", done.stdout)
    assert found, done.stdout
    return found[1]


def tasks_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of a run, by what `status` says."""
    told = batchrun("status", job["output"]["path"], "--json")
    found: list[dict[str, Any]] = json.loads(told.stdout)["tasks"] if told.exit_code == 0 else []
    return found


def on_disk(job: dict[str, Any]) -> int:
    """Return how many rows are on disk."""
    return sum(task["rows_on_disk"] for task in tasks_of(job))


def at_it(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks that run and have rows on disk."""
    return [task for task in tasks_of(job) if task["running"] and task["rows_on_disk"]]


def log_of(job: dict[str, Any], name: str) -> str:
    """Return a task's log."""
    return Path(f"{job['output']['path']}.slurm", f"{name}.log").read_text()


def check_rows(job: dict[str, Any]) -> None:
    """Exactly the input's rows are there, once, and went well."""
    rows = results_of(job)
    assert [row["row"] for row in rows] == list(range(pq.read_metadata(job["input"]["path"]).num_rows))
    assert not any(row["error"] for row in rows)


def check_merged(job: dict[str, Any]) -> None:
    """So it is, and the job that follows found all of them."""
    check_rows(job)
    rows = len(results_of(job))
    (log,) = Path(f"{job['output']['path']}.slurm").glob("*-merge.log")
    assert f"{rows} of {rows} rows on disk" in log.read_text()
    assert pq.read_table(Path(job["output"]["path"]) / "merged").num_rows == rows


@pytest.mark.parametrize("how", [[], ["--static"]])
def test_an_array_of_four(tmp_path: Path, slurm: SlurmCluster, how: list[str]) -> None:
    """Four tasks on two nodes do the rows together, log beside the run, and a job merges when they end."""
    here = tmp_path / "of four, 100%"
    here.mkdir()
    job = job_for(here, task_s=16)
    array = submit(job, here, "--array", "0-3", *how)
    slurm.wait_until(lambda: not slurm.jobs())
    check_merged(job)
    assert len(tasks_of(job)) == 4
    logs = [log_of(job, f"{array}_{n}") for n in range(4)]
    assert {re.findall(r"^(n[12]) ", log, re.MULTILINE)[0] for log in logs} == {"n1", "n2"}
    assert all(f" {array}_{n}: " in log for n, log in enumerate(logs))


def test_a_task_that_is_requeued(tmp_path: Path, slurm: SlurmCluster) -> None:
    """`scontrol requeue` in mid-run: the task comes back and goes on, and its log says so."""
    job = job_for(tmp_path, task_s=25)
    array = submit(job, tmp_path, "--array", "0-1")
    slurm.wait_until(lambda: len(at_it(job)) == 2)
    slurm.call("scontrol", "requeue", f"{array}_0")
    slurm.wait_until(lambda: not slurm.jobs())
    check_merged(job)
    log = log_of(job, f"{array}_0")
    assert "interrupted: waiting for the rows in flight, for 15 s at most" in log
    assert f"{array}_0 restart 1: " in log


def test_a_time_limit(tmp_path: Path, slurm: SlurmCluster) -> None:
    """A task drains before its time is up and queues itself again, until nothing is left."""
    job = job_for(tmp_path, task_s=35)
    array = submit(job, tmp_path, "--array", "0-0", "--time", "1", "--grace", "50")
    slurm.wait_until(lambda: not slurm.jobs())
    check_merged(job)
    log = log_of(job, f"{array}_0")
    assert "time is nearly up: waiting for the rows in flight, for 30 s at most" in log
    assert f"{array}_0 restart 1: " in log


def test_tasks_that_are_killed(tmp_path: Path, slurm: SlurmCluster) -> None:
    """One is cancelled, one gets a SIGKILL: the third takes over and does the rest."""
    job = job_for(tmp_path, task_s=22)
    array = submit(job, tmp_path, "--array", "0-2")
    slurm.wait_until(lambda: len(at_it(job)) == 3)
    slurm.call("scancel", "--signal=KILL", f"{array}_1")  # which begins with a SIGTERM
    (killed,) = (task for task in at_it(job) if "-t2-" in task["task"])
    os.kill(int(re.findall(r"pid (\d+)", killed["running"])[0]), signal.SIGKILL)
    slurm.wait_until(lambda: not slurm.jobs())
    check_merged(job)
    assert f"took over from {killed['task']}" in log_of(job, f"{array}_0")


def test_a_node_that_is_lost(tmp_path: Path, slurm: SlurmCluster) -> None:
    """slurmd killed: its task goes on while Slurm starts it once more elsewhere; then the node comes back."""
    job = job_for(tmp_path, task_s=90)
    array = submit(job, tmp_path, "--array", "0-1")
    slurm.wait_until(lambda: len(at_it(job)) == 2)
    slurm.kill_node("n1")
    slurm.wait_until(lambda: len(at_it(job)) == 3)
    slurm.start_node("n1")
    slurm.wait_until(lambda: not slurm.jobs())
    slurm.wait_until(lambda: slurm.node_state("n1") == "idle")
    check_merged(job)
    assert " restart 1: " in log_of(job, f"{array}_0") + log_of(job, f"{array}_1")


def test_tasks_that_are_added_late(tmp_path: Path, slurm: SlurmCluster) -> None:
    """The job submitted once more while it runs: the new tasks help, and do no row again."""
    job = job_for(tmp_path, task_s=20)
    submit(job, tmp_path, "--array", "0", "--no-merge")
    slurm.wait_until(lambda: at_it(job))
    submit(job, tmp_path, "--array", "0-1", "--no-merge")
    slurm.wait_until(lambda: not slurm.jobs())
    check_rows(job)
    assert [task["rows_on_disk"] > 0 for task in tasks_of(job)] == [True] * 3
