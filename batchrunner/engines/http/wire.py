"""The format of requests and replies of SGLang's HTTP interface. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import orjson

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.types import Completion, Request
from batchrunner.input.tokenize.detokenizer import Detokenizer
from batchrunner.job.engine import GATEWAY_DROPS

ERROR_CHARACTERS = 500
"""Most characters of an error message in a result row."""

# /generate's name → /v1/chat/completions' name, where they differ
_CHAT_NAMES = {
    "max_new_tokens": "max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


# The fields that are read of a reply: the rest is skipped without being made into Python values.


class _Meta(msgspec.Struct):
    finish_reason: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None


class _Sample(msgspec.Struct):
    text: str
    meta_info: _Meta


class _IdsSample(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    meta_info: _Meta | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _ChatReply(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage


_GenerateReply = _Sample | Annotated[list[_Sample], msgspec.Meta(min_length=1)]
_IdsReply = _IdsSample | Annotated[list[_IdsSample], msgspec.Meta(min_length=1)]
_read_chat = msgspec.json.Decoder(_ChatReply).decode
_read_generate = msgspec.json.Decoder(_GenerateReply).decode
_read_ids = msgspec.json.Decoder(_IdsReply).decode

_BUSY = {429, 502, 503, 504}
_REFUSED = {400, 404, 413, 422}
# A gateway's error codes where no replica took the row, or the replica ended before the answer was complete.
# sglang_router 0.3.2 gives them with status 500, for a refused connection and for one that was cut off.
_REPLICA_DOWN = (
    "call_upstream_",
    "read_response_",
    "no_workers",
    "no_available_workers",
    "no_healthy_workers",
)


GENERATE_PATH, CHAT_PATH, TOKENIZE_PATH = "/generate", "/v1/chat/completions", "/v1/tokenize"


def path_of(request: Request) -> str:
    """Return the endpoint for this kind of prompt: the server renders the chat template of messages."""
    return CHAT_PATH if request.kind == "messages" else GENERATE_PATH


def refuse_deadly(request: Request, vocabulary: int | None) -> None:
    """Raise RowRefusedError for a prompt that a server would accept and die of.

    In SGLang 0.5.23 an empty `text` and a token id that the model does not have end the scheduler, and with
    it every row in flight.
    """
    if request.kind == "messages":
        return
    if not request.prompt:
        raise RowRefusedError("the prompt is empty")
    if request.kind == "input_ids":
        if None in request.prompt:
            raise RowRefusedError("a token id is null")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            bad = low if low < 0 else high
            known = f"0 to {vocabulary - 1}" if vocabulary else "0 and more"
            raise RowRefusedError(f"token id {bad} is not in the model's vocabulary ({known})")


def refuse_dropped(request: Request) -> None:
    """Raise RowRefusedError for parameters that a gateway would drop, which would change the answer."""
    dropped = GATEWAY_DROPS["chat" if request.kind == "messages" else "generate"]
    if not dropped.isdisjoint(request.sampling):
        name = min(dropped.intersection(request.sampling))
        raise RowRefusedError(f"{name}: the gateway leaves it out of what it passes on")


def body_of(request: Request) -> dict[str, Any]:
    """Make the body for the endpoint of this kind of prompt."""
    return chat_body(request) if request.kind == "messages" else generate_body(request)


def bytes_of(body: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a body as JSON; raises RowRefusedError for values that neither JSON nor `default` can write."""
    try:
        return orjson.dumps(body, default=default)
    except TypeError as failure:  # an unpaired surrogate, which a template can write
        raise RowRefusedError(f"the prompt cannot be sent: {failure}") from None


def generate_body(request: Request) -> dict[str, Any]:
    """Make the body for `/generate`."""
    body = {request.kind: request.prompt, "sampling_params": request.sampling}
    if request.lora_path is not None:
        body["lora_path"] = request.lora_path
    return body


def chat_body(request: Request) -> dict[str, Any]:
    """Make the body for `/v1/chat/completions`, with `return_meta_info` for the counts of each sample."""
    sampling = dict(request.sampling)
    body: dict[str, Any] = {"model": "default", "messages": request.prompt, "return_meta_info": True}
    template_kwargs = dict(request.chat_template_kwargs or {})
    schema = sampling.pop("json_schema", None)
    if schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": _json(schema, "json_schema"), "strict": True},
        }
    tag = sampling.pop("structural_tag", None)
    if tag is not None:
        body["response_format"] = {"type": "structural_tag", **_json(tag, "structural_tag")}
    spaces = sampling.pop("spaces_between_special_tokens", None)
    if spaces is not None:  # the chat endpoint of SGLang 0.5 takes it from here
        template_kwargs["spaces_between_special_tokens"] = spaces
    body.update({_CHAT_NAMES.get(name, name): value for name, value in sampling.items()})
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    if request.lora_path is not None:
        body["lora_path"] = request.lora_path
    return body


def tokenize_body(request: Request) -> dict[str, Any]:
    """Make the body for `/v1/tokenize`, to get the tokens that the prompt's own endpoint would use."""
    if request.kind == "messages":
        body = {"messages": request.prompt, "chat_template_kwargs": request.chat_template_kwargs}
        return {"model": "default", **body}
    return {"model": "default", "prompt": request.prompt}


