"""Replies of a gateway, and what they mean."""

from __future__ import annotations

import json

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
)
from batchrunner.engines.http import replies


def _error_body(code: str) -> bytes:
    message = "error sending request for url (http://127.0.0.1:1/generate)"
    return json.dumps({"error": {"type": "Internal Server Error", "code": code, "message": message}}).encode()


def test_what_the_gateway_says() -> None:
    """A worker out of reach is nobody's fault and no sign of load; other errors mean what they always do."""
    for status, code in [(500, "call_upstream_request_error"), (503, "no_available_workers")]:
        assert type(replies.error_of(status, _error_body(code))) is EngineDownError
    assert type(replies.error_of(500, _error_body("internal_error"))) is AttemptFailedError
    assert (
        type(replies.error_of(503, b'{"error": {"message": "The request queue is full."}}'))
        is EngineBusyError
    )
    assert type(replies.error_of(500, b"[]")) is AttemptFailedError
