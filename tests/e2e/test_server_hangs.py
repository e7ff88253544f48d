"""A server that lives but does nothing is told from one that is slow, and the run goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineLostError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.queue import MOST_DEATHS
from batchrunner.engines.hang_detector import WARM_UP
from tests.conftest import events_of, job_of, results_of, rows_in, run_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import launchable
from tests.support.runs import rows_once

STUCK = """
import threading
stuck = threading.Event()

class Handler(Server):
    @property
    def known(self):
        work = int(time.time() * 1000) if not stuck.is_set() else 5
        return {
            "/ready": {}, "/health": {}, "/model_info": {"model_path": "fragile"},
            "/server_info": {"version": "0.5.23", "max_running_requests": 8},
            "/v1/loads": {"loads": [{
                "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 8,
                "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0,
                "timestamp": time.time(), "total_prefill_busy_us": work}]},
        }
    def asked(self, body):
        time.sleep(float(os.environ.get("SLOW_S", "0.01")))
        mark = os.environ.get("ONCE", "/no")
        if body["text"] == os.environ["POISON"] and not os.path.exists(mark):
            if mark != "/no":
                open(mark, "w").close()
            with open(os.environ["STUCK"], "a") as file:
                print(body["text"], file=file)
            stuck.set()
        if stuck.is_set():
            until = time.monotonic() + 600
            while time.monotonic() < until and not os.path.exists(os.environ.get("GO_ON", "/no")):
                time.sleep(0.02)
            stuck.clear()
        self.answer("to " + body["text"])
"""
HANG_S = 1.0  # five times as long at first: a process that is stopped for 3 s does not hang


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts and retries without the pauses that are for real engines."""
    monkeypatch.setattr(TIMING, "first_restart", 0.01)
    monkeypatch.setattr(TIMING, "first_retry", 0.01)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)


def sticky_job(directory: Path, rows: int, poison: str, **environ: str) -> dict[str, Any]:
    engine = launchable(directory, STUCK, POISON=poison, STUCK=str(directory / "stuck"), **environ)
    return job_of(directory, engine, rows=rows, limits={"hang": HANG_S, "max_attempts": 1})


@pytest.mark.usefixtures("quick_restarts")
def test_a_server_that_hangs_is_started_again(tmp_path: Path) -> None:
    """Its rows in flight go back unharmed and are answered; the event log tells of it."""
    job = sticky_job(tmp_path, 300, "row 117", ONCE=str(tmp_path / "once"))
    result = run_job(job, tmp_path)
    rows_once(job, 300)
    assert "the engine did nothing for" in result.stderr
    events = events_of(job)
    assert events == ["engine_hangs", "engine_back"] * max(1, len(events) // 2)


@pytest.mark.usefixtures("quick_restarts")
def test_a_row_that_hangs_the_server_is_found(tmp_path: Path) -> None:
    """As one that kills it is: all others are answered."""
    job = sticky_job(tmp_path, 300, "row 117")
    run_job(job, tmp_path, code=3)
    assert rows_in(job) == list(range(300))
    assert [row["row"] for row in results_of(job) if row["error"]] == [117]
    assert (tmp_path / "stuck").read_text().splitlines() == ["row 117"] * MOST_DEATHS
    assert events_of(job).count("engine_hangs") >= MOST_DEATHS


def test_a_slow_server_is_left_alone(tmp_path: Path) -> None:
    """No answer for longer than the limit is no hang while the scheduler works."""
    hang_s = 4.0  # the server may be stopped for 3 s
    job = sticky_job(tmp_path, 3, "none", SLOW_S=str(1.2 * WARM_UP * hang_s))
    job["limits"]["hang"] = hang_s
    report = batchrunner.run(job)
    assert (report.rows_ok, report.retries) == (3, 0)
    assert events_of(job) == []


def test_an_attached_server_that_hangs(tmp_path: Path, server: FakeSGLang) -> None:
    """Its rows go to the other one at once, instead of waiting for `request_timeout`."""
    with FakeSGLang(lambda sent: "hold" if server.sent else "answer") as stuck:
        engine = {"kind": "attach", "urls": [stuck.url, server.url]}
        job = job_of(tmp_path, engine, rows=200, window=8, limits={"hang": HANG_S, "max_attempts": 1})
        report = batchrunner.run(job)
        assert stuck.sent
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 200, 0)
    assert "engine_hangs" in events_of(job)


def test_an_attached_server_that_hangs_and_goes_on(tmp_path: Path, server: FakeSGLang) -> None:
    """Its rows wait until it moves again, and are then answered as if nothing had been."""
    hangs = {"now": True}

    def script(sent: Sent) -> Behaviour:
        hangs["now"] &= sent.tries < 2
        return "hold" if hangs["now"] else "answer"

    server.script = script
    job = job_of(tmp_path, server, rows=50, window=8, limits={"hang": HANG_S, "max_attempts": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 50)
    assert events_of(job)[:2] == ["engine_hangs", "engine_back"]


def test_an_attached_server_that_hangs_for_good(tmp_path: Path, server: FakeSGLang) -> None:
    """It ends the run when `engine_wait` has passed; nothing is blamed on a row."""
    server.script = lambda _: "hold"
    limits = {"hang": HANG_S, "engine_wait": 1, "max_attempts": 1, "request_timeout": "1d"}
    with pytest.raises(EngineLostError, match="did nothing for"):
        batchrunner.run(job_of(tmp_path, server, rows=50, window=8, limits=limits))
