"""Each way in which an engine fails a row, and what becomes of the row, of the others and of the run."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

import batchrunner
from batchrunner.core.errors import EngineLostError
from tests.conftest import (
    column_of,
    job_of,
    log_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.answers import Body, OnWire
from tests.support.fake_sglang import Behaviour, FakeSGLang
from tests.support.runs import rows_sent

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


def test_a_token_that_the_model_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would die of it. A hub's name is looked up in Hugging Face's cache, if it is there."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = tmp_path / "hub" / "models--org--name" / "snapshots" / "main"
    files.mkdir(parents=True)
    (files / "config.json").write_text('{"vocab_size": 100}')
    write_rows(tmp_path / "input.parquet", 2, ids=[[99, 1], [1, 100]])
    with FakeSGLang(model="org/name") as server:
        job = job_of(tmp_path, server, prompt={"input_ids": "ids"})
        batchrunner.run(job)
    errors = column_of(job, "error")
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
    server.script = lambda sent: what if sent.row == 1 and sent.tries < 3 else "answer"
    job = job_of(tmp_path, server, rows=3, prompt=prompt)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 3, 2)
    assert column_of(job, "attempts") == [1, 3, 1]
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
    assert column_of(job, "attempts") == [8, 8, 8]


@pytest.mark.parametrize("what", ["busy 429", "broken 500", "disconnect"])
def test_a_waiting_row_holds_no_place(tmp_path: Path, server: FakeSGLang, what: Behaviour) -> None:
    """With a single place, which the job sets, all others are served while one row waits for its next try."""
    server.retry_after = "1"
    server.script = lambda sent: what if sent.prompt == "row 0" and sent.tries == 1 else "answer"
    job = job_of(tmp_path, server, rows=20, window=1)
    report = batchrunner.run(job)
    assert report.wall_s >= (what == "busy 429")  # the pause that the server names is heeded
    assert (report.window, server.most_in_flight, log_of(job, "window")) == (1, 1, [])
    assert server.prompts[:2] == ["row 0", "row 1"]
    assert rows_sent(server) == [0, *range(20)]


def test_a_hanging_request_is_given_up(tmp_path: Path, server: FakeSGLang) -> None:
    """One answer that never comes costs `request_timeout`, not the run."""
    server.script = lambda sent: "hold" if sent.prompt == "row 1" and sent.tries == 1 else "answer"
    job = job_of(tmp_path, server, rows=3, limits={"request_timeout": 4})  # all others take less
    assert batchrunner.run(job).rows_ok == 3
    assert column_of(job, "attempts") == [1, 2, 1]


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


# --- what failed rows mean for the run ---


@pytest.mark.parametrize(("tolerated", "code"), [(1, 3), (2, 0), (0.1, 3), ("19%", 3), ("20%", 0)])
def test_max_failed_rows(tmp_path: Path, server: FakeSGLang, tolerated: float | str, code: int) -> None:
    """More failed rows than tolerated, a count or a share, make the exit code 3; the run is done anyway."""
    server.script = lambda sent: "too long" if sent.row < 2 else "answer"
    job = job_of(tmp_path, server, rows=10, limits={"max_failed_rows": tolerated})
    run_job(job, tmp_path, code=code)
    assert (report_of(job)["exit_code"], len(results_of(job))) == (code, 10)


def test_a_plainly_wrong_job_is_stopped(tmp_path: Path, server: FakeSGLang) -> None:
    """When most of at least 100 rows failed the run stops, exit 1, instead of spoiling all of them."""
    server.script = lambda sent: "too long" if sent.row % 4 else "answer"
    job = job_of(tmp_path, server, rows=2000, window=4)
    result = run_job(job, tmp_path, code=1)
    assert re.search(r"7[3-7]% of the rows failed \(limits.abort_failed_share\)", result.stderr)
    assert "run the same command again" not in result.stderr  # it would go on as it has begun
    assert 100 <= len(results_of(job)) == len(server.sent) <= 110
    run_job(job, tmp_path, "--set", "limits.abort_failed_share=1", code=3)
    assert rows_in(job) == list(range(2000))
    assert len(server.sent) == 2000


def test_deadline(tmp_path: Path) -> None:
    """When the deadline passes the rows in flight end, the rest stays for the next start: exit 1."""
    job = job_of(
        tmp_path,
        {"kind": "simulated", "step_s": 0.01, "max_running": 2},
        rows=5000,
        sampling={"max_new_tokens": 5},
        limits={"deadline": 4},  # in which a slow machine does some rows
    )
    result = run_job(job, tmp_path, code=1)
    assert "the deadline passed (limits.deadline)" in result.stderr
    report = report_of(job)
    assert 0 < report["rows_ok"] == len(results_of(job)) < 5000
    assert report["rows_failed"] == 0


# --- an engine that is gone ---


def test_an_engine_that_dies(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that is gone for longer than `engine_wait` ends the run, exit 1; another one finishes it."""
    server.script = lambda sent: "die" if sent.row == 30 else "answer"
    job = job_of(tmp_path, server, rows=100, window=4, limits={"engine_wait": 0.5})
    result = run_job(job, tmp_path, code=1)
    assert len([line for line in result.stderr.splitlines() if line.startswith("batchrun: ")]) == 1
    assert "the engine accepted no row for" in result.stderr
    done = {*column_of(job, "row")}
    assert 20 <= len(done) < 50  # those in flight at the death may have been answered, and more after them
    with FakeSGLang() as another:
        run_job(job, tmp_path, "--set", f"engine.urls=[{another.url}]")
        assert rows_sent(another) == sorted(set(range(100)) - done)
    assert rows_in(job) == list(range(100))


