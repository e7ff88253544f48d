"""Flags of launched servers change while the run goes on: what gains stays, and no row is lost by it."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.job.load import load_job
from batchrunner.job.tasks import GENERATE
from batchrunner.runner import adapt, send
from batchrunner.runner.control import Control
from batchrunner.runner.run import execute
from batchrunner.runner.shared_engine import open_engine_of
from batchrunner.tuning.signals import GUIDES
from tests.conftest import events_of, eventually, job_of, log_of, report_of, run_job
from tests.support.launchable import with_slots
from tests.support.runs import rows_once

ROWS = 600
AGAIN = ("--fresh", "--set", "input.limit=200")
"""What a second run is given."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Judge by a second of work, and expect a step to pay: a loaded machine starts a server for seconds."""
    for name, value in {"adapt": 1.0, "launch_poll": 0.02, "first_retry": 0.01, "load_poll": 0.05}.items():
        monkeypatch.setattr(TIMING, name, value)
    monkeypatch.setattr(GUIDES, "span_s", 0.5)
    monkeypatch.setattr(send, "LOGGED_EVERY_S", 0.1)
    monkeypatch.setattr(adapt, "GAIN_TO_COST", 0.01)


def slotted(
    directory: Path, rows: int = ROWS, engine: Mapping[str, Any] = {}, environ: Mapping[str, str] = {}
) -> dict[str, Any]:
    spec = {**with_slots(directory, **environ), **engine}
    return job_of(directory, spec, rows=rows, limits={"max_attempts": 1})


def starts_of(directory: Path) -> list[int]:
    """Return the places of each start, and forget them."""
    found = [int(line) for line in (directory / "starts").read_text().split()]
    (directory / "starts").unlink()
    return found


def verdicts(job: dict[str, Any]) -> list[str]:
    return [
        told["why"].rpartition(": ")[2] for told in report_of(job)["incidents"] if told["what"] == "adapted"
    ]


def test_a_step_that_gains_is_kept(tmp_path: Path) -> None:
    """It is told in the log, as events and in the report; the next run of such a job starts with it."""
    job = slotted(tmp_path, 2 * ROWS)
    result = run_job(job, tmp_path)
    rows_once(job, 2 * ROWS)
    first, *others = starts_of(tmp_path)
    assert first == 4 < min(others)
    assert verdicts(job)[0] == "kept"
    events = events_of(job)
    assert events.count("engine_adapts") == len(others)
    assert "engine_died" not in events
    assert "the engine: starts again with --max-running-requests" in result.stderr
    run_job(job, tmp_path, *AGAIN)
    assert starts_of(tmp_path) == others[-1:]
    assert events_of(job)[0] == "engine_recalled"


@pytest.mark.parametrize(
    "death", [{"AT_START": "if slots > 4: sys.exit('no')"}, {"AT_ROW": "if running > 4: os._exit(1)"}]
)
def test_a_step_that_kills_is_dropped(tmp_path: Path, death: dict[str, str]) -> None:
    """The server goes back to what it had; no row is at fault, and no later run tries it."""
    job = slotted(tmp_path, environ=death)
    run_job(job, tmp_path)
    rows_once(job, ROWS)
    first, tried, back = starts_of(tmp_path)
    assert (first, back) == (4, 4)
    assert tried > 4
    assert verdicts(job) == ["dropped"]
    run_job(job, tmp_path, *AGAIN)
    assert starts_of(tmp_path) == [4]


