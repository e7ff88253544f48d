"""Whatever a server replies can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
)
from batchrunner.core.types import RequestBody
from batchrunner.engines.http.failures import error_of
from batchrunner.engines.http.replies import completion_of_body
from tests.support.reader_checks import ANY_JSON, KINDS, check_answer, check_error, json_of, some_odd

REASON = {"type": "stop", "matched": 2, "message": "m", "status_code": 500}
META: dict[str, Any] = {
    "finish_reason": REASON, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0,
    "num_retractions": 0, "weight_version": "default",
}  # fmt: skip
SAMPLE = {"text": "a text", "meta_info": META}
CHOICE = {
    "index": 0, "message": {"role": "assistant", "content": "a text", "reasoning_content": None},
    "finish_reason": "stop", "meta_info": META,
}  # fmt: skip
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
ANSWERS: list[Any] = [
    SAMPLE, [SAMPLE], [SAMPLE, SAMPLE], {"choices": [CHOICE], "usage": USAGE},
    {"choices": [CHOICE, {**CHOICE, "index": 1}], "usage": USAGE}, {"tokens": [1, 2]},
]  # fmt: skip


def test_good_answers_pass_the_check() -> None:
    """The property below is tried with answers that are read, not only with those that are refused."""
    assert check_answer(json_of(SAMPLE))
    assert check_answer(json_of([SAMPLE, SAMPLE]), samples=2)
    assert check_answer(json_of(ANSWERS[3]), "messages")
    assert check_answer(json_of(ANSWERS[4]), "messages", 2)


@given(
    reply=some_odd(ANSWERS).map(json_of) | ANY_JSON.map(json_of) | st.binary(),
    kind=st.sampled_from(KINDS),
    samples=st.sampled_from([1, 2, 4]),
)
def test_any_answer_can_be_read_and_written(reply: bytes, kind: str, samples: int) -> None:
    """Whatever comes is an answer that the results can hold, or a failed attempt."""
    check_answer(reply, kind, samples)


def _error_body(code: str) -> bytes:
    message = "error sending request for url (http://127.0.0.1:1/generate)"
    return json.dumps({"error": {"type": "Internal Server Error", "code": code, "message": message}}).encode()


def test_what_the_gateway_says() -> None:
    """A worker out of reach is nobody's fault and no sign of load; other errors mean what they always do."""
    for status, code in [(500, "call_upstream_request_error"), (503, "no_available_workers")]:
        assert type(error_of(status, _error_body(code))) is EngineDownError
    assert type(error_of(500, _error_body("internal_error"))) is AttemptFailedError
    assert type(error_of(503, b'{"error": {"message": "The request queue is full."}}')) is EngineBusyError
    assert type(error_of(500, b"[]")) is AttemptFailedError


@given(
    code=st.integers(201, 999),
    body=some_odd([{"error": {"code": "x", "message": "m"}, "detail": ["d"]}]).map(json_of) | st.binary(),
    retry_after=st.none() | st.text(max_size=9),
)
def test_any_error_can_be_read(code: int, body: bytes, retry_after: str | None) -> None:
    """Whatever an error's body and headers are, it is an error of the row."""
    check_error(code, body, retry_after)


BODY = RequestBody("/v1/chat/completions", b'{"messages": []}', "gpt-4o-mini", 16)
REPLY: dict[str, Any] = {
    "id": "1",
    "model": "default",
    "choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


@given(
    st.binary()
    | st.builds(
        lambda key, value: json.dumps({**REPLY, key: value}).encode(),
        st.sampled_from(sorted(REPLY)),
        st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists),
    )
)
def test_no_reply_breaks_the_reader(reply: bytes) -> None:
    """Any reply is an answer, which is kept as JSON on one line, or a failed try."""
    try:
        completion = completion_of_body(BODY, reply)
    except AttemptFailedError:
        return
    (kept,) = completion.columns["response"]
    assert "\n" not in kept
    assert json.loads(kept)["model"] == "gpt-4o-mini"


@pytest.mark.parametrize(
    ("asked", "came", "is_answer"),
    [(b"2", 2, True), (b"2.0", 2, True), (b"null", 1, True), (b"2", 1, False)],
)
def test_the_number_of_choices(asked: bytes, came: int, *, is_answer: bool) -> None:
    """A chat has as many choices as it asks for."""
    body = BODY._replace(content=b'{"messages": [], "n": %s}' % asked)
    reply = json.dumps({**REPLY, "choices": REPLY["choices"] * came}).encode()
    if is_answer:
        assert completion_of_body(body, reply).texts == ["yes"]
    else:
        with pytest.raises(AttemptFailedError, match="were asked for"):
            completion_of_body(body, reply)
