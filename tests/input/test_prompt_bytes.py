"""Prompts as bytes: common prefixes and sort keys."""

from itertools import groupby, takewhile
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.types import PromptKind, Request, RowRef
from batchrunner.input.prompt_bytes import common_length, prompt_bytes, sort_key

REF = RowRef(0, pa.RecordBatch.from_pydict({"a": [1]}), 0)


def request(kind: PromptKind, prompt: Any, lora: str | None = None) -> Request:
    return Request(REF, kind, prompt, {}, lora)


@given(st.binary(max_size=600), st.binary(max_size=300), st.binary(max_size=300))
def test_common_is_the_longest_common_beginning(start: bytes, one: bytes, other: bytes) -> None:
    """The search by halves finds what a byte by byte comparison finds."""
    pairs = zip(start + one, start + other, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common_length(start + one, start + other) == alike


def test_messages_with_a_common_beginning_have_common_bytes() -> None:
    """A conversation's next turn begins with the bytes of the turns before it."""
    first = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": "hello"}]
    longer = [*first, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    assert prompt_bytes(request("messages", longer)).startswith(prompt_bytes(request("messages", first)))


def test_another_adapter_shares_nothing() -> None:
    """The cache of one LoRA adapter is of no use to another."""
    one, other = (prompt_bytes(request("text", "long text" * 9, lora)) for lora in ("a", "b"))
    assert common_length(one, other) == 0


@given(st.data())
def test_equal_beginnings_stand_together(data: st.DataObject) -> None:
    """In the order of keys all prompts with the same first blocks are neighbours, whatever follows."""
    blocks = [bytes([letter]) * 64 for letter in b"abc"]
    prompts = data.draw(
        st.lists(
            st.tuples(st.lists(st.sampled_from(blocks), max_size=5), st.binary(max_size=70)).map(
                lambda parts: b"".join(parts[0]) + parts[1]
            ),
            max_size=40,
        )
    )
    ordered = sorted(prompts, key=sort_key)
    for depth in range(0, 400, 64):
        deep = (prompt[:depth] for prompt in ordered if len(prompt) >= depth)
        beginnings = [beginning for beginning, _ in groupby(deep)]
        assert len(beginnings) == len(set(beginnings))
    assert [key for key, _ in groupby(ordered)] == list(dict.fromkeys(ordered))
