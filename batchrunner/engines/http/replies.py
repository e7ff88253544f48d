"""Reads the replies of SGLang's HTTP endpoints into completions and errors.

Whatever bytes a server sends, reading them ends with a completion or with a RequestError of the row.
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
    FinishReason,
    TokenCount,
    Word,
    decode_reply,
    raise_abort,
    strict_json,
)
from batchrunner.core.types import (
    CHAT_PATH,
    CLASSIFY_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    RESPONSES_PATH,
    SCORE_PATH,
    AskedColumns,
    Completion,
    Request,
    RequestBody,
)
from batchrunner.engines.http.wire import PostedAnswer
from batchrunner.input.request_bodies import fields_of, prompts_in
from batchrunner.job.output import CUT, REPETITION, RESPONSE
from batchrunner.job.sampling import THINKING
from batchrunner.job.tasks import check_embeddings

TokenLogprob = tuple[float | None, TokenCount, str | None]
"""A token as (log probability, id, text). The log probability is LOWEST for minus infinity."""


class Meta(msgspec.Struct):
    """The `meta_info` of one output; a request with `n` has several outputs for a prompt."""

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


class GenerateOutput(msgspec.Struct):
    """One output in a reply of `/generate`."""

    meta_info: Meta
    text: str = ""
    """Text of the output; empty if the server runs without a tokenizer."""
    output_ids: msgspec.Raw = msgspec.Raw()
    """Token ids of the output as undecoded JSON. SGLang always sends them, but few rows need them."""


class Event(GenerateOutput):
    """An event in the answer to a bundle: a row's answer so far, its last event, or an error of all rows."""

    meta_info: Meta = msgspec.field(default_factory=Meta)
    index: int | None = None
    """Index of the row in the bundle; None in an error of all rows, and for a request of one row."""
    error: Any = None
    """SGLang's error object; None in an event of a row."""


class Function(msgspec.Struct):
    """The function that a model calls."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct):
    """A tool call in a chat's answer."""

    id: str | None = None
    type: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct):
    """The assistant's message in the answer to a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """One output in a reply of an OpenAI endpoint: a chat's message, or a text."""

    message: Message | None = None
    text: str | None = None
    finish_reason: Word | None = None
    meta_info: Meta = msgspec.field(default_factory=Meta)
    matched_stop: Any = None
    """Stop text or stop token that ended the output."""


class CachedTokens(msgspec.Struct):
    """Details of the prompt tokens in the `usage` of an OpenAI endpoint's reply."""

    cached_tokens: TokenCount | None = None


class Usage(msgspec.Struct):
    """The `usage` of an OpenAI endpoint's reply: its token counts."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    prompt_tokens_details: CachedTokens | None = None
    reasoning_tokens: TokenCount | None = None


class Extension(msgspec.Struct):
    """The `sglext` that SGLang adds to the reply of a chat."""

    output_ids: list[list[TokenCount]] | None = None
    """Token ids of each choice."""


class Metadata(msgspec.Struct):
    """The `metadata` that SGLang adds to the reply of an OpenAI endpoint."""

    weight_version: str | None = None


class ChoicesReply(msgspec.Struct):
    """A reply of `/v1/chat/completions` or `/v1/completions`."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    usage: Usage | None = None
    sglext: Extension | None = None
    metadata: Metadata | None = None


class ResponseUsage(msgspec.Struct):
    """The counts of a reply of `/v1/responses`."""

    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    input_tokens_details: CachedTokens | None = None


class ResponseReply(msgspec.Struct):
    """A reply of `/v1/responses`."""

    status: Word
    output: list[msgspec.Raw]
    usage: ResponseUsage | None = None
    error: msgspec.Raw = msgspec.Raw()


class ScoresReply(msgspec.Struct):
    """A reply of `/v1/score`."""

    scores: list[msgspec.Raw]
    usage: Usage | None = None


class ClassesReply(msgspec.Struct):
    """A reply of `/v1/classify`."""

    data: list[msgspec.Raw]
    usage: Usage | None = None


class TokensReply(msgspec.Struct):
    """A reply of `/v1/tokenize`."""

    tokens: list[TokenCount]


