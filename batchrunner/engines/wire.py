"""Requests and replies as SGLang's HTTP interface has them: pure, no connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from batchrunner.errors import AttemptFailedError, EngineBusyError, RequestError, RowRefusedError
from batchrunner.records import Completion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchrunner.records import Request

ERROR_CHARACTERS = 500
"""An error message in a result row is cut to this length."""

# /generate's name → /v1/chat/completions' name, where they differ
_CHAT_NAMES = {
    "max_new_tokens": "max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_BUSY = {429, 502, 503, 504}
_REFUSED = {400, 404, 413, 422}


def path_of(request: Request) -> str:
    """Return the endpoint for this kind of prompt: the server renders the chat template of messages."""
    return "/v1/chat/completions" if request.kind == "messages" else "/generate"


def refuse_deadly(request: Request, vocabulary: int | None) -> None:
    """Raise RowRefusedError for what a server would accept and die of.

    Seen on SGLang 0.5.23: an empty `text`, and a token id that the model does not have, end the scheduler,
    and every row in flight with it.
    """
    if request.kind == "messages":
        return
    if not request.prompt:
        raise RowRefusedError("the prompt is empty")
    if request.kind == "input_ids":
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            bad = low if low < 0 else high
            known = f"0 to {vocabulary - 1}" if vocabulary else "0 and more"
            raise RowRefusedError(f"token id {bad} is not in the model's vocabulary ({known})")


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


def completion_of(request: Request, reply: Any) -> Completion:
    """Read a reply with status 200; raises RequestError where it is an abort, empty or no answer."""
    try:
        completion = _from_chat(reply) if request.kind == "messages" else _from_generate(reply)
    except (KeyError, TypeError, IndexError, AttributeError):
        raise AttemptFailedError(f"not an answer of SGLang: {_short(orjson.dumps(reply).decode())}") from None
    if "abort" in completion.finish_reasons:
        raise AttemptFailedError("aborted by the engine")
    if not any(completion.texts):
        raise AttemptFailedError("empty answer")
    return completion


def error_of(status: int, body: bytes, retry_after: str | None = None) -> RequestError:
    """Say what a reply with another status means for the row."""
    message = f"{status}: {_message_of(body)}"
    if status in _BUSY:
        seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
        return EngineBusyError(message, seconds)
    if status in _REFUSED:
        return RowRefusedError(message)
    return AttemptFailedError(message)


def _from_generate(reply: Any) -> Completion:
    samples: Sequence[Mapping[str, Any]] = reply if isinstance(reply, list) else [reply]
    metas = [sample["meta_info"] for sample in samples]
    _check_aborts(metas)
    return Completion(
        texts=[sample["text"] for sample in samples],
        finish_reasons=[_reason(meta) for meta in metas],
        completion_tokens=[meta.get("completion_tokens") for meta in metas],
        prompt_tokens=metas[0].get("prompt_tokens"),
        cached_tokens=metas[0].get("cached_tokens"),
    )


def _from_chat(reply: Any) -> Completion:
    choices: Sequence[Mapping[str, Any]] = reply["choices"]
    metas = [choice.get("meta_info") or {} for choice in choices]
    _check_aborts(metas)
    usage = reply["usage"]
    counts = [meta.get("completion_tokens") for meta in metas]
    if len(choices) == 1 and counts[0] is None:  # a release without return_meta_info
        counts = [usage.get("completion_tokens")]
    details = usage.get("prompt_tokens_details") or {}
    prompt_tokens = metas[0].get("prompt_tokens", usage.get("prompt_tokens"))
    return Completion(
        texts=[choice["message"].get("content") or "" for choice in choices],
        finish_reasons=[choice.get("finish_reason") for choice in choices],
        completion_tokens=counts,
        prompt_tokens=prompt_tokens,
        cached_tokens=metas[0].get("cached_tokens", details.get("cached_tokens")),
    )


def _reason(meta: Mapping[str, Any]) -> str | None:
    reason = meta.get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else reason


def _check_aborts(metas: Sequence[Mapping[str, Any]]) -> None:
    """Raise for an abort, which a 200 can carry with a status of its own that says whose fault it is."""
    for meta in metas:
        reason = meta.get("finish_reason")
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


def _message_of(body: bytes) -> str:
    """Dig the sentence out of SGLang's several shapes of an error body."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _short(body.decode(errors="replace")) or "no explanation"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _short(found if isinstance(found, str) else orjson.dumps(found).decode())


def _short(text: str) -> str:
    """One line without the server's own stack, which follows a blank line."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    return line if len(line) <= ERROR_CHARACTERS else line[: ERROR_CHARACTERS - 1] + "…"
