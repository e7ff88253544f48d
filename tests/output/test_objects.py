"""Errors of stores in a few words, and reads that are cut short."""

from __future__ import annotations

import pytest
from obstore.exceptions import GenericError

from batchrunner.core.errors import StoreRequestError
from batchrunner.output.objects import READ_TRIES, as_os_error, read_whole, reason_of

REFUSED = (
    "Generic S3 error: Error performing PUT http://h/b/k in 3ms - Server returned non-2xx status code: "
    '{status}: <?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>Long words.</Message></Error>'
    "\n\nDebug source:\nGeneric {{ many lines }}"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            REFUSED.format(status="400 Bad Request", code="AuthorizationHeaderMalformed"),
            "the region is wrong: give storage.region (AuthorizationHeaderMalformed)",
        ),
        (REFUSED.format(status="501", code="NotImplemented"), "no conditional writes (NotImplemented)"),
        (REFUSED.format(status="409 Conflict", code="Unheard"), "Long words. (Unheard)"),
        (
            "Generic S3 error: Received redirect, this normally indicates an incorrectly configured region",
            "the bucket is in another region: give storage.region",
        ),
        ("x in 3ms - Server returned non-2xx status code: 502 Bad Gateway: ", "answered 502 Bad Gateway"),
        ("x - HTTP error: error sending request\n\nDebug", "the store does not answer"),
        ("x PUT http://169.254.169.254/latest/api/token in 1s - HTTP error", "no credentials were found"),
        ("Generic S3 error: Something else\n\nDebug source:\nmore", "S3 error: Something else"),
    ],
)
def test_why_a_request_failed(text: str, reason: str) -> None:
    """One line says what to do, without the client's own details."""
    error = as_os_error(GenericError(text), "s3://b/k")
    assert isinstance(error, StoreRequestError)
    assert str(error).endswith(reason)
    assert "\n" not in reason_of(GenericError(text))


def test_an_object_that_is_not_there() -> None:
    """It is a file that is not there, but where the bucket itself is missing."""
    gone = FileNotFoundError("Object at location k not found")
    assert isinstance(as_os_error(gone, "k"), FileNotFoundError)
    no_bucket = FileNotFoundError(REFUSED.format(status="404 Not Found", code="NoSuchBucket"))
    assert str(as_os_error(no_bucket, "k")) == "there is no such bucket (NoSuchBucket)"


@pytest.mark.parametrize(("cuts", "is_read"), [(2, True), (READ_TRIES, False)])
def test_an_answer_that_is_cut_short(monkeypatch: pytest.MonkeyPatch, cuts: int, is_read: bool) -> None:
    """It is asked for again, a few times."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)
    cut: Exception = GenericError("HTTP error: request or response body error")
    answers: list[Exception | bytes] = [*([cut] * cuts), b"whole"]

    def read() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, bytes):
            return answer
        raise answer

    if is_read:
        assert read_whole(read) == b"whole"
    else:
        with pytest.raises(GenericError, match="body error"):
            read_whole(read)
        assert len(answers) == 1
