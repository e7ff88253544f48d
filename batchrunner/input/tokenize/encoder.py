"""Tokenizes the prompts of requests as SGLang would, and truncates those that are too long."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Outcome, PromptKind, Request
from batchrunner.input.tokenize.chat_template import load_chat_template
from batchrunner.input.tokenize.tokenizer_files import load_tokenizer

Truncation = Literal["head", "tail", "middle"]
"""The part of a prompt that is cut off, from `prompt.truncate`."""
Offsets = list[tuple[int, int]]
"""Start and end of each token in a text, in characters."""
Token = TypeVar("Token")
_ROLES = {"system", "user", "assistant"}


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The engine's limits, in tokens; None where it reports none."""

    context: int | None
    """Most tokens of prompt and output together."""
    longest_prompt: int | None = None
    """Tokens that a prompt must stay below."""

    def check(self, tokens: int) -> None:
        """Raise RowRefusedError, with SGLang's text, for a prompt that leaves no tokens for an output."""
        if self.context is not None and tokens >= self.context:
            raise RowRefusedError(
                f"The input ({tokens} tokens) is longer than the model's context length "
                f"({self.context} tokens)."
            )

    def prompt_limit(self, sampling: Mapping[str, Any]) -> int:
        """Return the most tokens of a prompt that leave `max_new_tokens` to the output; may be 0 or less."""
        assert self.context is not None
        limit = self.context - int(sampling.get("max_new_tokens") or 1)
        return limit if self.longest_prompt is None else min(limit, self.longest_prompt - 1)


