"""Rows with a common prefix stay on one route, unless it is behind; rows that avoid a route go elsewhere."""

import pytest

from batchrunner.dispatch.queue import DispatchQueue, PendingRow, PrefixGroup
from batchrunner.dispatch.route import Route, Routes
from tests.support.prompts import request, routes


def family(row: int, size: int) -> list[PendingRow]:
    """Make the rows of a prefix group, numbered from `row`; those behind the first are still to come."""
    first = PendingRow(request(row, "p"))
    group = first.group = PrefixGroup(first, to_come=size)
    return [first, *(PendingRow(request(row + n, "p"), group=group) for n in range(1, size))]


def queue_of(servers: Routes, home: Route, *families: list[PendingRow]) -> DispatchQueue:
    """Return a queue with the rows of these prefix groups, which all have the same home."""
    queue = DispatchQueue(servers)
    for rows in families:
        assert rows[0].group is not None
        rows[0].group.home = home
        for row in rows:
            queue.add(row)
    return queue


def test_groups_go_where_least_is_to_come() -> None:
    """The rows of a group that are not there yet count for its route, as soon as its first row is sent."""
    families = [family(0, 6), family(10, 2), family(20, 2), family(30, 2)]
    a, b = servers = routes(a=6, b=6)
    queue = DispatchQueue(servers)
    for rows in families:
        queue.add(rows[0])
    assert queue.take(a) is families[0][0]
    assert queue.take(a) is None
    assert [queue.take(b) for _ in range(3)] == [rows[0] for rows in families[1:]]
    assert [queue.home_of(rows[0].group) for rows in families if rows[0].group] == [a, b, b, b]


def test_a_route_with_little_to_do_takes_another_ones_rows() -> None:
    """It takes the largest group, whose prefix is computed again once, until it has half as many rows."""
    small, large = family(0, 2), family(10, 4)
    a, b = servers = routes(a=1, b=1)  # the slot that is asked for counts already
    queue = queue_of(servers, a, small, large)
    assert queue.take(a) is small[0]
    assert queue.take(b) is large[1]
    assert queue.take(a) is small[1]
    servers.acquire_slot(0.0, wants=lambda route: route is b)
    assert queue.take(b) is None
    queue.release(b)
    assert [queue.take(b) for _ in range(3)] == [large[2], large[3], None]
    assert not queue.has_for(b)
    assert queue.take(a) is large[0]


def test_one_moved_row_of_a_group_goes_first() -> None:
    """Rows of one group in the same pass would each compute the prefix, which the new route does not have."""
    sent, one, two = family(0, 6), family(10, 2), family(20, 2)
    a, b = servers = routes(a=1, b=1)
    queue = queue_of(servers, a, sent, one, two)
    assert queue.take(a) is sent[0]
    sent[0].route = a
    assert queue.take(b) is sent[5]  # and with it half of what is kept for the other route
    assert [queue.take(b) for _ in range(2)] == [one[0], two[0]]
    assert queue.take(b) is None
    queue.release(b)
    assert [queue.take(b) for _ in range(2)] == [one[1], two[1]]


def test_rows_that_move_back_are_sent_at_once() -> None:
    """The route of their group still has the prefix."""
    rows = family(0, 9)
    a, b = servers = routes(a=1, b=1)
    queue = queue_of(servers, a, rows)
    assert queue.take(a) is rows[0]
    assert queue.take(b) is rows[5]
    queue.release(b)
    assert [queue.take(a) for _ in range(6)] == [*rows[1:5], *rows[7:]]


def test_few_rows_wait_for_their_own_route() -> None:
    """Rows that are soon sent where their prefix is computed are not worth computing it again."""
    rows = family(0, 6)
    a, b = servers = routes(a=20, b=1)
    queue = queue_of(servers, a, rows)
    assert queue.take(a) is rows[0]
    assert queue.take(b) is rows[3]  # 5 were kept, a quarter of 20; then 2
    queue.release(b)
    assert [queue.take(b) for _ in range(3)] == [*rows[4:], None]
    assert not queue.has_for(b)


def test_a_route_whose_window_is_nearly_full_takes_no_rows() -> None:
    """Its server has enough rows, so the rows of another route wait where their prefix is."""
    rows = family(0, 40)
    a, b = servers = routes(a=1, b=4)
    queue = queue_of(servers, a, rows)
    assert queue.take(a) is rows[0]
    b.window = 4  # three other slots are in use
    assert queue.take(b) is None
    assert not queue.has_for(b)
    b.window = 5
    assert queue.take(b) is rows[20]


def test_a_slow_route_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it keeps so many rows that no others are read, they are for all."""
    monkeypatch.setattr("batchrunner.dispatch.queue.READ_AHEAD_ROWS", 4)
    slow, fast = servers = routes(slow=1, fast=10)
    rows = family(0, 6)
    queue = queue_of(servers, slow, rows)
    assert queue.take(slow) is rows[0]
    assert queue.take(fast) is rows[3]  # and with it most of what is kept
