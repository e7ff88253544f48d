"""Real replicas behind the real gateway."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.engines.launched.fleet import LaunchedFleet
from tests.conftest import (
    SMALL_MODEL,
    job_of,
    require_engine,
    results_of,
    write_job,
)
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchrunner.engines.launched.process import LaunchedProcess
START_S = 300

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_engine("sglang", "sglang_router")
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)


def fleet_of(tiny: Path) -> dict[str, Any]:
    # one thread for a model this small: the threads of two replicas would fight for the cores
    return {
        "kind": "gateway", "model": str(tiny), "device": "cpu", "replicas": 2,
        "env": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def replicas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """Two real replicas behind the real gateway."""
    logs = tmp_path_factory.mktemp("fleet")
    with batchrunner.open_engine(fleet_of(tiny), log_dir=logs) as engine:
        yield engine


def _long_job(tmp_path: Path, engine: dict[str, Any], rows: int, tokens: int = 64) -> dict[str, Any]:
    return job_of(
        tmp_path,
        engine,
        rows=rows,
        sampling={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        output={"part_rows": 50},
    )


def _marked(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def test_killed_runner_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    """SIGKILL of the runner ends the replicas and the gateway. (First: before the fixture's own are up.)"""
    job = _long_job(tmp_path, fleet_of(tiny), rows=5000)
    command = [sys.executable, "-m", "batchrunner", str(write_job(job, tmp_path))]
    environ = {**os.environ, "BATCHRUNNER_TEST_MARK": str(tmp_path)}
    marker = f"BATCHRUNNER_TEST_MARK={tmp_path}"
    parts = tmp_path / "run" / "parts"
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + START_S
            while not list(parts.glob("part-*.parquet")):
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert len(_marked(marker)) >= 9  # runner, 3 launchers, 2 servers with a scheduler each, gateway
        finally:
            process.kill()
    deadline = time.monotonic() + 30
    while _marked(marker):
        assert time.monotonic() < deadline, "something outlived the runner"
        time.sleep(0.1)
    assert pq.read_table(parts).num_rows >= 50


def _fleet(engine: batchrunner.OpenEngine) -> LaunchedFleet:
    made = engine._engine
    assert isinstance(made, LaunchedFleet)
    return made


def _descendants(pid: int) -> list[int]:
    """Return what a process has started, and only that, by the kernel's own lists of children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _signal(process: LaunchedProcess, number: signal.Signals) -> None:
    """Send a signal to the program and all that it started, and not to its launcher."""
    assert process._process is not None
    assert process._process.returncode is None
    victims = _descendants(process._process.pid)
    assert victims
    assert os.getpid() not in victims
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _run_and(
    engine: batchrunner.OpenEngine, job: dict[str, Any], strike: Callable[[], None], parts: int = 1
) -> Any:
    """Run a job; strike once it has written so many parts."""

    def wait_and_strike() -> None:
        folder = Path(job["output"]["path"]) / "parts"
        deadline = time.monotonic() + START_S
        while len(list(folder.glob("part-*.parquet"))) < parts and time.monotonic() < deadline:
            time.sleep(0.05)
        strike()

    striker = threading.Thread(target=wait_and_strike)
    striker.start()
    report = batchrunner.run(job, engine=engine)
    striker.join()
    return report


def _schedulers(job: dict[str, Any]) -> set[str]:
    """Return those that were seen to run rows."""
    lines = (Path(job["output"]["path"]) / "events.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines if '"sample"' in line]
    return {s["scheduler"] for sample in samples for s in sample["signals"] if s["running"] > 0}


def test_real_replicas(replicas: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """All rows are answered, by both replicas, whose loads are polled; the key is in no log."""
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=300)
    report = batchrunner.run(job, engine=replicas)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 300, 0)
    fleet = _fleet(replicas)
    assert _schedulers(job) == fleet._replicas.keys()
    assert report.engine["max_running"] == 64
    for log in fleet._log_dir.glob("engine-*.log"):
        assert fleet._key not in log.read_text(errors="replace")
    assert len(list(fleet._log_dir.glob("engine-*.log"))) == 3


def test_replica_that_is_killed(
    replicas: batchrunner.OpenEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again and put back; no row is lost, written twice, or blamed."""
    fleet = _fleet(replicas)
    victim = next(iter(fleet._replicas.values()))
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=1200)
    job["limits"] = {"max_attempts": 1}
    report = _run_and(replicas, job, lambda: _signal(victim.process, signal.SIGKILL), parts=2)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 1200, 0)
    assert [row["row"] for row in results_of(job)] == list(range(1200))
    assert report.retries > 0
    deadline = time.monotonic() + START_S
    while "replica 0 is back" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "replica 0 died (exit 137)" in caplog.text
    assert "replica 0 is back" in caplog.text
    again = _long_job(tmp_path / "again", fleet_of(tmp_path), rows=200)
    assert batchrunner.run(again, engine=replicas).rows_ok == 200
    assert victim.url in _schedulers(again)


def test_replica_that_stands_still(replicas: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """A replica that is stopped for 3 s keeps its rows; woken, it does them, and the next job uses both."""
    victim, other = _fleet(replicas)._replicas.values()
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=1200)
    job["limits"] = {"max_attempts": 1}

    def hold() -> None:
        _signal(victim.process, signal.SIGSTOP)
        time.sleep(3)
        _signal(victim.process, signal.SIGCONT)

    report = _run_and(replicas, job, hold, parts=2)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 1200, 0)  # no row went elsewhere
    assert [row["row"] for row in results_of(job)] == list(range(1200))
    # How the rest of that job was shared depends on the machine's speed: a second job shows both at work.
    again = _long_job(tmp_path / "again", fleet_of(tmp_path), rows=300)
    assert batchrunner.run(again, engine=replicas).rows_ok == 300
    assert _schedulers(again) == {victim.url, other.url}


def test_gateway_that_is_killed(
    replicas: batchrunner.OpenEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again with both replicas, and the run goes on."""
    fleet = _fleet(replicas)
    gateway = fleet._gateway
    assert gateway is not None
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=600)
    job["limits"] = {"max_attempts": 1}
    report = _run_and(replicas, job, lambda: _signal(gateway.process, signal.SIGKILL))
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 600, 0)
    assert [row["row"] for row in results_of(job)] == list(range(600))
    assert "the gateway died (exit 137)" in caplog.text
    assert "the gateway is back" in caplog.text