_read_choices = msgspec.json.Decoder(ChoicesReply)
_read_generate = msgspec.json.Decoder(
    GenerateOutput | Annotated[list[GenerateOutput], msgspec.Meta(min_length=1)]
)
_read_ids = msgspec.json.Decoder(list[TokenCount] | None)
_read_tokens = msgspec.json.Decoder(TokensReply)
_read_response = msgspec.json.Decoder(ResponseReply)
_FORWARD_REPLIES: dict[str, msgspec.json.Decoder[Any]] = {
    SCORE_PATH: msgspec.json.Decoder(ScoresReply),
    CLASSIFY_PATH: msgspec.json.Decoder(ClassesReply),
    RERANK_PATH: msgspec.json.Decoder(Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]),
}
"""Decoders of replies without output tokens, by endpoint. Embeddings have checks of their own."""
_read_event = msgspec.json.Decoder(Event)

MOST_ANSWER_BYTES = 128 << 20
"""Maximum bytes of an answer. For comparison, a part file (a Parquet file of results) has about 64 MiB."""
MOST_EVENT_BYTES = 16 << 20
"""Maximum bytes of an event in the answer to a bundle. A row with a larger event is sent again alone."""
LARGE_BYTES = 1 << 20
"""Number of bytes above which an answer is large. Large answers are read only with one of LARGE_AT_ONCE
permits."""
LARGE_AT_ONCE = 8
"""Maximum number of large answers that are read at the same time. Without it, a thousand endless answers
would fill the memory."""
_OK = HTTPStatus.OK.value
_DATA = b"data:"
"""Beginning of the line with the data of a server-sent event."""
JSON_BEGINS = b"{", b"["
"""Possible first bytes of a reply in JSON. Any other content, such as HTML, does not come from SGLang."""
THINK_BEGIN = "<think>"
"""Tag before a model's reasoning. Some chat templates put this tag into the prompt, so the answer lacks
it."""
THINK_END = "</think>"
"""Tag after a model's reasoning."""
END_OF_THINK_TAGS = "think>"
"""Last characters of both reasoning tags. A text that lacks them has no reasoning."""
NO_REASONING: Mapping[str, list[Any]] = MappingProxyType({"reasoning": [None]})
"""Column of an answer without reasoning."""
_END_ON_A_LINE = re.compile(r"(?:^|\n)[ \t]*</think>[ \t]*(?:\n|$)")
"""Matches the end tag of reasoning whose begin tag is in the prompt. Only a tag on a line of its own counts,
because an answer may mention the tag."""
ENDED_BY_MODEL = "stop"
"""Finish reason of an answer that the model ended, by its end token or a stop text."""
_FINISH_REASONS_OF_RESPONSES = {"completed": ENDED_BY_MODEL, "incomplete": CUT}
"""Finish reasons for the values of `status` in a reply of `/v1/responses`."""


class WholeAnswer(msgspec.Struct):
    """An HTTP answer whose body has been read to its end."""

    status: int
    content: bytes
    retry_after: str | None = None
    """Value of the header `Retry-After`; None for status 200, or if the answer has no such header."""

    @property
    def is_json(self) -> bool:
        """Whether the status is 200 and the body begins like JSON, unlike an HTML page of a proxy."""
        return self.status == _OK and self.content.lstrip().startswith(JSON_BEGINS)


async def read_whole(answer: PostedAnswer, large_answers: asyncio.Semaphore) -> WholeAnswer:
    """Read the body of an answer; raises AttemptFailedError if it exceeds MOST_ANSWER_BYTES.

    `large_answers` has the LARGE_AT_ONCE permits to read an answer of more than LARGE_BYTES.
    """
    stream = answer.content
    if stream.is_eof() and stream.total_bytes <= MOST_ANSWER_BYTES:
        # Usually all bytes have arrived, so nothing has to be awaited.
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


async def _read_on(stream: aiohttp.StreamReader, body: bytearray, most_bytes: int) -> None:
    """Append to a body until its stream ends, or until the body has more than `most_bytes`."""
    while len(body) <= most_bytes and (chunk := await stream.readany()):
        body += chunk


def read_event(content: bytes) -> Event:
    """Decode the data of an event; raises AttemptFailedError for any other content."""
    return decode_reply(_read_event, content)


