"""Replies of SGLang's HTTP interface → completions and errors. Pure.

Whatever bytes come, reading them ends in a completion or in a RequestError of the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson

from batchrunner.core.errors import AttemptFailedError, RequestError
from batchrunner.core.types import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    NO_COLUMNS,
    AskedColumns,
    Completion,
    Request,
    RequestBody,
)
from batchrunner.engines.http.failures import error_of, known_status, short
from batchrunner.input.request_bodies import fields_of, prompts_in
from batchrunner.input.tokenize.detokenizer import Detokenizer
from batchrunner.job.output import IDS_TO_CONTINUE, REASONING, RESPONSE
from batchrunner.job.tasks import check_embeddings

MOST_COUNT = (1 << 31) - 1
"""Largest count of tokens, and largest token id: the columns of the results have 32 bits."""
REASON_CHARACTERS = 100
"""Most characters of a finish reason; SGLang's have ten."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Word = Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS)]
TokenLogprob = tuple[float | None, Count, str | None]
"""A token: the logarithm of its probability, its id and its text."""


class Reason(msgspec.Struct):
    """Why an output ended."""

    type: Word
    matched: Any = None
    message: Any = None
    status_code: Any = None


class Meta(msgspec.Struct):
    """The `meta_info` of a sample."""

    finish_reason: Reason | Word | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    num_retractions: Count | None = None
    weight_version: Any = None
    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None


class Sample(msgspec.Struct):
    """An answer of `/generate`, without its token ids, which it has also where nobody asks for them."""

    text: str
    meta_info: Meta


class EndOfRow(Sample):
    """The event with which a row of a bundle ends: a sample with the row's index."""

    index: int
    error: None = None


class FullSample(Sample):
    """A Sample with its tokens."""

    output_ids: list[Count] | None = None


class IdsSample(msgspec.Struct):
    """An answer of a server without a tokenizer."""

    output_ids: list[Count]
    meta_info: Meta


class EventMeta(msgspec.Struct):
    """The `meta_info` of an event."""

    finish_reason: Any = None


class Event(msgspec.Struct):
    """An event of a bundle, whatever it tells."""

    index: int | None = None
    meta_info: EventMeta | None = None
    error: Any = None


class Function(msgspec.Struct):
    """The function that a model calls."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str | None = None
    type: str | None = None
    function: Function | None = None


class Message(msgspec.Struct):
    """The answer of a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @property
    def has_more(self) -> bool:
        """Whether there is an answer besides the text: thoughts, or calls of tools."""
        return bool(self.reasoning_content or self.tool_calls)


class ChatToken(msgspec.Struct):
    """A token of a chat in OpenAI's form, which has no ids."""

    token: str | None = None
    logprob: float | None = None
    top_logprobs: list[ChatToken] | None = None


class ChatLogprobs(msgspec.Struct):
    """The tokens of a chat."""

    content: list[ChatToken] | None = None


class Choice(msgspec.Struct):
    """A sample of a chat."""

    message: Message
    index: int | None = None
    finish_reason: Word | None = None
    meta_info: Meta | None = None
    matched_stop: Any = None
    logprobs: ChatLogprobs | None = None


class CachedTokens(msgspec.Struct):
    """The details of a chat's prompt."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    """The counts of a chat."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: CachedTokens | None = None


class ChatIds(msgspec.Struct):
    """The token ids that SGLang adds to a chat."""

    output_ids: list[list[Count]] | None = None


