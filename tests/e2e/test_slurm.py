"""Arrays on a real Slurm: whatever happens to a task, exactly the input's rows come out, once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow.parquet as pq
import pytest

from batchrunner.core.errors import OutputError
from batchrunner.dispatch.queue import READ_AHEAD_ROWS
from batchrunner.output.merge import merge
from batchrunner.report.report import report_of_all
from batchrunner.runner.status import status
from tests.conftest import batchrun, job_of, results_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.functions import HOOKED, check_hooked, write_hooks
from tests.support.slurm_cluster import NODES, SlurmCluster, require_slurm, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fake_sglang import Behaviour, Sent

pytestmark = pytest.mark.slurm

TASK_ROWS = 2 * READ_AHEAD_ROWS
"""Rows for each task of an array: more than one takes while the others still start."""


class Gate:
    """Lets a server hold every tenth row, so that no task can end, however fast it is, until it is opened."""

    def __init__(self, server: FakeSGLang) -> None:
        self._server = server
        self._passed = frozenset[str]()
        server.script = self

    def __call__(self, sent: Sent) -> Behaviour:
        is_held = int(sent.prompt.split()[1]) % 10 == 9
        return "hold" if is_held and sent.prompt not in self._passed else "answer"

    def pass_what_is_in_flight(self) -> None:
        """Let the rows be answered that have arrived, and hold others."""
        self._passed = frozenset(self._server.prompts)
        self._server.ask_again()

    def open(self) -> None:
        """Let all rows be answered from now on."""
        self._server.answer_held()


@contextlib.contextmanager
def gated_job(directory: Path, tasks: int) -> Iterator[tuple[Gate, dict[str, Any]]]:
    """Return a job for so many tasks, and what holds its rows."""
    with FakeSGLang() as server:
        yield Gate(server), job_of(directory, server, rows=tasks * TASK_ROWS)


class Submitted:
    """A job whose array was submitted."""

    def __init__(self, slurm: SlurmCluster, job: dict[str, Any], told: str) -> None:
        self._slurm = slurm
        self.job = job
        self.run = Path(job["output"]["path"])
        self.array = told.strip().partition(";")[0]

    def wait(self) -> None:
        """Wait for the end of its tasks."""
        self._slurm.wait_until(
            lambda: self.array not in {job.partition("_")[0] for job in self._slurm.jobs()}
        )

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of the run, by what `status` says."""
        with contextlib.suppress(OutputError):  # not before the run has begun
            found: list[dict[str, Any]] = status(self.run)["tasks"]
            return found
        return []

    def at_it(self) -> list[dict[str, Any]]:
        """Return those that run and have rows on disk."""
        return [task for task in self.tasks() if task["running"] and task["rows_on_disk"]]

    def restarted(self) -> bool:
        """Tell whether Slurm has started a task again."""
        return any("-r1-" in task["task"] for task in self.tasks())

    def log(self, task: int) -> str:
        """Return the log of a task of the array; empty before it has begun."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self.run}.slurm", f"{self.array}_{task}.log").read_text()
        return ""

    def check_rows(self) -> None:
        """Exactly the input's rows are there, once, and went well."""
        rows = results_of(self.job)
        there = pq.read_metadata(self.job["input"]["path"]).num_rows
        assert [row["row"] for row in rows] == list(range(there))
        assert not any(row["error"] for row in rows)


Story: TypeAlias = Callable[[SlurmCluster, Path], Submitted]
"""Submits an array, does something to it, and waits for its end."""
IN_TURN = threading.Lock()
"""Held by who runs the command in this process."""
STORIES: dict[str, Story] = {}


def story(tell: Story) -> Story:
    """Have a story run beside the others."""
    STORIES[tell.__name__] = tell
    return tell


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """One cluster for all of these tests."""
    require_slurm()
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stories(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Submitted]]]:
    """All stories, which run at the same time: they wait for Slurm, and seldom for a processor."""
    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {
            name: pool.submit(tell, slurm, tmp_path_factory.mktemp(name)) for name, tell in STORIES.items()
        }


@pytest.fixture
def ended(request: pytest.FixtureRequest, stories: dict[str, Future[Submitted]]) -> Submitted:
    """The array of the test's own story, which has ended."""
    return stories[request.function.__name__.removeprefix("test_")].result()


def submit(
    slurm: SlurmCluster, job: dict[str, Any], directory: Path, *options: object, partition: str = "main"
) -> Submitted:
    """Submit a job's array."""
    small = "--cpus-per-task=1", "--mem=100M", f"--partition={partition}"
    with IN_TURN:
        more = () if "--" in options else ("--",)
        done = batchrun("slurm", write_job(job, directory), *options, *more, *small)
    assert done.exit_code == 0, done.stderr
    return Submitted(slurm, job, slurm.call("sbatch", "--parsable", given=done.stdout))


@story
def a_time_limit(slurm: SlurmCluster, here: Path) -> Submitted:
    # its time is nearly up after 45 s, in which a slow machine has begun
    limit = ("--array", "0", "--grace", "75", "--", "--time=2")
    with gated_job(here, 1) as (gate, plan):
        job = submit(slurm, plan, here, *limit)
        slurm.wait_until(lambda: "time is nearly up" in job.log(0))
        gate.open()
        job.wait()
    return job


