"""The policy for repeating failed requests to object stores and the Hugging Face Hub."""

from collections.abc import Callable
from typing import Any

from tenacity import retry_if_exception, stop_after_attempt, wait_exponential

from batchrunner.core.timing import TIMING


def backoff(
    is_transient: Callable[[BaseException], bool],
    *,
    attempts: int,
    first_s: float | None = None,
) -> dict[str, Any]:
    """Return a retry policy as arguments of tenacity's `Retrying` or `AsyncRetrying`.

    After a transient error, there is a pause and another attempt. The first pause is `first_s`, by default
    `TIMING.first_retry`. Each further pause is twice as long, up to `TIMING.longest_retry`. The last of
    `attempts` raises its error.
    """
    return {
        "retry": retry_if_exception(is_transient),
        "stop": stop_after_attempt(attempts),
        "wait": wait_exponential(first_s or TIMING.first_retry, TIMING.longest_retry),
        "reraise": True,
    }
