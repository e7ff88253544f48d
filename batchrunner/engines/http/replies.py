"""Replies of SGLang's HTTP interface → completions and errors.

Whatever bytes come, reading them ends in a completion or in a RequestError of the row.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any

import aiohttp
import msgspec

from batchrunner.core.errors import (
    AttemptFailedError,
    BundleRefusedError,
    RequestError,
)
from batchrunner.core.server_replies import (
    MOST_TOKENS,
    FinishReason,
    TokenCount,
    Word,
    decode_reply,
    raise_abort,
    strict_json,
)
from batchrunner.core.types import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    AskedColumns,
    Completion,
    Request,
    RequestBody,
)
from batchrunner.engines.http.wire import PostedAnswer
from batchrunner.input.request_bodies import fields_of, prompts_in
from batchrunner.job.output import REPETITION, RESPONSE
from batchrunner.job.sampling import THINKING
from batchrunner.job.tasks import check_embeddings

TokenLogprob = tuple[float | None, TokenCount, str | None]
"""A token: the logarithm of its probability (LOWEST for minus infinity), its id and its text."""


class Meta(msgspec.Struct):
    """The `meta_info` of a sample."""

    finish_reason: FinishReason | Word | None = None
    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    num_retractions: TokenCount | None = None
    reasoning_tokens: TokenCount | None = None
    weight_version: str | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None


class Sample(msgspec.Struct):
    """An answer of `/generate`."""

    meta_info: Meta
    text: str = ""
    """Text of the answer; a server without a tokenizer leaves it out."""
    output_ids: msgspec.Raw = msgspec.Raw()
    """Its token ids, decoded only on request: SGLang sends them even if nobody asks for them."""


class Event(Sample):
    """An event of a bundle's answer: a part or the end of a row's answer, or an error of all rows."""

    meta_info: Meta = msgspec.field(default_factory=Meta)
    index: int | None = None
    """The row's place in the bundle."""
    error: Any = None


class Function(msgspec.Struct):
    """The function that a model calls."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str | None = None
    type: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct):
    """The answer of a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """A sample in OpenAI's form: a message of a chat, or a text."""

    message: Message | None = None
    text: str | None = None
    finish_reason: Word | None = None
    meta_info: Meta = msgspec.field(default_factory=Meta)
    matched_stop: Any = None


class CachedTokens(msgspec.Struct):
    """The `prompt_tokens_details` of a reply in OpenAI's form."""

    cached_tokens: TokenCount | None = None


class Usage(msgspec.Struct):
    """The counts of a reply in OpenAI's form."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    prompt_tokens_details: CachedTokens | None = None
    reasoning_tokens: TokenCount | None = None


class Extension(msgspec.Struct):
    """The token ids that SGLang adds to a chat."""

    output_ids: list[list[TokenCount]] | None = None


class Metadata(msgspec.Struct):
    """What SGLang says of the model in a reply in OpenAI's form."""

    weight_version: str | None = None


class ChoicesReply(msgspec.Struct):
    """A reply in OpenAI's form."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    usage: Usage | None = None
    sglext: Extension | None = None
    metadata: Metadata | None = None


class TokensReply(msgspec.Struct):
    """The answer of `/v1/tokenize`."""

    tokens: list[TokenCount]


_read_choices = msgspec.json.Decoder(ChoicesReply)
_read_generate = msgspec.json.Decoder(Sample | Annotated[list[Sample], msgspec.Meta(min_length=1)])
_read_ids = msgspec.json.Decoder(list[TokenCount] | None)
_read_tokens = msgspec.json.Decoder(TokensReply)
_read_event = msgspec.json.Decoder(Event)

MOST_ANSWER_BYTES = 128 << 20
"""Maximum bytes of an answer. For comparison: one part file of the results holds 64 MiB."""
MOST_EVENT_BYTES = 16 << 20
"""Maximum bytes of an event in an answer to several rows; a row with a larger one is sent again alone."""
LARGE_BYTES, LARGE_AT_ONCE = 1 << 20, 8
"""An answer of more than LARGE_BYTES bytes counts as large, and at most LARGE_AT_ONCE large answers are read
at once. So a thousand answers that do not end cannot fill the memory."""
_OK = HTTPStatus.OK.value
_DATA = b"data:"
JSON_BEGINS = b"{", b"["
"""First bytes of a JSON answer; any other content is a page for people."""
BEGIN, END = "<think>", "</think>"
"""Tags around a model's reasoning; some chat templates write the first tag."""
TAGS = "think>"
"""Common part of both tags: a text without it has no reasoning."""
NO_REASONING: Mapping[str, list[Any]] = MappingProxyType({"reasoning": [None]})
_END_ON_A_LINE = re.compile(r"(?:^|\n)[ \t]*</think>[ \t]*(?:\n|$)")
"""End tag of reasoning whose begin tag is in the chat template. The end tag counts only on a line of its own,
since an answer may mention it."""
ENDED = "stop"
"""The finish reason of an answer that the model ended, at its end token or at a stop text."""


