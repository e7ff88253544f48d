"""Rows with a common prefix stay on one route, unless it is behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.dispatch.queue import LONGEST_COOLDOWN_S, DispatchQueue, PendingRow, Slots
from tests.support.prompts import request, slots


def family(row: int, size: int) -> list[PendingRow]:
    """Make the rows of a prefix group, numbered from `row`; those behind the first are still to come."""
    first = PendingRow(request(row, "p"), to_come=size)
    first.group = first
    return [first, *(PendingRow(request(row + n, "p"), group=first) for n in range(1, size))]


def test_groups_go_where_least_is_to_come() -> None:
    """The rows of a group that are not there yet count for its route, as soon as its first row is sent."""
    families = [family(0, 6), family(10, 2), family(20, 2), family(30, 2)]
    ready = DispatchQueue(slots(a=6, b=6))
    for rows in families:
        ready.add(rows[0])
    assert ready.take("a") is families[0][0]
    assert ready.take("a") is None
    assert [ready.take("b") for _ in range(3)] == [rows[0] for rows in families[1:]]
    assert [ready.home_of(rows[0]) for rows in families] == ["a", "b", "b", "b"]


def test_a_route_with_little_to_do_takes_another_ones_rows() -> None:
    """It takes the largest group, whose prefix is computed again once, until it has half as many rows."""
    small, large = family(0, 2), family(10, 4)
    used = slots(a=1, b=1)  # what is asked for counts already
    ready = DispatchQueue(used)
    small[0].home = large[0].home = "a"
    for row in (*small, *large):
        ready.add(row)
    assert ready.take("a") is small[0]
    assert ready.take("b") is large[1]
    assert ready.take("a") is small[1]
    used.take(0.0, wants="b".__eq__)
    assert [ready.take("b") for _ in range(3)] == [large[2], large[3], None]
    assert not ready.has_for("b")
    assert ready.take("a") is large[0]


def test_few_rows_wait_for_their_own_route() -> None:
    """Rows that are soon sent where their prefix is computed are not worth computing it again."""
    rows = family(0, 6)
    used = slots(a=20, b=1)
    ready = DispatchQueue(used)
    rows[0].home = "a"
    for row in rows:
        ready.add(row)
    assert ready.take("a") is rows[0]
    assert [ready.take("b") for _ in range(4)] == [*rows[3:], None]  # 5 were kept, a quarter of 20; then 2
    assert not ready.has_for("b")


def test_a_slow_route_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it keeps so many rows that no others are read, they are for all."""
    monkeypatch.setattr("batchrunner.dispatch.queue.READ_AHEAD_ROWS", 4)
    ready = DispatchQueue(slots(slow=1, fast=10))
    rows = family(0, 6)
    rows[0].home = "slow"
    for row in rows:
        ready.add(row)
    assert ready.take("slow") is rows[0]
    assert ready.take("fast") is rows[3]  # and with it most of what is kept


ROUTES = ("a", "b", "c")
events = st.lists(
    st.tuples(
        st.sampled_from(["take", "leave", "resize", "rest", "answer", "wait"]),
        st.sampled_from(ROUTES),
        st.integers(1, 6),
    ),
    max_size=60,
)


@given(windows=st.tuples(*[st.integers(1, 6)] * 3), history=events)
def test_no_window_is_ever_exceeded(
    windows: tuple[int, int, int], history: list[tuple[str, str, int]]
) -> None:
    """Whatever happens, a place is given where there is room on a route that is awake, and only there."""
    size, inside = dict(zip(ROUTES, windows, strict=True)), dict.fromkeys(ROUTES, 0)
    gate, now = Slots(size), 0.0
    awake_at = dict.fromkeys(ROUTES, 0.0)
    for what, route, number in history:
        if what == "take":
            room = {r for r in ROUTES if inside[r] < size[r] and awake_at[r] <= now}
            taken = gate.take(now)
            assert (taken in room) if room else taken is None
            if taken is not None:
                inside[taken] += 1
        elif what == "leave" and inside[route]:
            inside[route] -= 1
            gate.release(route)
        elif what == "resize":
            size[route] = number
            gate.resize(route, number)
        elif what == "rest":
            awake_at[route] = now + gate.cool_down(route, now)
        elif what == "answer":
            awake_at[route] = 0.0
            gate.answered(route)
        else:
            now += number
        assert gate.by_route == inside
        assert (gate.in_flight, gate.window) == (sum(inside.values()), sum(size.values()))
        for r in ROUTES:
            assert gate.may_reuse(r, now) == (inside[r] <= size[r] and awake_at[r] <= now)


def test_a_rest_doubles_until_there_is_an_answer() -> None:
    """A route that stays down is tried less and less often, at most twice a minute; an answer ends that.

    A hundred rows that lose it at once are one failure; the only route never rests.
    """
    gate, now, rests = Slots({"a": 4, "full": 1}), 0.0, []
    while gate.by_route["full"] == 0:
        gate.take(now)
    gate.resize("a", 9)
    for _ in range(9):
        rests.append(gate.cool_down("a", now))
        assert gate.cool_down("a", now) == rests[-1]
        assert gate.take(now) is None
        now += rests[-1]
        assert gate.take(now) == "a"
        gate.release("a")
    assert rests[:4] == [0.5, 1.0, 2.0, 4.0]
    assert rests[-1] == LONGEST_COOLDOWN_S
    gate.answered("a")
    assert gate.cool_down("a", now) == 0.5
    assert Slots({"a": 2}).cool_down("a", 0.0) == 0.0
