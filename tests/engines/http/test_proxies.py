"""Requests that a proxy ends are of one age; other ends of requests show no limit."""

from collections.abc import Iterable

import pytest

from batchrunner.engines.http.proxies import ProxyLimit

LIMIT_S = 60.0


def learned(ends: Iterable[tuple[float, float]], *, answered_s: float = 0.0) -> float | None:
    """Return the limit that requests show, by the times at which they are sent and end."""
    limit = ProxyLimit()
    limit.answered(answered_s)
    for sent_at, now in ends:
        limit.ended(sent_at, now)
    return limit.limit_s


@pytest.mark.parametrize("pause_s", [1.0, 10.0, 61.0])
def test_requests_of_one_age(pause_s: float) -> None:
    """Three show the limit, also where a connection takes a moment, and where much is answered before it."""
    ends = [(pause_s * n, pause_s * n + LIMIT_S + 0.2 * n) for n in range(3)]
    assert learned(ends, answered_s=55.0) == LIMIT_S
    assert learned(ends[:2]) is None


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([(10.0 * n, 60.0) for n in range(5)], id="a death, of requests sent one by one"),
        pytest.param([(0.01 * n, 60.0) for n in range(5)], id="a death, of requests sent together"),
        pytest.param([(10.0 * n, 10.0 * n + 0.1) for n in range(5)], id="refused at once"),
        pytest.param([(10.0 * n, 10.0 * n + 20.0 + 3 * n) for n in range(5)], id="any ages"),
    ],
)
def test_other_ends(ends: list[tuple[float, float]]) -> None:
    """A server that dies, refuses or fails shows none."""
    assert learned(ends) is None


def test_longer_answers() -> None:
    """No proxy ends requests before an answer that took longer, even if that comes later."""
    ends = [(10.0 * n, 10.0 * n + LIMIT_S) for n in range(3)]
    assert learned(ends, answered_s=90.0) is None
    limit = ProxyLimit()
    assert [limit.ended(*each) for each in ends] == [False, False, True]
    assert limit.ended(100.0, 160.5)
    assert not limit.ended(100.0, 110.0)
    limit.answered(90.0)
    assert limit.limit_s is None


def test_a_limit_is_not_disproved_by_an_earlier_answer() -> None:
    """Ages of 60 to 62.5 s would be a limit of 60 s, which an answer after 64 s has outlived already."""
    assert learned([(0.0, 60.0), (10.0, 71.0), (20.0, 82.5)], answered_s=64.0) is None
    assert learned([(0.0, 60.0), (10.0, 71.0), (20.0, 82.5)], answered_s=62.0) == LIMIT_S