def stopped_at_repetition(event: Event, request: Request) -> Event | None:
    """Return a last event for an answer that repeats itself, with the text before the first repeat.

    Return None for an answer that does not repeat itself, or whose repetition is also in the prompt. By
    default (`stops_repetition` is `prose`), return None in three more cases: the answer repeats data or code,
    the prompt contains one period of the repetition, or the prompt repeats itself, as a text to translate
    may. If the job asks for token ids or probabilities, the text stays whole, because they belong to the
    whole text.
    """
    from batchrunner.engines import repetition as repetitions  # noqa: PLC0415 - few need it

    repetition = repetitions.find_repetition(event.text)
    if repetition is None:
        return None
    # The search for the repetition in the prompt needs the answer in the prompt's form: a text, or token ids.
    output: str | list[int] = event.text
    if request.kind == "input_ids":
        output = (_read_ids.decode(event.output_ids) if event.output_ids else None) or []
    if request.stops_repetition == "prose":
        may_repeat = (
            not repetitions.is_prose(event.text[repetition.start : repetition.first_end])
            or repetitions.is_mentioned(request.prompt, output)
            or repetitions.repeats_itself(request.prompt)
        )
    else:
        may_repeat = repetitions.repeats_in_prompt(request.prompt, output)
    if may_repeat:
        return None
    keeps_whole_text = request.asks is not None and request.asks.of_tokens
    text = event.text if keeps_whole_text else event.text[: repetition.first_end]
    meta = msgspec.structs.replace(event.meta_info, finish_reason=REPETITION)
    return msgspec.structs.replace(event, text=text, meta_info=meta)


class EventLines:
    """Splits a byte stream into server-sent events, each with one line of data."""

    def __init__(self) -> None:
        self._incomplete_line = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add a chunk of the stream; return the data of the events that end in the chunk.

        Lines without data are ignored. Raises BundleRefusedError for an event of more than MOST_EVENT_BYTES.
        """
        *lines, incomplete_line = chunk.split(b"\n")
        if lines and self._incomplete_line:
            lines[0] = bytes(self._incomplete_line) + lines[0]
            self._incomplete_line.clear()
        self._incomplete_line += incomplete_line
        if len(self._incomplete_line) > MOST_EVENT_BYTES:
            raise BundleRefusedError(f"an event is larger than {MOST_EVENT_BYTES >> 20} MiB")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


class Output(msgspec.Struct):
    """One output, with the same fields for all endpoints."""

    text: str
    finish_reason: str | None
    meta: Meta
    matched_stop: Any = None
    """Stop text or stop token that ended the output."""
    ids: list[int] | None = None
    """Token ids of the output; None if they were not requested."""
    reasoning: str | None = None
    """Reasoning that the server has separated from the text."""
    tool_calls: list[ToolCall] | None = None


def completion_of(request: Request, reply: bytes | GenerateOutput | list[bytes]) -> Completion:
    """Convert a successful reply, or an event of a bundle's answer, to a Completion.

    For an embedding or a score, `reply` is a list with the reply to each body of the request. Raises
    RequestError if the reply is an abort or cannot be read, if the number of outputs is not the requested
    one, or if all outputs are empty although the model did not end them.
    """
    try:
        if isinstance(reply, GenerateOutput):
            return _from_generate(request, (reply,))
        if isinstance(reply, list):
            assert request.task is not None
            (result,) = request.task.answers([request], reply)
            if isinstance(result, RequestError):
                raise result  # noqa: TRY301 - the handler below raises it again, unchanged
            return result
        if request.kind == "body":
            return _from_body(request.prompt, reply)
        if request.kind == "messages":
            return _from_chat(request, decode_reply(_read_choices, reply))
        generated = decode_reply(_read_generate, reply)
        return _from_generate(request, generated if isinstance(generated, list) else (generated,))
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})") from None


def _from_generate(request: Request, generated: Sequence[GenerateOutput]) -> Completion:
    """Convert the outputs of `/generate` for one prompt to a Completion; raises like `completion_of`."""
    needs_ids = request.asks is not None and request.asks.of_tokens
    outputs = []
    for output in generated:
        meta = output.meta_info
        finish_reason, matched_stop = _reason_and_match(meta)
        ids = _read_ids.decode(output.output_ids) if needs_ids and output.output_ids else None
        outputs.append(
            Output(
                text=output.text, finish_reason=finish_reason, meta=meta, matched_stop=matched_stop, ids=ids
            )
        )
    return _completion(request, outputs)


def _from_chat(request: Request, reply: ChoicesReply) -> Completion:
    """Convert the reply to a chat to a Completion; raises like `completion_of`."""
    choices = reply.choices
    ids: Sequence[list[int] | None] = (reply.sglext and reply.sglext.output_ids) or ()
    if len(ids) != len(choices):
        # The server has sent no token ids, or not for every choice.
        ids = [None] * len(choices)
    outputs = []
    for number, choice in enumerate(choices):
        # SGLang may name an abort in the meta information or in the choice itself.
        raise_abort(choice.meta_info.finish_reason)
        raise_abort(choice.finish_reason)
        message = choice.message
        # `_completion` checks a reply with one empty output. If there are several outputs, each must have a
        # text.
        if message is None or (len(choices) > 1 and not _has_content(message)):
            raise AttemptFailedError(f"sample {number} of {len(choices)} has no text")
        outputs.append(
            Output(
                text=message.content or "",
                finish_reason=choice.finish_reason,
                meta=choice.meta_info,
                matched_stop=choice.matched_stop,
                ids=ids[number],
                reasoning=message.reasoning_content or None,
                tool_calls=message.tool_calls,
            )
        )
    if outputs[0].meta.prompt_tokens is None and reply.usage is not None:
        # The gRPC workers of a gateway send the token counts only in `usage`.
        _add_counts(outputs, reply.usage)
    return _completion(request, outputs)


def _add_counts(outputs: Sequence[Output], usage: Usage) -> None:
    """Copy the token counts in the `usage` of a chat's reply to the outputs."""
    meta = outputs[0].meta
    meta.prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        meta.cached_tokens = usage.prompt_tokens_details.cached_tokens
    # With several outputs, this count is the sum over all of them.
    if len(outputs) == 1:
        meta.completion_tokens = usage.completion_tokens


