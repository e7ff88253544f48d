"""`batchrun ray` does a job on a cluster: every row once, also when a node dies; a wrong call is one line."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchrunner.core.errors import OutputError, install_command
from batchrunner.runner.status import TaskStatus, status
from tests.conftest import batchrun, ended, eventually, job_of, rows_in, started, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import two_halves
from tests.support.ray_cluster import RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
WORKER = "JobWorker"


def on_cluster(nodes: RayNodes, job: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Run the command on the cluster to its end."""
    return ended(sys.executable, "-m", "batchrunner", "ray", job, "--address", nodes.address, *options)


def tasks_of(run: Path) -> list[TaskStatus]:
    """Return the state of the tasks that live; none before a worker has begun."""
    with contextlib.suppress(OutputError):
        return [task for task in status(run).tasks if task.running]
    return []


def working_tasks(run: Path) -> set[int]:
    """Return the process IDs of the tasks that have rows in flight."""
    samples = {str(task.running): task.last_sample for task in tasks_of(run)}
    return {
        int(running.split("pid ")[1].split()[0])
        for running, sample in samples.items()
        if sample and sample.in_flight
    }


def at_work(run: Path, count: int) -> set[int]:
    """Return the process IDs of the tasks that have rows in flight, once there are so many."""
    pids: set[int] = set()

    def are_there() -> bool:
        pids.clear()
        pids.update(working_tasks(run))
        return len(pids) == count

    eventually(are_there)
    return pids


def are_stopping(run: Path) -> bool:
    """Return whether tasks live, and all of them have heard that they are to stop."""
    samples = [task.last_sample for task in tasks_of(run)]
    return bool(samples) and all(sample and sample.stopping for sample in samples)


def test_a_node_that_dies_is_replaced_and_ctrl_c_can_be_resumed(
    nodes: RayNodes, server: FakeSGLang, tmp_path: Path
) -> None:
    """Workers share the rows of a run; a signal drains it; the same command does the rest, each row once.

    A worker that waits for room does not hold up the end.
    """
    server.script = lambda sent: "hold" if sent.row >= 100 else "answer"
    job = job_of(tmp_path, server, rows=2000, window=20)  # more than the first worker takes at once
    path, run = write_job(job, tmp_path), tmp_path / "run"
    with started("ray", path, "--workers", 2, "--address", nodes.address) as command:
        nodes.kill_the_node_of(WORKER, at_work(run, 2).pop())
        command.wait_for_line("a worker died")
        command.process.send_signal(signal.SIGINT)
        command.wait_for_line("interrupted: waiting for the rows in flight")
        eventually(lambda: are_stopping(run))
        server.answer_held()
        assert command.end() == 130
    assert any("interrupted: " in line and "of 2,000 rows ok" in line for line in command.lines)
    server.script = lambda _: "answer"
    done = on_cluster(nodes, path, "--workers", 3, "--cpus", 2, "--json")  # one of them finds no room
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows_total"], report["rows_ok"], report["rows_left"]) == (2000, 2000, 0)
    assert rows_in(job) == list(range(2000))
    assert not list(tmp_path.glob(".*.ray"))


def test_a_cluster_grows_and_shrinks(nodes: RayNodes, server: FakeSGLang, tmp_path: Path) -> None:
    """A worker without room takes part once a node comes, and its rows go to the others when the node goes.

    No row is answered before, so that there are rows for it.
    """
    server.script = lambda _: "hold"
    job = job_of(tmp_path, server, rows=4000)
    with started(
        "ray", write_job(job, tmp_path), "--workers", 3, "--cpus", 2, "--address", nodes.address
    ) as run:
        first = at_work(tmp_path / "run", 2)
        nodes.add()
        newcomer = (at_work(tmp_path / "run", 3) - first).pop()
        nodes.take_away_the_node_of(WORKER, newcomer)
        run.wait_for_line("a worker died")
        server.script = lambda _: "answer"
        server.answer_held()
        assert run.end() == 0
    assert rows_in(job) == list(range(4000))