class WholeAnswer(msgspec.Struct):
    """An HTTP answer whose body has been read to its end."""

    status: int
    content: bytes
    retry_after: str | None = None
    """Value of the header `Retry-After`; None for status 200, or if the answer has no such header."""

    @property
    def is_json(self) -> bool:
        """Whether the status is 200 and the body begins like JSON, which a proxy's page of HTML does not."""
        return self.status == _OK and self.content.lstrip().startswith(JSON_BEGINS)


async def whole(answer: PostedAnswer, large_answers: asyncio.Semaphore) -> WholeAnswer:
    """Read the body of an answer; raises AttemptFailedError if it exceeds MOST_ANSWER_BYTES.

    `large_answers` has the permits to read a large answer; see LARGE_BYTES.
    """
    stream = answer.content
    if stream.is_eof() and stream.total_bytes <= MOST_ANSWER_BYTES:
        content = stream.read_nowait()
    else:
        body = bytearray()
        await _read_on(stream, body, LARGE_BYTES)
        if len(body) > LARGE_BYTES:
            async with large_answers:
                await _read_on(stream, body, MOST_ANSWER_BYTES)
        if len(body) > MOST_ANSWER_BYTES:
            raise AttemptFailedError(f"the answer is larger than {MOST_ANSWER_BYTES >> 20} MiB")
        content = bytes(body)
    retry_after = None if answer.status == _OK else answer.headers.get("Retry-After")
    return WholeAnswer(answer.status, content, retry_after)


async def _read_on(stream: aiohttp.StreamReader, body: bytearray, most: int) -> None:
    """Add to a body until its stream ends or it has more than `most` bytes."""
    while len(body) <= most and (part := await stream.readany()):
        body += part


def read_event(content: bytes) -> Event:
    """Decode an event; raises for any other content."""
    return decode_reply(_read_event, content)


def stopped_at_repetition(event: Event, request: Request) -> Event | None:
    """Return a last event for an answer that repeats itself, with the text before the first repeat.

    Return None for any other answer, and if the prompt has the same repetition. If the job asks for token ids
    or probabilities, the answer keeps its whole text, since these belong to it.
    """
    from batchrunner.engines.repetition import find_repetition, repeats_in_prompt  # noqa: PLC0415 - few need it

    repetition = find_repetition(event.text)
    if repetition is None:
        return None
    output: str | list[int] = event.text
    if request.kind == "input_ids":
        output = (_read_ids.decode(event.output_ids) if event.output_ids else None) or []
    if repeats_in_prompt(request.prompt, output):
        return None
    is_whole = request.asks is not None and request.asks.of_tokens
    text = event.text if is_whole else event.text[: repetition.sense]
    meta = msgspec.structs.replace(event.meta_info, finish_reason=REPETITION)
    return msgspec.structs.replace(event, text=text, meta_info=meta)