class ChatReply(msgspec.Struct):
    """The answer to a chat."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    usage: Usage
    sglext: ChatIds | None = None


class TokensReply(msgspec.Struct):
    """The answer of `/v1/tokenize`."""

    tokens: list[Count]


class BodyMessage(msgspec.Struct):
    """The answer of a chat, kept as it came."""

    content: str | None = None


class BodyChoice(msgspec.Struct):
    """A sample of a whole reply."""

    text: str | None = None
    message: BodyMessage | None = None
    finish_reason: Word | None = None


class Metadata(msgspec.Struct):
    """What SGLang adds to a whole reply."""

    weight_version: Any = None


class BodyReply(msgspec.Struct):
    """The answer to a whole request."""

    choices: Annotated[list[BodyChoice], msgspec.Meta(min_length=1)]
    usage: Usage | None = None
    metadata: Metadata | None = None


_read_chat = msgspec.json.Decoder(ChatReply)
_read_generate = msgspec.json.Decoder(Sample | Annotated[list[Sample], msgspec.Meta(min_length=1)])
_read_full = msgspec.json.Decoder(FullSample | Annotated[list[FullSample], msgspec.Meta(min_length=1)])
_read_ids = msgspec.json.Decoder(IdsSample | Annotated[list[IdsSample], msgspec.Meta(min_length=1)])
_read_end_of_row = msgspec.json.Decoder(EndOfRow)
_read_event = msgspec.json.Decoder(Event)
_read_tokens = msgspec.json.Decoder(TokensReply)
_read_body = msgspec.json.Decoder(BodyReply)
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


BEGIN, END = "<think>", "</think>"
"""What models write around their reasoning, unless their template writes the first."""
TAGS = "think>"
"""What both have in common: a text without it has no reasoning."""
NO_REASONING: Mapping[str, list[Any]] = MappingProxyType({"reasoning": [None]})
_END_ON_A_LINE = re.compile(r"(?:^|\n)[ \t]*</think>[ \t]*(?:\n|$)")
"""The end of reasoning whose beginning the template wrote: a line of its own, since an answer may name it."""


class Thoughts(NamedTuple):
    """A text, parted."""

    reasoning: str | None
    """What came before the answer; None where there was nothing."""
    answer: str


def part(text: str) -> Thoughts:
    """Part a text into reasoning and answer; reasoning without an end is reasoning to the end of the text.

    As SGLang's reasoning parsers do it, the parts are stripped. A text without reasoning is left as it is.
    """
    if text.lstrip().startswith(BEGIN):
        reasoning, _, answer = text.lstrip().removeprefix(BEGIN).partition(END)
        return Thoughts(reasoning.strip() or None, answer.strip())
    end = _END_ON_A_LINE.search(text) if END in text and BEGIN not in text else None
    if end is None:
        return Thoughts(None, text)
    return Thoughts(text[: end.start()].strip() or None, text[end.end() :].strip())


def columns_of_samples(
    asked: AskedColumns, samples: Sequence[Sample], thoughts: Sequence[Thoughts]
) -> Mapping[str, list[Any]]:
    """Return the columns of answers of `/generate`.

    Raises AttemptFailedError where a token's id or probability was asked for and did not come.
    """
    found: dict[str, list[Any]] = {}
    names = asked.names
    if "reasoning" in names:
        found["reasoning"] = [thought.reasoning for thought in thoughts]
    if "tool_calls" in names:
        found["tool_calls"] = [None] * len(samples)
    if "matched_stop" in names:
        found["matched_stop"] = [_matched(_reason_of(sample.meta_info)) for sample in samples]
    if IDS_TO_CONTINUE in names:
        found[IDS_TO_CONTINUE] = [s.output_ids if isinstance(s, FullSample) else None for s in samples]
    if "output_ids" in names:
        ids = [sample.output_ids for sample in samples if isinstance(sample, FullSample)]
        found["output_ids"] = [_there(each, "output_ids") for each in ids]
    return found | _logprobs(names, [sample.meta_info for sample in samples])


def columns_of_choices(
    asked: AskedColumns,
    choices: Sequence[Choice],
    thoughts: Sequence[Thoughts],
    ids: Sequence[list[int]] | None,
) -> Mapping[str, list[Any]]:
    """Return the columns of the answers of a chat, whose token ids are `ids`; raises AttemptFailedError."""
    found: dict[str, list[Any]] = {}
    names = asked.names
    if "reasoning" in names:
        given = [choice.message.reasoning_content for choice in choices]
        found["reasoning"] = [g or t.reasoning for g, t in zip(given, thoughts, strict=True)]
    if "tool_calls" in names:
        found["tool_calls"] = [_calls(choice.message.tool_calls) for choice in choices]
    if "matched_stop" in names:
        found["matched_stop"] = [_matched(choice.matched_stop) for choice in choices]
    if "output_ids" in names:
        if ids is None or len(ids) != len(choices):
            raise _missing("output_ids")
        found["output_ids"] = [ids[choice.index or 0] for choice in choices]
    return found | _logprobs(names, [_meta_of(choice) for choice in choices])


def _reason_of(meta: Meta) -> Any:
    return meta.finish_reason.matched if isinstance(meta.finish_reason, Reason) else None


def _matched(matched: Any) -> str | None:
    return None if matched is None else _text(matched)


def _text(value: Any) -> str:
    """Return a value of JSON as text: a text as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _calls(calls: Any) -> list[dict[str, Any]] | None:
    """Return calls of tools in OpenAI's form, with the arguments as JSON text."""
    if not calls:
        return None
    found = []
    for call in msgspec.convert(calls, list[ToolCall]):
        named = call.function.name if call.function else None
        given = call.function.arguments if call.function else None
        arguments = None if given is None else _text(given)
        function = {"name": named, "arguments": arguments}
        found.append({"id": call.id, "type": call.type, "function": function})
    return found