def test_an_engine_on_two_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    """A node with a part of the engine dies: another node takes its place, and all parts start again."""
    job = job_of(tmp_path, two_halves(tmp_path, device="cpu"), rows=40, window=2)
    with started("ray", write_job(job, tmp_path), "--workers", 1, "--address", nodes.address) as run:
        at_work(tmp_path / "run", 1)
        nodes.kill_the_node_of("Rank")
        run.wait_for_line("the engine is back")
        (tmp_path / "go").touch()
        assert run.end() == 0
    assert rows_in(job) == list(range(40))
    starts = [line.split()[0] for line in (tmp_path / "seen").read_text().splitlines()]
    assert starts.count("0") >= starts.count("1") >= 2
    (task,) = (tmp_path / "run" / "tasks").iterdir()
    assert (task / "engine-server-node1.log").read_text() == "rank 1 begins\n" * starts.count("1")


def test_what_the_cluster_cannot_give_is_one_line(nodes: RayNodes, tmp_path: Path) -> None:
    """No worker is started that no node has room for."""
    model = {"kind": "server", "model": "m", "device": "cuda", "tp": 2}
    path = write_job(job_of(tmp_path, model), tmp_path)
    done = on_cluster(nodes, path, "--workers", 2)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        "batchrun: engine: an actor needs 2 GPUs, but no node of the Ray cluster has more than 0: "
        "lower engine.tp, or add a node with enough GPUs"
    )
    path = write_job(job_of(tmp_path, input={"path": str(tmp_path / "nothing.csv")}), tmp_path)
    done = on_cluster(nodes, path, "--workers", 2)
    assert (done.returncode, done.stderr.count("nothing.csv: no such file or directory")) == (2, 1), (
        done.stderr
    )
    done = on_cluster(nodes, write_job(job_of(tmp_path), tmp_path), "--cpus", 64, "--json")
    assert done.returncode == 2
    assert "no node of the Ray cluster has more than 2 cores" in json.loads(done.stdout)["error"]["message"]


def refused(tmp_path: Path, *options: object) -> str:
    """Return the one line with which a command is refused, before anything is sent."""
    done = batchrun("ray", write_job(job_of(tmp_path), tmp_path), *options)
    assert done.exit_code == 2
    assert not (tmp_path / "run").exists()
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", 0], "--workers 0: give a number of at least 1"),
        (["--cpus", 0], "--cpus 0: give a number above 0"),
        (["--address", "nowhere"], "--address nowhere: Ray cannot connect: .*: give host:port"),
        (
            ["--address", "ray://localhost:10001"],
            "a Ray client cannot start a job: give host:port",
        ),
    ],
)
def test_bad_options_are_one_line(options: list[Any], said: str, tmp_path: Path) -> None:
    """What is wrong, where, and what to do."""
    assert re.search(said, refused(tmp_path, *options))


def test_a_worker_that_dies_again_and_again_ends(nodes: RayNodes, server: FakeSGLang, tmp_path: Path) -> None:
    """A worker is not started a sixth time if no row has finished between its deaths."""
    server.script = lambda sent: "hold" if sent.row >= 10 else "answer"
    job = job_of(tmp_path, server, rows=4000)
    dead = set[int]()
    with started("ray", write_job(job, tmp_path), "--workers", 1, "--address", nodes.address) as command:
        for _ in range(6):
            eventually(lambda: bool(working_tasks(tmp_path / "run") - dead))
            pid = (working_tasks(tmp_path / "run") - dead).pop()
            os.kill(pid, signal.SIGKILL)
            dead.add(pid)
        assert command.end() == 1
    assert any("a worker died 6 times in succession, and no row finished" in line for line in command.lines)


