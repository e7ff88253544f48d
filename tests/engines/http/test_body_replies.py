"""Replies to whole requests, whatever comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import AttemptFailedError
from batchrunner.core.types import RequestBody
from batchrunner.engines.http.body_replies import completion_of_body

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
    [(b"2", 2, True), (b"2.0", 2, True), (b"null", 1, True), (b"2", 1, False), (b'"2"', 2, True)],
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
