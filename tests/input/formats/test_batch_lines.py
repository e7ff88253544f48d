"""Lines of batch files, whatever they hold."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.input.formats.batch_lines import line_of

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "model": "m"}}


@given(
    st.binary()
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: repr(v).encode())
)
@example(b"\n")
@example(b'{"a": \r 1')
def test_no_line_breaks_the_reader(text: bytes) -> None:
    """Any bytes are a request, or have a problem in one line."""
    line = line_of(text)
    assert line.problem is not None
    assert line.problem.isprintable()


@given(
    st.sampled_from(sorted(GOOD)), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)
)
def test_no_value_breaks_the_reader(key: str, value: object) -> None:
    """A wrong value is named, and a right one is kept as it stands."""
    line = line_of(json.dumps({**GOOD, key: value}).encode())
    if line.problem is None:
        assert key == "custom_id"
        assert line.custom_id == value
    else:
        assert "\n" not in line.problem


def test_a_body_is_kept_as_it_stands() -> None:
    """Numbers, escapes and spaces of a body do not change."""
    body = '{ "prompt" : "\\u00e9" , "seed":12345678901234567890123, "top_p":0.10 }'
    line = line_of(f'{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{body}}}'.encode())
    assert (line.problem, line.body, line.model) == (None, body, None)
