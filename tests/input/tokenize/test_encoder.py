"""Tokens made on the client: the same as SGLang's, or none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from tests.conftest import require_engine
from tests.support.tokenizers import ids_of, messages, request

if TYPE_CHECKING:
    from pathlib import Path


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
