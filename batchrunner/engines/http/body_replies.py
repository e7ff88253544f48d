"""Replies to whole requests (chats, text completions, embeddings), kept as they come. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from batchrunner.core.endpoints import CHAT_PATH, EMBEDDINGS_PATH
from batchrunner.core.errors import AttemptFailedError, RequestError
from batchrunner.core.types import Completion, RequestBody
from batchrunner.engines.http.replies import decoded, unreadable
from batchrunner.engines.http.reply_shapes import Usage, Word
from batchrunner.input.request_bodies import fields_of, prompts_in
from batchrunner.job.output import RESPONSE
from batchrunner.job.tasks.embed import check_embeddings


class _BodyMessage(msgspec.Struct):
    content: str | None = None


class _BodyChoice(msgspec.Struct):
    text: str | None = None
    message: _BodyMessage | None = None
    finish_reason: Word | None = None


class _Metadata(msgspec.Struct):
    weight_version: Any = None


class _BodyReply(msgspec.Struct):
    choices: Annotated[list[_BodyChoice], msgspec.Meta(min_length=1)]
    usage: Usage | None = None
    metadata: _Metadata | None = None


_read_reply = msgspec.json.Decoder(_BodyReply)
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def completion_of_body(body: RequestBody, reply: bytes) -> Completion:
    """Read a reply with status 200 to a whole request; the name of its model becomes that of the request.

    Raises AttemptFailedError where it is an abort or no answer.
    """
    if body.path == EMBEDDINGS_PATH:
        return _vectors(body, reply)
    try:
        found = decoded(_read_reply, reply)
        _check(body, found.choices)
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


def _check(body: RequestBody, choices: list[_BodyChoice]) -> None:
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