def test_the_reader_does_not_run_away(tmp_path: Path, server: FakeSGLang) -> None:
    """An engine that takes no row cannot fill the memory with rows that wait for it."""
    server.script = lambda sent: "busy 503"
    job = job_of(tmp_path, server, rows=20_000, window=16, limits={"engine_wait": 2})
    server.retry_after = "1"
    with pytest.raises(EngineLostError, match="the engine accepted no row"):
        batchrunner.run(job)
    assert 16 <= len(set(server.prompts)) <= 4096
    assert results_of(job) == []


def test_a_few_bad_rows_before_the_first_answer_stop_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """Answers take long, and bad rows fail at once: those that are in flight have not failed."""
    server.script = lambda sent: "too long" if sent.row % 5 == 0 else "hold"
    job = job_of(tmp_path, server, rows=600, window=600, order="input")
    with started(write_job(job, tmp_path), "--json") as process:
        server.wait_for(600)
        server.answer_held()
        assert process.end() == 3
    assert (report_of(job)["rows_ok"], report_of(job)["rows_failed"]) == (480, 120)


# --- odd answers: each is a failed attempt of its row alone ---


ODD_ROW = "row 3"
HTTP_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def body(**changes: Any) -> Body:
    """An answer to a text, with some values of its `meta_info` changed."""
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    return Body(json.dumps({"text": "fine", "meta_info": {**meta, **changes}}).encode())


