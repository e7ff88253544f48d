"""Tokenizes prompts as SGLang does, and truncates prompts that are too long."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Outcome, PromptKind, Request
from batchrunner.input.tokenize.chat_template import load_chat_template, load_tokenizer

Truncation = Literal["head", "tail", "middle"]
"""Part of a prompt that is removed if the prompt is too long (`prompt.truncate`)."""
Ids = list[int] | RowRefusedError
"""Token ids of a prompt, or the error of a prompt that cannot be tokenized."""
Offsets = list[tuple[int, int]]
"""Start and end of each token in a text, in characters."""
_TOKENS_FROM_BEGINNING: Mapping[Truncation, Callable[[int], int]] = {
    "head": lambda _keep: 0, "tail": lambda keep: keep, "middle": lambda keep: keep // 2,
}  # fmt: skip
"""How many of the `keep` remaining tokens come from the start of a truncated prompt.

The other tokens come from its end.
"""
_ROLES = {"system", "user", "assistant"}


class TokenBudget(NamedTuple):
    """Limits of the engine for a request, in tokens. A limit is None if the engine does not report it."""

    context: int | None
    """Maximum number of tokens of prompt and output together (context length)."""
    longest_prompt: int | None = None
    """A prompt must have fewer tokens than this."""


class Encoder:
    """Tokenizes batches of prompts, and refuses or truncates prompts that are too long. Thread-safe.

    All prompts are of one kind (text, messages or token ids).
    """

    def __init__(
        self,
        kind: PromptKind,
        directory: Path | None,
        budget: TokenBudget,
        truncation: Truncation | None = None,
        *,
        chat_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the tokenizer from a model's `directory`; None if prompts are token ids already.

        `chat_sampling` has the sampling parameters that SGLang's chat endpoint would add to a request. Raises
        CannotTokenizeError if a file of the model cannot be used.
        """
        self._kind = kind
        self._backend: Any = None if directory is None else load_tokenizer(directory)
        """Tokenizer; None if prompts are token ids already."""
        self._chat = load_chat_template(directory) if directory and kind == "messages" else None
        """Chat template; None unless prompts are chats."""
        self._budget = budget
        self._truncation = truncation
        self._chat_sampling = chat_sampling or {}

    def can_encode(self, request: Request) -> bool:
        """Tell whether `encode` can tokenize a request; if not, the engine has to.

        The engine must tokenize prompts that depend on more than the texts of messages, such as media or
        tools, and chats in which it continues an assistant message.
        """
        if request.kind != self._kind or request.media or request.tools:
            return False
        if self._kind != "messages":
            # An empty prompt is left to the engine, which refuses it.
            return bool(request.prompt)
        is_plain_chat = all(map(_is_plain, request.prompt)) and "structural_tag" not in request.sampling
        return is_plain_chat and request.prompt[-1]["role"] != "assistant"

    def encode(self, requests: Sequence[Request]) -> list[Request | Outcome]:
        """Return the requests with token ids as prompts, or an Outcome for a row that cannot be sent.

        A request that fails `can_encode` is returned unchanged.
        """
        items: list[Request | Outcome] = [*requests]
        # Requests that can be encoded are tokenized in one batch; the others keep their places in `items`.
        indices = [index for index, request in enumerate(requests) if self.can_encode(request)]
        ids_of_requests = self.token_ids([requests[index] for index in indices])
        for index, ids in zip(indices, ids_of_requests, strict=True):
            request = requests[index]
            try:
                items[index] = self._as_ids(request, self._fitted(request, ids))
            except Exception as failure:  # noqa: BLE001 - one row must not end the run
                items[index] = Outcome.unsent(request.ref, str(_refusal(failure)))
        return items

    def token_ids(self, requests: Sequence[Request]) -> list[Ids]:
        """Return the token ids of each prompt, not truncated, or the error of its row.

        All requests must pass `can_encode`.
        """
        if self._backend is None:
            return [list(request.prompt) for request in requests]
        # A text or an error for each request. Token ids replace the texts below.
        results: list[Any] = [self.prompt_text(request) for request in requests]
        indices = [index for index, text in enumerate(results) if isinstance(text, str)]
        texts = [results[index] for index in indices]
        # A chat template writes the special tokens itself.
        ids_of_texts = self._encoded(texts, special=self._chat is None)
        for index, ids in zip(indices, ids_of_texts, strict=True):
            results[index] = ids
        return results

    def prompt_text(self, request: Request) -> str | RowRefusedError:
        """Return the text of a prompt before tokenization, or the error of the chat template."""
        if self._chat is None:
            return str(request.prompt)
        try:
            messages = [{name: message[name] for name in ("role", "content")} for message in request.prompt]
            return self._chat.render(messages, request.chat_template_kwargs)
        except Exception as failure:  # noqa: BLE001 - one row must not end the run
            return _refusal(failure)

    def _encoded(self, texts: Sequence[str], *, special: bool) -> list[Ids]:
        """Return the token ids of each text, or an error for a text with an unpaired surrogate.

        With `special`, the tokenizer adds its special tokens.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as failure:  # noqa: BLE001 - the library raises TypeError or plain Exception
            if len(texts) > 1:
                # Encode each text alone, so that one bad text does not fail the others.
                return [self._encoded([text], special=special)[0] for text in texts]
            return [_refusal(failure, text) for text in texts]
        return [encoding.ids for encoding in encodings]

    def _as_ids(self, request: Request, ids: list[int]) -> Request:
        """Return a request with token ids as its prompt."""
        sampling = request.sampling
        # Token ids go to an endpoint that does not add the sampling parameters of the chat endpoint.
        if request.kind == "messages":
            sampling = {**self._chat_sampling, **sampling}
        return request._replace(
            kind="input_ids", prompt=ids, sampling=sampling, chat_template_kwargs=None, continues=False
        )

    def _fitted(self, request: Request, ids: Ids) -> list[int]:
        """Return the token ids of a prompt, truncated to the budget if the job allows it.

        Raises RowRefusedError if the prompt cannot be tokenized or does not fit.
        """
        if isinstance(ids, RowRefusedError):
            raise ids
        context, longest_prompt = self._budget
        if context is None:
            # The limit is unknown, so the engine decides whether the prompt fits.
            return ids
        if self._truncation is None:
            if len(ids) >= context:
                # SGLang would refuse the row with the same message.
                raise RowRefusedError(
                    f"The input ({len(ids)} tokens) is longer than the model's context length "
                    f"({context} tokens)."
                )
            return ids
        # Leave room for the longest output. If the job does not limit the output, leave room for one token.
        limit = context - int(request.sampling.get("max_new_tokens") or 1)
        if longest_prompt is not None:
            # A prompt must be shorter than `longest_prompt`.
            limit = min(limit, longest_prompt - 1)
        if len(ids) <= limit:
            return ids
        if limit > 0 and self._backend is None:
            # The prompt was given as token ids, so there is no text to truncate.
            return truncate_tokens(ids, limit, self._truncation)
        return self._truncated(request, len(ids), limit, self._truncation)

    def _truncated(self, request: Request, length: int, limit: int, truncation: Truncation) -> list[int]:
        """Truncate a prompt of `length` tokens to `limit` tokens, and return its token ids.

        The text is truncated and tokenized again, because a shorter text may have other tokens. Raises
        RowRefusedError if the parts that must stay have too many tokens.
        """
        text = _truncatable(request)
        offsets = self._backend.encode(text, add_special_tokens=False).offsets if limit > 0 else []
        # This text loses as many tokens as the whole prompt has too many.
        keep = len(offsets) - (length - limit)
        while keep > 0:
            shorter_text = truncate_text(text, offsets, keep, truncation)
            (ids,) = self.token_ids([_with_text(request, shorter_text)])
            if isinstance(ids, RowRefusedError):
                raise ids
            if len(ids) <= limit:
                return ids
            # Tokens at the cut may change, so the shorter text can have more tokens than expected.
            keep -= len(ids) - limit
        raise RowRefusedError(
            f"prompt.truncate: the prompt has {length} tokens, but at most {limit} are allowed, "
            "and the text that may not be truncated already has more"
        )


def truncate_tokens(tokens: Sequence[int], keep: int, truncation: Truncation) -> list[int]:
    """Return `keep` of the tokens; the others are removed at the head, at the tail or in the middle."""
    if keep >= len(tokens):
        return [*tokens]
    from_beginning = _TOKENS_FROM_BEGINNING[truncation](keep)
    from_end = keep - from_beginning
    return [*tokens[:from_beginning], *tokens[len(tokens) - from_end :]]


def truncate_text(text: str, offsets: Offsets, keep: int, truncation: Truncation) -> str:
    """Return the text truncated to about `keep` tokens, in whole characters.

    `offsets` are the offsets of all tokens of the text.
    """
    from_beginning = _TOKENS_FROM_BEGINNING[truncation](keep)
    from_end = keep - from_beginning
    # Each part is cut at the boundary of a token.
    head = text[: offsets[from_beginning - 1][1]] if from_beginning else ""
    tail = text[offsets[-from_end][0] :] if from_end else ""
    return head + tail


def _truncatable(request: Request) -> str:
    """Return the text that may be truncated: the last user message, or a prompt that is a text."""
    if request.kind == "text":
        return str(request.prompt)
    user_texts = [message["content"] for message in request.prompt if message["role"] == "user"]
    return str(user_texts[-1]) if user_texts else ""


def _with_text(request: Request, text: str) -> Request:
    """Return a request with `text` in place of its last user message, or of its plain text prompt."""
    if request.kind == "text":
        return request._replace(prompt=text)
    messages = [*request.prompt]
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    messages[last_user] = {"role": "user", "content": text}
    return request._replace(prompt=messages)


def _refusal(failure: Exception, text: str = "") -> RowRefusedError:
    """Return the error for a row whose prompt could not be tokenized.

    `text` is the prompt's text, if it is known.
    """
    if isinstance(failure, RowRefusedError):
        return failure
    try:
        text.encode()
    # This error names the bad character; the tokenizer's error only names types.
    except UnicodeEncodeError as error:
        failure = error
    return RowRefusedError(f"the prompt cannot be tokenized: {type(failure).__name__}: {failure}")


def _is_plain(message: Any) -> bool:
    """Tell whether a message has only a text and a role that every chat template supports."""
    if not isinstance(message, dict):
        # The list of messages has a null.
        return False
    fields = {name: value for name, value in message.items() if value is not None}
    is_text = all(isinstance(value, str) for value in fields.values())
    return fields.keys() == {"role", "content"} and is_text and fields["role"] in _ROLES
