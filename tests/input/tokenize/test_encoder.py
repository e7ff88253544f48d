"""Tokens made on the client: the same as SGLang's, or none; prompts that are too long are cut to fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.core.types import Request
from batchrunner.input.tokenize.encoder import Encoder, TokenBudget, truncate_tokens
from tests.conftest import require_engine
from tests.support.tokenizers import ids_of, messages, request

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.input.tokenize.encoder import Truncation


@given(text=st.text(max_size=200))
@example(text="")
@example(text="👩\u200d👩\u200d👧 e\u0301\r\n\t  <s></s><|im_end|> \ufeff")
@example(text="x" * 1_000_000)
def test_any_text_becomes_the_tokens_that_transformers_makes(text: str, directory: Path) -> None:
    """Plain prompts and messages of any text, of a million characters too, become the server's tokens."""
    require_engine("transformers")
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    theirs = AutoTokenizer.from_pretrained(directory)
    assert ids_of(directory, request(text, "text")) == theirs(text)["input_ids"]
    chat = messages(("user", text))
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = theirs.encode(rendered, add_special_tokens=False)
    assert ids_of(directory, request(chat)) == expected


@given(begun=st.text(max_size=60))
@example(begun="")
@example(begun="<s></s> It is")
def test_the_beginning_of_an_answer_becomes_the_tokens_that_sglang_makes(begun: str, directory: Path) -> None:
    """They follow those of the template, without the token that begins a prompt, as SGLang has it."""
    require_engine("transformers")
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    theirs = AutoTokenizer.from_pretrained(directory)
    chat = messages(("user", "Why?"))
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = theirs.encode(rendered, add_special_tokens=False)
    encoded = theirs.encode(begun) if begun else []
    expected += encoded[1:] if encoded[:1] == [theirs.bos_token_id] else encoded
    one = request([*chat, *messages(("assistant", begun))])._replace(continues=True)
    assert ids_of(directory, one) == expected


@given(
    text=st.text(min_size=1, max_size=300),
    room=st.integers(-5, 120),
    cut=st.sampled_from(["head", "tail", "middle"]),
)
def test_what_is_cut_fits_and_leaves_the_template(
    text: str, room: int, cut: Truncation, directory: Path
) -> None:
    """Whatever the text, what comes out has room and its template whole, or the row says why not."""
    encoder = Encoder("messages", directory, TokenBudget(room + 10), cut)
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