def _has_content(message: Message) -> bool:
    """Tell whether a message has a text (even an empty text), reasoning or tool calls."""
    return message.content is not None or bool(message.reasoning_content or message.tool_calls)


def _reason_and_match(meta: Meta) -> tuple[str | None, Any]:
    """Return the finish reason, and the stop text or token that ended the output; raises for an abort."""
    reason = meta.finish_reason
    raise_abort(reason)
    return (reason.type, reason.matched) if isinstance(reason, FinishReason) else (reason, None)


def _completion(request: Request, outputs: Sequence[Output]) -> Completion:
    """Return the outputs for a request as one Completion.

    Raises AttemptFailedError if their number is wrong, or if all of them are empty. An empty text still
    counts as an answer if the model ended it, or if it comes with reasoning or tool calls.
    """
    output_count = request.sampling.get("n") or 1
    if len(outputs) != output_count:
        raise AttemptFailedError(f"the reply has {len(outputs)} samples, not {output_count} (sampling.n)")
    texts = []
    finish_reasons = []
    completion_tokens = []
    retractions = 0
    is_empty = True
    # All lists are filled in one loop, because a comprehension for each of them would take twice as long.
    for output in outputs:
        meta = output.meta
        texts.append(output.text)
        finish_reasons.append(output.finish_reason)
        completion_tokens.append(meta.completion_tokens)
        retractions += meta.num_retractions or 0
        if output.text or output.finish_reason == ENDED_BY_MODEL or output.reasoning or output.tool_calls:
            is_empty = False
    if is_empty:
        raise AttemptFailedError("empty answer")
    # All outputs have the same prompt, so the first one has the counts of the prompt.
    first_meta = outputs[0].meta
    completion = Completion(
        texts=texts,
        finish_reasons=finish_reasons,
        completion_tokens=completion_tokens,
        prompt_tokens=first_meta.prompt_tokens,
        cached_tokens=first_meta.cached_tokens,
        retractions=retractions,
        weights=first_meta.weight_version,
    )
    budget = request.sampling.get(THINKING)
    if budget is not None:
        thinking_tokens = max(output.meta.reasoning_tokens or 0 for output in outputs)
        completion = completion._replace(thinking_cut=_exceeds_budget(thinking_tokens, budget))
    asks = request.asks
    if asks is None:
        return completion
    # Most chats ask only for the column `reasoning`, and have no reasoning. They skip the steps below.
    if asks.only_reasoning and len(outputs) == 1:
        has_reasoning = outputs[0].reasoning or END_OF_THINK_TAGS in texts[0]
        if not has_reasoning:
            return completion._replace(columns=NO_REASONING)
    if "reasoning" in asks.names:
        outputs = [_split_reasoning(output) for output in outputs]
    return completion._replace(texts=[output.text for output in outputs], columns=_columns(asks, outputs))