def _logprobs(names: frozenset[str], metas: Sequence[Meta]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    if "logprobs" in names:
        found["logprobs"] = [_tokens(_there(meta.output_token_logprobs, "logprobs")) for meta in metas]
    if "top_logprobs" in names:
        tops = [_there(meta.output_top_logprobs, "top_logprobs") for meta in metas]
        found["top_logprobs"] = [[_tokens(tokens or []) for tokens in top] for top in tops]
    if "prompt_logprobs" in names:  # all samples have the same prompt
        found["prompt_logprobs"] = [_tokens(_there(metas[0].input_token_logprobs, "prompt_logprobs"))]
    return found


def _tokens(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{"id": number, "token": text, "logprob": logprob} for logprob, number, text in tokens]


def _meta_of(choice: Choice) -> Meta:
    """Return what is known of a choice's tokens; a gateway gives it in OpenAI's form, which has no ids."""
    meta = choice.meta_info or Meta()
    content = choice.logprobs.content if choice.logprobs else None
    if meta.output_token_logprobs is None and content is not None:
        return Meta(
            output_token_logprobs=[_triple(token) for token in content],
            output_top_logprobs=[[_triple(top) for top in token.top_logprobs or []] for token in content],
        )
    return meta


def _triple(token: ChatToken) -> Any:
    return token.logprob, None, token.token


def _there(value: Any, name: str) -> Any:
    if value is None:
        raise _missing(name)
    return value


def _missing(name: str) -> AttemptFailedError:
    return AttemptFailedError(f"the answer came without {name}, which output.columns asks for")


ENDED = "stop"
"""The finish reason of an answer that the model ended, at its end token or at a stop text."""

_HEX = rb"[0-9a-f]{2}"
_ESCAPES = re.compile(
    rb"\\(?:ud[89ab]" + _HEX + rb"\\ud[c-f]" + _HEX + rb"|ud[89a-f]" + _HEX + rb"|.)",
    re.DOTALL | re.IGNORECASE,
)
"""Escapes of a JSON text: a pair of surrogates, a lone surrogate, any other."""
_LONE_SURROGATE_BYTES = len(rb"\ud800")
_REPLACEMENT = rb"\ufffd"


def completion_of(request: Request, reply: bytes, detokenizer: Detokenizer | None = None) -> Completion:
    """Read a reply with status 200.

    Take the `detokenizer` of a server without a tokenizer, whose answers are token ids. Raises RequestError
    where the reply is an abort, no answer, one with fewer or more samples than were asked for, or an empty
    one that the model did not end.
    """
    try:
        if request.kind == "messages":
            return _from_chat(request, decoded(_read_chat, reply))
        if detokenizer is not None:
            return _from_generate(request, _samples_of_ids(request, reply, detokenizer))
        return _from_generate(
            request, decoded(_read_full if _asks_of_tokens(request) else _read_generate, reply)
        )
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise unreadable(failure, reply) from None


def unreadable(failure: Exception, reply: bytes) -> AttemptFailedError:
    """Return the error of a row whose reply could not be read."""
    match failure:
        case msgspec.ValidationError():
            return AttemptFailedError(f"not an answer of SGLang: {short(reply.decode(errors='replace'))}")
        case UnicodeDecodeError():
            return AttemptFailedError("the answer is not UTF-8")
        case msgspec.DecodeError():
            return AttemptFailedError("the answer is not JSON")
    return AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})")


