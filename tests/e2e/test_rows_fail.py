"""Each way in which an engine fails a row, and what becomes of the row, of the others and of the run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import EngineLostError
from batchrunner.core.timing import TIMING
from tests.conftest import (
    batchrun,
    job_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

pytestmark = pytest.mark.usefixtures("quick_retries")

REFUSALS: dict[Behaviour, str] = {
    "too long": "400: The input (6001 tokens) is longer than the model's context length (4096 tokens).",
    "bad schema": "400: Failed to compile json grammar: Expecting property name in double quotes: "
    "line 1 column 2 (char 1)",
    "abort 400": "400: The input is not for this model.",
}
ROW_MAY_BE_WHY: dict[Behaviour, str] = {
    "broken 500": "500: Out of memory of the last running request",
    "abort": "500: Aborted by the engine",
    "empty": "empty answer",
    "no answer": "not an answer of SGLang: {",
    "disconnect": "connection lost: Server disconnected",
}
BUSY: list[Behaviour] = ["busy 429", "busy 503", "abort 503", "not json"]
PROMPTS = [{"text": "text"}, {"user": "{{ text }}"}]


def ids(sent: Sent) -> int:
    return int(sent.prompt.split()[1])


def test_a_token_that_the_model_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would die of it. A hub's name is looked up in Hugging Face's cache, if it is there."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = tmp_path / "hub" / "models--org--name" / "snapshots" / "main"
    files.mkdir(parents=True)
    (files / "config.json").write_text('{"vocab_size": 100}')
    pq.write_table(pa.table({"ids": [[99, 1], [1, 100]]}), tmp_path / "ids.parquet")
    with FakeSGLang(model="org/name") as server:
        source: Any = {"input": {"path": str(tmp_path / "ids.parquet")}, "prompt": {"input_ids": "ids"}}
        job = job_of(tmp_path, server, **source)
        batchrunner.run(job)
    errors = [row["error"] for row in results_of(job)]
    assert errors == [None, "token id 100 is not in the model's vocabulary (0 to 99)"]
    assert len(server.sent) == 1


@pytest.mark.parametrize(
    ("prompt", "what", "reason"),
    [
        (PROMPTS[0], "said nothing", "stop"),
        (PROMPTS[1], "said nothing", "stop"),
        (PROMPTS[1], "thought", "length"),
        (PROMPTS[1], "tool call", "tool_calls"),
    ],
)
def test_answers_without_text(
    tmp_path: Path, server: FakeSGLang, prompt: dict[str, str], what: Behaviour, reason: str
) -> None:
    """The model had nothing to say, called a tool, or was cut while it thought: it would do so again."""
    server.script = lambda _: what
    job = job_of(tmp_path, server, rows=3, prompt=prompt)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 3, 0)
    assert report.finish_reasons == {reason: 3}
    assert [(row["output"], row["error"]) for row in results_of(job)] == [("", None)] * 3


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("what", REFUSALS)
def test_refused_rows_are_final_at_once(
    tmp_path: Path, server: FakeSGLang, what: Behaviour, prompt: dict[str, str]
) -> None:
    """What the engine says no to is sent once, keeps the engine's words, and costs the others nothing."""
    server.script = lambda sent: what if sent.prompt == "row 1" else "answer"
    job = job_of(tmp_path, server, rows=3, prompt=prompt)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed, report.retries) == (3, 2, 1, 0)
    bad = results_of(job)[1]
    assert (bad["output"], bad["error"], bad["attempts"]) == (None, REFUSALS[what], 1)
    assert len(server.sent) == 3


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("what", [*ROW_MAY_BE_WHY, *BUSY])
def test_passing_failures_are_tried_again(
    tmp_path: Path, server: FakeSGLang, what: Behaviour, prompt: dict[str, str]
) -> None:
    """A failure that passes leaves no trace but the count of attempts; half an answer is never a result."""
    server.script = lambda sent: what if ids(sent) == 1 and sent.tries < 3 else "answer"
    job = job_of(tmp_path, server, rows=3, prompt=prompt)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 3, 2)
    assert [row["attempts"] for row in results_of(job)] == [1, 3, 1]
    assert all(row["output"] == f"answer 0 to row {row['row']}" for row in results_of(job))