def truncate_tokens(tokens: Sequence[Token], keep: int, truncation: Truncation) -> list[Token]:
    """Return `keep` of the tokens, with the others cut off at the head, the tail or the middle."""
    begin = {"head": 0, "tail": keep, "middle": keep // 2}[truncation]
    return [*tokens[:begin], *tokens[len(tokens) - (keep - begin) :]] if keep < len(tokens) else [*tokens]


def truncate_text(text: str, offsets: Offsets, keep: int, truncation: Truncation) -> str:
    """Return the text of about `keep` of its tokens, in whole characters; `offsets` are those of the text."""
    begin = {"head": 0, "tail": keep, "middle": keep // 2}[truncation]
    first = text[: offsets[begin - 1][1]] if begin else ""
    return first + (text[offsets[len(offsets) - (keep - begin)][0] :] if begin < keep else "")


class Tokenizer:
    """The tokenizer and chat template of a model directory. Thread-safe; uses all cores for a batch."""

    def __init__(self, directory: Path, kind: PromptKind, template: str | None = None) -> None:
        """Load the files for prompts of this kind; raises CannotTokenizeError where one is unusable."""
        self._backend = load_tokenizer(directory)
        self._chat = load_chat_template(directory, template) if kind == "messages" else None

    def can_encode(self, request: Request) -> bool:
        """Return whether this request's prompt can be tokenized here; else the engine has to do it."""
        if request.media:
            return False
        if request.kind == "messages":
            plain = all(map(_is_plain, request.prompt))
            answerable = plain and (request.continues or request.prompt[-1]["role"] != "assistant")
            return answerable and "structural_tag" not in request.sampling
        return request.kind == "text" and bool(request.prompt)

    def prompt_text(self, request: Request) -> str:
        """Return the text to tokenize; raises RowRefusedError where the chat template fails."""
        if self._chat is None:
            return str(request.prompt)
        messages = [{"role": m["role"], "content": m["content"]} for m in request.prompt]
        if answer_begun(request) is not None:
            messages.pop()
        return self._chat.render(messages, request.chat_template_kwargs)

    def answer_ids(self, request: Request) -> list[int] | RowRefusedError:
        """Return the token ids of the beginning of the answer, which follow those of `prompt_text`.

        SGLang 0.5.23 tokenizes it on its own, as a prompt of plain text without the token that begins one.
        """
        begun = answer_begun(request)
        if not begun or self._chat is None:
            return []
        ids = self._encoded([begun], special=True)[0]
        first = self._backend.token_to_id(self._chat.bos_token) if self._chat.bos_token else None
        return ids[1:] if isinstance(ids, list) and first is not None and ids[:1] == [first] else ids

    def token_ids(self, texts: Sequence[str]) -> list[list[int] | RowRefusedError]:
        """Return the token ids of each text, or an error where it cannot be encoded (unpaired surrogate)."""
        return self._encoded(texts, special=self._chat is None)  # a chat template writes them itself

    def _encoded(self, texts: Sequence[str], *, special: bool) -> list[list[int] | RowRefusedError]:
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as failure:  # noqa: BLE001 - TypeError, or Exception itself
            if len(texts) > 1:
                return [self._encoded([text], special=special)[0] for text in texts]
            return [_bad_text(texts[0], failure)] if texts else []
        return [encoding.ids for encoding in found]

    def offsets(self, text: str) -> Offsets:
        """Return the position of each token in a text."""
        return list(self._backend.encode(text, add_special_tokens=False).offsets)


def answer_begun(request: Request) -> str | None:
    """Return the beginning of the answer, the assistant's last message; None where there is none."""
    last = request.prompt[-1] if request.kind == "messages" and request.continues else None
    return str(last["content"]) if last and last["role"] == "assistant" else None


def _bad_text(text: str, failure: Exception) -> RowRefusedError:
    """Return why a text cannot be encoded; the library's own message for a bad surrogate is about types."""
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        return RowRefusedError(f"the prompt cannot be tokenized: character {bad.start}: {bad.reason}")
    return _refusal(failure)


def _refusal(failure: Exception) -> RowRefusedError:
    """Return any failure as the refusal of its row."""
    if isinstance(failure, RowRefusedError):
        return failure
    return RowRefusedError(f"the prompt cannot be tokenized: {type(failure).__name__}: {failure}")


def _is_plain(message: Any) -> bool:
    """Return whether a message has a role that every chat template knows, a text, and nothing else."""
    if not isinstance(message, dict):  # a null
        return False
    given = {name: value for name, value in message.items() if value is not None}
    is_text = all(isinstance(value, str) for value in given.values())
    return given.keys() == {"role", "content"} and is_text and given["role"] in _ROLES


class Encoder:
    """Tokenizes prompts in batches, and checks or truncates their lengths."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_sampling: Mapping[str, Any],
        budget: TokenBudget,
        truncation: Truncation | None,
    ) -> None:
        """Take the parts; `tokenizer` is None where prompts are token ids already.

        `chat_sampling` are sampling parameters that SGLang's chat endpoint would add to a request.
        """
        self._tokenizer = tokenizer
        self._chat_sampling = chat_sampling
        self._budget = budget
        self._truncation = truncation

    def can_encode(self, request: Request) -> bool:
        """Return whether `encode` tokenizes this request; others pass unchanged."""
        if self._tokenizer is None:
            return request.kind == "input_ids"
        return self._tokenizer.can_encode(request)

    def encode(self, requests: Sequence[Request]) -> list[Request | Outcome]:
        """Return the requests with token ids as prompts; a row that cannot be sent becomes an Outcome."""
        done: list[Request | Outcome] = [*requests]
        taken = [n for n, request in enumerate(requests) if self.can_encode(request)]
        for n, ids in zip(taken, self.token_ids([requests[n] for n in taken]), strict=True):
            request = requests[n]
            try:
                done[n] = self._as_ids(request, self._fitted(request, ids))
            except Exception as failure:  # noqa: BLE001 - the text of one row must not end the run
                done[n] = Outcome(request.ref, None, str(_refusal(failure)), None, 0)
        return done

    def token_ids(self, requests: Sequence[Request]) -> list[list[int] | RowRefusedError]:
        """Return the token ids of each prompt, not truncated, or the error of its row.

        All requests must pass `can_encode`.
        """
        if self._tokenizer is None:
            return [list(request.prompt) for request in requests]
        texts: list[str] = []
        found: list[list[int] | RowRefusedError | None] = []
        for request in requests:
            try:
                texts.append(self._tokenizer.prompt_text(request))
                found.append(None)
            except Exception as failure:  # noqa: BLE001 - as above
                found.append(_refusal(failure))
        encoded = iter(self._tokenizer.token_ids(texts))
        whole = [next(encoded) if ids is None else ids for ids in found]
        return [self._with_answer(request, ids) for request, ids in zip(requests, whole, strict=True)]

    def _with_answer(self, request: Request, ids: list[int] | RowRefusedError) -> list[int] | RowRefusedError:
        if isinstance(ids, RowRefusedError) or self._tokenizer is None or not request.continues:
            return ids
        begun = self._tokenizer.answer_ids(request)
        return begun if isinstance(begun, RowRefusedError) else ids + begun

    def _as_ids(self, request: Request, ids: list[int]) -> Request:
        sampling = request.sampling
        if request.kind == "messages":
            sampling = {**self._chat_sampling, **sampling}
        return request._replace(
            kind="input_ids", prompt=ids, sampling=sampling, chat_template_kwargs=None, continues=False
        )

    def _fitted(self, request: Request, ids: list[int] | RowRefusedError) -> list[int]:
        """Return token ids that are not too long; raises RowRefusedError where that is impossible."""
        if isinstance(ids, RowRefusedError):
            raise ids
        if self._truncation is None:
            self._budget.check(len(ids))
            return ids
        limit = self._budget.prompt_limit(request.sampling)
        if len(ids) <= limit:
            return ids
        if limit > 0 and self._tokenizer is None:
            return truncate_tokens(ids, limit, self._truncation)
        return self._truncated(request, len(ids), limit, self._truncation)

    def _truncated(self, request: Request, length: int, limit: int, truncation: Truncation) -> list[int]:
        """Truncate the text and tokenize it again, so that the tokens are those of a shorter row."""
        text = _truncatable(request)
        offsets = self._tokenizer.offsets(text) if self._tokenizer and limit > 0 else []
        keep = len(offsets) - (length - limit)
        while keep > 0:
            (ids,) = self.token_ids([_with_text(request, truncate_text(text, offsets, keep, truncation))])
            if isinstance(ids, RowRefusedError):
                raise ids
            if len(ids) <= limit:
                return ids
            keep -= len(ids) - limit
        raise RowRefusedError(
            f"prompt.truncate: the prompt has {length} tokens and may have {limit}: "
            f"without what may be cut it would still have more"
        )


def _truncatable(request: Request) -> str:
    """Return the text that may be truncated: that of the last user message, or the whole prompt."""
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
