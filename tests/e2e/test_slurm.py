"""Arrays on a real Slurm: whatever happens to a task, exactly the input's rows come out, once."""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq
import pytest

from batchrunner.core.errors import OutputError
from batchrunner.dispatch.queue import READ_AHEAD_ROWS
from batchrunner.engines.http.connections import free_port
from batchrunner.runner.status import TaskStatus, status
from tests.conftest import (
    SMALL_MODEL,
    ended,
    eventually,
    job_of,
    require_engine,
    skip_without,
    write_job,
)
from tests.support.engine_processes import command_line
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import two_halves
from tests.support.runs import rows_once
from tests.support.server_thread import PATIENCE_S
from tests.support.tiny_model import make_tiny_llama

pytestmark = pytest.mark.slurm

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")

# The timeouts bear a machine that stands still for some seconds. cred_expire: a requeued job waits for so
# long and 1 s. NoInAddrAny: else the daemons listen to the network.
_CONF = """\
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={base}/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU,CR_LLN
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=15
KillWait=30
GresTypes=gpu
MessageTimeout=60
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=30 State=UP
"""


def require_slurm() -> None:
    """Skip, by name, what needs a Slurm of its own where that cannot be; under CI it fails."""
    skip_without(f"{program} (.ci/run installs Slurm)" for program in PROGRAMS if not shutil.which(program))
    skip_without([] if os.geteuid() == 0 else ["root, for a Slurm of its own"])


