"""Prompts that are too long are cut so that they fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.types import Request
from batchrunner.input.tokenize.encoder import Encoder, Tokenizer
from batchrunner.input.tokenize.truncate import TokenBudget, truncate_tokens
from tests.support.tokenizers import ids_of, messages, request

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.input.tokenize.truncate import Truncation


@given(
    text=st.text(min_size=1, max_size=300),
    room=st.integers(-5, 120),
    cut=st.sampled_from(["head", "tail", "middle"]),
)
def test_what_is_cut_fits_and_leaves_the_template(
    text: str, room: int, cut: Truncation, directory: Path
) -> None:
    """Whatever the text, what comes out has room and its template whole, or the row says why not."""
    encoder = Encoder(Tokenizer(directory, "messages"), {}, TokenBudget(room + 10), cut)
    prompt = messages(("system", "S"), ("user", text))
    (done,) = encoder.encode([request(prompt, max_new_tokens=10)])
    if not isinstance(done, Request):
        assert "prompt.truncate: the prompt has" in str(done.error)
        return
    assert len(done.prompt) <= room
    whole = ids_of(directory, request(prompt))
    assert isinstance(whole, list)
    before = ids_of(directory, request(messages(("system", "S"), ("user", ""))))
    assert isinstance(before, list)
    assert len(whole) <= room or len(done.prompt) < len(whole)
    assert done.prompt[:4] == whole[:4]
    assert done.prompt[-4:] == before[-4:]


@given(tokens=st.lists(st.integers(), max_size=20), keep=st.integers(1, 25))
def test_cut_tokens(tokens: list[int], keep: int) -> None:
    """Head, tail and middle keep as many tokens as they may, of the ends that they are named for."""
    assert truncate_tokens(tokens, keep, "head") == tokens[-keep:]
    assert truncate_tokens(tokens, keep, "tail") == tokens[:keep]
    kept = truncate_tokens(tokens, keep, "middle")
    assert len(kept) == min(keep, len(tokens))
    assert kept[: keep // 2] == tokens[: keep // 2]
