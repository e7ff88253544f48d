"""The events of an answer to several rows, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import BundleRefusedError
from batchrunner.engines.http.client import EventLines
from tests.support.reader_checks import ANY_JSON, check_bundle, json_of, some_odd

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


@given(events=st.lists(ANY_EVENT, max_size=12))
def test_any_events_can_be_read(events: list[bytes]) -> None:
    """Whatever comes, a row is answered once at most, and only one that was sent."""
    check_bundle(events, ROWS)


@given(
    events=st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"").strip())),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    data=st.data(),
)
def test_events_in_any_pieces(events: list[bytes], end: bytes, data: st.DataObject) -> None:
    wire = b": a comment\n" + b"".join(b"data: " + event + end for event in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))
    lines = EventLines()
    found = []
    for begin, until in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += lines.feed(wire[begin:until])
    assert found == events


@given(pieces=st.lists(st.binary(max_size=50), max_size=20))
def test_any_bytes_can_be_cut(pieces: list[bytes]) -> None:
    lines = EventLines()
    found = [event for piece in pieces for event in lines.feed(piece)]
    assert all(b"\n" not in event for event in found)


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrunner.engines.http.client.MOST_ANSWER_BYTES", 100)
    lines = EventLines()
    lines.feed(b"data: " + b"x" * 90)
    with pytest.raises(BundleRefusedError, match="an event is larger than"):
        lines.feed(b"x" * 90)