class EventLines:
    """Splits a stream into server-sent events with one line of data each, wherever its chunks begin."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """Add the next chunk; return the data of the events that it completes. Other lines are ignored.

        Raises BundleRefusedError for an event that is too large.
        """
        *lines, rest = part.split(b"\n")
        if lines and self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > MOST_EVENT_BYTES:
            raise BundleRefusedError(f"an event is larger than {MOST_EVENT_BYTES >> 20} MiB")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


class Answer(msgspec.Struct):
    """One completion, in the same form for all endpoints."""

    text: str
    reason: str | None
    """Finish reason: why the completion ended."""
    meta: Meta
    matched: Any = None
    """The stop text or token that ended it."""
    ids: list[int] | None = None
    reasoning: str | None = None
    """Reasoning that the server has separated from the text."""
    calls: list[ToolCall] | None = None


def completion_of(request: Request, reply: bytes | Sample | list[bytes]) -> Completion:
    """Read a reply with status 200, an event of such a reply, or all replies to a task without decoding.

    Raises RequestError if the reply is an abort or no answer, if it has fewer or more completions than
    requested, or if it is empty although the model did not end it.
    """
    try:
        if isinstance(reply, Sample):
            return _from_generate(request, (reply,))
        if isinstance(reply, list):
            (result,) = answers_of([request], reply)
            if isinstance(result, RequestError):
                raise result  # noqa: TRY301 - as it is
            return result
        if request.kind == "body":
            return _from_body(request.prompt, reply)
        if request.kind == "messages":
            return _from_chat(request, decode_reply(_read_choices, reply))
        samples = decode_reply(_read_generate, reply)
        return _from_generate(request, samples if isinstance(samples, list) else (samples,))
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})") from None


def _from_generate(request: Request, samples: Sequence[Sample]) -> Completion:
    asks = request.asks
    has_ids = asks is not None and asks.of_tokens
    answers = []
    for sample in samples:
        meta = sample.meta_info
        reason, matched = _word_and_match(meta)
        ids = _read_ids.decode(sample.output_ids) if has_ids and sample.output_ids else None
        answers.append(Answer(text=sample.text, reason=reason, meta=meta, matched=matched, ids=ids))
    first = samples[0].meta_info
    return _completion(request, answers, first.prompt_tokens, first.cached_tokens)


def _from_chat(request: Request, reply: ChoicesReply) -> Completion:
    choices = reply.choices
    ids = reply.sglext.output_ids if reply.sglext else None
    has_ids = ids is not None and len(ids) == len(choices)
    answers = []
    for number, choice in enumerate(choices):
        raise_abort(choice.meta_info.finish_reason)
        raise_abort(choice.finish_reason)
        message = choice.message
        if message is None or (len(choices) > 1 and not _says_something(message)):
            raise AttemptFailedError(f"sample {number} of {len(choices)} has no text")
        answers.append(
            Answer(
                text=message.content or "",
                reason=choice.finish_reason,
                meta=choice.meta_info,
                matched=choice.matched_stop,
                ids=ids[number] if ids is not None and has_ids else None,
                reasoning=message.reasoning_content or None,
                calls=message.tool_calls,
            )
        )
    first = choices[0].meta_info
    if first.prompt_tokens is None and reply.usage is not None:
        _fill_counts(answers, reply.usage)
    return _completion(request, answers, first.prompt_tokens, first.cached_tokens)


def _fill_counts(answers: Sequence[Answer], usage: Usage) -> None:
    """Add the token counts of a chat whose choices have none, as with the gRPC workers of a gateway."""
    meta = answers[0].meta
    meta.prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        meta.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if len(answers) == 1:
        meta.completion_tokens = usage.completion_tokens


def _says_something(message: Message) -> bool:
    return message.content is not None or bool(message.reasoning_content or message.tool_calls)


def _word_and_match(meta: Meta) -> tuple[str | None, Any]:
    """Return why an output ended, and the stop text or token that ended it; raises the error of an abort."""
    reason = meta.finish_reason
    raise_abort(reason)
    return (reason.type, reason.matched) if isinstance(reason, FinishReason) else (reason, None)


def _completion(
    request: Request, answers: Sequence[Answer], prompt_tokens: int | None, cached_tokens: int | None
) -> Completion:
    """Return the answers to a request as one Completion; raises AttemptFailedError if they are no answer.

    An empty text is an answer if the model ended it, or if it comes with reasoning or tool calls.
    """
    number = request.sampling.get("n") or 1
    if len(answers) != number:
        raise AttemptFailedError(f"the reply has {len(answers)} samples, not {number} (sampling.n)")
    texts, reasons, counts, retractions, is_empty = [], [], [], 0, True
    for answer in answers:  # one pass: a comprehension for each list takes twice as long
        meta = answer.meta
        texts.append(answer.text)
        reasons.append(answer.reason)
        counts.append(meta.completion_tokens)
        retractions += meta.num_retractions or 0
        if answer.text or answer.reason == ENDED or answer.reasoning or answer.calls:
            is_empty = False
    if is_empty:
        raise AttemptFailedError("empty answer")
    weights = answers[0].meta.weight_version
    completion = Completion(
        texts=texts,
        finish_reasons=reasons,
        completion_tokens=counts,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        retractions=retractions,
        weights=weights,
    )
    budget = request.sampling.get(THINKING)
    if budget is not None:
        thoughts = max(answer.meta.reasoning_tokens or 0 for answer in answers)
        completion = completion._replace(thinking_cut=thoughts >= budget > 0)
    asks = request.asks
    if asks is None:
        return completion
    if asks.only_reasoning and len(answers) == 1 and TAGS not in texts[0] and not answers[0].reasoning:
        return completion._replace(columns=NO_REASONING)  # the usual case
    if "reasoning" in asks.names:
        answers = [_split_reasoning(answer) for answer in answers]
    return completion._replace(texts=[answer.text for answer in answers], columns=_columns(asks, answers))


def _split_reasoning(answer: Answer) -> Answer:
    """Split a text into reasoning and answer; without an end tag, reasoning extends to the end of the text.

    Both parts are stripped, as in SGLang's reasoning parsers. A text without reasoning stays unchanged.
    """
    text = answer.text
    if text.lstrip().startswith(BEGIN):
        reasoning, _, rest = text.lstrip().removeprefix(BEGIN).partition(END)
    elif END in text and BEGIN not in text and (end := _END_ON_A_LINE.search(text)):
        reasoning, rest = text[: end.start()], text[end.end() :]
    else:
        return answer
    parted = answer.reasoning or reasoning.strip() or None
    return msgspec.structs.replace(answer, text=rest.strip(), reasoning=parted)


def _columns(asks: AskedColumns, answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Return the requested columns.

    Raises AttemptFailedError if the reply lacks a requested token id or probability.
    """
    metas = [answer.meta for answer in answers]
    values: dict[str, Callable[[], list[Any]]] = {
        "reasoning": lambda: [answer.reasoning for answer in answers],
        "tool_calls": lambda: [_calls(answer.calls) for answer in answers],
        "matched_stop": lambda: [_text(answer.matched) for answer in answers],
        "output_ids": lambda: [_required(answer.ids, "output_ids") for answer in answers],
        "logprobs": lambda: [_tokens(_required(meta.output_token_logprobs, "logprobs")) for meta in metas],
        "top_logprobs": lambda: [
            [_tokens(tokens or []) for tokens in _required(meta.output_top_logprobs, "top_logprobs")]
            for meta in metas
        ],
        # all samples have the same prompt
        "prompt_logprobs": lambda: [_tokens(_required(metas[0].input_token_logprobs, "prompt_logprobs"))],
    }
    return {name: values[name]() for name in values if name in asks.names}