ODD: dict[str, Body | OnWire] = {
    "65 bits": body(completion_tokens=1 << 65),
    "deep": Body(b'{"text": "fine", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b', "meta_info": {}}'),
    "no text": Body(b'{"text": null, "meta_info": {}}'),
    "chunks of garbage": OnWire(HTTP_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "a body that ends": OnWire(HTTP_HEAD + b"Content-Length: 100\r\n\r\n{"),
    "gzip that is none": OnWire(HTTP_HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
    "a huge header": OnWire(HTTP_HEAD + b"X-Large: " + b"x" * 100_000 + b"\r\nContent-Length: 2\r\n\r\n{}"),
    "no HTTP": OnWire(b"\x00\xff\x16\x03\x01 garbage\r\n\r\n"),
    "a deep error": OnWire(
        b"HTTP/1.1 500 Odd\r\nConnection: close\r\nContent-Length: 1200\r\n\r\n" + b"[" * 600 + b"]" * 600
    ),
}


def run_with(
    directory: Path, server: FakeSGLang, odd: Behaviour | Body | OnWire, **changes: Any
) -> dict[int, dict[str, Any]]:
    """Run ten rows, of which one gets an odd answer each time; return the results by row."""
    server.script = lambda sent: odd if sent.prompt == ODD_ROW else "answer"
    job = job_of(directory, server, **{"limits": {"max_attempts": 2}, **changes})
    report = batchrunner.run(job)
    assert report.rows_ok + report.rows_failed == 10
    results = {row["row"]: row for row in results_of(job)}
    assert {n for n, row in results.items() if row["error"] is None} >= set(range(10)) - {3}
    return results


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_answer_fails_its_row_alone(tmp_path: Path, server: FakeSGLang, odd: str) -> None:
    results = run_with(tmp_path, server, ODD[odd])
    assert len(results[3]["error"].splitlines()) == 1
    assert results[3]["attempts"] == 2
    assert server.prompts.count(ODD_ROW) == 2


class Torrent(FakeSGLang):
    """A server whose answers do not end."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = dict[object, int]()
        """Bytes of each answer that goes on."""
        self.most_large = 0
        """Most answers at once of which 16 MiB were taken: more than the buffers of a connection hold."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        answer, block = object(), b"1" * (1 << 18)
        self.sizes[answer] = 0
        try:
            while True:
                await response.write(block)
                self.sizes[answer] += len(block)
                large = sum(size > 16 << 20 for size in self.sizes.values())
                self.most_large = max(self.most_large, large)
        finally:
            del self.sizes[answer]


def test_answers_that_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is given up when it is too large, and few are in memory at once."""
    monkeypatch.setattr("batchrunner.engines.http.replies.LARGE_AT_ONCE", 1)
    monkeypatch.setattr("batchrunner.engines.http.replies.MOST_ANSWER_BYTES", 24 << 20)
    with Torrent() as server:
        job = job_of(tmp_path, server, rows=4, limits={"max_attempts": 1})
        assert batchrunner.run(job).exit_code == 3
        assert server.most_large == 1
    assert set(column_of(job, "error")) == {"the answer is larger than 24 MiB"}


def test_ever_new_finish_reasons(tmp_path: Path, server: FakeSGLang) -> None:
    """They are in the results; the report counts fifty of them one by one, and the rest together."""

    server.script = lambda sent: body(finish_reason={"type": sent.prompt})
    report = batchrunner.run(job_of(tmp_path, server, rows=200))
    assert report.rows_ok == sum(report.finish_reasons.values()) == 200
    assert len(report.finish_reasons) == 51


SAMPLES = [{"text": "a", "meta_info": {}}] * 2
CHOICES = [{"message": {"content": text}, "finish_reason": "stop"} for text in ("a", None)]


@pytest.mark.parametrize(
    ("prompt", "asked", "reply"),
    [
        (PROMPTS[0], 4, SAMPLES),
        (PROMPTS[0], 1, SAMPLES),
        (PROMPTS[1], 2, {"choices": CHOICES, "usage": {}}),
        (PROMPTS[1], 1, {"choices": CHOICES, "usage": {}}),
    ],
)
def test_other_samples_than_asked_for(
    tmp_path: Path, server: FakeSGLang, prompt: dict[str, str], asked: int, reply: Any
) -> None:
    """The answer is asked for again, as often as an answer that failed."""
    body = Body(json.dumps(reply).encode())
    row = run_with(tmp_path, server, body, prompt=prompt, sampling={"n": asked})[3]
    assert "sample" in row["error"]
    assert row["attempts"] == 2


@pytest.mark.parametrize(
    "told",
    [
        {"max_running_requests": "8", "max_total_num_tokens": True, "context_length": "x"},
        {"served_model_name": ["a"], "weight_version": {"a": 1}, "revision": 5},
        {"tokenizer_path": "no\0path"},
        {"model_path": "~nobody/model"},
    ],
    ids=lambda told: str(told)[:60],
)
def test_an_odd_description(tmp_path: Path, told: dict[str, Any]) -> None:
    """What a server says of itself decides how it is used, and never that it is not."""
    with FakeSGLang(arguments=told) as server:
        server.polls = "gone"
        report = batchrunner.run(job_of(tmp_path, server))
    assert (report.exit_code, report.rows_ok) == (0, 10)
