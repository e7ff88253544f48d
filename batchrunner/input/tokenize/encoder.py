"""Requests with a text or messages → the same requests with the token ids that SGLang would make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Outcome
from batchrunner.input.tokenize.chat_template import load_chat_template
from batchrunner.input.tokenize.detokenizer import load_tokenizer
from batchrunner.input.tokenize.truncate import cut_text, cut_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from batchrunner.core.types import PromptKind, Request
    from batchrunner.input.tokenize.truncate import Cut, Offsets, TokenBudget

_ROLES = {"system", "user", "assistant"}


class Tokenizer:
    """A model directory's tokenizer and chat template. Safe in threads; uses all cores for a batch."""

    def __init__(self, directory: Path, kind: PromptKind, template: str | None = None) -> None:
        """Load what prompts of this kind need; raises CannotTokenizeError, with what is missing or broken."""
        self._backend = load_tokenizer(directory)
        self._chat = load_chat_template(directory, template) if kind == "messages" else None

    def takes(self, request: Request) -> bool:
        """Tell whether this request's prompt can be made tokens here; the engine does the rest by itself."""
        if request.kind == "messages":
            plain = all(map(_is_plain, request.prompt)) and request.prompt[-1]["role"] != "assistant"
            return plain and "structural_tag" not in request.sampling
        return request.kind == "text" and bool(request.prompt)

    def text_of(self, request: Request) -> str:
        """Return what is made tokens; raises RowRefusedError where the template refuses the messages."""
        if self._chat is None:
            return str(request.prompt)
        messages = [{"role": m["role"], "content": m["content"]} for m in request.prompt]
        return self._chat.render(messages, request.chat_template_kwargs)

    def ids(self, texts: Sequence[str]) -> list[list[int] | RowRefusedError]:
        """Encode a batch; a text that cannot be (an unpaired surrogate) becomes its error."""
        special = self._chat is None  # a chat template has written them already
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as failure:  # noqa: BLE001 - TypeError, or Exception itself
            if len(texts) > 1:
                return [self.ids([text])[0] for text in texts]
            return [_bad_text(texts[0], failure)] if texts else []
        return [encoding.ids for encoding in found]

    def offsets(self, text: str) -> Offsets:
        """Return where the tokens of a text are in it."""
        return list(self._backend.encode(text, add_special_tokens=False).offsets)


def _bad_text(text: str, failure: Exception) -> RowRefusedError:
    """Say why a text cannot be made tokens; the library's own words for bad text are about its types."""
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        return RowRefusedError(f"the prompt cannot be made tokens: character {bad.start}: {bad.reason}")
    return _refusal(failure)


def _refusal(failure: Exception) -> RowRefusedError:
    """Return a failure as one of its row's, whatever it is."""
    if isinstance(failure, RowRefusedError):
        return failure
    return RowRefusedError(f"the prompt cannot be made tokens: {type(failure).__name__}: {failure}")


def _is_plain(message: Any) -> bool:
    """Tell a message of a role that every server knows, with a text and nothing else."""
    if not isinstance(message, dict):  # a null
        return False
    given = {name: value for name, value in message.items() if value is not None}
    is_text = all(isinstance(value, str) for value in given.values())
    return given.keys() == {"role", "content"} and is_text and given["role"] in _ROLES


class Encoder:
    """Makes tokens of a batch's prompts, and sees to it that they are not too long."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_sampling: Mapping[str, Any],
        room: TokenBudget,
        cut: Cut | None,
    ) -> None:
        """`chat_sampling` is what SGLang's chat endpoint would add; without a tokenizer prompts are ids."""
        self._tokenizer = tokenizer
        self._chat_sampling = chat_sampling
        self._room = room
        self._cut = cut

    def takes(self, request: Request) -> bool:
        """Tell whether this request is encoded; others stay as they are."""
        if self._tokenizer is None:
            return request.kind == "input_ids"
        return self._tokenizer.takes(request)

    def encode(self, requests: Sequence[Request]) -> list[Request | Outcome]:
        """Encode a batch, in order; a row that cannot be sent becomes its final Outcome."""
        done: list[Request | Outcome] = [*requests]
        taken = [n for n, request in enumerate(requests) if self.takes(request)]
        for n, ids in zip(taken, self.ids([requests[n] for n in taken]), strict=True):
            request = requests[n]
            try:
                done[n] = self._as_ids(request, self._fitted(request, ids))
            except Exception as failure:  # noqa: BLE001 - one row's text may not end the run
                done[n] = Outcome(request.ref, None, str(_refusal(failure)), None, 0)
        return done

    def ids(self, requests: Sequence[Request]) -> list[list[int] | RowRefusedError]:
        """Return the ids of prompts that this encoder takes, each or why there are none, uncut."""
        if self._tokenizer is None:
            return [list(request.prompt) for request in requests]
        texts: list[str] = []
        found: list[list[int] | RowRefusedError | None] = []
        for request in requests:
            try:
                texts.append(self._tokenizer.text_of(request))
                found.append(None)
            except Exception as failure:  # noqa: BLE001 - as above
                found.append(_refusal(failure))
        encoded = iter(self._tokenizer.ids(texts))
        return [next(encoded) if ids is None else ids for ids in found]

    def _as_ids(self, request: Request, ids: list[int]) -> Request:
        sampling = request.sampling
        if request.kind == "messages":
            sampling = {**self._chat_sampling, **sampling}
        return request._replace(kind="input_ids", prompt=ids, sampling=sampling, chat_template_kwargs=None)

    def _fitted(self, request: Request, ids: list[int] | RowRefusedError) -> list[int]:
        """Return ids that are not too long; raises RowRefusedError where that cannot be."""
        if isinstance(ids, RowRefusedError):
            raise ids
        if self._cut is None:
            self._room.check(len(ids))
            return ids
        room = self._room.for_prompt(request.sampling)
        if len(ids) <= room:
            return ids
        if room > 0 and self._tokenizer is None:
            return cut_tokens(ids, room, self._cut)
        return self._shortened(request, len(ids), room, self._cut)

    def _shortened(self, request: Request, length: int, room: int, cut: Cut) -> list[int]:
        """Cut the text itself and encode again: what is sent is what a shorter row would have been."""
        text = _cuttable(request)
        offsets = self._tokenizer.offsets(text) if self._tokenizer and room > 0 else []
        keep = len(offsets) - (length - room)
        while keep > 0:
            (ids,) = self.ids([_with_text(request, cut_text(text, offsets, keep, cut))])
            if isinstance(ids, RowRefusedError):
                raise ids
            if len(ids) <= room:
                return ids
            keep -= len(ids) - room
        raise RowRefusedError(
            f"prompt.truncate: the prompt has {length} tokens and may have {room}: "
            f"without what may be cut it would still have more"
        )


def _cuttable(request: Request) -> str:
    """Return the text that may be cut: the last user message's, or all."""
    if request.kind == "text":
        return str(request.prompt)
    users = [message["content"] for message in request.prompt if message["role"] == "user"]
    return str(users[-1]) if users else ""


def _with_text(request: Request, text: str) -> Request:
    if request.kind == "text":
        return request._replace(prompt=text)
    last = max(n for n, message in enumerate(request.prompt) if message["role"] == "user")
    messages = [*request.prompt[:last], {"role": "user", "content": text}, *request.prompt[last + 1 :]]
    return request._replace(prompt=messages)
