"""A run takes what the users of a server leave, and gives it back when they come."""

from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineStartError, JobError
from batchrunner.core.timing import TIMING
from tests.conftest import batchrun, column_of, job_of, report_of, run_job, write_job, write_rows
from tests.e2e.test_batch_files import Batch, request_of
from tests.support.fake_sglang import TOKENS_OF_ABORTED, Behaviour, FakeSGLang, Sent
from tests.support.functions import write_module
from tests.support.runs import rows_once

pytestmark = pytest.mark.usefixtures("quick_retries")

SLOTS, ROWS, POLLS = 8, 40, 8
PRIORITIES = {"enable_priority_scheduling": True, "default_priority_value": 0}


class Day:
    """A server on which users come after a few polls, and want all slots and the pool; later they leave."""

    def __init__(self, server: FakeSGLang) -> None:
        self._server = server
        self.running_at_first = self.running_with_users = 0
        self.sent_before_users = self.sent_with_users = 0
        server.on_poll = self.poll
        server.script = self.script

    def script(self, _: Sent) -> Behaviour:
        return "answer" if self._server.polled > 3 * POLLS else "hold"

    def poll(self) -> None:
        """Change with the polls of the load, so that no clock matters."""
        server = self._server
        in_flight = len(server.sent) - len(server.aborted)
        if server.polled < POLLS:
            self.running_at_first = in_flight
        elif server.polled == POLLS:
            server.others, server.used_tokens = SLOTS, 19_000  # of 20,000
        elif server.polled == POLLS + 1:
            self.sent_before_users = len(server.sent)
        elif server.polled == 3 * POLLS:
            self.running_with_users, self.sent_with_users = in_flight, len(server.sent)
            server.others = server.used_tokens = 0
        server.wake_held()


@pytest.mark.parametrize(
    "arguments", [{}, PRIORITIES, PRIORITIES | {"schedule_low_priority_values_first": True}]
)
def test_users_get_back_what_they_need(
    tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in the way of users are aborted, and sent again later, without counting as attempts."""
    monkeypatch.setattr(TIMING, "background_poll", 0.01)
    with FakeSGLang(max_running=SLOTS, arguments=arguments) as server:
        day = Day(server)
        job = job_of(tmp_path, server, rows=ROWS)
        job["limits"] = {"max_attempts": 1}
        ran = batchrun("run", write_job(job, tmp_path), "--background")
        assert ran.exit_code == 0, ran.stderr
        sent = [each.body for each in server.sent]
    rows_once(job, ROWS)
    assert {*column_of(job, "attempts")} == {1}
    assert (day.running_with_users, day.sent_with_users) == (0, day.sent_before_users)
    assert day.running_at_first == (SLOTS + 1 if arguments else SLOTS - 1)
    lowest = {0: None, 2: -(2**63), 3: 2**63 - 1}[len(arguments)]
    assert {body.get("priority") for body in sent} == {lowest}
    assert len({body["rid"] for body in sent}) == len(sent) > ROWS
    background = report_of(job)["load"]["background"]
    assert background["rows_given_back"] == len(sent) - ROWS
    assert background["tokens_lost"] == TOKENS_OF_ABORTED * background["rows_given_back"]
    assert 0 < background["our_share"] < 1
    assert 0 < background["users_share"] < 1
    assert "rows of this run, so the run leaves a part of the server free" in ran.stderr or arguments
    assert f"{background['rows_given_back']} rows preempted" in ran.stderr


def test_an_abort_that_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose server refuses aborts loses its connection at once, which ends it too."""
    monkeypatch.setattr(TIMING, "background_poll", 0.01)
    monkeypatch.setattr(TIMING, "status_timeout", 60)
    with FakeSGLang(max_running=SLOTS, arguments=PRIORITIES) as server:
        server.takes_aborts = False
        Day(server)
        job = job_of(tmp_path, server, rows=ROWS)
        job["engine"]["background"] = True
        batchrunner.run(job)
    rows_once(job, ROWS)
    assert report_of(job)["load"]["background"]["rows_given_back"] > 0


@pytest.mark.parametrize("servers", [1, 2])
def test_rollouts(tmp_path: Path, servers: int) -> None:
    """Rollouts choose their replica before any row has ended, when the users have left nothing yet."""
    write_module(
        tmp_path,
        """
        async def solve(row, generate):
            first = await generate(row["text"])
            return {"answer": (await generate(f"{row['text']} {first.text}")).text}
        """,
    )
    with FakeSGLang(max_running=SLOTS) as one, FakeSGLang(max_running=SLOTS) as other:
        job = job_of(tmp_path, [one, other][:servers], rows=ROWS, prompt={"rollout": "hooks:solve"})
        run_job(job, tmp_path, "--background")
    rows_once(job, ROWS)


@pytest.mark.parametrize("batch", [False, True])
def test_shared_prefixes(tmp_path: Path, *, batch: bool) -> None:
    """Rows that begin alike choose their replica before any row has ended, too, in a job and in a batch."""
    beginnings = [f"{number % 4} {'long beginning ' * 200}" for number in range(ROWS)]
    with FakeSGLang(max_running=SLOTS) as one, FakeSGLang(max_running=SLOTS) as other:
        if batch:
            messages = [[{"role": "user", "content": f"{text} {n}"}] for n, text in enumerate(beginnings)]
            requests = [request_of(number, messages=each) for number, each in enumerate(messages)]
            done = Batch(tmp_path, requests)
            ran = done.do("--background", "--engine", other.url, engine=one)
            assert ran.exit_code == 0, ran.stderr
            assert len(done.results.read_text().splitlines()) == ROWS
        else:
            texts = [f"{text} {number}" for number, text in enumerate(beginnings)]
            write_rows(tmp_path / "input.parquet", ROWS, text=texts)
            job = job_of(tmp_path, [one, other])
            run_job(job, tmp_path, "--background")
            rows_once(job, ROWS)


def test_what_goes_without_background(tmp_path: Path) -> None:
    """An engine of the run has no users; a server without a load cannot say when they come."""
    for engine in ({"kind": "server", "model": "Qwen/Qwen3-8B"}, {"kind": "simulated"}):
        with pytest.raises(JobError, match=r"unknown key 'engine\.background'"):
            batchrunner.run(job_of(tmp_path, {**engine, "background": True}))
    with FakeSGLang() as server:
        server.polls = "gone"
        with pytest.raises(EngineStartError, match=r"does not report its load.*SGLang 0.5.23"):
            batchrunner.run(job_of(tmp_path, server), overrides=["engine.background=true"])
