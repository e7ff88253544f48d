"""What happens to a row whose attempt failed, and when an engine that takes no rows counts as lost."""

import random
from dataclasses import dataclass

from msgspec.structs import replace

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineLostError,
    RequestError,
)
from batchrunner.core.timing import pause_before_retry
from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.queue import Backlog

ACCEPTED_RATIO, ACCEPTED_S = 2.0, 1.0
"""A request in flight for more than 2 times as long as a refusal takes, and over 1 s, counts as accepted."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The job's limits on attempts."""

    max_attempts: int
    """Attempts that may fail for a reason of the row's own (`limits.max_attempts`)."""
    engine_wait_s: float
    """Seconds for which an engine that takes no row is waited for (`limits.engine_wait`)."""


class Retries:
    """Puts rows back for another attempt, as long as the policy allows."""

    def __init__(self, policy: RetryPolicy, backlog: Backlog) -> None:
        self._policy = policy
        self._backlog = backlog
        self._refused_since: float | None = None

    def accepted(self) -> None:
        """Record that the engine took a row, or that the time until now says nothing of it."""
        self._refused_since = None

    def retry(self, row: PendingRow, error: RequestError, now: float, oldest_sent_at: float) -> bool:
        """Put a row back, if it gets another attempt; tell whether it does.

        `now` and `oldest_sent_at`, when the oldest request in flight was sent, are seconds of one clock.
        Raises EngineLostError where the engine has taken no row for too long.
        """
        if isinstance(error, EngineBusyError):
            self._check_engine(row, error, now, oldest_sent_at)
        row.failures += isinstance(error, AttemptFailedError)
        pause_s = pause_before_retry(
            error,
            tries=row.attempts,
            failures=row.failures,
            max_attempts=self._policy.max_attempts,
            jitter=random.random(),  # noqa: S311 - jitter, not a secret
        )
        if pause_s is not None:
            self._backlog.retry_after(row, pause_s)
        return pause_s is not None

    def try_duplicates(self, row: PendingRow) -> None:
        """Send the duplicates of a row that was given up, in two halves: they may have better luck.

        One after the other could take days for thousands of them; all at once is too many if the first
        succeeds.
        """
        duplicates, row.duplicates = row.duplicates, []
        for first, *others in filter(None, (duplicates[::2], duplicates[1::2])):
            asked = row.asking.first if row.asking else row.request
            unencoded = None if row.unencoded is None else row.unencoded._replace(ref=first)
            anew = replace(
                row, request=asked._replace(ref=first), unencoded=unencoded, asking=None, duplicates=others,
                followers=[], attempts=0, failures=0, deaths=0,
            )  # fmt: skip
            self._backlog.expect(1)
            self._backlog.add(anew)
        self._backlog.wake_dispatcher()

    def _check_engine(
        self, row: PendingRow, error: EngineBusyError, now: float, oldest_sent_at: float
    ) -> None:
        """Raise EngineLostError if the engine took no row for `engine_wait_s`.

        An old request in flight was accepted: its answer is waited for.
        """
        if self._refused_since is None or isinstance(error, EngineDiedError):  # until now it took rows
            self._refused_since = now
        waited_s = now - self._refused_since
        took_one = now - oldest_sent_at > max(ACCEPTED_RATIO * (now - row.sent_at), ACCEPTED_S)
        if not took_one and waited_s > self._policy.engine_wait_s:
            raise EngineLostError(f"the engine took no row for {waited_s:.0f} s: {error}")
