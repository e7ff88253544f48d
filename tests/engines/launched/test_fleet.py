"""Launched servers: GPUs, ports and arguments; none outlives its owner, and no key is visible."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineStartError
from batchrunner.core.processes import STOP_SIGNALS
from batchrunner.engines.launched.fleet import LaunchedFleet, gpu_slices
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import LimitsSpec
from tests.conftest import batchrun, eventually, job_of, write_job
from tests.support.engine_processes import deaf_to
from tests.support.launchable import launchable, two_halves
from tests.support.server_thread import PATIENCE_S


def test_gpus_are_dealt_out() -> None:
    assert gpu_slices(["4", "5", "6"], gpus_per_replica=2, replicas="auto") == [["4", "5"]]
    with pytest.raises(EngineStartError, match="needs 2 GPUs: this machine has 1"):
        gpu_slices(["0"], gpus_per_replica=2, replicas="auto")
    with pytest.raises(EngineStartError, match="needs 3 GPUs: this machine has 2"):
        gpu_slices(["0", "1"], gpus_per_replica=1, replicas=3)


@pytest.mark.parametrize(
    ("args", "slices"),
    [
        ({}, ["4", "5", "6", "7"]),
        ({"pp-size": 2}, ["4,5", "6,7"]),
        ({"data-parallel-size": 2}, ["4,5", "6,7"]),
        ({"dp-size": 2, "enable-dp-attention": True}, ["4", "5", "6", "7"]),
    ],
)
def test_the_jobs_own_gpus_are_dealt_out(
    args: dict[str, Any], slices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica gets separate GPUs among those that `env` allows, as many as its arguments need."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    spec = ServerEngine(kind="server", model="org/model", replicas="auto", args=args, env=env)
    servers = LaunchedFleet(spec, log_dir=tmp_path, limits=LimitsSpec())._make_servers("o/m", cpu=False)
    assert [server.environ["CUDA_VISIBLE_DEVICES"] for server in servers] == slices
    for server in servers:
        asyncio.run(server.close())  # gives its port back


@pytest.mark.parametrize(
    ("changes", "needed"),
    [({"tp": 2, "replicas": 4}, 8), ({"replicas": 4}, 4), ({"tp": 2, "replicas": "auto"}, 2)],
)
def test_a_job_of_several_gpus_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], needed: int
) -> None:
    """A job of several GPUs is refused on a machine without any, before a server starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    engine = launchable(tmp_path, ANSWERS, SEEN=str(tmp_path / "seen")) | {"device": "auto"} | changes
    with pytest.raises(EngineStartError, match=f"needs {needed} GPUs: this machine has none"):
        batchrunner.run(job_of(tmp_path, engine))
    assert not (tmp_path / "seen").exists()


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """SGLang's message about a missing GPU is reported with the field that demands one."""
    said = "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available."
    engine = launchable(tmp_path, f"sys.exit({said!r})")
    with pytest.raises(EngineStartError, match=r"SGLang finds no GPU .*set engine\.device: cpu"):
        batchrunner.run(job_of(tmp_path, engine))


async def test_an_interpreter_that_does_not_read_its_configuration(tmp_path: Path) -> None:
    """A program that ends before it has read its configuration is reported like any failed start."""
    python = tmp_path / "no-python"
    python.write_text("#!/bin/sh\nsleep 0.2\nexit 3\n")
    python.chmod(0o755)
    # The configuration does not fit into the pipe, so the write is pending when the program ends.
    args = {"json-model-override-args": {"name": "x" * 200_000}}
    spec = ServerEngine(**launchable(tmp_path, "") | {"python": str(python), "args": args})
    fleet = LaunchedFleet(spec, log_dir=tmp_path, limits=LimitsSpec())
    try:
        with pytest.raises(EngineStartError, match=r"the engine did not start \(exit 3\)"):
            await fleet.open()
    finally:
        await fleet.close()


ANSWERS = """
Path(os.environ["SEEN"]).write_text(json.dumps(sys.argv[1:]))
if int(dict(zip(sys.argv, sys.argv[1:])).get("--tokenizer-worker-num", 1)) > 1:
    assert "--api-key" not in sys.argv, "API key is not supported in multi-tokenizer mode"

class Handler(Server):
    known = {"/ready": {}, "/model_info": {"model_path": "answers"}, "/server_info": {"version": "0.5.23"}}
    def asked(self, body):
        self.answer("to " + body["text"])
"""


@pytest.mark.parametrize(
    ("args", "has_key"),
    [
        ({}, True),
        ({"tokenizer-worker-num": 4}, False),
        ({"--tokenizer_worker_num": "2"}, False),
    ],
)
def test_several_tokenizers_have_no_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, args: dict[str, object], *, has_key: bool
) -> None:
    """SGLang starts several tokenizers only without an API key: such a server has none, with a warning."""
    engine = launchable(tmp_path, "from pathlib import Path\n" + ANSWERS, SEEN=str(tmp_path / "seen"))
    assert batchrunner.run(job_of(tmp_path, {**engine, "args": args})).rows_ok == 10
    assert ("--api-key" in json.loads((tmp_path / "seen").read_text())) == has_key
    assert ("every user of this machine can send requests to it" in caplog.text) != has_key


async def test_a_planned_restart_that_is_cancelled(tmp_path: Path) -> None:
    """The server goes on with its flags, which are the ones that it names, and takes rows at once."""
    engine = launchable(tmp_path, "from pathlib import Path\n" + ANSWERS, SEEN=str(tmp_path / "seen"))
    fleet = LaunchedFleet(ServerEngine(**engine), log_dir=tmp_path, limits=LimitsSpec())
    try:
        await fleet.open()
        (server,) = fleet.servers
        server.adapt({"max-running-requests": 99}, "more requests")
        server.cancel_restart()
        await server.ready()
        assert (server.up, server.adapted) == (True, {})
        assert "99" not in json.loads((tmp_path / "seen").read_text())
    finally:
        await fleet.close()


