"""When a failed try is repeated: who is tried again, how often, and after what pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import AttemptFailedError, EngineBusyError, RequestError, RowRefusedError
from batchrunner.core.timing import TIMING, pause_before_retry

counts = st.integers(1, 10) | st.integers(1, 10_000)  # small ones are where pauses still grow
lucks = st.floats(0, 1, exclude_max=True)
wishes = st.none() | st.floats(0, 3600)


def pause(
    error: RequestError, *, tries: int = 1, failures: int = 0, attempts: int = 5, luck: float = 0
) -> float:
    seconds = pause_before_retry(error, tries=tries, failures=failures, max_attempts=attempts, jitter=luck)
    assert seconds is not None
    return seconds


@given(tries=counts, luck=lucks)
def test_pauses_stay_in_the_upper_half(tries: int, luck: float) -> None:
    """No pause is shorter than half of its ceiling or longer than the longest."""
    ceiling = min(TIMING.longest_retry, TIMING.first_retry * 2.0 ** min(tries, 1000) / 2)
    assert ceiling / 2 <= pause(EngineBusyError("503"), tries=tries, luck=luck) <= ceiling


@given(tries=counts, failures=st.integers(0, 10_000), attempts=st.integers(1, 10), wish=wishes)
def test_a_busy_engine_never_uses_a_row_up(
    tries: int, failures: int, attempts: int, wish: float | None
) -> None:
    """A row is not given up because the engine was full, however often."""
    assert pause(EngineBusyError("429", wish), tries=tries, failures=failures, attempts=attempts) > 0


@given(tries=counts, luck=lucks, wish=st.floats(0, 3600))
def test_retry_after_is_a_floor(tries: int, luck: float, wish: float) -> None:
    """A server's own wish is heeded up to half a minute, and never makes a pause shorter."""
    plain = pause(EngineBusyError("503"), tries=tries, luck=luck)
    assert pause(EngineBusyError("503", wish), tries=tries, luck=luck) == max(
        plain, min(wish, TIMING.longest_retry)
    )


@given(attempts=st.integers(1, 20), failures=st.integers(0, 40), tries=counts, luck=lucks)
def test_failures_are_limited(attempts: int, failures: int, tries: int, luck: float) -> None:
    """A row that fails is tried again exactly until it has failed max_attempts times."""
    seconds = pause_before_retry(
        AttemptFailedError("500"), tries=tries, failures=failures, max_attempts=attempts, jitter=luck
    )
    assert (seconds is None) == (failures >= attempts)


@pytest.mark.parametrize("error", [RowRefusedError("too long"), RequestError("unknown")])
@given(tries=counts, attempts=st.integers(1, 20))
def test_a_refused_row_is_never_sent_again(error: RequestError, tries: int, attempts: int) -> None:
    """What cannot succeed costs one try."""
    assert pause_before_retry(error, tries=tries, failures=0, max_attempts=attempts, jitter=0.5) is None