class SlurmCluster:
    """Two nodes that say they have 16 CPUs; `base` holds everything that it writes."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.conf = base / "slurm.conf"
        self._environ = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=16 "
            "RealMemory=4000 Gres=gpu:2"
            for node in NODES
        ]
        self.conf.write_text(
            _CONF.format(host=host, base=self.base, port=free_port(), nodes="\n".join(nodes))
        )
        (self.base / "state").mkdir()
        for number in range(2):  # devices that do nothing, for Slurm to give out
            os.mknod(self.base / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self.base / "gres.conf").write_text(f"Name=gpu File={self.base}/gpu[0-1]\n")
        key = self.base / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        names = {
            "key-file": "key",
            "socket": "sock",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        files = [f"--{name}={self.base}/munge.{end}" for name, end in names.items()]
        self._daemon("munged", "munged", "-F", *files)
        eventually(lambda: self._works("munge", "-S", f"{self.base}/munge.sock", "-n"))
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        eventually(lambda: self._works("scontrol", "ping"))
        for node in NODES:
            self._daemon(node, "slurmd", "-D", "-N", node)
        eventually(lambda: all(self.node_state(node) == "idle" for node in NODES))

    def node_state(self, node: str) -> str:
        """Return a node's state as sinfo has it."""
        return self.call("sinfo", "-h", "-N", "-n", node, "-o", "%T").strip()

    def call(self, *command: str, given: str = "") -> str:
        """Run one of Slurm's commands, which is given this as its input; return its output."""
        return subprocess.run(
            command,
            input=given,
            env=self._environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout

    def jobs(self) -> dict[str, str]:
        """Return the state of all jobs that have not ended, by their IDs (`7_2`: task 2 of array 7)."""
        lines = self.call("squeue", "-h", "-r", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for what Slurm does, which takes its time: a dead node is found out after half a minute."""
        eventually(condition, patience_s=2 * PATIENCE_S, every_s=0.2)

    def stop(self) -> None:
        """End everything: jobs, what is left of them, and the daemons."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.call("scancel", "-u", "root", "--signal=KILL", "--full")
            self.call("scancel", "-u", "root")
            self.wait_until(lambda: not self.jobs())
        for name in reversed(list(self._daemons)):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Return the processes that belong to this cluster: they have its configuration's name."""
        mine = f"SLURM_CONF={self.conf}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mine in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def _daemon(self, name: str, *command: str) -> None:
        with (self.base / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _works(self, *command: str) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.call(*command)
            return True
        return False


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """One cluster for all of these tests; this process's own Slurm commands mean it."""
    require_slurm()
    base = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own directories are too deep for a socket
    base.chmod(0o755)  # munge wants all to reach its socket
    cluster = SlurmCluster(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
            shutil.rmtree(base, ignore_errors=True)


TASK_ROWS = 2 * READ_AHEAD_ROWS
"""Rows for each task of an array: more than one takes while the others still start."""


class Gate:
    """Lets a server hold every tenth row, so that no task can end, however fast it is, until it is opened."""

    def __init__(self, server: FakeSGLang) -> None:
        self._server = server
        self._passed = frozenset[str]()
        server.script = self

    def __call__(self, sent: Sent) -> Behaviour:
        is_held = sent.row % 10 == 9
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

    def tasks(self) -> list[TaskStatus]:
        """Return the tasks of the run, by what `status` says."""
        with contextlib.suppress(OutputError):  # not before the run has begun
            return status(self.run).tasks
        return []

    def at_it(self) -> list[TaskStatus]:
        """Return those that run and have rows on disk."""
        return [task for task in self.tasks() if task.running and task.rows_on_disk]

    def restarted(self) -> bool:
        """Tell whether Slurm has started a task again."""
        return any("-r1-" in task.task for task in self.tasks())

    def log(self, task: int) -> str:
        """Return the log of a task of the array; empty before it has begun."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self.run}.slurm", f"{self.array}_{task}.log").read_text()
        return ""

    def check_rows(self) -> None:
        """Exactly the input's rows are there, once, and went well."""
        rows_once(self.job, pq.read_metadata(self.job["input"]["path"]).num_rows)


Story: TypeAlias = Callable[[SlurmCluster, Path], None]
"""Submits an array, does something to it, waits for its end, and checks what came of it."""
STORIES: dict[str, Story] = {}


def story(tell: Story) -> Story:
    """Have a story run beside the others."""
    STORIES[tell.__name__] = tell
    return tell


@pytest.fixture(scope="module")
def stories(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """All stories, which run at the same time: they wait for Slurm, and seldom for a processor."""
    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {
            name: pool.submit(tell, slurm, tmp_path_factory.mktemp(name)) for name, tell in STORIES.items()
        }


def submit(slurm: SlurmCluster, job: dict[str, Any], directory: Path, *options: object) -> Submitted:
    """Submit a job's array."""
    small = (*(() if "--" in options else ("--",)), "--cpus-per-task=1", "--mem=100M")
    done = ended(sys.executable, "-m", "batchrunner", "slurm", write_job(job, directory), *options, *small)
    assert done.returncode == 0, done.stderr
    return Submitted(slurm, job, slurm.call("sbatch", "--parsable", given=done.stdout))


@story
def a_time_limit(slurm: SlurmCluster, here: Path) -> None:
    """A task drains before its time is up and queues itself again, until nothing is left."""
    # its the time limit is near after 45 s, in which a slow machine has begun
    limit = ("--array", "0", "--grace", "75", "--", "--time=2")
    with gated_job(here, 1) as (gate, plan):
        job = submit(slurm, plan, here, *limit)
        slurm.wait_until(lambda: "the time limit is near" in job.log(0))
        gate.open()
        job.wait()
    job.check_rows()
    assert "the time limit is near: waiting for the rows in flight, for 55 s at most" in job.log(0)
    assert job.restarted()


@story
def an_array_of_four(slurm: SlurmCluster, here: Path) -> None:
    """Four tasks on two nodes, a GPU each, do the rows together."""
    here = here / "of four, 100%"
    here.mkdir()
    gpus = ("--preamble", 'echo "GPU $CUDA_VISIBLE_DEVICES of $SLURMD_NODENAME"', "--", "--gpus-per-task=1")
    with gated_job(here, 4) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-3", *gpus)
        slurm.wait_until(lambda: len(job.at_it()) == 4)
        gate.open()
        job.wait()
    job.check_rows()
    assert len(job.tasks()) == 4
    logs = [job.log(n) for n in range(4)]
    gpu_of = sorted(log.splitlines()[0] for log in logs)
    assert gpu_of == [f"GPU {n} of {node}" for n in (0, 1) for node in NODES]


@story
def a_task_that_is_requeued(slurm: SlurmCluster, here: Path) -> None:
    """`scontrol requeue` in mid-run: the task comes back and goes on."""
    with gated_job(here, 2) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-1")
        slurm.wait_until(lambda: len(job.at_it()) == 2)
        slurm.call("scontrol", "requeue", f"{job.array}_0")
        slurm.wait_until(lambda: "interrupted: waiting" in job.log(0))
        gate.pass_what_is_in_flight()
        slurm.wait_until(job.restarted)
        gate.open()
        job.wait()
    job.check_rows()
    assert "interrupted: waiting for the rows in flight, for 15 s at most" in job.log(0)
    assert job.restarted()


@story
def tasks_that_are_killed(slurm: SlurmCluster, here: Path) -> None:
    """One is cancelled, one gets a SIGKILL: the others take over and do the rest."""
    with gated_job(here, 4) as (gate, plan):
        job = submit(slurm, plan, here, "--array", "0-3")
        slurm.wait_until(lambda: len(job.at_it()) == 4)
        (killed,) = (task for task in job.at_it() if "-t2-" in task.task)
        slurm.call("scancel", "--signal=KILL", f"{job.array}_1")  # which begins with a SIGTERM
        os.kill(int(re.findall(r"pid (\d+)", str(killed.running))[0]), signal.SIGKILL)
        gate.open()
        job.wait()
    job.check_rows()
    assert f"took over from {killed.task}" in job.log(0) + job.log(3)


@story
def an_engine_on_two_machines(slurm: SlurmCluster, here: Path) -> None:
    """The death of one machine's part is the server's: both start again. Of a task that is requeued both end
    when its rows in flight have."""
    plan = job_of(here, two_halves(here), rows=40, window=2)
    job = submit(slurm, plan, here, "--array", "0", "--", "--gpus-per-task=1")
    slurm.wait_until(job.at_it)
    (here / "die").touch()
    slurm.wait_until(lambda: job.log(0).count("the engine is back") and job.at_it())
    slurm.call("scontrol", "requeue", f"{job.array}_0")
    slurm.wait_until(lambda: "interrupted: waiting" in job.log(0))
    (here / "go").touch()
    job.wait()
    job.check_rows()
    seen = [line.split() for line in (here / "seen").read_text().splitlines()]
    for start in (seen[:2], seen[2:4], seen[4:]):
        assert sorted(line[0] for line in start) == ["0", "1"]
        assert all(line[1].isdigit() for line in start)  # a GPU on each, whichever is free there
        places = {tuple(words[words.index("--nnodes") : words.index("--node-rank")]) for words in start}
        assert len(places) == 1
        assert "--dist-init-addr" in places.pop()
    told = job.log(0)
    assert told.count("the engine died (") == 1
    assert "the second machine is out of order" in told
    (log,) = (job.run / "tasks").glob("*-r1-*/engine-server-node1.log")
    assert log.read_text() == "rank 1 begins\n"


@pytest.mark.parametrize("name", STORIES)
def test_arrays(stories: dict[str, Future[None]], name: str) -> None:
    """Each story ends well."""
    stories[name].result()


@pytest.mark.engine
@pytest.mark.long
def test_the_real_engine_on_two_machines(slurm: SlurmCluster, tmp_path: Path) -> None:
    """SGLang's two halves meet, by gloo on CPUs. A scheduler of the second one dies: both start again."""
    require_engine("sglang")
    model = make_tiny_llama(tmp_path / "model", SMALL_MODEL)
    cpus = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "none"}  # as a machine without NCCL
    engine = {"kind": "server", "model": str(model), "device": "cpu", "nodes": 2, "tp": 2, "env": cpus}
    # answers are taken once there is a file, so that the run cannot end before
    (tmp_path / "gate.py").write_text(
        f"import pathlib\ndef judge(*_): return pathlib.Path({str(tmp_path / 'go')!r}).exists() or 'wait'\n"
    )
    accept = {"python": "gate:judge", "tries": 100, "feedback": False}
    plan = job_of(tmp_path, engine, rows=40, sampling={"max_new_tokens": 8}, accept=accept)
    job = submit(slurm, plan, tmp_path, "--array", "0", "--", "--mem=4000M")
    deaths = 0

    def second_half() -> list[int]:
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if "sglang::scheduler_TP1" in command_line(int(path.parent.name))
            and "engine-server-node1.log" in str((path.parent / "fd" / "1").readlink())
        ]

    slurm.wait_until(lambda: "rows to do" in job.log(0) or not slurm.jobs())
    for pid in second_half():
        os.kill(pid, signal.SIGKILL)
        deaths += 1
    assert deaths == 1, job.log(0)
    slurm.wait_until(lambda: "the engine is back" in job.log(0) or not slurm.jobs())
    (tmp_path / "go").touch()
    job.wait()
    job.check_rows()
    assert "the engine died" in job.log(0)
