"""A server that does nothing is told from one that is slow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.engines.hang_detector import WARM_UP, HangDetector, SilenceTimer

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST_S = 60.0
URL = "http://127.0.0.1:30000"


def warm_timer(pause_s: float = 1.0) -> tuple[SilenceTimer, float]:
    """Return a timer that has seen work every so often for long enough, and the time."""
    timer, now = SilenceTimer(SHORTEST_S), 0.0
    while now <= WARM_UP * SHORTEST_S + 2 * pause_s:
        now += pause_s
        assert timer.poll(now, now, busy=True) is None
    return timer, now


def silence_of(timer: SilenceTimer, now: float, work: object) -> float:
    """Return after how long a silence is called a hang, looked at every half second."""
    began = now
    while timer.poll(now, work, busy=True) is None:
        now += 0.5
        assert now - began < 10_000, "never"
    return now - began


@given(pauses=st.lists(st.floats(0.1, SHORTEST_S), min_size=1, max_size=50), polls=st.floats(0.1, 10))
def test_work_is_never_a_hang(pauses: list[float], polls: float) -> None:
    """Something done at least every `limits.hang` is no hang, however rare the looks."""
    timer, now = SilenceTimer(SHORTEST_S), 0.0
    for work, pause in enumerate(pauses):
        until = now + pause
        while now < until:
            assert timer.poll(now, work, busy=True) is None
            now += polls


def test_how_long_a_silence_is_borne() -> None:
    """Five times the floor at first, the floor when the server is known to be quick."""
    assert silence_of(SilenceTimer(SHORTEST_S), 0.0, "x") == pytest.approx(WARM_UP * SHORTEST_S, abs=1)
    timer, now = warm_timer()
    assert silence_of(timer, now, "x") == pytest.approx(SHORTEST_S, abs=1)


def test_what_did_nothing_since_its_last_hang_is_given_twice_as_long() -> None:
    """Work that only takes long comes to its end at the second try; after work it is as before."""
    timer, now = warm_timer()
    now += silence_of(timer, now, "x")
    second_s = silence_of(timer, now, "x")
    assert second_s == pytest.approx(2 * SHORTEST_S, abs=1)
    assert silence_of(timer, now + second_s, "y") == pytest.approx(SHORTEST_S, abs=1)


def load(running: int, work: float, *, queue: int = 0, at: float = 0.0) -> SchedulerLoad:
    return SchedulerLoad(URL, "loads", running, queue, 0.5, used_tokens=100, taken_at=at, work=work)


def two_ranks(first: SchedulerLoad, second: SchedulerLoad) -> list[SchedulerLoad]:
    return [replace(first, scheduler=f"{URL}#dp0"), replace(second, scheduler=f"{URL}#dp1")]


@pytest.mark.parametrize(
    ("told", "hangs"),
    [
        (lambda step: [load(4, step)], False),
        (lambda step: [load(4, 1, at=step)], True),  # the clock of the telling is no work
        (lambda step: [load(4, 1, queue=step)], True),  # nor is an arrival
        (lambda step: [load(4 + step % 2, 1)], False),  # rows began or ended
        (lambda step: [load(4, 1)] if step == 0 else [], True),  # a poll that fails is no work
        (lambda _: [], False),  # a server that never told its load cannot be judged
        (lambda step: two_ranks(load(4, step), load(4, 1)), True),  # one rank of two stands still
        (lambda step: two_ranks(load(4, step), load(0, 1)), False),  # it has nothing to do
    ],
)
def test_what_counts_as_work(told: Callable[[int], list[SchedulerLoad]], hangs: bool) -> None:
    """A forward pass does, counted or seen in what is running; a reply to a poll does not."""
    detector = HangDetector(1.0)
    assert any(detector.poll(step / 2, told(step), in_flight=8) for step in range(40)) is hangs


def test_a_replica_behind_a_gateway_without_rows() -> None:
    """Rows in flight at the gateway are another replica's where this one tells that it has none."""
    idle, working = HangDetector(1.0, alone=False), HangDetector(1.0, alone=False)
    assert not any(idle.poll(step / 2, [load(0, 1)], in_flight=8) for step in range(100))
    assert any(working.poll(step / 2, [load(4, 1)], in_flight=8) for step in range(100))