def end_of_row(event: bytes) -> EndOfRow | None:
    """Read an event of a bundle; None where it is none that ends a row, or anything else is odd about it."""
    try:
        found: EndOfRow = _read_end_of_row.decode(event)
    except Exception:  # noqa: BLE001 - as above
        return None
    return found if found.meta_info.finish_reason is not None else None


def event_in(event: bytes) -> Event:
    """Read an event that ends no row as it should; raises what decoding raises."""
    found: Event = decoded(_read_event, event)
    return found


def completion_of_end(request: Request, end: EndOfRow, event: bytes) -> Completion:
    """Return the answer to a row of a bundle from its `event`, read as `end`; raises as `completion_of`."""
    return completion_of(request, event) if _asks_of_tokens(request) else _from_generate(request, end)


def _asks_of_tokens(request: Request) -> bool:
    return request.asks is not None and request.asks.of_tokens


def tokens_in(reply: bytes) -> list[int] | None:
    """Read a reply of `/v1/tokenize`; None where it is none."""
    try:
        return list(decoded(_read_tokens, reply).tokens)
    except Exception:  # noqa: BLE001 - as above
        return None


def decoded(decoder: msgspec.json.Decoder[Any], reply: bytes) -> Any:
    """Decode a reply; where JSON has lone surrogates, which no UTF-8 has, they become U+FFFD."""
    try:
        return decoder.decode(reply)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _ESCAPES.sub(_without_lone_surrogate, reply)
        if mended == reply:
            raise
        return decoder.decode(mended)


def _without_lone_surrogate(escape: re.Match[bytes]) -> bytes:
    found = escape[0]
    return _REPLACEMENT if len(found) == _LONE_SURROGATE_BYTES else found


def _samples_of_ids(request: Request, reply: bytes, detokenizer: Detokenizer) -> Sequence[Sample]:
    try:
        found = decoded(_read_ids, reply)
    except msgspec.DecodeError:
        found = decoded(_read_generate, reply)  # an abort, or no answer of SGLang's
        return found if isinstance(found, list) else [found]
    samples: list[IdsSample] = found if isinstance(found, list) else [found]
    return [
        FullSample(
            detokenizer.text(request, sample.output_ids, _stopped_at(sample.meta_info)),
            sample.meta_info,
            sample.output_ids,
        )
        for sample in samples
    ]


def _from_generate(request: Request, reply: Sample | Sequence[Sample]) -> Completion:
    samples = (reply,) if isinstance(reply, Sample) else reply
    texts, reasons, counts, retractions = [], [], [], 0
    for sample in samples:  # one pass: a comprehension for each list takes twice as long
        meta = sample.meta_info
        reason = meta.finish_reason
        texts.append(sample.text)
        reasons.append(_word_of(reason) if isinstance(reason, Reason) else reason)
        counts.append(meta.completion_tokens)
        retractions += meta.num_retractions or 0
    _check_count(request, len(texts))
    first = samples[0].meta_info
    completion = Completion(
        texts, reasons, counts, first.prompt_tokens, first.cached_tokens, retractions, _weights(first)
    )
    _check(completion)
    if request.asks is None:
        return completion
    if request.asks.only_reasoning and len(samples) == 1 and TAGS not in completion.texts[0]:
        return completion._replace(columns=NO_REASONING)
    thoughts = _thoughts(request, completion.texts)
    columns = columns_of_samples(request.asks, samples, thoughts)
    return completion._replace(texts=[thought.answer for thought in thoughts], columns=columns)


