"""The gate: its window is kept, resized while held, and its queue is fair."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrunner.gate import Gate

Event: TypeAlias = tuple[str, int]

events = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.just(0)),
        st.tuples(st.sampled_from(["leave", "give up"]), st.integers(0, 9)),
        st.tuples(st.just("resize"), st.integers(1, 6)),
    ),
    max_size=40,
)

patient = settings(deadline=None)  # an event loop's start takes its time on a busy machine


class Crowd:
    """Tasks before and behind a gate, in order of arrival."""

    def __init__(self, window: int) -> None:
        self.gate = Gate(window)
        self.waiting: list[asyncio.Task[None]] = []
        self.inside: list[asyncio.Task[None]] = []

    async def arrive(self, count: int = 1) -> None:
        self.waiting += [asyncio.create_task(self.gate.acquire()) for _ in range(count)]
        await self.settle()

    def happen(self, event: Event) -> None:
        """Let one thing happen, and nobody notice yet."""
        what, which = event
        if what == "arrive":
            self.waiting.append(asyncio.create_task(self.gate.acquire()))
        elif what == "resize":
            self.gate.resize(which)
        elif what == "leave" and self.inside:
            self.inside.pop(which % len(self.inside))
            self.gate.release()
        elif what == "give up" and self.waiting:
            self.waiting[which % len(self.waiting)].cancel()

    async def settle(self) -> None:
        """Let all tasks run as far as they can, and sort them by where they are."""
        for _ in range(4):
            await asyncio.sleep(0)
        self.inside += [task for task in self.waiting if task.done() and not task.cancelled()]
        self.waiting = [task for task in self.waiting if not task.done()]

    async def go_home(self) -> None:
        for task in self.waiting:
            task.cancel()
        await self.settle()


@patient
@given(window=st.integers(1, 6), history=events)
def test_the_gate_is_a_fair_queue(window: int, history: list[Event]) -> None:
    """Whatever happens, exactly those are inside that a plain first-come-first-served list lets in."""

    async def scenario() -> None:
        crowd, size = Crowd(window), window
        for event in history:
            crowd.happen(event)
            queue = [t for t in crowd.waiting if not t.cancelling()]
            size = event[1] if event[0] == "resize" else size
            expected = [*crowd.inside, *queue[: max(0, size - len(crowd.inside))]]
            await crowd.settle()
            assert crowd.inside == expected
            assert crowd.gate.in_flight == len(expected)
            assert crowd.gate.window == size
        await crowd.go_home()

    asyncio.run(scenario())


@patient
@given(window=st.integers(1, 4), bursts=st.lists(events, max_size=6))
def test_no_place_is_lost_in_a_burst(window: int, bursts: list[list[Event]]) -> None:
    """Cancelling a task in the moment in which it gets its place hands that place on."""

    async def scenario() -> None:
        crowd = Crowd(window)
        for burst in bursts:
            for event in burst:
                crowd.happen(event)
            await crowd.settle()
            assert crowd.gate.in_flight == len(crowd.inside)
            assert not crowd.waiting or crowd.gate.in_flight >= crowd.gate.window
        await crowd.go_home()

    asyncio.run(scenario())


@patient
@given(window=st.integers(1, 8), arrivals=st.integers(0, 20))
def test_the_window_is_never_passed(window: int, arrivals: int) -> None:
    """As many enter as the window holds, and not one more."""

    async def scenario() -> None:
        crowd = Crowd(window)
        await crowd.arrive(arrivals)
        assert len(crowd.inside) == crowd.gate.in_flight == min(window, arrivals)
        await crowd.go_home()

    asyncio.run(scenario())


@patient
@given(wide=st.integers(2, 8), data=st.data())
def test_shrinking_takes_nothing_back(wide: int, data: st.DataObject) -> None:
    """A smaller window lets requests in flight end, and admits nobody until the number fits."""
    narrow = data.draw(st.integers(1, wide - 1))

    async def scenario() -> None:
        crowd = Crowd(wide)
        await crowd.arrive(wide + 2)
        crowd.gate.resize(narrow)
        for still_inside in range(wide, narrow, -1):
            await crowd.settle()
            assert crowd.gate.in_flight == len(crowd.inside) == still_inside
            crowd.happen(("leave", 0))
        await crowd.settle()
        assert crowd.gate.in_flight == narrow
        crowd.happen(("leave", 0))
        await crowd.settle()
        assert crowd.gate.in_flight == narrow
        assert len(crowd.waiting) == 1
        await crowd.go_home()

    asyncio.run(scenario())


@patient
@given(narrow=st.integers(1, 4), more=st.integers(1, 6), waiting=st.integers(0, 8))
def test_growing_admits_at_once_and_in_order(narrow: int, more: int, waiting: int) -> None:
    """A larger window is filled by those who waited longest, without a release in between."""

    async def scenario() -> None:
        crowd = Crowd(narrow)
        await crowd.arrive(narrow + waiting)
        queue = list(crowd.waiting)
        crowd.gate.resize(narrow + more)
        assert crowd.gate.in_flight == narrow + min(more, waiting)
        await crowd.settle()
        assert crowd.inside[narrow:] == queue[:more]
        assert crowd.waiting == queue[more:]
        await crowd.go_home()

    asyncio.run(scenario())


@patient
@given(gone=st.sets(st.integers(0, 9)))
def test_those_who_give_up_cost_nobody_a_place(gone: set[int]) -> None:
    """The rest of the queue keeps its order, and no place goes to a task that is gone."""

    async def scenario() -> None:
        crowd = Crowd(1)
        await crowd.arrive(11)
        rest = [task for i, task in enumerate(crowd.waiting) if i not in gone]
        for i in gone:
            crowd.happen(("give up", i))
        for expected in rest:
            crowd.happen(("leave", 0))
            await crowd.settle()
            assert crowd.inside == [expected]
        await crowd.go_home()

    asyncio.run(scenario())


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_an_error(window: int) -> None:
    """A controller that would stop the run for ever is told so."""
    with pytest.raises(ValueError, match=f"got {window}"):
        Gate(1).resize(window)
