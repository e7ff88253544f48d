"""What all replies of SGLang have in common: odd JSON, errors and aborts."""

from typing import Any

import msgspec
import pytest

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError, RowRefusedError
from batchrunner.core.server_replies import FinishReason, decode_reply, raise_abort
from batchrunner.job.tasks import RewardTask
from tests.support.prompts import request

ABORTS: list[tuple[Any, type[RequestError], str]] = [
    ("abort", AttemptFailedError, "aborted by the engine"),
    (FinishReason("abort"), AttemptFailedError, "500: aborted by the engine"),
    (FinishReason("abort", message="too long", status_code=400), RowRefusedError, "400: too long"),
    (FinishReason("abort", message="queue full", status_code=503), EngineBusyError, "503: queue full"),
    (FinishReason("abort", message="m", status_code="odd"), AttemptFailedError, "500: m"),
]


@pytest.mark.parametrize(("reason", "error", "message"), ABORTS)
def test_an_abort_has_the_error_of_its_status(reason: Any, error: type[RequestError], message: str) -> None:
    """A reply with status 200 may say that its row was aborted."""
    with pytest.raises(error, match=f"^{message}$"):
        raise_abort(reason)


@pytest.mark.parametrize("reason", [None, "stop", FinishReason("length"), FinishReason("stop", matched=2)])
def test_other_reasons_are_no_abort(reason: Any) -> None:
    """An output that ended in any other way is an answer."""
    raise_abort(reason)


def test_an_abort_in_a_list_is_an_error_of_its_row() -> None:
    """A task without decoding reads aborts by the same rule, and other rows of the list are answered."""
    abort = {"type": "abort", "message": "too long", "status_code": 400}
    reply = msgspec.json.encode([
        {"meta_info": {"finish_reason": abort}, "embedding": None},
        {"meta_info": {"finish_reason": {"type": "stop"}}, "embedding": [0.5]},
    ])  # fmt: skip
    refusal, answer = RewardTask().answers([request(0, "a"), request(1, "b")], [reply])
    assert isinstance(refusal, RowRefusedError)
    assert (str(refusal), refusal.body) == ("400: too long", b'{"message":"too long"}')
    assert not isinstance(answer, RequestError)
    assert answer.columns == {"score": [0.5]}


def test_a_reply_that_is_none_is_a_failed_attempt() -> None:
    """Odd JSON is repaired; what cannot be decoded then is shown in the error."""
    decoder = msgspec.json.Decoder(list[float | None])
    assert decode_reply(decoder, b"[NaN, 1]") == [None, 1.0]
    with pytest.raises(AttemptFailedError, match="not an answer of SGLang: <html>"):
        decode_reply(decoder, b"<html>")
