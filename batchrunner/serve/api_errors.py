"""Errors of the HTTP API, in the form of OpenAI's API."""

import json
from http import HTTPStatus

from aiohttp import web
from pydantic import ValidationError

_PARAMETER_ERRORS = {
    "missing": ("Missing required parameter: '{}'.", "missing_required_parameter"),
    "extra_forbidden": ("Unknown parameter: '{}'.", "unknown_parameter"),
}
"""Message and code for a wrong parameter, by the type of pydantic's error."""
RATE_LIMIT = "rate_limit_exceeded"
"""OpenAI's error code for a call that exceeds a limit and may succeed soon."""
QUOTA = "insufficient_quota"
"""OpenAI's error code for a client that has used all its tokens of the day."""


class ApiError(web.HTTPException):
    """A refused call, with the error object of OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        """Make a reply from the HTTP `status`, message, name of the wrong parameter, and OpenAI's error code.

        `retry_after_s` is the number of seconds after which the client may repeat the call.
        """
        self.status_code = status
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            # OpenAI's API uses special error types for this status.
            kind = QUOTA if code == QUOTA else "requests"
        error = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__(
            headers=None if retry_after_s is None else {"Retry-After": str(retry_after_s)},
            text=json.dumps({"error": error}),
            content_type="application/json",
        )


def invalid(name: str, problem: str) -> ApiError:
    """Return the error for a call whose parameter `name` has a wrong value."""
    return ApiError(400, f"Invalid '{name}': {problem}.", name, "invalid_value")


def parameter_error(failure: ValidationError) -> ApiError:
    """Return OpenAI's error for the first parameter that pydantic refuses."""
    error = failure.errors()[0]
    name = ".".join(map(str, error["loc"])) or "body"
    template, code = _PARAMETER_ERRORS.get(error["type"], ("Invalid '{}': {}.", "invalid_value"))
    # pydantic puts this prefix before the messages of our own validators.
    message = template.format(name, error["msg"].removeprefix("Value error, "))
    return ApiError(400, message, name, code)