def tokens_in(reply: bytes | Any) -> list[int] | None:
    """Read a reply of `/v1/tokenize`, as JSON or as its plain Python values."""
    try:
        found = orjson.loads(reply) if isinstance(reply, bytes) else reply
        return [int(token) for token in found["tokens"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def completion_of(request: Request, reply: bytes | Any) -> Completion:
    """Read a reply with status 200, as JSON or as its plain Python values.

    Raises RequestError where it is an abort, empty or no answer.
    """
    chat = request.kind == "messages"
    try:
        if not isinstance(reply, bytes):
            found: Any = msgspec.convert(reply, _ChatReply if chat else _GenerateReply)
        else:
            found = (_read_chat if chat else _read_generate)(reply)
    except msgspec.ValidationError:
        text = reply if isinstance(reply, bytes) else orjson.dumps(reply, default=str)
        raise AttemptFailedError(
            f"not an answer of SGLang: {_short(text.decode(errors='replace'))}"
        ) from None
    except msgspec.DecodeError:
        raise AttemptFailedError("the answer is not JSON") from None
    if chat:  # reasoning that was cut off before the answer is no empty answer
        return _checked(_from_chat(found), any(c.message.reasoning_content for c in found.choices))
    return _checked(_from_generate(found))


def _checked(completion: Completion, reasoned: bool = False) -> Completion:
    if "abort" in completion.finish_reasons:
        raise AttemptFailedError("aborted by the engine")
    if not any(completion.texts) and not reasoned:
        raise AttemptFailedError("empty answer")
    return completion


def completion_in_ids(request: Request, reply: bytes, detokenizer: Detokenizer) -> Completion:
    """Read a reply with status 200 of a server without a tokenizer; raises as `completion_of` does."""
    try:
        found = _read_ids(reply)
    except msgspec.DecodeError:
        return completion_of(request, reply)  # an abort, or no answer of SGLang's
    samples = found if isinstance(found, list) else [found]
    read = [
        _Sample(
            detokenizer.text(request, sample.output_ids, sample.meta_info.finish_reason), sample.meta_info
        )
        for sample in samples
    ]
    return _checked(_from_generate(read))


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """Return the error that a reply with another status means for the row."""
    message = f"{status}: {_message_of(body)}"
    if status >= 500 and _code_of(body).startswith(_REPLICA_DOWN):  # noqa: PLR2004
        return EngineDownError(message)
    if status in _BUSY:
        seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
        return EngineBusyError(message, seconds)
    if status in _REFUSED:
        return RowRefusedError(message)
    return AttemptFailedError(message)


def _from_generate(reply: _Sample | list[_Sample]) -> Completion:
    samples = reply if isinstance(reply, list) else [reply]
    metas = [sample.meta_info for sample in samples]
    _check_aborts(metas)
    return Completion(
        texts=[sample.text for sample in samples],
        finish_reasons=[_reason(meta.finish_reason) for meta in metas],
        completion_tokens=[meta.completion_tokens for meta in metas],
        prompt_tokens=metas[0].prompt_tokens,
        cached_tokens=metas[0].cached_tokens,
        retractions=sum(meta.num_retractions or 0 for meta in metas),
    )


def _from_chat(reply: _ChatReply) -> Completion:
    metas = [choice.meta_info or _Meta() for choice in reply.choices]
    _check_aborts(metas)
    first, usage = metas[0], reply.usage
    counts = [meta.completion_tokens for meta in metas]
    if counts == [None]:  # a release without return_meta_info
        counts = [usage.completion_tokens]
    prompt_tokens, cached_tokens = first.prompt_tokens, first.cached_tokens
    if prompt_tokens is None:
        prompt_tokens = usage.prompt_tokens
    if cached_tokens is None and usage.prompt_tokens_details is not None:
        cached_tokens = usage.prompt_tokens_details.cached_tokens
    return Completion(
        texts=[choice.message.content or "" for choice in reply.choices],
        finish_reasons=[choice.finish_reason for choice in reply.choices],
        completion_tokens=counts,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        retractions=sum(meta.num_retractions or 0 for meta in metas),
    )


def _reason(reason: Any) -> str | None:
    return reason.get("type") if isinstance(reason, dict) else reason


def _check_aborts(metas: Sequence[_Meta]) -> None:
    """Raise for an abort, which a reply with status 200 can contain, with a status of its own."""
    for meta in metas:
        reason = meta.finish_reason
        if isinstance(reason, dict) and reason.get("type") == "abort":
            message = orjson.dumps({"message": reason.get("message") or "aborted by the engine"})
            raise error_of(int(reason.get("status_code") or 500), message)


def _json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as failure:
        raise RowRefusedError(f"{name} is not JSON: {failure}") from None


def _code_of(body: bytes) -> str:
    """Return the gateway's code of an error; empty where the body is not a gateway's."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def _message_of(body: bytes) -> str:
    """Return the sentence in an error body, of which SGLang has several formats."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _short(body.decode(errors="replace")) or "no explanation"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _short(found if isinstance(found, str) else orjson.dumps(found).decode())


def _short(text: str) -> str:
    """Return the first paragraph as one line, cut to 500 characters: a stack trace may follow it."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"