def test_a_worker_out_of_reach_has_not_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray may take half a minute to see that a node is gone: that is no death for each time it was asked.

    The log does not claim that the worker is dead either.
    """
    from ray.exceptions import ActorUnavailableError  # noqa: PLC0415

    from batchrunner.core.timing import TIMING  # noqa: PLC0415
    from batchrunner.job.load import load_job  # noqa: PLC0415
    from batchrunner.ray import whole_job  # noqa: PLC0415
    from batchrunner.report.report import Report  # noqa: PLC0415
    from batchrunner.runner.control import Control  # noqa: PLC0415

    answers: list[Any] = [*[ActorUnavailableError("RPC error", None)] * 9, Report("run", rows_total=0)]
    process = object()

    def get(reference: object, timeout: float | None = None) -> object:
        if reference is process:
            return "the same process"
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = SimpleNamespace(wait=lambda given, timeout: ([*given], []), get=get, kill=lambda _: None)
    monkeypatch.setattr(whole_job, "ray", fake)
    monkeypatch.setattr(TIMING, "ray_poll", 0.0)
    workers = whole_job.Workers(load_job(job_of(tmp_path)), whole_job.SharedPaths(None, None), Control())
    actor = SimpleNamespace(
        run=SimpleNamespace(remote=lambda *_: object()), process=SimpleNamespace(remote=lambda: process)
    )
    workers.start(whole_job.Worker(actor))
    while workers.watch():
        pass
    assert workers.error is None
    assert workers.last is not None
    assert caplog.text.count("a worker died or cannot be reached, and is started again: ") == 9
    assert "a worker died, and" not in caplog.text


def test_sigterm_while_ray_connects(tmp_path: Path) -> None:
    """The command ends with its own exit code, and not with Ray's."""
    with started("ray", write_job(job_of(tmp_path), tmp_path), "--address", "127.0.0.1:9") as command:
        state = Path(f"/proc/{command.process.pid}/status")
        bit = 1 << (signal.SIGTERM - 1)
        eventually(lambda: int(state.read_text().split("SigCgt:")[1].split()[0], 16) & bit)
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == 143
    assert "batchrun: interrupted before the first row was sent" in command.lines[-1]


def test_ray_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the command that installs it; `import batchrunner.ray` says so too."""
    for name in [name for name in sys.modules if name.startswith(("batchrunner.ray", "ray."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused(tmp_path) == f"batchrun: Ray is not installed: {install_command('ray')}"
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("ray"))):
        __import__("batchrunner.ray")


def test_a_path_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not see the command's directory, or the results, says which node and which path."""
    from batchrunner.core.errors import JobError  # noqa: PLC0415
    from batchrunner.ray.whole_job import SharedPaths, _shared_paths  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    with _shared_paths("out/run") as shared:
        shared.enter()
        os.chdir(tmp_path)
    with pytest.raises(JobError, match=f"of the command is not visible on the node {socket.gethostname()}"):
        shared.enter()
    with pytest.raises(JobError, match=r"the node .* has no such directory"):
        SharedPaths(str(tmp_path / "gone"), None).enter()
    with _shared_paths("s3://bucket/run") as shared:
        assert shared.mark is None


def test_results_in_a_copy_that_ray_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit --working-dir`: Ray deletes its copy of the directory, so that no results may be in it.

    Workers are in their own node's copy already.
    """
    from ray.runtime_context import RuntimeContext  # noqa: PLC0415
    from ray.runtime_env import RuntimeEnv  # noqa: PLC0415

    from batchrunner.core.errors import JobError  # noqa: PLC0415
    from batchrunner.ray.whole_job import _shared_paths  # noqa: PLC0415

    monkeypatch.setattr(RuntimeContext, "runtime_env", RuntimeEnv(working_dir="gcs://_ray_pkg_1f.zip"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match="Ray deletes its copy of the working directory"):
        _shared_paths("out/run").__enter__()
    for outside in ("s3://bucket/run", str(tmp_path / "run")):
        with _shared_paths(outside) as shared:
            assert shared.directory is None
    monkeypatch.setattr(RuntimeContext, "runtime_env", RuntimeEnv())
    with _shared_paths("run") as shared:  # a directory of the user's own
        assert shared.directory == str(tmp_path)
