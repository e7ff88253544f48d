"""The loop as a whole: windows follow the load of real HTTP servers, and no fault of theirs costs a row."""

import threading
import time
from pathlib import Path
from typing import Literal

import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from tests.conftest import eventually, job_of, log_of, report_of, write_rows
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.runs import rows_once
from tests.support.server_thread import PATIENCE_S


def test_the_first_window_and_every_change_has_a_reason(tmp_path: Path) -> None:
    """The event log tells which scheduler's window was set, to what, in which state, and why."""
    with FakeSGLang(max_running=32, delay_s=0.05) as server:
        job = job_of(tmp_path, server, rows=1000)
        batchrunner.run(job)
        first, *later = log_of(job, "window")
        assert (first["scheduler"], first["old"], first["new"]) == (server.url, 0, 44)
        assert "12-250 (scaled down: the scheduler runs at most 32 requests)" in first["reason"]
        assert all(change["reason"] and change["state"] for change in later)


@pytest.mark.parametrize(("order", "window"), [("auto", 1024 + 100), ("input", 75 + 100)])
def test_the_first_window_is_by_the_prompts(tmp_path: Path, order: str, window: int) -> None:
    """The sample for the order says how many rows the KV pool holds; without it prompts have 256 tokens."""
    write_rows(tmp_path / "input.parquet", 20, ids=[[1000 * row + n for n in range(8)] for row in range(20)])
    sampling = {"max_new_tokens": 16}
    with FakeSGLang(max_running=1024) as server:  # its pool has 20,000 tokens
        job = job_of(tmp_path, server, order=order, prompt={"input_ids": "ids"}, sampling=sampling)
        batchrunner.run(job)
    assert log_of(job, "window")[0]["new"] == window


class Steady:
    """The script of a server that answers a few rows for each poll of its load, and keeps some until the end.

    So what the polls find is the same however fast the machine is, or which process is stopped for how long.
    """

    def __init__(self, server: FakeSGLang, rows: int) -> None:
        self._server, self._rows = server, rows
        self._answered = 0
        server.on_poll = server.wake_held

    def __call__(self, _: Sent) -> Behaviour:
        arrived = len(self._server.sent)
        has_more = arrived - self._answered > self._server.max_running + 4 or arrived == self._rows
        if not has_more or self._answered >= 4 * self._server.polled:
            return "hold"
        self._answered += 1
        return "answer"


def test_the_queue_is_held_and_reported(tmp_path: Path) -> None:
    """The window settles so that the queue is in its band, and the report says for how long it was."""
    with FakeSGLang(max_running=32) as server:
        server.script = Steady(server, 200)
        job = job_of(tmp_path, server, rows=200)
        batchrunner.run(job)
        load = report_of(job)["load"]
        assert load["steady_s"] > 3  # of 50 polls, 0.25 s apart at least
        assert load["in_band_share"] > 0.8
        assert load["empty_queue_share"] == 0
        assert 10 < load["mean_queue"] < 250


@pytest.mark.parametrize("polls", ["gone", "hang"])
def test_a_load_that_is_not_told_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polls: Literal["gone", "hang"]
) -> None:
    """A poll without an answer is given up; the run goes on, held to what was known, and says so."""
    with FakeSGLang(max_running=32, delay_s=0.05) as server:
        monkeypatch.setattr(TIMING, "silent_scheduler", PATIENCE_S)
        job = job_of(tmp_path, server, rows=1500)

        def script(sent: Sent) -> Behaviour:
            if len(server.sent) == 200:
                server.polls = polls
                monkeypatch.setattr(TIMING, "status_timeout", 0.3)
                monkeypatch.setattr(TIMING, "silent_scheduler", 1.0)  # not before: a machine may stand still
            return "hold" if sent.prompt == "row 1499" else "answer"

        def wait_for_the_event() -> None:
            log = tmp_path / "run" / "events.jsonl"
            eventually(lambda: log.exists() and '"blind"' in log.read_text())
            server.answer_held()

        server.script = script
        waiter = threading.Thread(target=wait_for_the_event)
        waiter.start()
        batchrunner.run(job)
        waiter.join()
        rows_once(job, 1500)
        (blind,) = (change for change in log_of(job, "window") if change["state"] == "blind")
        assert "no fresh load" in blind["reason"]


def test_a_load_that_is_told_later(tmp_path: Path) -> None:
    """An error as the engine is opened does not mean that the server reports no load."""
    with FakeSGLang() as server:
        server.polls = "error"

        def script(_: Sent) -> Behaviour:
            server.polls = "answer"
            return "answer" if server.polled else "hold"

        def answer_held() -> None:
            if server.polled:
                server.answer_held()

        server.on_poll, server.script = answer_held, script
        report = batchrunner.run(job_of(tmp_path, server))
        assert (report.rows_ok, server.polled > 0) == (10, True)


def test_refusals_narrow_the_window(tmp_path: Path) -> None:
    """A server that answers 503 for a while is sent less; no row is lost or failed by that."""
    with FakeSGLang(max_running=64, delay_s=0.02) as server:
        job = job_of(tmp_path, server, rows=2000)
        refused_at: list[int] = []

        def script(sent: Sent) -> Behaviour:
            if 300 <= len(server.sent) < 600:
                refused_at.append(server.polled)
                return "busy 503"
            # the run does not end before the load was asked for after the refusals
            return "hold" if sent.prompt == "row 1999" and server.polled < refused_at[-1] + 3 else "answer"

        server.script, server.on_poll = script, server.wake_held
        report = batchrunner.run(job)
        rows_once(job, 2000)
        assert report.retries >= 250  # some of those refused were controls
        pressed = [change for change in log_of(job, "window") if change["state"] == "pressure"]
        assert pressed
        assert all(change["new"] < change["old"] for change in pressed)
        assert "503" in pressed[0]["reason"]


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock may be set back or forth in mid-run: nothing is timed by it."""
    clock = iter(range(10**9, 0, -3600))
    with FakeSGLang(max_running=32, delay_s=0.02) as server:
        job = job_of(tmp_path, server, rows=800)
        monkeypatch.setattr("batchrunner.output.events.time.time", lambda: float(next(clock)))
        began = time.monotonic()
        report = batchrunner.run(job)
        took_s = time.monotonic() - began
    rows_once(job, 800)
    assert 0 < report.wall_s <= took_s
    elapsed = [sample["elapsed_s"] for sample in log_of(job, "sample")]
    assert elapsed == sorted(elapsed)
