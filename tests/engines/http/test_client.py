"""The events of an answer to several rows, whatever they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import BundleRefusedError
from batchrunner.engines.http.client import Deadline, EventLines
from tests.support.json_values import ANY_JSON, json_of, some_odd
from tests.support.reader_checks import check_bundle

ROWS = 4
META = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2}
BEGUN = {**META, "finish_reason": None}
EVENTS: list[Any] = [
    *({"text": f"text {n}", "meta_info": META, "index": n} for n in range(ROWS)),
    {"text": "a", "meta_info": BEGUN, "index": 0},
    {"error": {"message": "m", "code": 400}},
]
ANY_EVENT = some_odd(EVENTS).map(json_of) | ANY_JSON.map(json_of) | st.binary()


def test_good_events_answer_their_rows() -> None:
    """The property below is tried with events that are read, not only with those that count for nothing."""
    found = check_bundle([json_of(event) for event in reversed(EVENTS)], ROWS)
    assert found == {2 * n: [f"text {n}"] for n in range(ROWS)}


def test_half_a_character() -> None:
    event = rb'{"text": "a\ud800b", "meta_info": {"finish_reason": {"type": "stop"}}, "index": 1}'
    assert check_bundle([event], ROWS) == {2: ["a\ufffdb"]}


@given(events=st.lists(ANY_EVENT, max_size=12))
def test_any_events_can_be_read(events: list[bytes]) -> None:
    """Whatever comes, a row is answered once at most, and only one that was sent."""
    check_bundle(events, ROWS)


async def wait_under(deadline: Deadline, seconds: float) -> str:
    with deadline:
        await asyncio.sleep(seconds)
    return "in time"


async def test_only_what_is_late_ends() -> None:
    """Only those of many tasks that take too long are ended by their shared timer."""
    deadline = Deadline(6)  # a machine may stand still for some of it
    ended = await asyncio.gather(
        *(wait_under(deadline, seconds) for seconds in (0, 30, 0.01, 30)), return_exceptions=True
    )
    assert [type(end) for end in ended] == [str, TimeoutError, str, TimeoutError]


async def test_it_ends_the_later_ones_later() -> None:
    """Each has the whole time from its own start, also after the timer has stopped."""
    deadline = Deadline(0.2)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        began = loop.time()
        with pytest.raises(TimeoutError):
            await wait_under(deadline, 30)
        assert loop.time() - began >= 0.2


async def test_a_cancelled_task_stays_cancelled() -> None:
    """A cancellation from outside is not mistaken for a timeout."""
    deadline = Deadline(30)
    task = asyncio.create_task(wait_under(deadline, 30))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_passes() -> None:
    """What fails in its time fails with its own error."""
    with pytest.raises(OSError, match="gone"), Deadline(30):
        raise OSError("gone")


async def test_the_task_lives_on() -> None:
    """After a timeout the task can go on waiting, and use the deadline again."""
    deadline = Deadline(4)
    with pytest.raises(TimeoutError):
        await wait_under(deadline, 30)
    await asyncio.sleep(0.01)
    assert await wait_under(deadline, 0) == "in time"


@given(
    events=st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"").strip())),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    data=st.data(),
)
def test_events_in_any_pieces(events: list[bytes], end: bytes, data: st.DataObject) -> None:
    wire = b": a comment\n" + b"".join(b"data: " + event + end for event in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))
    lines = EventLines(1000)
    found = []
    for begin, until in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += lines.feed(wire[begin:until])
    assert found == events


@given(pieces=st.lists(st.binary(max_size=50), max_size=20))
def test_any_bytes_can_be_cut(pieces: list[bytes]) -> None:
    lines = EventLines(10_000)
    found = [event for piece in pieces for event in lines.feed(piece)]
    assert all(b"\n" not in event for event in found)


def test_an_endless_event_is_refused() -> None:
    lines = EventLines(100)
    lines.feed(b"data: " + b"x" * 90)
    with pytest.raises(BundleRefusedError, match="an event is larger than"):
        lines.feed(b"x" * 90)