LAUNCHER = Path(batchrunner.__file__).parent / "engines" / "launched" / "launcher.py"
SECRET = "5ecret"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc are Linux's")

# A stand-in for the engine. It prints its arguments as SGLang does. Its tree: a child by spawn, a
# grandchild in a session of its own, and an orphan in another, whose parent has ended.
FAKE_SERVER = """
    import json, multiprocessing, os, signal, subprocess, sys, time

    def worker(argv, path):
        held = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                time.sleep(600)
            os._exit(0)
        orphan = int(os.read(read, 99))
        seen = {"pids": [os.getppid(), os.getpid(), held.pid, orphan], "key": sys.argv[-1]}
        with open(path + ".partial", "w") as file:
            json.dump(seen, file)
        os.rename(path + ".partial", path)
        time.sleep(600)

    if __name__ == "__main__":
        mode, path, *rest = sys.argv[1:]
        print("server_args", rest)
        print(json.dumps(rest), *rest)
        os.write(2, b"not text: \\xff\\xfe\\n")
        if mode.isdigit():
            sys.exit(int(mode))
        if mode == "signal":
            os.kill(os.getpid(), signal.SIGUSR2)
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=worker, args=(sys.argv, path))
        child.start()
        child.join()
"""


class Launched:
    """A launcher that runs the stand-in, and what the stand-in told about its tree."""

    def __init__(self, folder: Path) -> None:
        self.log, self.told = folder / "server.log", folder / "told.json"
        (folder / "fake_server.py").write_text(textwrap.dedent(FAKE_SERVER))
        self.env = {**os.environ, "PYTHONPATH": str(folder)}
        self.process: subprocess.Popen[bytes] | None = None

    def config(self, mode: str) -> bytes:
        """The line that the launcher reads first."""
        fields = {
            "module": "fake_server",
            "argv": [mode, str(self.told)],
            "key": SECRET,
            "log": str(self.log),
        }
        return json.dumps(fields).encode() + b"\n"

    def start(self, mode: str) -> subprocess.Popen[bytes]:
        """Start the launcher as the runner does."""
        command = [sys.executable, str(LAUNCHER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=self.env)
        assert self.process.stdin is not None
        self.process.stdin.write(self.config(mode))
        self.process.stdin.flush()
        return self.process

    def tree(self) -> list[int]:
        """Server, child, grandchild and orphan, once they all run."""
        eventually(self.told.exists)
        pids: list[int] = json.loads(self.told.read_text())["pids"]
        assert all(map(alive, pids))
        return pids


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    it = Launched(tmp_path)
    yield it
    if it.process is not None:
        it.process.kill()
        it.process.communicate()
    if it.told.exists():  # only where a test failed is there anything left to kill
        for pid in filter(alive, json.loads(it.told.read_text())["pids"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


@pytest.mark.parametrize(("mode", "status"), [("0", 0), ("3", 3), ("signal", 128 + signal.SIGUSR2)])
def test_exit_status_is_the_servers(launched: Launched, mode: str, status: int) -> None:
    """The launcher ends with the server's exit status."""
    assert launched.start(mode).wait(PATIENCE_S) == status


def test_key_shows_nowhere(launched: Launched) -> None:
    """The server has the key, and no list of processes shows it."""
    launcher = launched.start("quiet")
    pids = [launcher.pid, *launched.tree()]
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert json.loads(launched.told.read_text())["key"] == SECRET


def test_log_is_private_and_whole(launched: Launched) -> None:
    """The log has the complete output of the server, invalid UTF-8 included."""
    launched.start("3").wait(PATIENCE_S)
    log = launched.log.read_bytes()
    assert log.startswith(b"server_args ['--api-key', '5ecret']\n")
    assert b"not text: \xff\xfe\n" in log
    assert stat.S_IMODE(launched.log.stat().st_mode) == 0o600


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_all_is_for_the_runner_to_judge(launched: Launched, number: signal.Signals) -> None:
    """Ctrl-C, or a SIGTERM from Slurm, reaches the whole tree, and must not interrupt rows in flight."""
    launcher = launched.start("quiet")
    tree = [launcher.pid, *launched.tree()]
    assert not [pid for pid in tree if number not in deaf_to(pid)]
    for pid in tree:
        os.kill(pid, number)
    assert all(map(alive, tree))


def test_killed_owner_leaves_nothing(launched: Launched) -> None:
    """A SIGKILL of the runner, which it cannot handle, still ends the server's whole tree."""
    owner_code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE)\n"
        "p.stdin.write(sys.argv[1].encode()); p.stdin.flush(); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", owner_code, launched.config("quiet").decode()]
    launched.process = subprocess.Popen([*command, sys.executable, str(LAUNCHER)], env=launched.env)
    pids = launched.tree()
    launched.process.kill()
    eventually(lambda: gone(pids))


def test_killed_launcher_takes_the_server_along(launched: Launched) -> None:
    """If the launcher is killed, the kernel ends the server, which ends its workers."""
    launcher = launched.start("deaf")
    server = launched.tree()[0]
    launcher.kill()
    eventually(lambda: not alive(server))


def test_machines_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on two machines is refused in one line in a task with one machine."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    done = batchrun(write_job(job_of(tmp_path, two_halves(tmp_path)), tmp_path))
    assert done.exit_code == 2
    assert "engine.nodes 2: needs a Slurm job with 2 machines (SLURM_JOB_NUM_NODES is 1): " in done.stderr
