"""Bodies of requests in OpenAI's format, as in batch files: what is sent, and which fields hold prompts."""

from typing import Any

import msgspec

from batchrunner.core.types import COMPLETIONS_PATH, EMBEDDINGS_PATH, RequestBody

CUSTOM_ID, URL, BODY = BATCH_COLUMNS = ("custom_id", "url", "body")
"""Columns of a batch file: the ID of a request, its endpoint, and its body."""
PROMPT_FIELDS = ("tools", "messages", "prompt", "input_ids", "input")
"""Fields whose values begin the prompt, in the order in which chat templates write them."""
_PLAIN_PROMPTS = ("prompt", "input_ids")
_TO_EMBED = ("input",)
_LIMITS = ("max_completion_tokens", "max_tokens")
CHAT_TOKENS, COMPLETION_TOKENS = 1024, 16
"""Estimated output tokens of a request without a limit. 16 is SGLang's own limit for completions."""
_STREAMED = ("stream", "stream_options")
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def request_of(row: dict[str, Any]) -> RequestBody:
    """Return the request of a row. The values of its body stay as they are written in the file."""
    fields = fields_of(row[BODY].encode())
    model = fields.pop("model", None)
    for name in _STREAMED:  # answers are not streamed
        fields.pop(name, None)
    return RequestBody(
        path=row[URL],
        content=msgspec.json.encode(fields),
        model=None if model is None else msgspec.json.decode(model),
        most_tokens=_most_tokens(row[URL], fields),
    )


def fields_of(content: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object; their values stay as they are written."""
    return _read_fields.decode(content)


def with_model(body: RequestBody, model: str | None) -> bytes:
    """Return a body as it is sent, with the name of the model unless that is None."""
    if model is None:
        return body.content
    return msgspec.json.encode({"model": model, **fields_of(body.content)})


def prompt_of(body: RequestBody) -> bytes:
    """Return the JSON of the fields that begin the prompt, by which common prefixes are found."""
    fields = fields_of(body.content)
    return b"".join(fields[name] for name in PROMPT_FIELDS if name in fields)


def prompts_in(body: RequestBody) -> list[Any]:
    """Return the prompts that reach the model without a chat template: texts and lists of token ids.

    A field may hold several prompts in a list. A value that is no prompt is left to the server to refuse.
    """
    fields = fields_of(body.content)
    values: list[Any] = []
    for name in _TO_EMBED if body.path == EMBEDDINGS_PATH else _PLAIN_PROMPTS:
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if isinstance(value, list) and any(isinstance(item, (str, list)) for item in value):
            values += value
        else:
            values.append(value)
    return [value for value in values if isinstance(value, str) or _is_ids(value)]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(item is None or type(item) is int for item in prompt)


def _most_tokens(path: str, fields: dict[str, msgspec.Raw]) -> int:
    """Return a request's limit of output tokens, or an estimate if the request has no limit."""
    if path == EMBEDDINGS_PATH:
        return 1
    for name in _LIMITS:
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if type(value) is int and value > 0:
            return value
    return COMPLETION_TOKENS if path == COMPLETIONS_PATH else CHAT_TOKENS
