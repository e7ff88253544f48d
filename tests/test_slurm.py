"""Arrays on a real Slurm: whatever happens to a task, exactly the input's rows come out, once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import batchrun, job_of, results_of, write_job
from tests.slurm_cluster import SlurmCluster, require_slurm, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slurm

HOW: tuple[str, ...] = ("--static",)
ROW_S = 1.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """One cluster for all of these tests."""
    require_slurm()
    with slurm_cluster() as cluster:
        yield cluster


def slow_job(directory: Path, *, rows: int, at_once: int = 8) -> dict[str, Any]:
    """Return a job of which a task does about `at_once` rows a second."""
    engine = {"kind": "simulated", "step_s": ROW_S / 20, "max_running": at_once}
    return job_of(directory, engine, rows=rows, sampling={"max_new_tokens": 20, "ignore_eos": True})


def submit(job: dict[str, Any], directory: Path, *options: object) -> str:
    """Submit a job's array; return its ID."""
    done = batchrun("slurm", write_job(job, directory), "--submit", *HOW, *options)
    assert done.exit_code == 0, done.stderr
    found = re.search(r"array (\d+) submitted", done.stdout)
    assert found, done.stdout
    return found[1]


def on_disk(job: dict[str, Any]) -> int:
    """Return how many rows are on disk, by what `status` says."""
    told = batchrun("status", job["output"]["path"], "--json")
    return int(json.loads(told.stdout)["rows_on_disk"]) if told.exit_code == 0 else 0


def log_of(job: dict[str, Any], name: str) -> str:
    """Return a task's log."""
    return Path(f"{job['output']['path']}.slurm", f"{name}.log").read_text()


def check_whole(job: dict[str, Any], rows: int) -> None:
    """Exactly the input's rows are there, once, and the job that follows has merged them."""
    assert [row["row"] for row in results_of(job)] == list(range(rows))
    assert not [row for row in results_of(job) if row["error"]]
    (log,) = Path(f"{job['output']['path']}.slurm").glob("*-merge.log")
    assert f"{rows} of {rows} rows on disk" in log.read_text()


def test_an_array_of_four(tmp_path: Path, slurm: SlurmCluster) -> None:
    """Four tasks on two nodes do the rows together, log beside the run, and a job merges when they end."""
    here = tmp_path / "of four, 100%"
    here.mkdir()
    job = slow_job(here, rows=100)
    array = submit(job, here, "--array", "0-3")
    slurm.wait_until(lambda: not slurm.jobs())
    check_whole(job, 100)
    logs = [log_of(job, f"{array}_{n}") for n in range(4)]
    assert {re.findall(r"^(n[12]) ", log, re.MULTILINE)[0] for log in logs} == {"n1", "n2"}
    assert all(f" {array}_{n}: " in log for n, log in enumerate(logs))


def test_a_task_that_is_requeued(tmp_path: Path, slurm: SlurmCluster) -> None:
    """`scontrol requeue` in mid-run: the task comes back and goes on, and its log says so."""
    job = slow_job(tmp_path, rows=160)
    array = submit(job, tmp_path, "--array", "0-1")
    slurm.wait_until(lambda: on_disk(job) >= 16)
    slurm.call("scontrol", "requeue", f"{array}_0")
    slurm.wait_until(lambda: not slurm.jobs())
    check_whole(job, 160)
    assert f"{array}_0 restart 1: " in log_of(job, f"{array}_0")


def test_a_time_limit(tmp_path: Path, slurm: SlurmCluster) -> None:
    """A task drains before its time is up and queues itself again, until nothing is left."""
    job = slow_job(tmp_path, rows=180)
    array = submit(job, tmp_path, "--array", "0-0", "--time", "1", "--grace", "50")
    slurm.wait_until(lambda: not slurm.jobs())
    check_whole(job, 180)
    log = log_of(job, f"{array}_0")
    assert "time is nearly up: waiting for the rows in flight, for 30 s at most" in log
    assert f"{array}_0 restart 1: " in log
