"""Errors of a server or a gateway, and what they mean for a row."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
)
from batchrunner.engines.http.reply_errors import error_of
from tests.support.json_values import json_of, some_odd
from tests.support.reader_checks import check_error


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
