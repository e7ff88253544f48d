"""Odd answers: each is a failed attempt of its row, the run goes on, and good rows are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from tests.conftest import job_of, results_of
from tests.support.answers import Body, OnWire
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

pytestmark = pytest.mark.usefixtures("quick_retries")

ODD_ROW = "row 3"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def body(**changes: Any) -> Body:
    """An answer to a text, with some values of its `meta_info` changed."""
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    return Body(json.dumps({"text": "fine", "meta_info": {**meta, **changes}}).encode())


ODD: dict[str, Body | OnWire] = {
    "65 bits": body(completion_tokens=1 << 65),
    "reason: no type": body(finish_reason={"matched": 1}),
    "reason: long": body(finish_reason="stop" * 10_000),
    "abort code: text": body(finish_reason={"type": "abort", "status_code": "no", "message": {"a": 1 << 70}}),
    "deep": Body(b'{"text": "fine", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b', "meta_info": {}}'),
    "not UTF-8": Body(b'{"text": "caf\xe9", "meta_info": {}}'),
    "no text": Body(b'{"text": null, "meta_info": {}}'),
    "chunks of garbage": OnWire(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "a body that ends": OnWire(HEAD + b"Content-Length: 100\r\n\r\n{"),
    "gzip that is none": OnWire(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
    "a huge header": OnWire(HEAD + b"X-Large: " + b"x" * 100_000 + b"\r\nContent-Length: 2\r\n\r\n{}"),
    "no HTTP": OnWire(b"\x00\xff\x16\x03\x01 garbage\r\n\r\n"),
    "a deep error": OnWire(b"HTTP/1.1 500 Odd\r\nContent-Length: 1200\r\n\r\n" + b"[" * 600 + b"]" * 600),
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


@pytest.mark.parametrize(
    "retry_after", ["²", "\u0661", "-1", "nan", "9" * 400, "Wed, 21 Oct 2015 07:28:00 GMT", ""]
)
def test_an_odd_retry_after(tmp_path: Path, retry_after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that is no number of seconds is no pause; one that is endless is cut."""
    monkeypatch.setattr("batchrunner.core.timing.TIMING.longest_retry", 0.01)
    with FakeSGLang() as server:
        content = (
            b"HTTP/1.1 503 Full\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: "
            + retry_after.encode()
            + b"\r\n\r\n"
        )
        server.script = lambda sent: OnWire(content) if sent.tries == 1 else "answer"
        report = batchrunner.run(job_of(tmp_path, server))
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 10, 10)


def test_ever_new_finish_reasons(tmp_path: Path, server: FakeSGLang) -> None:
    """They are in the results; the report counts fifty of them one by one, and the rest together."""

    def script(sent: Sent) -> Body:
        return body(finish_reason={"type": sent.prompt})

    server.script = script
    report = batchrunner.run(job_of(tmp_path, server, rows=200))
    assert report.rows_ok == sum(report.finish_reasons.values()) == 200
    assert len(report.finish_reasons) == 51
    assert len({row["finish_reason"] for row in results_of(job_of(tmp_path, server))}) == 200


CHOICES = [{"message": {"content": text}, "finish_reason": "stop"} for text in ("a", "b", None, "d")]
SAMPLE = {"text": "a", "meta_info": {}}
TEXTS: dict[str, tuple[int, Any]] = {
    "two of four": (4, [SAMPLE] * 2),
    "an only one of four": (4, SAMPLE),
    "two of one": (1, [SAMPLE] * 2),
}


@pytest.mark.parametrize("odd", ["no text in one", *TEXTS])
def test_other_samples_than_asked_for(tmp_path: Path, server: FakeSGLang, odd: str) -> None:
    """The answer is asked for again, as often as an answer that failed."""
    n, reply = TEXTS.get(odd, (4, {"choices": CHOICES, "usage": {}}))
    changes = {} if odd in TEXTS else {"prompt": {"user": "{{ text }}"}}
    row = run_with(tmp_path, server, Body(json.dumps(reply).encode()), sampling={"n": n}, **changes)[3]
    assert "sample" in row["error"]
    assert row["attempts"] == 2


NUMBERS = [
    b"1e400", b"1e308", b"NaN", b"-1", b"true", b"null", b'"5"', b"[]", b"{}", b"12222222222222222222222222",
]  # fmt: skip
FIELDS = [
    "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "max_running_requests",
    "token_usage", "timestamp", "dp_rank", "total_prefill_busy_us", "decode_moments",
]  # fmt: skip
LOAD: dict[str, Any] = {
    "timestamp": 1, "dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 10,
    "max_total_num_tokens": 20000, "max_running_requests": 8, "token_usage": 0.1,
    "total_prefill_busy_us": 5, "decode_moments": [1],
}  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS, ids=bytes.decode)
def test_odd_loads(tmp_path: Path, server: FakeSGLang, value: bytes) -> None:
    """Each field in turn has a value that no gauge can have, from the start or from the second poll on."""
    fields = iter(FIELDS * 1000)

    def load() -> bytes:
        name = next(fields)
        entries = (
            f'"{key}": '.encode() + (value if key == name else json.dumps(v).encode())
            for key, v in LOAD.items()
        )
        return b'{"loads": [{' + b", ".join(entries) + b"}]}"

    server.load, server.delay_s = load, 0.05
    job = job_of(tmp_path, server, rows=200)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok) == (0, 200)


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