def _exceeds_budget(thinking_tokens: int, budget: int) -> bool:
    """Tell whether thinking was truncated at its budget.

    A budget of 0 switches thinking off, so nothing is truncated. SGLang counts the end tag of the thinking
    too, but not towards the budget (`update_reasoning_tokens` in schedule_batch.py).
    """
    return thinking_tokens > budget > 0


def _split_reasoning(output: Output) -> Output:
    """Split a text into reasoning and answer.

    If a text begins with the begin tag and has no end tag, all of it is reasoning. Reasoning and answer
    are stripped, as in SGLang's reasoning parsers. A text without reasoning stays unchanged.
    """
    text = output.text
    if text.lstrip().startswith(THINK_BEGIN):
        reasoning, _, text_after = text.lstrip().removeprefix(THINK_BEGIN).partition(THINK_END)
    elif THINK_END in text and THINK_BEGIN not in text and (end_tag := _END_ON_A_LINE.search(text)):
        # The chat template has put the begin tag into the prompt. The end tag must be on a line of its own,
        # because an answer may mention the tag.
        reasoning, text_after = text[: end_tag.start()], text[end_tag.end() :]
    else:
        return output
    # Reasoning that the server has separated takes precedence over reasoning in the text.
    reasoning_or_none = output.reasoning or reasoning.strip() or None
    return msgspec.structs.replace(output, text=text_after.strip(), reasoning=reasoning_or_none)


def _columns(asks: AskedColumns, outputs: Sequence[Output]) -> dict[str, list[Any]]:
    """Return the values of the requested columns, one for each output.

    Raises AttemptFailedError if the reply lacks requested token ids or probabilities.
    """
    metas = [output.meta for output in outputs]
    # These are functions, so that only the requested columns are computed.
    values: dict[str, Callable[[], list[Any]]] = {
        "reasoning": lambda: [output.reasoning for output in outputs],
        "tool_calls": lambda: [_openai_calls(output.tool_calls) for output in outputs],
        "matched_stop": lambda: [_as_text(output.matched_stop) for output in outputs],
        "output_ids": lambda: [_required(output.ids, "output_ids") for output in outputs],
        "logprobs": lambda: [
            _logprob_entries(_required(meta.output_token_logprobs, "logprobs")) for meta in metas
        ],
        "top_logprobs": lambda: [
            # A position without top tokens is null.
            [_logprob_entries(tokens or []) for tokens in _required(meta.output_top_logprobs, "top_logprobs")]
            for meta in metas
        ],
        # All outputs have the same prompt, so one value is enough.
        "prompt_logprobs": lambda: [
            _logprob_entries(_required(metas[0].input_token_logprobs, "prompt_logprobs"))
        ],
    }
    return {name: values[name]() for name in values if name in asks.names}


def _as_text(value: Any) -> str | None:
    """Return a text or None unchanged, and any other value as JSON."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _openai_calls(calls: Sequence[ToolCall] | None) -> list[dict[str, Any]] | None:
    """Return tool calls in OpenAI's format, with their arguments as JSON text; None if there are none."""
    if not calls:
        return None
    return [
        {
            "id": call.id,
            "type": call.type,
            "function": {"name": call.function.name, "arguments": _as_text(call.function.arguments)},
        }
        for call in calls
    ]


