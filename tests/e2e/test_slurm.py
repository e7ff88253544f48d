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
from tests.support.slurm_cluster import NODES, SlurmCluster, require_slurm, slurm_cluster

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


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """A job with a time limit, which takes a minute: it runs beside the other tests."""
    here = tmp_path_factory.mktemp("limited")
    job = job_for(here, task_s=35)
    return submit(slurm, job, here, "--static", "--array", "0", "--time", "1", "--grace", "50")


def job_for(directory: Path, task_s: float) -> dict[str, Any]:
    """Return a job that keeps one task busy for about so long."""
    engine = {"kind": "simulated", "step_s": 8 / 8 / ROWS_PER_S, "max_running": 8}
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    return job_of(directory, engine, rows=round(task_s * ROWS_PER_S), sampling=sampling)


class Submitted:
    """A job whose array was submitted."""

    def __init__(self, slurm: SlurmCluster, job: dict[str, Any], told: str) -> None:
        self._slurm = slurm
        self.job = job
        self.run = Path(job["output"]["path"])
        self.array, *merge = re.findall(r"(?:array|^job) (\d+)", told, re.MULTILINE)
        self._ids = {self.array, *merge}

    def wait(self) -> None:
        """Wait for the end of its tasks, and of the job that merges."""
        self._slurm.wait_until(lambda: not {job.partition("_")[0] for job in self._slurm.jobs()} & self._ids)

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of the run, by what `status` says."""
        told = batchrun("status", self.run, "--json")
        found: list[dict[str, Any]] = json.loads(told.stdout)["tasks"] if told.exit_code == 0 else []
        return found

    def at_it(self) -> list[dict[str, Any]]:
        """Return those that run and have rows on disk."""
        return [task for task in self.tasks() if task["running"] and task["rows_on_disk"]]

    def log(self, task: int) -> str:
        """Return the log of a task of the array."""
        return Path(f"{self.run}.slurm", f"{self.array}_{task}.log").read_text()

    def check_rows(self) -> None:
        """Exactly the input's rows are there, once, and went well."""
        rows = results_of(self.job)
        there = pq.read_metadata(self.job["input"]["path"]).num_rows
        assert [row["row"] for row in rows] == list(range(there))
        assert not any(row["error"] for row in rows)

    def check_merged(self) -> None:
        """So it is, and the job that follows found and merged all of them."""
        self.check_rows()
        rows = len(results_of(self.job))
        (log,) = Path(f"{self.run}.slurm").glob("*-merge.log")
        assert f"{rows} of {rows} rows on disk" in log.read_text()
        assert pq.read_table(self.run / "merged").num_rows == rows


def submit(slurm: SlurmCluster, job: dict[str, Any], directory: Path, *options: object) -> Submitted:
    """Submit a job's array."""
    done = batchrun("slurm", write_job(job, directory), "--submit", *options)
    assert done.exit_code == 0, done.stderr
    return Submitted(slurm, job, done.stdout)


def test_an_array_of_four(tmp_path: Path, slurm: SlurmCluster) -> None:
    """Four tasks on two nodes, a GPU each, do the rows together; a job merges them when all have ended."""
    here = tmp_path / "of four, 100%"
    here.mkdir()
    gpus = ("--gpus-per-task", "1", "--preamble", 'echo "GPU $CUDA_VISIBLE_DEVICES of $SLURMD_NODENAME"')
    job = submit(slurm, job_for(here, task_s=20), here, "--array", "0-3", *gpus)
    job.wait()
    job.check_merged()
    assert len(job.tasks()) > 1
    logs = [job.log(n) for n in range(4)]
    gpu_of = sorted(log.splitlines()[0] for log in logs)
    assert gpu_of == [f"GPU {n} of {node}" for n in (0, 1) for node in NODES]


def test_a_task_that_is_requeued(tmp_path: Path, slurm: SlurmCluster) -> None:
    """`scontrol requeue` in mid-run: the task comes back and goes on, and its log says so."""
    job = submit(slurm, job_for(tmp_path, task_s=30), tmp_path, "--array", "0-1")
    slurm.wait_until(lambda: len(job.at_it()) == 2)
    slurm.call("scontrol", "requeue", f"{job.array}_0")
    job.wait()
    job.check_merged()
    assert "interrupted: waiting for the rows in flight, for 15 s at most" in job.log(0)
    assert re.search(rf"^n[12] {job.array}_0 restart 1: ", job.log(0), re.MULTILINE)


def test_tasks_that_are_killed(tmp_path: Path, slurm: SlurmCluster) -> None:
    """One is cancelled, one gets a SIGKILL: the others take over and do the rest."""
    job = submit(slurm, job_for(tmp_path, task_s=40), tmp_path, "--array", "0-3")
    slurm.wait_until(lambda: len(job.at_it()) == 4)
    (killed,) = (task for task in job.at_it() if "-t2-" in task["task"])
    slurm.call("scancel", "--signal=KILL", f"{job.array}_1")  # which begins with a SIGTERM
    os.kill(int(re.findall(r"pid (\d+)", killed["running"])[0]), signal.SIGKILL)
    job.wait()
    job.check_merged()
    assert f"took over from {killed['task']}" in job.log(0) + job.log(3)


def test_tasks_that_are_added_late(tmp_path: Path, slurm: SlurmCluster) -> None:
    """The job submitted once more while it runs: the new tasks help, and do no row again."""
    plan = job_for(tmp_path, task_s=30)
    job = submit(slurm, plan, tmp_path, "--array", "0", "--no-merge")
    slurm.wait_until(job.at_it)
    late = submit(slurm, plan, tmp_path, "--array", "0-1", "--no-merge")
    job.wait()
    late.wait()
    job.check_rows()
    assert [task["rows_on_disk"] > 0 for task in job.tasks()] == [True] * 3


def test_a_node_that_is_lost(tmp_path: Path, slurm: SlurmCluster) -> None:
    """slurmd killed: its task goes on while Slurm starts it once more elsewhere; then the node comes back."""
    job = submit(slurm, job_for(tmp_path, task_s=90), tmp_path, "--array", "0-1")
    slurm.wait_until(lambda: len(job.at_it()) == 2)
    slurm.kill_node("n1")
    slurm.wait_until(lambda: len(job.at_it()) == 3)
    slurm.start_node("n1")
    job.wait()
    slurm.wait_until(lambda: slurm.node_state("n1") == "idle")
    job.check_merged()
    assert " restart 1: " in job.log(0) + job.log(1)


def test_a_time_limit(limited: Submitted) -> None:
    """A task drains before its time is up and queues itself again, until nothing is left."""
    limited.wait()
    limited.check_merged()
    assert "time is nearly up: waiting for the rows in flight, for 30 s at most" in limited.log(0)
    assert f"{limited.array}_0 restart 1: " in limited.log(0)
