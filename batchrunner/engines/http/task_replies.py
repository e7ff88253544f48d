"""Replies to tasks without decoding → completions and errors. Pure."""

from collections.abc import Sequence

from batchrunner.core.errors import RequestError
from batchrunner.core.types import Completion, Request
from batchrunner.engines.http.replies import unreadable


def answer_of(request: Request, reply: bytes) -> Completion:
    """Read a reply to one request of a task without decoding; raises RequestError where it has no answer."""
    (result,) = answers_of([request], reply)
    if isinstance(result, RequestError):
        raise result
    return result


def answers_of(requests: Sequence[Request], reply: bytes) -> list[Completion | RequestError]:
    """Read a reply to requests of one task without decoding; raises RequestError where it is none to them."""
    task = requests[0].task
    assert task is not None
    try:
        return task.answers(requests, reply)
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise unreadable(failure, reply) from None
