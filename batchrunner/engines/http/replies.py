"""Replies of SGLang's HTTP interface → completions and errors. Pure.

Whatever bytes come, reading them ends in a completion or in a RequestError of the row.
"""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    RequestError,
)
from batchrunner.core.types import NO_COLUMNS, Completion, Request
from batchrunner.engines.http.answer_columns import (
    NO_REASONING,
    TAGS,
    Thoughts,
    columns_of_choices,
    columns_of_samples,
    part,
)
from batchrunner.engines.http.reply_errors import error_of, short
from batchrunner.engines.http.reply_shapes import (
    ChatReply,
    Choice,
    EndOfRow,
    FullChatReply,
    FullSample,
    IdsSample,
    Meta,
    Reason,
    Sample,
    read_chat,
    read_end_of_row,
    read_full_chat,
    read_full_generate,
    read_generate,
    read_ids,
    read_tokens,
)
from batchrunner.input.tokenize.detokenizer import Detokenizer
from batchrunner.job.output import REASONING

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


def completion_of(request: Request, reply: bytes | Any, detokenizer: Detokenizer | None = None) -> Completion:
    """Read a reply with status 200, as JSON or as its plain Python values.

    Take the `detokenizer` of a server without a tokenizer, whose answers are token ids. Raises RequestError
    where the reply is an abort, no answer, one with fewer or more samples than were asked for, or an empty
    one that the model did not end.
    """
    full = _asks_of_tokens(request)
    try:
        if request.kind == "messages":
            return _from_chat(request, decoded(read_full_chat if full else read_chat, reply))
        if detokenizer is not None:
            return _from_generate(request, _samples_of_ids(request, reply, detokenizer))
        return _from_generate(request, decoded(read_full_generate if full else read_generate, reply))
    except RequestError:
        raise
    except Exception as failure:  # noqa: BLE001 - nothing that a server sends may end a run
        raise unreadable(failure, reply) from None


def unreadable(failure: Exception, reply: bytes | Any) -> AttemptFailedError:
    """Return the error of a row whose reply could not be read."""
    match failure:
        case msgspec.ValidationError():
            text = reply if isinstance(reply, bytes) else orjson.dumps(reply, default=str)
            return AttemptFailedError(f"not an answer of SGLang: {short(text.decode(errors='replace'))}")
        case UnicodeDecodeError():
            return AttemptFailedError("the answer is not UTF-8")
        case msgspec.DecodeError():
            return AttemptFailedError("the answer is not JSON")
    return AttemptFailedError(f"the answer cannot be read ({type(failure).__name__})")


def end_of_row(event: bytes) -> EndOfRow | None:
    """Read an event of a bundle; None where it is none that ends a row, or anything else is odd about it."""
    try:
        found: EndOfRow = read_end_of_row.decode(event)
    except Exception:  # noqa: BLE001 - as above
        return None
    return found if found.meta_info.finish_reason is not None else None


def completion_of_end(request: Request, end: EndOfRow, event: bytes) -> Completion:
    """Return the answer to a row of a bundle from its `event`, read as `end`; raises as `completion_of`."""
    return completion_of(request, event) if _asks_of_tokens(request) else _from_generate(request, end)


def _asks_of_tokens(request: Request) -> bool:
    return request.asks is not None and request.asks.of_tokens


def tokens_in(reply: bytes | Any) -> list[int] | None:
    """Read a reply of `/v1/tokenize`, as JSON or as its plain Python values; None where it is none."""
    try:
        return list(decoded(read_tokens, reply).tokens)
    except Exception:  # noqa: BLE001 - as above
        return None


def decoded(decoder: msgspec.json.Decoder[Any], reply: bytes | Any) -> Any:
    """Decode a reply; where JSON has lone surrogates, which no UTF-8 has, they become U+FFFD."""
    if not isinstance(reply, bytes):
        return msgspec.convert(reply, decoder.type)
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


def _samples_of_ids(
    request: Request, reply: bytes, detokenizer: Detokenizer
) -> Sequence[Sample | FullSample]:
    try:
        found = decoded(read_ids, reply)
    except msgspec.DecodeError:
        found = decoded(read_generate, reply)  # an abort, or no answer of SGLang's
        return found if isinstance(found, list) else [found]
    samples: list[IdsSample] = found if isinstance(found, list) else [found]
    return [
        FullSample(
            detokenizer.text(request, sample.output_ids, _matched(sample.meta_info)),
            sample.meta_info,
            sample.output_ids,
        )
        for sample in samples
    ]


def _from_generate(
    request: Request, reply: Sample | FullSample | Sequence[Sample | FullSample]
) -> Completion:
    samples = (reply,) if isinstance(reply, (Sample, FullSample)) else reply
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


def _from_chat(request: Request, reply: ChatReply | FullChatReply) -> Completion:
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
    ids = reply.sglext.output_ids if isinstance(reply, FullChatReply) and reply.sglext else None
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
    code = reason.status_code
    known = type(code) is int and HTTPStatus.BAD_REQUEST <= code < 600  # noqa: PLR2004
    body = orjson.dumps({"message": said or "aborted by the engine"})
    raise error_of(code if known else HTTPStatus.INTERNAL_SERVER_ERROR.value, body)


def _check(completion: Completion, *, has_more: bool = False) -> None:
    """Raise AttemptFailedError where this is no answer. An empty one that the model ended is."""
    if "abort" in completion.finish_reasons:
        raise AttemptFailedError("aborted by the engine")
    if not any(completion.texts) and not has_more and ENDED not in completion.finish_reasons:
        raise AttemptFailedError("empty answer")


def _matched(meta: Meta) -> Any:
    reason = meta.finish_reason
    return reason.matched if isinstance(reason, Reason) else None


def _weights(meta: Meta) -> str | None:
    """Return the version of the weights that made an answer, where the server tells it."""
    version = meta.weight_version
    return version if isinstance(version, str) else None
