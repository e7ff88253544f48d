"""Ctrl-C, SIGTERM, SIGKILL and time limits: a run drains or stops, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.conftest import (
    batchrun,
    eventually,
    job_of,
    parts_of,
    report_of,
    started,
    write_job,
)
from tests.support.engine_processes import (
    command_line,
    descendants_of,
    marked,
    processes_of,
    wait_while_it_runs,
)
from tests.support.launchable import launchable
from tests.support.runs import held_from, rows_in, rows_sent

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_one_signal_drains(tmp_path: Path, server: FakeSGLang, number: signal.Signals, code: int) -> None:
    """No row is sent any more, those in flight are waited for, and the run can be resumed."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4)
    file = write_job(job, tmp_path)
    with started(file) as process:
        server.wait_for(14)
        process.process.send_signal(number)
        process.wait_for_line("waiting for the rows in flight")
        server.answer_held()
        assert process.end() == code
    assert rows_in(job) == list(range(14))
    report = report_of(job)
    assert (report["exit_code"], report["rows_ok"]) == (code, 14)
    server.forget()
    assert batchrun(file).exit_code == 0
    assert rows_sent(server) == list(range(14, 40))
    assert rows_in(job) == list(range(40))


def test_a_drain_has_an_end(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that do not end within limits.drain of a SIGUSR1 are cut; what had ended is kept."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4, limits={"drain": 0.2})
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(14)
        process.process.send_signal(signal.SIGUSR1)
        assert process.end() == 138
    assert rows_in(job) == list(range(10))
    assert report_of(job)["reason"] == "time is nearly up"


def test_a_second_sigterm_changes_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Slurm's SIGTERM comes twice, to us and through our script: that is no wish to stop now."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4)
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(14)
        process.process.send_signal(signal.SIGTERM)
        process.wait_for_line("waiting for the rows in flight")
        process.process.send_signal(signal.SIGTERM)
        process.process.send_signal(signal.SIGUSR1)
        server.answer_held()
        assert process.end() == 143
    assert rows_in(job) == list(range(14))


def test_two_interrupts_stop_now(tmp_path: Path, server: FakeSGLang) -> None:
    """The second Ctrl-C waits for nobody; what had ended is kept and the rest is resumed."""
    server.script = held_from(10)
    job = job_of(tmp_path, server, rows=40, window=4)
    file = write_job(job, tmp_path)
    with started(file) as process:
        server.wait_for(14)
        process.process.send_signal(signal.SIGINT)
        process.wait_for_line("interrupted: waiting for the rows in flight")
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    assert "Traceback" not in "".join(process.lines)
    assert rows_in(job) == list(range(10))
    assert report_of(job)["rows_ok"] == 10
    server.forget()
    server.script = lambda _: "answer"
    assert batchrun(file).exit_code == 0
    assert rows_sent(server) == list(range(10, 40))


def test_a_kill_leaves_whole_parts(tmp_path: Path, server: FakeSGLang) -> None:
    """After SIGKILL the parts are whole, none of their rows is sent again, and all others are."""
    server.script = held_from(23)
    job = job_of(tmp_path, server, rows=40, window=4, output={"part_rows": 5})
    file = write_job(job, tmp_path)
    with started(file) as process:
        server.wait_for(27)
        eventually(lambda: len(parts_of(tmp_path / "run")) >= 2)
        process.process.kill()
        assert process.end() == -signal.SIGKILL
    survived = rows_in(job)
    assert len(survived) >= 10
    state = json.loads(batchrun("status", tmp_path / "run", "--json").stdout)
    assert state["running"] is None
    assert len(survived) <= state["rows_on_disk"] <= 23  # those in the journal too
    # what a kill in mid-write would leave
    (tmp_path / "run" / "parts" / ".part-main-000099.parquet.tmp").write_bytes(b"PAR1 torn")
    server.forget()
    server.script = lambda _: "answer"
    assert batchrun(file).exit_code == 0
    assert len(rows_sent(server)) == 40 - state["rows_on_disk"]
    assert not set(rows_sent(server)) & set(survived)
    assert rows_in(job) == list(range(40))
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert report_of(job)["starts"] == 2


HOLDING = """
from pathlib import Path

class Handler(Server):
    known = {
        "/health": {}, "/model_info": {"model_path": "holding"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
    }
    def asked(self, body):
        Path(os.environ["SEEN"]).touch()
        while not Path(os.environ["GO"]).exists():
            time.sleep(0.02)
        self.answer("to " + body["text"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_to_all_processes_drains(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Slurm and systemd send a signal to all that a run has started: its rows in flight still end."""
    seen, go = tmp_path / "seen", tmp_path / "go"
    engine = launchable(tmp_path, HOLDING, SEEN=str(seen), GO=str(go))
    job = job_of(tmp_path, engine, rows=40, window=4, bundle="off")
    with started(write_job(job, tmp_path)) as process:
        eventually(seen.exists)
        everybody = [process.process.pid, *descendants_of(process.process.pid)]
        assert len(everybody) >= 3  # launcher and server
        for pid in everybody:
            os.kill(pid, number)
        process.wait_for_line("waiting for the rows in flight")
        go.touch()
        assert process.end() == code
    assert not [line for line in process.lines if "died" in line]
    assert 1 <= len(rows_in(job)) < 40
    assert report_of(job)["rows_failed"] == 0


WITH_CHILD = """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "with child"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
    }
    def asked(self, body):
        while int(body["text"].split()[1]) >= 100:
            time.sleep(1)
        self.answer("to " + body["text"])
"""


@pytest.mark.gateway
def test_a_kill_takes_gateway_and_replicas_along(tmp_path: Path) -> None:
    """SIGKILL of the runner in mid-run ends all that it has started, and what that has started."""
    engine = {**launchable(tmp_path, WITH_CHILD), "kind": "gateway", "replicas": 2}
    job = job_of(tmp_path, engine, rows=200, output={"part_rows": 50})
    command = [sys.executable, "-m", "batchrunner", str(write_job(job, tmp_path))]
    run = tmp_path / "run"
    with subprocess.Popen(
        command, env=marked(os.environ, tmp_path), stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            wait_while_it_runs(process, lambda: sum(part.num_rows for part in parts_of(run)) >= 50)
            others = descendants_of(process.pid)
            # 3 launchers, gateway, 2 servers with a child each
            assert len(others) >= 8, [command_line(pid) for pid in others]
        finally:
            process.kill()
    eventually(lambda: not processes_of(tmp_path) and not any(map(command_line, others)))
    assert sum(part.num_rows for part in parts_of(run)) >= 50