def _logprob_entries(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return tokens with their probabilities in the format of the results."""
    return [{"id": token_id, "token": text, "logprob": logprob} for logprob, token_id, text in tokens]


def _required(value: Any, name: str) -> Any:
    """Return `value`, which the reply must have; raises AttemptFailedError if it is None."""
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
    """Convert the reply to a row of a batch file to a Completion.

    The row's model name replaces the name in the reply. Raises RequestError if the reply is an abort or not
    an answer, or if a vector is invalid.
    """
    # The reply becomes a line of the results, so it must be valid JSON.
    reply = strict_json(reply)
    if body.path == EMBEDDINGS_PATH or body.path in _FORWARD_REPLIES:
        return Completion(
            texts=[""],
            finish_reasons=[ENDED_BY_MODEL],
            completion_tokens=[0],
            prompt_tokens=_check_forward_reply(body, reply),
            cached_tokens=None,
            columns={RESPONSE: [_as_line(reply, body.model)]},
        )
    if body.path == RESPONSES_PATH:
        return _from_response(body, reply)
    parsed = decode_reply(_read_choices, reply)
    _check_choices(body, parsed.choices)
    # The completion gets only the first choice, because the column `response` has the whole reply.
    choice = parsed.choices[0]
    text = choice.message.content if choice.message else choice.text
    usage = parsed.usage or Usage()
    details = usage.prompt_tokens_details
    # Without a budget, no thinking counts as truncated.
    thinking_cut = _exceeds_budget(usage.reasoning_tokens or 0, body.most_thinking or 0)
    return Completion(
        texts=[text or ""],
        finish_reasons=[choice.finish_reason],
        completion_tokens=[usage.completion_tokens],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else None,
        weights=parsed.metadata.weight_version if parsed.metadata else None,
        thinking_cut=thinking_cut,
        columns={RESPONSE: [_as_line(reply, body.model)]},
    )


def _check_forward_reply(body: RequestBody, reply: bytes) -> int | None:
    """Check a reply without output tokens; return its number of prompt tokens, or None if it has none.

    Raises RequestError if the reply is not an answer, or if a vector is invalid.
    """
    if body.path == EMBEDDINGS_PATH:
        # If no prompt can be read, their number is unknown.
        return check_embeddings(reply, len(prompts_in(body)) or None)
    parsed = decode_reply(_FORWARD_REPLIES[body.path], reply)
    # The reply of `/v1/rerank` is a list.
    usage = getattr(parsed, "usage", None)
    return None if usage is None else usage.prompt_tokens


def _from_response(body: RequestBody, reply: bytes) -> Completion:
    """Read a reply of `/v1/responses`; raises RequestError if the response has failed.

    The completion has no text of its own, because the column `response` has the whole reply.
    """
    response = decode_reply(_read_response, reply)
    if response.status not in _FINISH_REASONS_OF_RESPONSES:
        raise AttemptFailedError(f"the response is {response.status}: {bytes(response.error).decode():.200}")
    usage = response.usage or ResponseUsage()
    details = usage.input_tokens_details
    return Completion(
        texts=[""],
        finish_reasons=[_FINISH_REASONS_OF_RESPONSES[response.status]],
        completion_tokens=[usage.output_tokens],
        prompt_tokens=usage.input_tokens,
        cached_tokens=details.cached_tokens if details else None,
        columns={RESPONSE: [_as_line(reply, body.model)]},
    )


def _check_choices(body: RequestBody, choices: list[Choice]) -> None:
    """Raise the error of an abort, or AttemptFailedError if a choice is missing or has no text."""
    for choice in choices:
        raise_abort(choice.finish_reason)
    is_chat = body.path == CHAT_PATH
    if any((choice.message if is_chat else choice.text) is None for choice in choices):
        raise AttemptFailedError(f"not an answer of {body.path}: a choice has no text")
    # The number of choices of a text completion also depends on its number of prompts, so it is not checked.
    field_n = fields_of(body.content).get("n") if is_chat else None
    n = msgspec.json.decode(field_n) if field_n else None
    if n and n != len(choices):
        raise AttemptFailedError(f"the reply has {len(choices)} choices, not {n} (n)")


def _as_line(reply: bytes, model: str | None) -> str:
    """Return a reply as JSON on one line, with its values unchanged.

    If the request has a model name, `model` replaces the name in the reply.
    """
    content = reply.strip()
    if content.startswith(b"{"):
        fields = fields_of(content)
        if model is not None and "model" in fields:
            fields["model"] = msgspec.Raw(msgspec.json.encode(model))
        content = msgspec.json.encode(fields)
    if b"\n" in content or b"\r" in content:
        # A negative indent removes blanks and line ends between the values.
        content = msgspec.json.format(content, indent=-1)
    return content.decode()
