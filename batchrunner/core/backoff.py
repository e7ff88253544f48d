"""When a failed try is repeated: pure, so that it can be tested without a clock or an engine."""

from __future__ import annotations

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0


def pause_before_retry(
    error: RequestError, *, tries: int, failures: int, max_attempts: int, luck: float
) -> float | None:
    """Seconds until the next try, or None to give the row up.

    `tries` counts all tries of this row, this one included; `failures` those that may be the row's own
    fault: a busy engine is nobody's, so it never uses a row up. `luck` is uniform in [0, 1).

    The pause doubles with each try and is then drawn from its upper half ("equal jitter", Amazon's
    *Exponential backoff and jitter*, 2015), so that rows refused together do not come back together. A
    server's own Retry-After is a floor, up to the longest pause: nobody would notice when it is back earlier.
    """
    if not isinstance(error, (AttemptFailedError, EngineBusyError)):
        return None
    if isinstance(error, AttemptFailedError) and failures >= max_attempts:
        return None
    ceiling = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 10))
    pause = ceiling * (0.5 + 0.5 * luck)
    if isinstance(error, EngineBusyError) and error.retry_after_s is not None:
        pause = max(pause, min(error.retry_after_s, LONGEST_PAUSE_S))
    return pause
