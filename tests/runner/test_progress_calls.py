"""`progress` and `on_progress`: a program sees how far its run is."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from tests.conftest import INSTANT, job_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def test_the_last_call_tells_the_end(server: FakeSGLang) -> None:
    """However short a run is, the program hears of its end."""
    told: list[batchrunner.Progress] = []
    server.script = lambda sent: "too long" if sent.prompt == "b" else "answer"
    batchrunner.generate(["a", "b", "c"], engine=server.url, prompt={"text": "text"}, on_progress=told.append)
    last = told[-1]
    assert (last.rows_done, last.rows_total, last.rows_failed, last.rows_in_flight) == (3, 3, 1, 0)
    assert last.eta_s in {0, None}
    assert not last.simulated
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.rows_done = 4  # type: ignore[misc]


def test_calls_are_a_second_apart(tmp_path: Path, server: FakeSGLang) -> None:
    """A program that writes each call to a log or a database is not flooded; the last call comes at once."""
    told: list[tuple[float, batchrunner.Progress]] = []
    enough = threading.Event()

    def listen(progress: batchrunner.Progress) -> None:
        told.append((time.monotonic(), progress))
        if [progress.rows_in_flight for _, progress in told].count(10) == 2:
            enough.set()
            server.answer_held()

    def script(sent: Sent) -> Behaviour:
        return "answer" if enough.is_set() else "hold"

    server.script = script
    report = batchrunner.run(job_of(tmp_path, server), on_progress=listen)
    assert report.rows_ok == 10
    times = [at for at, _ in told[:-1]]
    assert all(later - earlier > TIMING.progress * 0.9 for earlier, later in itertools.pairwise(times))
    assert [progress.rows_in_flight for _, progress in told].count(10) >= 2
    assert told[-1][1].rows_done == 10


async def test_arun_and_an_open_engine(tmp_path: Path) -> None:
    """All ways to start a run tell how far it is."""
    told: list[batchrunner.Progress] = []
    await batchrunner.arun(job_of(tmp_path), on_progress=told.append)
    assert told[-1].rows_done == 10
    with batchrunner.open_engine(INSTANT) as engine:
        batchrunner.generate(["a"], engine=engine, on_progress=told.append)
    assert (told[-1].rows_done, told[-1].simulated) == (1, True)


def test_a_listener_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A slip in what shows a run costs no rows: it is logged once."""

    def listen(progress: batchrunner.Progress) -> None:
        raise KeyError(progress.rows_done)

    with caplog.at_level(logging.ERROR, logger="batchrunner"):
        assert batchrunner.run(job_of(tmp_path), on_progress=listen).exit_code == 0
    assert caplog.text.count("on_progress failed") == 1


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str], *, progress: bool) -> None:
    """The bar is written to standard error, and only where it is asked for."""
    options: dict[str, Any] = {"progress": True} if progress else {}
    batchrunner.run(job_of(tmp_path), **options)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert ("10/10" in shown.err) == progress


async def _asynchronous(progress: batchrunner.Progress) -> None:
    """Do nothing."""


@pytest.mark.parametrize("given", [5, "print", [], lambda: None, lambda a, b: (a, b), _asynchronous])
async def test_what_cannot_be_called_is_refused_before_the_run(tmp_path: Path, given: Any) -> None:
    """A listener that no call could reach is a JobError in every function that takes one; nothing is sent."""
    with pytest.raises(batchrunner.JobError, match=r"^on_progress: .* a plain function of one argument"):
        batchrunner.run(job_of(tmp_path), on_progress=given)
    with pytest.raises(batchrunner.JobError, match=r"^on_progress: "):
        await batchrunner.arun(job_of(tmp_path), on_progress=given)
    with pytest.raises(batchrunner.JobError, match=r"^on_progress: "):
        batchrunner.generate([], engine="simulated", on_progress=given)
    with pytest.raises(batchrunner.JobError, match=r"^on_progress: "):
        batchrunner.stream(["a"], engine="simulated", on_progress=given)
    assert not (tmp_path / "run").exists()