def test_a_time_limit(ended: Submitted) -> None:
    """A task drains before its time is up and queues itself again, until nothing is left."""
    ended.check_rows()
    assert "time is nearly up: waiting for the rows in flight, for 55 s at most" in ended.log(0)
    assert ended.restarted()


@story
def an_array_of_four(slurm: SlurmCluster, here: Path) -> Submitted:
    here = here / "of four, 100%"
    here.mkdir()
    gpus = ("--preamble", 'echo "GPU $CUDA_VISIBLE_DEVICES of $SLURMD_NODENAME"', "--", "--gpus-per-task=1")
    with gated_job(here, 4) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-3", *gpus)
        slurm.wait_until(lambda: len(job.at_it()) == 4)
        gate.open()
        job.wait()
    return job


def test_an_array_of_four(ended: Submitted) -> None:
    """Four tasks on two nodes, a GPU each, do the rows together."""
    ended.check_rows()
    assert len(ended.tasks()) == 4
    logs = [ended.log(n) for n in range(4)]
    gpu_of = sorted(log.splitlines()[0] for log in logs)
    assert gpu_of == [f"GPU {n} of {node}" for n in (0, 1) for node in NODES]


@story
def a_task_that_is_requeued(slurm: SlurmCluster, here: Path) -> Submitted:
    with gated_job(here, 2) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-1")
        slurm.wait_until(lambda: len(job.at_it()) == 2)
        slurm.call("scontrol", "requeue", f"{job.array}_0")
        slurm.wait_until(lambda: "interrupted: waiting" in job.log(0))
        gate.pass_what_is_in_flight()
        slurm.wait_until(job.restarted)
        gate.open()
        job.wait()
    return job


def test_a_task_that_is_requeued(ended: Submitted) -> None:
    """`scontrol requeue` in mid-run: the task comes back and goes on."""
    ended.check_rows()
    assert "interrupted: waiting for the rows in flight, for 15 s at most" in ended.log(0)
    assert ended.restarted()


@story
def tasks_that_are_killed(slurm: SlurmCluster, here: Path) -> Submitted:
    with gated_job(here, 4) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-3")
        slurm.wait_until(lambda: len(job.at_it()) == 4)
        (killed,) = (task for task in job.at_it() if "-t2-" in task["task"])
        slurm.call("scancel", "--signal=KILL", f"{job.array}_1")  # which begins with a SIGTERM
        os.kill(int(re.findall(r"pid (\d+)", killed["running"])[0]), signal.SIGKILL)
        gate.open()
        job.wait()
    return job


def test_tasks_that_are_killed(ended: Submitted) -> None:
    """One is cancelled, one gets a SIGKILL: the others take over and do the rest."""
    ended.check_rows()
    (killed,) = (task["task"] for task in ended.tasks() if "-t2-" in task["task"])
    assert f"took over from {killed}" in ended.log(0) + ended.log(3)


@story
def tasks_that_are_added_late(slurm: SlurmCluster, here: Path) -> Submitted:
    with gated_job(here, 3) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0")
        slurm.wait_until(job.at_it)
        late = submit(slurm, plan, here, "--array", "0-1")
        slurm.wait_until(lambda: len(job.at_it()) == 3)
        gate.open()
        job.wait()
        late.wait()
    return job


def test_tasks_that_are_added_late(ended: Submitted) -> None:
    """The job submitted once more while it runs: the new tasks help, and do no row again."""
    ended.check_rows()
    assert [task["rows_on_disk"] > 0 for task in ended.tasks()] == [True] * 3


@story
def checked_samples(slurm: SlurmCluster, here: Path) -> Submitted:
    write_hooks(here)
    engine = {"kind": "simulated", "step_s": 0.01, "max_running": 8}
    job = job_of(here, engine, rows=600, sampling={"max_new_tokens": 8, "ignore_eos": True}) | HOOKED
    job["input"] = {**job["input"], "columns": ["id"]}
    job["sampling"] = {**job["sampling"], "n": 2}
    submitted = submit(slurm, job, here, "--array", "0-2")
    submitted.wait()
    return submitted


def test_checked_samples(ended: Submitted) -> None:
    """Checks, Python functions and several samples: as without an array, each row once."""
    table = pq.read_table(merge(ended.run).path)
    rows = pq.read_metadata(ended.job["input"]["path"]).num_rows
    check_hooked(table.to_pylist(), rows)
    checks = report_of_all(ended.run).checks
    assert (checks["rows_mended"], checks["rows_failed"]) == (rows, 0)


@story
def a_node_that_is_lost(slurm: SlurmCluster, here: Path) -> Submitted:
    with gated_job(here, 3) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-1", partition="lossy")
        slurm.wait_until(lambda: len(job.at_it()) == 2)
        slurm.kill_node("n3")
        slurm.wait_until(lambda: len(job.at_it()) == 3)
        slurm.start_node("n3")
        gate.open()
        job.wait()
    slurm.wait_until(lambda: slurm.node_state("n3") == "idle")
    return job


def test_a_node_that_is_lost(ended: Submitted) -> None:
    """slurmd killed: its task goes on while Slurm starts it once more elsewhere; then the node comes back."""
    ended.check_rows()
    assert ended.restarted()