def _from_chat(request: Request, reply: ChatReply) -> Completion:
    for choice in reply.choices:
        if choice.meta_info is not None and isinstance(choice.meta_info.finish_reason, Reason):
            _word_of(choice.meta_info.finish_reason)
    _check_count(request, len(reply.choices))
    choices = _in_order(reply.choices)
    metas = [choice.meta_info or Meta() for choice in choices]
    first, usage = metas[0], reply.usage
    counts = [meta.completion_tokens for meta in metas]
    if counts == [None]:  # a release without return_meta_info
        counts = [usage.completion_tokens]
    prompt_tokens, cached_tokens = first.prompt_tokens, first.cached_tokens
    if prompt_tokens is None:
        prompt_tokens = usage.prompt_tokens
    if cached_tokens is None and usage.prompt_tokens_details is not None:
        cached_tokens = usage.prompt_tokens_details.cached_tokens
    asks, texts = request.asks, [choice.message.content or "" for choice in choices]
    columns: Mapping[str, list[Any]] = NO_COLUMNS
    is_parted = asks is None or (asks.only_reasoning and len(texts) == 1 and TAGS not in texts[0])
    if asks is not None and is_parted:  # nearly always so: the general way takes twice the time for a reply
        columns = {REASONING: [choices[0].message.reasoning_content or None]}
    completion = Completion(
        texts=texts,
        finish_reasons=[choice.finish_reason for choice in choices],
        completion_tokens=counts,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        retractions=sum(meta.num_retractions or 0 for meta in metas),
        weights=_weights(first),
        columns=columns,
    )
    # reasoning that was cut off before the answer is no empty answer, and neither is a call of a tool
    _check(completion, has_more=any(choice.message.has_more for choice in choices))
    if asks is None or is_parted:
        return completion
    thoughts = _thoughts(request, completion.texts)
    ids = reply.sglext.output_ids if reply.sglext else None
    columns = columns_of_choices(asks, choices, thoughts, ids)
    return completion._replace(texts=[thought.answer for thought in thoughts], columns=columns)


def _thoughts(request: Request, texts: Sequence[str]) -> list[Thoughts]:
    """Part the texts into reasoning and answers, where the reasoning has a column."""
    assert request.asks is not None
    if "reasoning" not in request.asks.names:
        return [Thoughts(None, text) for text in texts]
    return [part(text) for text in texts]


def _in_order(choices: Sequence[Choice]) -> Sequence[Choice]:
    """Return the samples of a chat by their numbers; raises AttemptFailedError where one has no text."""
    if len(choices) == 1:
        return choices
    numbers = [choice.index for choice in choices]
    if numbers != [None] * len(choices):
        if sorted(-1 if number is None else number for number in numbers) != list(range(len(choices))):
            raise AttemptFailedError(f"the samples are numbered {short(str(numbers))}")
        choices = sorted(choices, key=lambda choice: choice.index or 0)
    for number, choice in enumerate(choices):
        if choice.message.content is None and not choice.message.has_more:
            raise AttemptFailedError(f"sample {number} of {len(choices)} has no text")
    return choices


def _check_count(request: Request, count: int) -> None:
    """Raise AttemptFailedError for fewer or more samples than `sampling.n`, which is 1 where it is unset."""
    wanted = request.sampling.get("n") or 1
    if count != wanted:
        raise AttemptFailedError(f"{count} samples came, and {wanted} were asked for (sampling.n)")