def test_what_starts_no_more_is_forgotten(tmp_path: Path) -> None:
    """What was found best, and kills the server now, is tried by one run, and by none after it.

    A machine on which no server starts tells nothing of it.
    """
    job = slotted(tmp_path, 2 * ROWS)
    run_job(job, tmp_path)
    starts_of(tmp_path)
    code = next((tmp_path / "site").rglob("launch_server.py"))
    good = code.read_text()
    code.write_text(good.replace("free, lock =", "sys.exit('no')\nfree, lock ="))
    run_job(job, tmp_path, *AGAIN, code=2)
    assert starts_of(tmp_path)[1:] == [4]
    code.write_text(good.replace("free, lock =", "if slots > 4: sys.exit('no')\nfree, lock ="))
    run_job(job, tmp_path, *AGAIN)
    tried, back = starts_of(tmp_path)
    assert (tried > 4, back) == (True, 4)
    run_job(job, tmp_path, *AGAIN)
    assert starts_of(tmp_path) == [4]


def test_a_stop_waits_for_no_restart(tmp_path: Path) -> None:
    """Rows that wait for the server are left for the next start."""
    job = slotted(tmp_path, 10 * ROWS, environ={"AT_START": "if slots > 4: time.sleep(900)"})
    job["limits"] |= {"deadline": 15}
    began = time.monotonic()
    run_job(job, tmp_path, code=1)
    assert starts_of(tmp_path)[1] > 4
    assert time.monotonic() - began < 300
    assert report_of(job)["rows_failed"] == 0


@pytest.mark.parametrize("engine", [{"adapt": "off"}, {"args": {"max_running": 4}}, {"adapt": False}])
def test_what_the_job_says_stays(tmp_path: Path, engine: dict[str, Any]) -> None:
    """A flag that it names, even in short, is not touched, nor any flag where it wants none changed."""
    job = slotted(tmp_path, 200, engine)
    run_job(job, tmp_path)
    assert starts_of(tmp_path) == [4]


def test_what_memory_caps_is_not_tried(tmp_path: Path) -> None:
    """Where the log says that the state pool caps the running requests, no start asks for more of them."""
    job = slotted(tmp_path, 200, environ={"STATES": "3"})
    run_job(job, tmp_path)
    rows_once(job, 200)
    assert starts_of(tmp_path) == [3]


async def test_a_run_after_one_that_was_stopped(tmp_path: Path) -> None:
    """On the same engine, as in `batchrun serve`, its rows wait for a restart that the stopped run began."""
    at_start = "import os\nwhile slots > 4 and not os.path.exists(os.environ['GO']): time.sleep(0.1)"
    go = tmp_path / "go"
    one = slotted(tmp_path, 10 * ROWS, environ={"AT_START": at_start, "GO": str(go)})
    two = {**one, "output": {"path": str(tmp_path / "two")}, "input": {**one["input"], "limit": 40}}
    first, control = load_job(one), Control()
    second = load_job({**two, "limits": {"engine_wait": 0.05}})
    async with contextlib.AsyncExitStack() as stack:
        engine = await open_engine_of(
            first, GENERATE, log_directory=tmp_path / "logs", control=Control(), stack=stack
        )
        running = asyncio.create_task(execute(first, engine=engine, control=control))
        await asyncio.to_thread(eventually, lambda: len((tmp_path / "starts").read_text().split()) == 2)
        control.drain("the test stops it")
        assert (await running).exit_code == 1
        running = asyncio.create_task(execute(second, engine=engine))
        # It goes on while the engine is away for longer than the limit.
        await asyncio.to_thread(eventually, lambda: running.done() or len(log_of(two, "sample")) > 20)
        go.touch()
        report = await running
    assert (report.exit_code, report.rows_ok) == (0, 40)


async def test_one_of_the_runs_at_once_adapts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the servers, and each would judge the steps of the other as its own."""
    adapting = list[Any]()
    monkeypatch.setattr(adapt, "adaptation_of", lambda *given: adapting.append(given))
    one = slotted(tmp_path, rows=100)
    two = {**one, "output": {**one["output"], "path": str(tmp_path / "two")}}
    with batchrunner.open_engine(one["engine"], log_dir=tmp_path / "logs") as engine:
        del one["engine"], two["engine"]
        await asyncio.gather(*(batchrunner.arun(job, engine=engine) for job in (one, two)))
    assert len(adapting) == 1
