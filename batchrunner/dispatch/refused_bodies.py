"""What a line of a batch file keeps of the answer by which the server refused it."""

import orjson

from batchrunner.core.errors import RequestError
from batchrunner.core.exact_json import read_exactly, write_exactly
from batchrunner.core.types import Completion, Request
from batchrunner.job.output import RESPONSE

MOST_BYTES = 1 << 16
"""Most bytes of such an answer that are kept: a stack trace may be in it."""


def refused_answer(request: Request, error: RequestError) -> Completion | None:
    """Return an answer without a text, with the server's own error as its `response`.

    None for a row that is no whole request, and where the server gave no JSON object.
    """
    body = error.body
    if request.kind != "body" or body is None or len(body) > MOST_BYTES:
        return None
    try:
        found = read_exactly(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    try:
        columns = {RESPONSE: [write_exactly(found)]}
    except RecursionError:
        return None
    return Completion([None], [None], [None], None, None, columns=columns)  # type: ignore[list-item]
