"""`batchrun engine` starts a server by hand, as a run would, for jobs that attach to it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, batchrun, column_of, job_of, run_job, write_job
from tests.support.launchable import FRAGILE, launchable
from tests.support.server_thread import PATIENCE_S, is_free

ANSWERS = FRAGILE.replace('body["input_ids"]', '[1]\n        return self.answer("to " + body["text"])')


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_server_by_hand(tmp_path: Path, key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its URL is what stands on standard output, jobs attach to it, and Ctrl-C ends it with exit code 0."""
    seen = 'open(os.environ["SEEN"], "w").write(" ".join([os.environ["PYTHONPATH"], *sys.argv]))\n'
    own = launchable(tmp_path, seen + ANSWERS, SEEN=str(tmp_path / "seen"))
    file = write_job(job_of(tmp_path, own), tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if key:
        monkeypatch.setenv("SGLANG_API_KEY", key)
    command = [sys.executable, "-m", "batchrunner", "engine", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = process.stdout.readline().strip()
            shown = next(line for line in process.stderr if "export" in line).strip().rpartition("=")[2]
            assert shown == key or (key is None and len(shown) == 48)
            monkeypatch.setenv("SGLANG_API_KEY", shown)
            run_job(job := job_of(tmp_path) | {"engine": url}, tmp_path)
            assert column_of(job, "output") == [f"to row {n}" for n in range(10)]
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    assert is_free(int(url.rpartition(":")[2]))
    told = (tmp_path / "seen").read_text()
    assert "--schedule-policy fcfs" in told
    assert f"--api-key {shown}" in told


def test_an_engine_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says why; the log of a server that dies stays."""
    monkeypatch.setenv("SGLANG_API_KEY", "a-key")  # the command sets one, in this process, if there is none
    refused = batchrun("engine", "simulated")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "batchrun: engine: kind simulated starts no server: give a model\n",
    )
    own = launchable(tmp_path, "sys.exit('RuntimeError: no CUDA GPUs are available')\n")
    dead = batchrun("engine", write_job(job_of(tmp_path, own), tmp_path))
    assert dead.exit_code == 2
    assert "no CUDA GPUs are available" in dead.stderr
    assert Path(dead.stderr.rpartition("[")[2].rstrip("]\n")).exists()
    assert "export" not in dead.stderr


def test_no_server_is_started_without_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without smg is found before minutes are spent on loading the model."""
    monkeypatch.setenv("SGLANG_API_KEY", "a-key")
    engine = launchable(tmp_path, 'open(os.environ["SEEN"], "w")\n' + ANSWERS, SEEN=str(tmp_path / "seen"))
    python = tmp_path / "python-without-smg"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    file = write_job(job_of(tmp_path, {**engine, "python": str(python)}), tmp_path)
    refused = batchrun("engine", file, "--gateway")
    assert refused.exit_code == 2
    assert f"{python} has no module smg: install it for this interpreter" in refused.stderr
    assert not (tmp_path / "seen").exists()


@pytest.mark.gateway
def test_replicas_behind_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One address for two replicas: jobs that attach to it send their rows to both, and Ctrl-C ends all."""
    seen = 'open(os.environ["SEEN"], "a").write(sys.argv[sys.argv.index("--port") + 1] + "\\n")\n'
    own = launchable(tmp_path, seen + ANSWERS, SEEN=str(tmp_path / "seen"))
    file = write_job(job_of(tmp_path, own), tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "batchrunner", "engine", str(file), "--replicas", "2", "--gateway"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = process.stdout.readline().strip()
            shown = next(line for line in process.stderr if "export" in line).strip().rpartition("=")[2]
            monkeypatch.setenv("SGLANG_API_KEY", shown)
            run = run_job(job := job_of(tmp_path) | {"engine": url}, tmp_path)
            assert column_of(job, "output") == [f"to row {n}" for n in range(10)]
            assert f"{url} is a Model Gateway" in run.stderr
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    replicas = [int(port) for port in (tmp_path / "seen").read_text().split()]
    assert len(replicas) == 2
    assert all(map(is_free, [*replicas, int(url.rpartition(":")[2])]))
