"""When a failed attempt is repeated, and after which pause."""

from collections.abc import Callable
from typing import Any

from tenacity import retry_if_exception, stop_after_attempt, wait_exponential

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError
from batchrunner.core.timing import TIMING


def backoff(
    is_transient: Callable[[BaseException], bool],
    *,
    attempts: int,
    first_s: float | None = None,
) -> dict[str, Any]:
    """Return a retry policy as arguments of tenacity's `Retrying` or `AsyncRetrying`.

    An attempt that ends with a transient error is repeated after a pause. The first pause is `first_s`, by
    default that of rows; each further one is twice as long. The last of `attempts` raises its error.
    """
    return {
        "retry": retry_if_exception(is_transient),
        "stop": stop_after_attempt(attempts),
        "wait": wait_exponential(first_s or TIMING.first_retry, TIMING.longest_retry),
        "reraise": True,
    }


def pause_before_retry(
    error: RequestError, *, tries: int, failures: int, max_attempts: int, jitter: float
) -> float | None:
    """Return the seconds until the next attempt of a row; None where the row has failed for good.

    `tries` counts all attempts of the row, including this one. `failures` counts the attempts that failed
    possibly because of the row, which excludes those that a busy engine refused. `jitter` is uniform in
    [0, 1).

    The pause doubles with each attempt and is then drawn from its upper half ("equal jitter" in Amazon's
    *Exponential backoff and jitter*, 2015), so that rows refused together do not return together. A server's
    Retry-After is a lower bound, but at most the longest pause, so that a server that recovers early is used.
    """
    if not isinstance(error, (AttemptFailedError, EngineBusyError)):
        return None
    if isinstance(error, AttemptFailedError) and failures >= max_attempts:
        return None
    ceiling = min(TIMING.longest_retry, TIMING.first_retry * 2.0 ** min(tries - 1, 10))
    pause = ceiling * (0.5 + 0.5 * jitter)
    if isinstance(error, EngineBusyError) and error.retry_after_s is not None:
        pause = max(pause, min(error.retry_after_s, TIMING.longest_retry))
    return pause
