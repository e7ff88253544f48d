"""Tokenizes prompts as SGLang does, and truncates those that are too long."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Outcome, PromptKind, Request
from batchrunner.input.tokenize.chat_template import load_chat_template, load_tokenizer

Truncation = Literal["head", "tail", "middle"]
"""The part of a prompt that is truncated (`prompt.truncate`)."""
Ids = list[int] | RowRefusedError
"""Token ids of a prompt, or the error that says why there are none."""
Offsets = list[tuple[int, int]]
"""Start and end of each token in a text, in characters."""
_BEGIN: Mapping[Truncation, Callable[[int], int]] = {
    "head": lambda _keep: 0, "tail": lambda keep: keep, "middle": lambda keep: keep // 2,
}  # fmt: skip
"""How many of the tokens to keep come from the beginning of the prompt. The rest come from its end."""
_ROLES = {"system", "user", "assistant"}


class TokenBudget(NamedTuple):
    """The engine's limits, in tokens; None where it reports none."""

    context: int | None
    """Maximum number of tokens of prompt and output together (context length)."""
    longest_prompt: int | None = None
    """A prompt must have fewer tokens than this number."""


class Encoder:
    """Tokenizes prompts of one kind in batches, and checks or truncates their lengths. Thread-safe."""

    def __init__(
        self,
        kind: PromptKind,
        directory: Path | None,
        budget: TokenBudget,
        truncation: Truncation | None = None,
        *,
        chat_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the tokenizer of a model directory; without one, prompts are token ids already.

        `chat_sampling` are the sampling parameters that SGLang's chat endpoint would add to a request. Raises
        CannotTokenizeError if a file cannot be used.
        """
        self._kind = kind
        self._backend: Any = None if directory is None else load_tokenizer(directory)
        self._chat = load_chat_template(directory) if directory and kind == "messages" else None
        self._budget = budget
        self._truncation = truncation
        self._chat_sampling = chat_sampling or {}

    def can_encode(self, request: Request) -> bool:
        """Tell whether `encode` tokenizes this request; the engine tokenizes the others."""
        if request.kind != self._kind or request.media or request.tools:
            return False
        if self._kind != "messages":
            return bool(request.prompt)
        plain = all(map(_is_plain, request.prompt)) and "structural_tag" not in request.sampling
        return plain and request.prompt[-1]["role"] != "assistant"

    def encode(self, requests: Sequence[Request]) -> list[Request | Outcome]:
        """Return the requests with token ids as prompts, or an Outcome for a row that cannot be sent."""
        done: list[Request | Outcome] = [*requests]
        encodable = [n for n, request in enumerate(requests) if self.can_encode(request)]
        for n, ids in zip(encodable, self.token_ids([requests[n] for n in encodable]), strict=True):
            request = requests[n]
            try:
                done[n] = self._as_ids(request, self._fitted(request, ids))
            except Exception as failure:  # noqa: BLE001 - one row must not end the run
                done[n] = Outcome.unsent(request.ref, str(_refusal(failure)))
        return done

    def token_ids(self, requests: Sequence[Request]) -> list[Ids]:
        """Return the token ids of each prompt, not truncated, or the error of its row.

        All requests must pass `can_encode`.
        """
        if self._backend is None:
            return [list(request.prompt) for request in requests]
        results: list[Any] = [self.prompt_text(request) for request in requests]
        encodable = [n for n, text in enumerate(results) if isinstance(text, str)]
        texts = [results[n] for n in encodable]
        # A chat template writes the tokens that begin and end a prompt itself.
        for n, ids in zip(encodable, self._encoded(texts, special=self._chat is None), strict=True):
            results[n] = ids
        return results

    def prompt_text(self, request: Request) -> str | RowRefusedError:
        """Return the text to tokenize, or the error of the chat template."""
        if self._chat is None:
            return str(request.prompt)
        try:
            messages = [{name: message[name] for name in ("role", "content")} for message in request.prompt]
            return self._chat.render(messages, request.chat_template_kwargs)
        except Exception as failure:  # noqa: BLE001 - one row must not end the run
            return _refusal(failure)

    def _encoded(self, texts: Sequence[str], *, special: bool) -> list[Ids]:
        """Return the token ids of each text, or an error if it cannot be encoded (unpaired surrogate)."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as failure:  # noqa: BLE001 - TypeError, or Exception itself
            if len(texts) > 1:
                return [self._encoded([text], special=special)[0] for text in texts]
            return [_refusal(failure, text) for text in texts]
        return [encoding.ids for encoding in encodings]

    def _as_ids(self, request: Request, ids: list[int]) -> Request:
        sampling = request.sampling
        if request.kind == "messages":
            sampling = {**self._chat_sampling, **sampling}
        return request._replace(
            kind="input_ids", prompt=ids, sampling=sampling, chat_template_kwargs=None, continues=False
        )

    def _fitted(self, request: Request, ids: Ids) -> list[int]:
        """Return token ids that fit the budget; raises RowRefusedError if that is impossible."""
        if isinstance(ids, RowRefusedError):
            raise ids
        context, longest = self._budget
        if context is None:
            return ids
        if self._truncation is None:
            if len(ids) >= context:  # the message is SGLang's own
                raise RowRefusedError(
                    f"The input ({len(ids)} tokens) is longer than the model's context length "
                    f"({context} tokens)."
                )
            return ids
        limit = context - int(request.sampling.get("max_new_tokens") or 1)
        limit = limit if longest is None else min(limit, longest - 1)
        if len(ids) <= limit:
            return ids
        if limit > 0 and self._backend is None:
            return truncate_tokens(ids, limit, self._truncation)
        return self._truncated(request, len(ids), limit, self._truncation)

    def _truncated(self, request: Request, length: int, limit: int, truncation: Truncation) -> list[int]:
        """Truncate the text and tokenize it again, because a shorter text may have other tokens.

        The prompt has `length` tokens and may have `limit`. Raises RowRefusedError if that is impossible.
        """
        text = _truncatable(request)
        offsets = self._backend.encode(text, add_special_tokens=False).offsets if limit > 0 else []
        keep = len(offsets) - (length - limit)
        while keep > 0:
            (ids,) = self.token_ids([_with_text(request, truncate_text(text, offsets, keep, truncation))])
            if isinstance(ids, RowRefusedError):
                raise ids
            if len(ids) <= limit:
                return ids
            keep -= len(ids) - limit
        raise RowRefusedError(
            f"prompt.truncate: the prompt has {length} tokens, and more than the allowed {limit} "
            "even without all text that may be truncated"
        )


def truncate_tokens(tokens: Sequence[int], keep: int, truncation: Truncation) -> list[int]:
    """Return `keep` of the tokens, truncated at the head, the tail or in the middle."""
    if keep >= len(tokens):
        return [*tokens]
    begin = _BEGIN[truncation](keep)
    return [*tokens[:begin], *tokens[len(tokens) - (keep - begin) :]]


def truncate_text(text: str, offsets: Offsets, keep: int, truncation: Truncation) -> str:
    """Return the text truncated to about `keep` tokens, in whole characters.

    `offsets` are the offsets of all tokens of the text.
    """
    begin = _BEGIN[truncation](keep)
    end = keep - begin
    head = text[: offsets[begin - 1][1]] if begin else ""
    tail = text[offsets[-end][0] :] if end else ""
    return head + tail


def _truncatable(request: Request) -> str:
    """Return the text that may be truncated: the last user message, or the whole prompt."""
    if request.kind == "text":
        return str(request.prompt)
    users = [message["content"] for message in request.prompt if message["role"] == "user"]
    return str(users[-1]) if users else ""


def _with_text(request: Request, text: str) -> Request:
    if request.kind == "text":
        return request._replace(prompt=text)
    messages = [*request.prompt]
    last_user = max(n for n, message in enumerate(messages) if message["role"] == "user")
    messages[last_user] = {"role": "user", "content": text}
    return request._replace(prompt=messages)


def _refusal(failure: Exception, text: str = "") -> RowRefusedError:
    """Return a failure as the error that refuses its row."""
    if isinstance(failure, RowRefusedError):
        return failure
    try:
        text.encode()
    except UnicodeEncodeError as bad:  # the library's own message is about types
        failure = bad
    return RowRefusedError(f"the prompt cannot be tokenized: {type(failure).__name__}: {failure}")


def _is_plain(message: Any) -> bool:
    """Tell whether a message has a role that every chat template knows, a text, and nothing else."""
    if not isinstance(message, dict):  # a null
        return False
    fields = {name: value for name, value in message.items() if value is not None}
    is_text = all(isinstance(value, str) for value in fields.values())
    return fields.keys() == {"role", "content"} and is_text and fields["role"] in _ROLES
