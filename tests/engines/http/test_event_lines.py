"""Events are the same however the bytes are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import BundleRefusedError
from batchrunner.engines.http.event_lines import EventLines


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