def _text(value: Any) -> str | None:
    """Return a JSON value as text; a string is returned unchanged."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _calls(calls: Sequence[ToolCall] | None) -> list[dict[str, Any]] | None:
    """Return calls of tools in OpenAI's form, with the arguments as JSON text."""
    if not calls:
        return None
    return [
        {
            "id": call.id,
            "type": call.type,
            "function": {"name": call.function.name, "arguments": _text(call.function.arguments)},
        }
        for call in calls
    ]


def _tokens(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{"id": number, "token": text, "logprob": logprob} for logprob, number, text in tokens]


def _required(value: Any, name: str) -> Any:
    if value is None:
        raise AttemptFailedError(f"the answer lacks {name}, which output.columns requests")
    return value


def tokens_in(reply: bytes) -> list[int] | None:
    """Return the token ids in a reply of `/v1/tokenize`; None for any other reply."""
    try:
        return _read_tokens.decode(reply).tokens
    except Exception:  # noqa: BLE001 - nothing that a server sends may end a run
        return None


def _from_body(body: RequestBody, reply: bytes) -> Completion:
    """Read a reply to a whole request; the request's model name replaces the one in the reply.

    Raises RequestError if the reply is an abort or no answer, or if a vector is unusable.
    """
    reply = strict_json(reply)  # it becomes a line of the results, which must be valid JSON
    if body.path == EMBEDDINGS_PATH:
        prompt_tokens = check_embeddings(reply, len(prompts_in(body)) or None)
        columns = {RESPONSE: [_as_line(reply, body.model)]}
        return Completion(
            texts=[""],
            finish_reasons=[ENDED],
            completion_tokens=[0],
            prompt_tokens=prompt_tokens,
            cached_tokens=None,
            columns=columns,
        )
    answer = decode_reply(_read_choices, reply)
    _check_choices(body, answer.choices)
    first, usage = answer.choices[0], answer.usage or Usage()
    details = usage.prompt_tokens_details
    return Completion(
        texts=[(first.message.content if first.message else first.text) or ""],
        finish_reasons=[first.finish_reason],
        completion_tokens=[usage.completion_tokens],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else None,
        weights=answer.metadata.weight_version if answer.metadata else None,
        thinking_cut=(usage.reasoning_tokens or 0) >= (body.most_thinking or MOST_TOKENS),
        columns={RESPONSE: [_as_line(reply, body.model)]},
    )


def _check_choices(body: RequestBody, choices: list[Choice]) -> None:
    for choice in choices:
        raise_abort(choice.finish_reason)
    is_chat = body.path == CHAT_PATH
    if any((choice.message if is_chat else choice.text) is None for choice in choices):
        raise AttemptFailedError(f"not an answer of {body.path}: a choice has no text")
    n_field = fields_of(body.content).get("n") if is_chat else None
    number = (n_field and msgspec.json.decode(n_field)) or len(choices)
    if number != len(choices):
        raise AttemptFailedError(f"the reply has {len(choices)} choices, not {number} (n)")


def _as_line(reply: bytes, model: str | None) -> str:
    """Return a reply as JSON on one line, each value as it came; `model` is the request's, or None."""
    fields = fields_of(reply)
    if model is not None and "model" in fields:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    content = msgspec.json.encode(fields)
    if b"\n" in content or b"\r" in content:
        content = msgspec.json.format(content, indent=-1)
    return content.decode()


def answers_of(requests: Sequence[Request], replies: Sequence[bytes]) -> list[Completion | RequestError]:
    """Return the answers in replies to requests of a task without decoding; raises for other replies."""
    task = requests[0].task
    assert task is not None
    return task.answers(requests, replies)