@pytest.mark.parametrize("what", ROW_MAY_BE_WHY)
def test_lasting_failures_end_the_row(tmp_path: Path, server: FakeSGLang, what: Behaviour) -> None:
    """A row that may itself be why is given up after `max_attempts` tries, with the last error."""
    server.script = lambda sent: what if sent.prompt == "row 1" else "answer"
    job = job_of(tmp_path, server, rows=3, limits={"max_attempts": 3})
    batchrunner.run(job)
    bad = results_of(job)[1]
    assert bad["error"].startswith(ROW_MAY_BE_WHY[what])
    assert (bad["output"], bad["attempts"], len(server.sent)) == (None, 3, 5)


@pytest.mark.parametrize("what", BUSY)
def test_a_busy_engine_uses_no_row_up(tmp_path: Path, server: FakeSGLang, what: Behaviour) -> None:
    """However often the engine has no room, no row fails for it."""
    server.script = lambda sent: what if sent.tries <= 7 else "answer"
    job = job_of(tmp_path, server, rows=3, limits={"max_attempts": 2})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 3)
    assert [row["attempts"] for row in results_of(job)] == [8, 8, 8]


@pytest.mark.parametrize("what", ["busy 429", "broken 500", "disconnect"])
def test_a_waiting_row_holds_no_place(tmp_path: Path, server: FakeSGLang, what: Behaviour) -> None:
    """With a single place, all others are served while one row waits for its next try."""
    server.retry_after = "1"
    server.script = lambda sent: what if sent.prompt == "row 0" and sent.tries == 1 else "answer"
    batchrunner.run(job_of(tmp_path, server, rows=20, window=1))
    assert server.most_in_flight == 1
    assert server.prompts[0] == "row 0"
    assert server.prompts[1] != "row 0"
    assert Counter(server.prompts) == Counter([*(f"row {i}" for i in range(20)), "row 0"])


def test_retry_after_is_heeded(tmp_path: Path, server: FakeSGLang) -> None:
    """A server that names a pause gets it."""
    server.retry_after = "1"
    server.script = lambda sent: "busy 503" if sent.tries == 1 else "answer"
    assert batchrunner.run(job_of(tmp_path, server, rows=1)).wall_s >= 1


def test_a_hanging_request_is_given_up(tmp_path: Path, server: FakeSGLang) -> None:
    """One answer that never comes costs `request_timeout`, not the run."""
    server.script = lambda sent: "hold" if sent.prompt == "row 1" and sent.tries == 1 else "answer"
    job = job_of(tmp_path, server, rows=3, limits={"request_timeout": 8})  # all others take less
    assert batchrunner.run(job).rows_ok == 3
    assert [row["attempts"] for row in results_of(job)] == [1, 2, 1]


def test_rows_whose_data_does_not_fit_are_not_sent(tmp_path: Path, server: FakeSGLang) -> None:
    """A template error that only some data has fails those rows, says so, and the others go on."""
    table = pa.table({"a": [1, 2, 3], "b": [1, 0, None]})
    pq.write_table(table, tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"text": "{{ a / b }}"})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (3, 1, 2)
    assert server.prompts == ["1.0"]
    _, zero, null = results_of(job)
    assert zero["error"] == "template: ZeroDivisionError: division by zero"
    assert null["error"].startswith("template: TypeError")
    assert (zero["attempts"], zero["latency_s"]) == (0, None)


@pytest.mark.parametrize("printed", ["a", "a ~ '!'", "[a, 'b']|join"])
def test_a_null_is_not_sent_as_none(tmp_path: Path, server: FakeSGLang, printed: str) -> None:
    """A missing value fails its row instead of reading "None" in a prompt, whatever is done to it before."""
    pq.write_table(pa.table({"a": ["x", None]}), tmp_path / "input.parquet")
    job = job_of(tmp_path, server, prompt={"user": "Say {{ " + printed + " }}"})
    batchrunner.run(job)
    assert len(server.prompts) == 1
    assert results_of(job)[1]["error"] == "template: a is null"


# --- what failed rows mean for the run ---


@pytest.mark.parametrize(("tolerated", "code"), [(1, 3), (2, 0), (0.1, 3), ("19%", 3), ("20%", 0)])
def test_max_failed_rows(tmp_path: Path, server: FakeSGLang, tolerated: float | str, code: int) -> None:
    """More failed rows than tolerated, a count or a share, make the exit code 3; the run is done anyway."""
    server.script = lambda sent: "too long" if ids(sent) < 2 else "answer"
    job = job_of(tmp_path, server, rows=10, limits={"max_failed_rows": tolerated})
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == report_of(job)["exit_code"] == code
    assert len(results_of(job)) == 10