def _word_of(reason: Reason) -> str:
    """Return SGLang's word; raises for an abort, which a reply with status 200 can be, by its own status."""
    if reason.type != "abort":
        return reason.type
    said = reason.message if isinstance(reason.message, str) else ""
    body = orjson.dumps({"message": said or "aborted by the engine"})
    raise error_of(known_status(reason.status_code), body)


def _check(completion: Completion, *, has_more: bool = False) -> None:
    """Raise AttemptFailedError where this is no answer. An empty one that the model ended is."""
    if "abort" in completion.finish_reasons:
        raise AttemptFailedError("aborted by the engine")
    if not any(completion.texts) and not has_more and ENDED not in completion.finish_reasons:
        raise AttemptFailedError("empty answer")


def _stopped_at(meta: Meta) -> Any:
    reason = meta.finish_reason
    return reason.matched if isinstance(reason, Reason) else None


def _weights(meta: Meta) -> str | None:
    """Return the version of the weights that made an answer, where the server tells it."""
    version = meta.weight_version
    return version if isinstance(version, str) else None


def completion_of_body(body: RequestBody, reply: bytes) -> Completion:
    """Read a reply with status 200 to a whole request; the name of its model becomes that of the request.

    Raises AttemptFailedError where it is an abort or no answer.
    """
    if body.path == EMBEDDINGS_PATH:
        return _vectors(body, reply)
    try:
        found = decoded(_read_body, reply)
        _check_choices(body, found.choices)
        kept = _as_line(decoded(_read_fields, reply), body.model)
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise unreadable(failure, reply) from None
    first, usage = found.choices[0], found.usage or Usage()
    details = usage.prompt_tokens_details
    weights = found.metadata.weight_version if found.metadata else None
    return Completion(
        texts=[(first.message.content if first.message else first.text) or ""],
        finish_reasons=[first.finish_reason],
        completion_tokens=[usage.completion_tokens],
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details else None,
        weights=weights if isinstance(weights, str) else None,
        columns={RESPONSE: [kept]},
    )


def _vectors(body: RequestBody, reply: bytes) -> Completion:
    """Read a reply with vectors; raises RequestError where it is none, or one of them has no use."""
    try:
        prompt_tokens = check_embeddings(reply, len(prompts_in(body)) or None)
        kept = _as_line(decoded(_read_fields, reply), body.model)
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise unreadable(failure, reply) from None
    return Completion([""], ["stop"], [0], prompt_tokens, None, columns={RESPONSE: [kept]})


def _check_choices(body: RequestBody, choices: list[BodyChoice]) -> None:
    if any(choice.finish_reason == "abort" for choice in choices):
        raise AttemptFailedError("aborted by the engine")
    is_chat = body.path == CHAT_PATH
    if any((choice.message if is_chat else choice.text) is None for choice in choices):
        raise AttemptFailedError(f"not an answer of {body.path}: a choice has no text")
    wanted = fields_of(body.content).get("n") if is_chat else None
    asked = len(choices) if wanted is None else msgspec.json.decode(wanted)
    if isinstance(asked, (int, float)) and asked != len(choices):
        raise AttemptFailedError(f"{len(choices)} choices came, and {asked} were asked for (n)")


def _as_line(fields: dict[str, msgspec.Raw], model: str | None) -> str:
    """Return the fields as JSON on one line, each value as it came; `model` is the request's, or None."""
    if model is not None and "model" in fields:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    content = msgspec.json.encode(fields)
    if b"\n" in content or b"\r" in content:
        content = msgspec.json.format(content, indent=-1)
    return content.decode()


def answer_of(request: Request, reply: bytes) -> Completion:
    """Read a reply to one request of a task without decoding; raises RequestError where it has no answer."""
    (result,) = answers_of([request], reply)
    if isinstance(result, RequestError):
        raise result
    return result


def answers_of(requests: Sequence[Request], reply: bytes) -> list[Completion | RequestError]:
    """Read a reply to requests of one task without decoding; raises RequestError where it is none to them."""
    task = requests[0].task
    assert task is not None
    try:
        return task.answers(requests, reply)
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise unreadable(failure, reply) from None
