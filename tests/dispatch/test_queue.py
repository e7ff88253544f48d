"""Rows with a common prefix stay on one route, unless it is behind."""

from __future__ import annotations

from batchrunner.dispatch.pending_row import PendingRow
from batchrunner.dispatch.queue import DispatchQueue
from tests.support.prompts import InFlight, request


def test_a_route_with_little_to_do_takes_another_ones_rows() -> None:
    """A replica that is behind does not keep its families' rows; one that is not behind is left with them."""
    first = PendingRow(request(0, "p"))
    first.group = first  # all are of one family
    works = [first, *(PendingRow(request(row, "p"), group=first) for row in range(1, 5))]
    in_flight = InFlight(a=1, b=1)
    ready = DispatchQueue(("a", "b"), in_flight, 512)
    for work in works:
        ready.add(work)
    assert ready.take("a") is first
    in_flight |= {"a": 2, "b": 4}  # what is asked for counts already
    assert ready.take("b") is None
    assert not ready.has_for("b")
    in_flight["b"] = 3  # two rows beside the one that is asked for: until 2 * 2 is no less than 2 + 2
    assert [ready.take("b") is not None for _ in range(3)] == [True, True, False]
    assert len(ready) == 2


def test_a_slow_route_does_not_hold_up_the_others() -> None:
    """Once it keeps so many rows that no others are read, they are for all."""
    first = PendingRow(request(0, "p"))
    first.group = first
    ready = DispatchQueue(("slow", "fast"), InFlight(slow=0, fast=100), 4)
    for work in (first, *(PendingRow(request(row, "p"), group=first) for row in range(1, 6))):
        ready.add(work)
    assert ready.take("slow") is first
    assert [ready.take("fast") is not None for _ in range(3)] == [True, True, False]
