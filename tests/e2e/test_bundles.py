"""Rows that share a request: each has the answer, the attempts and the fate that it would have alone."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.dispatch.attempt import MOST_DEATHS
from tests.conftest import (
    events_of,
    eventually,
    job_of,
    report_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.answers import Body, Endless, OnWire
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import FRAGILE, launchable
from tests.support.runs import rows_once, until_stored
from tests.support.server_thread import PATIENCE_S

pytestmark = pytest.mark.usefixtures("quick_retries")

ROWS = 40
ONE_BY_ONE = "rows are sent one by one"


def bundled_job(directory: Path, engine: Any, *, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """Return a job whose rows are token ids, 16 of which are in flight and 8 share a request."""
    write_rows(directory / "input.parquet", rows, ids=[[row] for row in range(rows)])
    return job_of(directory, engine, **{"prompt": {"input_ids": "ids"}, "window": 16, "bundle": 8, **changes})


def only(row: int, behaviour: Behaviour | Body, *, tries: int = 10**6) -> Callable[[Sent], Behaviour | Body]:
    """Return a script in which one row has this fate the first times that it is sent."""
    return lambda sent: behaviour if sent.row == row and sent.tries <= tries else "answer"


def check_answers(job: dict[str, Any], *failed: int, rows: int = ROWS) -> dict[int, dict[str, Any]]:
    """Check that each row is there once, with its own answer but for those that failed; return all."""
    results = {row["row"]: row for row in results_of(job)}
    assert sorted(results) == list(range(rows)) == rows_in(job)
    for number, row in results.items():
        expected = None if number in failed else f"answer 0 to [{number}]"
        assert (row["output"], row["error"] is not None) == (expected, number in failed)
    return results


@pytest.mark.usefixtures("full_requests")
def test_rows_share_requests(tmp_path: Path, server: FakeSGLang) -> None:
    """8 rows come in one request, and the results are those of 40 requests."""
    job = bundled_job(tmp_path, server)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, ROWS, 0)
    assert server.most_in_flight <= 16
    assert report.bundles["requests"] == server.requests < ROWS / 2
    assert (report.bundles["most_rows"], report.bundles["rows_resent"]) == (8, 0)
    bundled = check_answers(job)

    alone = bundled_job(tmp_path, server, bundle="off", output={"path": str(tmp_path / "alone")})
    assert batchrunner.run(alone).bundles["most_rows"] == 1
    columns = ("output", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "attempts")
    for number, row in check_answers(alone).items():
        assert [row[name] for name in columns] == [bundled[number][name] for name in columns]


def test_sizes_follow_the_rows_a_second(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself a run begins with single rows, and bundles them where hundreds end in a second."""
    monkeypatch.setattr(TIMING, "bundle_fill", 0.3)  # in which several rows end on a slow machine too
    job = bundled_job(tmp_path, server, rows=4000, window=256, bundle="auto")
    report = batchrunner.run(job)
    assert report.bundles["requests"] == server.requests < 4000
    assert 2 <= report.bundles["most_rows"] <= 64
    check_answers(job, rows=4000)


