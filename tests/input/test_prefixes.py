"""What prompts have in common at their beginning."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.types import Request, RowRef
from batchrunner.input.prefixes import common_length, prompt_bytes
from tests.support.prompts import shared

if TYPE_CHECKING:
    from batchrunner.core.types import PromptKind

REF = RowRef(0, pa.RecordBatch.from_pydict({"a": [1]}), 0)


def request(kind: PromptKind, prompt: Any, lora: str | None = None) -> Request:
    return Request(REF, kind, prompt, {}, lora)


@given(st.binary(max_size=600), st.binary(max_size=300), st.binary(max_size=300))
def test_common_is_the_longest_common_beginning(start: bytes, one: bytes, other: bytes) -> None:
    """The search by halves finds what a byte by byte comparison finds."""
    pairs = zip(start + one, start + other, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common_length(start + one, start + other) == alike


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=12))
def test_shared_is_what_a_tree_of_the_prompts_saves(texts: list[str]) -> None:
    """All prompts together need as many bytes as they have different beginnings."""
    prompts = [text.encode() for text in texts]
    beginnings = {text[:end] for text in prompts for end in range(1, len(text) + 1)}
    assert sum(map(len, prompts)) - shared(prompts) == len(beginnings)


def test_messages_with_a_common_beginning_have_common_bytes() -> None:
    """A conversation's next turn begins with the bytes of the turns before it."""
    first = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": "hello"}]
    longer = [*first, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    assert prompt_bytes(request("messages", longer)).startswith(prompt_bytes(request("messages", first)))


def test_another_adapter_shares_nothing() -> None:
    """The cache of one LoRA adapter is of no use to another."""
    one, other = (prompt_bytes(request("text", "long text" * 9, lora)) for lora in ("a", "b"))
    assert common_length(one, other) == 0


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("text", "a\ud800b"),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]),
        ("messages", [None, {"content": "no role"}]),
        ("input_ids", [2**40, -1]),
        ("input_ids", [None]),
    ],
)
def test_what_no_engine_takes_has_a_beginning_too(kind: PromptKind, prompt: Any) -> None:
    """A prompt that will be refused when it is sent does not end the run before."""
    assert prompt_bytes(request(kind, prompt))