def test_a_plainly_wrong_job_is_stopped(tmp_path: Path, server: FakeSGLang) -> None:
    """When most of at least 100 rows failed the run stops, exit 1, instead of spoiling all of them."""
    server.script = lambda sent: "too long" if ids(sent) % 4 else "answer"
    job = job_of(tmp_path, server, rows=2000, window=4)
    result = run_job(job, tmp_path, code=1)
    assert re.search(r"7[3-7]% of the rows failed \(limits.abort_failed_share\)", result.stderr)
    assert "run the same command again" not in result.stderr  # it would go on as it has begun
    assert 100 <= len(results_of(job)) == len(server.sent) <= 110
    run_job(job, tmp_path, "--set", "limits.abort_failed_share=1", code=3)
    assert rows_in(job) == list(range(2000))
    assert len(server.sent) == 2000


def test_deadline(tmp_path: Path, server: FakeSGLang) -> None:
    """When the deadline passes the rows in flight end, the rest stays for the next start: exit 1."""
    server.script = lambda sent: "answer"
    job = job_of(
        tmp_path,
        {"kind": "simulated", "step_s": 0.01, "max_running": 2},
        rows=5000,
        sampling={"max_new_tokens": 5},
        limits={"deadline": 8},  # in which a slow machine does some rows
    )
    result = run_job(job, tmp_path, code=1)
    assert "the deadline passed (limits.deadline)" in result.stderr
    report = report_of(job)
    assert 0 < report["rows_ok"] == len(results_of(job)) < 5000
    assert report["rows_failed"] == 0


# --- an engine that is gone ---


def test_an_engine_that_dies(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that is gone for longer than `engine_wait` ends the run, exit 1; another one finishes it."""
    server.script = lambda sent: "die" if ids(sent) == 30 else "answer"
    job = job_of(tmp_path, server, rows=100, window=4, limits={"engine_wait": 0.5})
    result = run_job(job, tmp_path, code=1)
    assert len([line for line in result.stderr.splitlines() if line.startswith("batchrun: ")]) == 1
    assert "the engine took no row for" in result.stderr
    done = {row["row"] for row in results_of(job)}
    assert 20 <= len(done) < 50  # those in flight at the death may have been answered, and more after them
    assert report_of(job)["exit_code"] == 1
    with FakeSGLang() as another:
        urls = f"engine.urls=[{another.url}]"
        run_job(job, tmp_path, "--set", urls)
        assert sorted(map(ids, another.sent)) == sorted(set(range(100)) - done)
    assert rows_in(job) == list(range(100))


def test_a_long_retry_after_does_not_outlast_our_patience(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a load balancer that says to come back in an hour is asked again all the same."""
    monkeypatch.setattr(TIMING, "longest_retry", 0.5)
    server.script = lambda _: "busy 503"
    server.retry_after = "3600"
    with pytest.raises(EngineLostError, match="the engine took no row"):
        batchrunner.run(job_of(tmp_path, server, rows=20, limits={"engine_wait": 1}))


def test_the_reader_does_not_run_away(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that takes no row cannot fill the memory with rows that wait for it."""
    server.script = lambda sent: "busy 503"
    job = job_of(tmp_path, server, rows=20_000, window=16, limits={"engine_wait": 4})
    server.retry_after = "1"
    with pytest.raises(EngineLostError, match="the engine took no row"):
        batchrunner.run(job)
    assert 16 <= len(set(server.prompts)) <= 4096
    assert results_of(job) == []


def test_a_few_bad_rows_before_the_first_answer_stop_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Answers take long, and bad rows fail at once: those that are in flight have not failed."""
    server.script = lambda sent: "too long" if ids(sent) % 5 == 0 else "hold"
    job = job_of(tmp_path, server, rows=600, window=600, order="input")
    with started(write_job(job, tmp_path), "--json") as process:
        server.wait_for(600)
        server.answer_held()
        assert process.end() == 3
    assert (report_of(job)["rows_ok"], report_of(job)["rows_failed"]) == (480, 120)
