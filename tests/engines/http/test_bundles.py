"""The events of an answer to several rows, whatever they are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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
