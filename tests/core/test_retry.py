"""When a failed try is repeated: who is tried again, how often, and after what pause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import Retrying

from batchrunner.core.errors import EngineBusyError, RequestError
from batchrunner.core.retry import backoff, pause_before_retry
from batchrunner.core.timing import TIMING

counts = st.integers(1, 10) | st.integers(1, 10_000)  # small ones are where pauses still grow
lucks = st.floats(0, 1, exclude_max=True)


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


@given(tries=counts, luck=lucks, wish=st.floats(0, 3600))
def test_retry_after_is_a_floor(tries: int, luck: float, wish: float) -> None:
    """A server's own wish is heeded up to half a minute, and never makes a pause shorter."""
    plain = pause(EngineBusyError("503"), tries=tries, luck=luck)
    assert pause(EngineBusyError("503", wish), tries=tries, luck=luck) == max(
        plain, min(wish, TIMING.longest_retry)
    )


def test_backoff_repeats_transient_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last attempt, whose error is raised; another error is raised at once."""
    pauses_s = list[float]()
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses_s.append)
    failures: list[Exception] = [ConnectionError("1"), ConnectionError("2"), ConnectionError("3")]

    def attempt() -> None:
        raise failures.pop(0)

    def is_transient(failure: BaseException) -> bool:
        return isinstance(failure, ConnectionError)

    with pytest.raises(ConnectionError, match="3"):
        Retrying(**backoff(is_transient, attempts=3, first_s=2.0))(attempt)
    assert pauses_s == [2.0, 4.0]
    failures = [ValueError("wrong"), ConnectionError("never tried")]
    with pytest.raises(ValueError, match="wrong"):
        Retrying(**backoff(is_transient, attempts=3))(attempt)
    assert len(failures) == 1
