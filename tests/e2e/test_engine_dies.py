"""An engine that dies is started again; a row that kills it is found, and nothing else is lost."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import EngineLostError
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.queue import MOST_DEATHS, PoisonRows
from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.launched import supervisor as guard
from batchrunner.engines.launched.supervisor import MOST_QUICK_DEATHS, ServerSupervisor, Supervised
from tests.conftest import batchrun, events_of, eventually, job_of, report_of, results_of, write_job
from tests.support.launchable import launchable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from batchrunner.engines.launched.supervisor import LaunchedProcess

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


@pytest.mark.gateway
@pytest.mark.usefixtures("quick_restarts")
def test_a_replica_in_a_crash_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be started any more is left out, and the run goes on with the other."""
    monkeypatch.setattr(guard, "MOST_QUICK_DEATHS", 1)
    go_on = tmp_path / "go on"  # until one is lost, the other answers no row from 300 on
    job = fragile_job(
        tmp_path, 400, poison="row 117", BROKEN_BY_IT=str(tmp_path / "mark"), LATER="300", GO_ON=str(go_on)
    )
    job["engine"] |= {"kind": "gateway", "replicas": 2}

    def see_it_lost() -> None:
        log = tmp_path / "run" / "events.jsonl"
        eventually(lambda: log.exists() and '"engine_lost"' in log.read_text())
        go_on.touch()

    with ThreadPoolExecutor() as pool:
        seen = pool.submit(see_it_lost)
        result = batchrun(write_job(job, tmp_path))
        seen.result()
    assert result.exit_code == 0, result.stderr
    assert [row["row"] for row in results_of(job)] == list(range(400))
    assert "no CUDA GPUs are available" in result.stderr
    assert events_of(job).count("engine_lost") == 1


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


class MortalProcess:
    """A process that ends whenever the test says so."""

    name = "the program"

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def ended(self) -> None:
        await self.end.wait()
        self.end.clear()

    async def stop(self) -> None:
        return

    def failure_message(self, what: str) -> str:
        return f"{what}: out of memory"


class Mortal(Supervised):
    """The program that a supervisor restarts."""

    def __init__(self) -> None:
        self.process: LaunchedProcess = MortalProcess()  # type: ignore[assignment]
        self.end: asyncio.Event = self.process.end  # type: ignore[attr-defined]
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1

    async def set_up(self, *, up: bool) -> None:
        return


async def test_a_death_now_and_then_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only quick deaths in a row are a crash loop: one every few minutes goes on for ever."""
    monkeypatch.setattr(TIMING, "quick_death", 0.0)
    mortal = Mortal()
    watched = ServerSupervisor(mortal, IncidentQueue())
    watching = asyncio.create_task(watched.watch())
    for death in range(1, 3 * MOST_QUICK_DEATHS):
        mortal.end.set()
        while mortal.starts < death:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        await watched.ready()
    assert watched.lost is None
    watching.cancel()


async def test_a_crash_loop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the program learns why there is none."""
    monkeypatch.setattr(TIMING, "first_restart", 0.0)
    mortal = Mortal()
    watched = ServerSupervisor(mortal, IncidentQueue())
    watching = asyncio.create_task(watched.watch())
    while not watching.done():
        mortal.end.set()
        await asyncio.sleep(0)
    assert mortal.starts == MOST_QUICK_DEATHS
    with pytest.raises(EngineLostError, match=r"died: out of memory \(for the 9th time in a row\)"):
        await watched.ready()


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
