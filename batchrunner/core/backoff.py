"""Decides whether and when a failed try of a row is repeated (exponential backoff). Pure."""

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError
from batchrunner.core.timing import TIMING


def pause_before_retry(
    error: RequestError, *, tries: int, failures: int, max_attempts: int, jitter: float
) -> float | None:
    """Return the seconds until the next try; None means that the row has failed for good.

    `tries` counts all tries of the row, including this one. `failures` counts the tries that failed possibly
    because of the row; a busy engine is not counted, and retried without a limit. `jitter` is uniform in
    [0, 1).

    The pause doubles with each try and is then drawn from its upper half ("equal jitter" in Amazon's
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