@pytest.mark.usefixtures("full_requests")
def test_own_parameters(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows with sampling parameters of their own keep them."""
    job = bundled_job(tmp_path, server, sampling={"max_new_tokens": {"column": "id"}}, input={"filter": "id"})
    assert batchrunner.run(job).rows_ok == ROWS - 1
    assert max(sent.together for sent in server.sent) == 8
    for sent in server.sent:
        sampling = sent.body["sampling_params"]
        assert sent.together == 1 or sampling["stream_interval"] > 10_000
        assert sampling["max_new_tokens"] == sent.row


@pytest.mark.usefixtures("full_requests")
@pytest.mark.parametrize("fate", ["too long", "bad schema"])
def test_a_bad_row_fails_alone(tmp_path: Path, server: FakeSGLang, fate: Behaviour) -> None:
    """The server refuses a whole request for it; the others are sent again, and no attempt is counted."""
    server.script = lambda sent: fate if sent.row in {11, 29} else "answer"
    job = bundled_job(tmp_path, server, limits={"max_failed_rows": 2, "max_attempts": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_failed) == (0, 2)
    assert report.bundles["rows_resent"] > 8
    for row in check_answers(job, 11, 29).values():
        assert row["attempts"] == 1


def test_rows_that_are_not_sent(tmp_path: Path, server: FakeSGLang) -> None:
    """Prompts of which an engine would die fail alone: the others of their bundle are sent once, together."""
    job = bundled_job(tmp_path, server, limits={"max_failed_rows": ROWS})
    bad = range(0, ROWS, 2)
    ids = [[-1 - row] if row in bad else [row] for row in range(ROWS)]
    write_rows(tmp_path / "input.parquet", ROWS, ids=ids)
    run_job(job, tmp_path)
    check_answers(job, *bad)
    assert report_of(job)["bundles"]["rows_resent"] == 0


@pytest.mark.parametrize("fate", ["abort", "broken 500", "busy 503"])
def test_a_row_that_is_cut_off(tmp_path: Path, server: FakeSGLang, fate: Behaviour) -> None:
    """One row is cut off: it is sent again, and only it."""
    server.script = only(21, fate, tries=1)
    job = bundled_job(tmp_path, server)
    report = batchrunner.run(job)
    assert (report.exit_code, report.retries, len(server.sent)) == (0, 1, ROWS + 1)
    assert [row["attempts"] for row in check_answers(job).values()] == [1 + (n == 21) for n in range(ROWS)]


def test_a_cut_connection(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that had ended keep their answers; the others are aborted, and tried again, each alone."""
    server.script = only(35, "disconnect", tries=1)
    job = bundled_job(tmp_path, server)
    assert batchrunner.run(job).exit_code == 0
    rids = {sent.body["rid"]: sent.row for sent in reversed(server.sent)}
    bundle = next(rid for rid, row in rids.items() if row == 35 and "_" in rid).rpartition("_")[0]
    assert {*server.aborted} == {rid for rid in rids if rid.startswith(f"{bundle}_")}
    assert [row["attempts"] for row in check_answers(job).values()] == [1 + (n == 35) for n in range(ROWS)]
    assert [sent.together > 1 for sent in server.sent if sent.row == 35] == [True, False]


GOOD = {"text": "answer 0 to [0]", "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 1}}
ODD_INDICES: list[Any] = [-1, 8, 10**30, None, "0", {}]
EVENTS: dict[str, list[Any]] = {
    "garbage": [b"<html>", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"3", b'""', b"{}", b""],
    "odd indices": [{**GOOD, "index": index} for index in ODD_INDICES],
    "an error and no more": [{"error": {"message": "odd", "code": 500}}],
    "unfinished": [{"text": "a", "meta_info": {"finish_reason": None}, "index": i} for i in range(8)],
}


def stream_of(events: list[Any]) -> OnWire:
    lines = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return OnWire(head + b"".join(b"data: " + line + b"\n\n" for line in lines) + b"data: [DONE]\n\n")


@pytest.mark.parametrize("what", EVENTS)
def test_an_answer_without_rows(tmp_path: Path, server: FakeSGLang, what: str) -> None:
    """Rows that their request does not answer are asked for alone, and no attempt is counted."""
    server.bundles = lambda _: stream_of(EVENTS[what])
    job = bundled_job(tmp_path, server, limits={"max_attempts": 1})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, ROWS, 0)
    check_answers(job)


def reply(status: bytes, content: bytes) -> OnWire:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return OnWire(head % (status, len(content)) + content)


WHOLE: dict[str, OnWire | Body] = {
    "400": reply(b"400 Bad Request", b'{"error": {"message": "unexpected keyword argument"}}'),
    "no stream": Body(json.dumps([GOOD] * 8).encode()),
}


@pytest.mark.parametrize("what", WHOLE)
def test_a_server_that_takes_no_lists(
    tmp_path: Path, server: FakeSGLang, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After some tries its rows go one by one; the log says so once, and no attempt is counted."""
    server.bundles = lambda _: WHOLE[what]
    job = bundled_job(tmp_path, server, rows=100, limits={"max_attempts": 1})
    with caplog.at_level(logging.INFO):
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 100, 0)
    check_answers(job, rows=100)
    assert sum(ONE_BY_ONE in line for line in caplog.messages) == 1
    assert all(sent.together == 1 for sent in server.sent[-20:])


def test_a_proxy_that_is_always_busy_for_lists(tmp_path: Path, server: FakeSGLang) -> None:
    """A row that was put off is tried again alone, and after some tries no row is put off."""
    server.bundles = lambda _: reply(b"503 Service Unavailable", b"busy")
    job = bundled_job(tmp_path, server, rows=400, limits={"engine_wait": PATIENCE_S})
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 400)
    check_answers(job, rows=400)
    assert all(sent.together == 1 for sent in server.sent[-20:])


def test_a_stream_that_does_not_end(tmp_path: Path, server: FakeSGLang) -> None:
    """A request whose rows have all ended is over, though its answer is not."""

    def endless(body: dict[str, Any]) -> Endless | Literal["rows"]:
        if [3] in body["input_ids"]:
            return "rows"
        texts = [f"answer 0 to {prompt}" for prompt in body["input_ids"]]
        events = [{**GOOD, "text": text, "index": index} for index, text in enumerate(texts)]
        return Endless(tuple(json.dumps(event).encode() for event in events))

    server.bundles, server.script = endless, only(3, "hold")
    job = bundled_job(tmp_path, server)
    with started(write_job(job, tmp_path)) as running:
        until_stored(tmp_path / "run", ROWS - 1)
        eventually(lambda: server.open_streams == 0)
        server.answer_held()
        assert running.end() == 0
    assert report_of(job)["bundles"]["rows_resent"] == 0
    check_answers(job)


@pytest.mark.usefixtures("full_requests")
def test_long_prompts_fill_a_bundle(tmp_path: Path, server: FakeSGLang) -> None:
    """Requests stay small: two prompts of 15,000 tokens are as many as one may have."""
    server.arguments = {"context_length": 100_000}
    write_rows(tmp_path / "input.parquet", 12, ids=[[row, *range(15_000)] for row in range(12)])
    batchrunner.run(job_of(tmp_path, server, prompt={"input_ids": "ids"}, window=12, bundle=12))
    assert max(sent.together for sent in server.sent) == 2


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("the engine tokenizes their prompts", {"prompt": {"text": "text"}}),
        ("sampling.stop_regex", {"sampling": {"stop_regex": "a+"}}),
    ],
)
def test_rows_that_cannot_share(
    tmp_path: Path, server: FakeSGLang, caplog: pytest.LogCaptureFixture, why: str, changes: dict[str, Any]
) -> None:
    job = bundled_job(tmp_path, server, **changes)
    with caplog.at_level(logging.INFO):
        assert batchrunner.run(job).rows_ok == ROWS
    assert server.requests == ROWS
    assert [line for line in caplog.messages if ONE_BY_ONE in line] == [f"{ONE_BY_ONE}: {why}"]
    assert events_of(job, "bundles") == ["bundles_off"]


def test_a_server_that_streams_in_pieces(tmp_path: Path, server: FakeSGLang) -> None:
    server.arguments = {"incremental_streaming_output": True}
    assert batchrunner.run(bundled_job(tmp_path, server)).rows_ok == ROWS
    assert server.requests == ROWS


def test_rows_end_before_their_bundle(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows are durable, and their slots are used again, while another row of their request goes on."""
    server.script = lambda sent: "hold" if sent.row == 3 else "answer"
    job = bundled_job(tmp_path, server)
    with started(write_job(job, tmp_path)) as running:
        until_stored(tmp_path / "run", ROWS - 1)
        running.kill()
    assert next(sent.together for sent in server.sent if sent.row == 3) > 1
    server.forget()
    server.answer_held()
    assert batchrunner.run(job).rows_resumed == ROWS - 1
    assert [sent.row for sent in server.sent] == [3]
    rows_once(job, ROWS)


@pytest.mark.usefixtures("full_requests")
def test_a_poisonous_row_in_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that kills the engine is found; all others of its request are answered."""
    monkeypatch.setattr(TIMING, "first_restart", 0.01)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)
    job = bundled_job(tmp_path, launchable(tmp_path, FRAGILE), rows=200, window=32)
    run_job(job, tmp_path, code=3)
    results = check_answers(job, 117, rows=200)
    assert f"the engine died {MOST_DEATHS} times while it had this row" in results[117]["error"]
    assert report_of(job)["bundles"]["most_rows"] == 8
