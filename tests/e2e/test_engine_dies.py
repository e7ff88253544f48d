"""An engine that dies is started again; a row that kills it is found, and nothing else is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.timing import TIMING
from batchrunner.dispatch.queue import MOST_DEATHS, PoisonRows
from batchrunner.engines.launched.supervisor import MOST_QUICK_DEATHS
from tests.conftest import batchrun, events_of, job_of, report_of, results_of, write_job
from tests.support.launchable import launchable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


FRAGILE = """
class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "fragile"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
        "/v1/loads": {"loads": [{
            "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 8,
            "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0, "timestamp": 1.0}]},
    }
    def asked(self, body):
        time.sleep(0.02)
        while int(body["text"].split()[1]) >= int(os.environ.get("LATER", 10**9)):
            if os.path.exists(os.environ["GO_ON"]):
                break
            time.sleep(0.02)
        broken = os.path.exists(os.environ.get("BROKEN_BY_IT", "/no"))
        if body["text"] in os.environ["POISON"].split(",") and not broken:
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            open(os.environ.get("BROKEN_BY_IT", os.devnull), "w").close()
            os._exit(1)
        self.answer("to " + body["text"])

if os.path.exists(os.environ.get("BROKEN_BY_IT", "/no")):
    sys.exit("RuntimeError: no CUDA GPUs are available")
"""


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts and retries without the pauses that are for real engines."""
    monkeypatch.setattr(TIMING, "first_restart", 0.01)
    monkeypatch.setattr(TIMING, "first_retry", 0.01)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)
    monkeypatch.setattr(TIMING, "quick_death", 3600.0)  # a slow machine starts a server for minutes


def fragile_job(
    directory: Path, rows: int, *, poison: str, limits: Mapping[str, Any] = {}, **environ: str
) -> dict[str, Any]:
    engine = launchable(directory, FRAGILE, POISON=poison, **environ)
    return job_of(directory, engine, rows=rows, limits=limits)


@pytest.mark.usefixtures("quick_restarts")
def test_a_poisonous_row_is_found(tmp_path: Path) -> None:
    """The row that kills the engine ends as a failed row that says so; all others are answered."""
    job = fragile_job(tmp_path, 300, poison="row 117")
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 3, result.stderr
    results = results_of(job)
    assert [row["row"] for row in results] == list(range(300))
    failed = [row for row in results if row["error"]]
    assert [row["row"] for row in failed] == [117]
    assert f"the engine died {MOST_DEATHS} times while it had this row" in failed[0]["error"]
    assert result.stderr.count("the engine is back") >= MOST_DEATHS - 1  # the last start need not end
    assert "an illegal memory access was encountered" in result.stderr


@pytest.mark.usefixtures("quick_restarts")
def test_a_server_that_finds_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not started for ever, and the start after does not take the old log for its own."""
    monkeypatch.setattr(TIMING, "launch_word", 0.01)
    loses = """
if not os.path.exists(os.environ["WINS"]):
    sys.exit("OSError: [Errno 98] error while attempting to bind on address: address already in use")
time.sleep(0.2)
"""
    engine = launchable(tmp_path, FRAGILE + loses, POISON="", WINS=str(tmp_path / "wins"))
    file = write_job(job_of(tmp_path, engine, rows=5), tmp_path)
    result = batchrun(file)
    assert result.exit_code == 2
    assert "the engine did not start" in result.stderr
    (tmp_path / "wins").touch()
    assert batchrun(file).exit_code == 0


@pytest.mark.gateway
@pytest.mark.usefixtures("quick_restarts")
def test_a_poisonous_row_behind_a_gateway(tmp_path: Path) -> None:
    """It kills replicas here and there; the row is found as with one server, and no other row is blamed."""
    job = fragile_job(tmp_path, 400, poison="row 117", limits={"max_attempts": 1})
    job["engine"] |= {"kind": "gateway", "replicas": 2}
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 3, result.stderr
    assert [row["row"] for row in results_of(job)] == list(range(400))
    failed = [row for row in results_of(job) if row["error"]]
    assert [row["row"] for row in failed] == [117]
    assert f"the engine died {MOST_DEATHS} times while it had this row" in failed[0]["error"]
    events = events_of(job)
    assert [event for event in events if event == "engine_died"] == ["engine_died"] * MOST_DEATHS
    assert "engine_back" in events


@pytest.mark.usefixtures("quick_restarts")
def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    """An engine that dies whenever it is started ends the run with the cause; what is done is kept."""
    job = fragile_job(tmp_path, 300, poison="row 117", BROKEN_BY_IT=str(tmp_path / "mark"))
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert "no CUDA GPUs are available" in last
    assert f"for the {MOST_QUICK_DEATHS + 1}th time in a row" in last
    assert 0 < report_of(job)["rows_ok"] < 300


@given(window=st.integers(1, 5000), poison=st.integers(0, 10**6), fresh=st.integers(0, 20_000))
def test_one_row_is_given_up_at_last(window: int, poison: int, fresh: int) -> None:
    """However many were in flight, it takes four deaths, and the row that is given up is the right one."""
    suspects: PoisonRows[int] = PoisonRows()
    poison %= window
    rows = iter(range(window + fresh))
    saw: dict[int, int] = {}
    deaths = 0
    given_up: list[int] = []
    while not given_up:
        flying: list[int] = []
        while len(flying) < window:
            degree = suspects.next_degree(window)
            row = suspects.take(degree) if degree is not None else next(rows, None)
            if row is None:
                break
            flying.append(row)
        assert flying, "nothing can be sent"
        died = poison in flying
        deaths += died
        for row in flying:
            if saw.get(row):
                suspects.came_back(saw[row])
            if died:
                saw[row] = saw.get(row, 0) + 1
                if saw[row] >= MOST_DEATHS:
                    given_up.append(row)
                else:
                    suspects.add(row, saw[row])
    assert given_up == [poison]
    assert deaths == MOST_DEATHS
