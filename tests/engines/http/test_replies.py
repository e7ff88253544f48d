"""Whatever a server replies can be read."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.json_values import ANY_JSON, json_of, some_odd
from tests.support.reader_checks import KINDS, check_answer

REASON = {"type": "stop", "matched": 2, "message": "m", "status_code": 500}
META: dict[str, Any] = {
    "finish_reason": REASON, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0,
    "num_retractions": 0, "weight_version": "default",
}  # fmt: skip
SAMPLE = {"text": "a text", "meta_info": META}
CHOICE = {
    "index": 0, "message": {"role": "assistant", "content": "a text", "reasoning_content": None},
    "finish_reason": "stop", "meta_info": META,
}  # fmt: skip
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
ANSWERS: list[Any] = [
    SAMPLE, [SAMPLE], [SAMPLE, SAMPLE], {"choices": [CHOICE], "usage": USAGE},
    {"choices": [CHOICE, {**CHOICE, "index": 1}], "usage": USAGE}, {"tokens": [1, 2]},
]  # fmt: skip


def test_good_answers_pass_the_check() -> None:
    """The property below is tried with answers that are read, not only with those that are refused."""
    assert check_answer(json_of(SAMPLE))
    assert check_answer(json_of([SAMPLE, SAMPLE]), samples=2)
    assert check_answer(json_of(ANSWERS[3]), "messages")
    assert check_answer(json_of(ANSWERS[4]), "messages", 2)


@given(
    reply=some_odd(ANSWERS).map(json_of) | ANY_JSON.map(json_of) | st.binary(),
    kind=st.sampled_from(KINDS),
    samples=st.sampled_from([1, 2, 4]),
)
def test_any_answer_can_be_read_and_written(reply: bytes, kind: str, samples: int) -> None:
    """Whatever comes is an answer that the results can hold, or a failed attempt."""
    check_answer(reply, kind, samples)
