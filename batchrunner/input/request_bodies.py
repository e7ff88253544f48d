"""Reads request bodies in OpenAI's format, as in batch files, and makes the bodies to send."""

from typing import Any

import msgspec

from batchrunner.core.types import (
    CHAT_PATH,
    CLASSIFY_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    SCORE_PATH,
    RequestBody,
)

CUSTOM_ID, URL, BODY = BATCH_COLUMNS = ("custom_id", "url", "body")
"""Columns of a batch file: the ID of a request, its endpoint, and its body."""
PROMPT_FIELDS = (
    "instructions", "tools", "messages", "prompt", "input_ids", "query", "input", "items", "documents",
)  # fmt: skip
"""Fields of a body that make up the prompt, in the order in which chat templates write them."""
_PLAIN_PROMPTS = {
    COMPLETIONS_PATH: ("prompt", "input_ids"),
    EMBEDDINGS_PATH: ("input",),
    CLASSIFY_PATH: ("input",),
    SCORE_PATH: ("query", "items"),
}
"""Fields with prompts that reach the model without a chat template, by endpoint."""
_WITHOUT_DECODING = {EMBEDDINGS_PATH, CLASSIFY_PATH, SCORE_PATH, RERANK_PATH}
"""Endpoints that generate no output tokens."""
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""Fields with the limit of output tokens. The first one takes precedence."""
CHAT_TOKENS = 1024
"""Estimated output tokens of a chat without a limit."""
COMPLETION_TOKENS = 16
"""Output tokens of a completion without a limit: SGLang's default for this endpoint."""
THINKING_BUDGET = "thinking_budget"
"""Key in `custom_params` that limits the thinking tokens in SGLang's chat endpoint."""
_STREAMED = ("stream", "stream_options")
"""Fields that are not sent, because answers are not streamed."""
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def request_of(row: dict[str, Any]) -> RequestBody:
    """Return the request in a row of a batch file. Values in its body stay raw JSON."""
    fields = fields_of(row[BODY].encode())
    # The name is kept apart from the body, because a client may send another form of it: `model:adapter`.
    model = fields.pop("model", None)
    for name in _STREAMED:
        fields.pop(name, None)
    most_thinking = _most_thinking(row[URL], fields)
    if most_thinking is not None:
        fields["custom_params"] = _with_budget(fields.get("custom_params"), most_thinking)
    return RequestBody(
        path=row[URL],
        content=msgspec.json.encode(fields),
        model=None if model is None else msgspec.json.decode(model),
        most_tokens=_most_tokens(row[URL], fields),
        most_thinking=most_thinking,
    )


def fields_of(content: bytes) -> dict[str, msgspec.Raw]:
    """Return the raw JSON of each field of a JSON object."""
    return _read_fields.decode(content)


def with_model(body: RequestBody, model: str | None) -> bytes:
    """Return the JSON of a body with the field `model` set; unchanged if `model` is None."""
    if model is None:
        return body.content
    return msgspec.json.encode({"model": model, **fields_of(body.content)})


def prompt_of(body: RequestBody) -> bytes:
    """Return the JSON of a body's PROMPT_FIELDS, by which bodies are compared to find common prefixes."""
    fields = fields_of(body.content)
    return b"".join(fields[name] for name in PROMPT_FIELDS if name in fields)


def prompts_in(body: RequestBody) -> list[Any]:
    """Return the prompts to which no chat template is applied, as texts and lists of token ids.

    A field may hold several prompts in a list. Invalid prompts are left out, because the server refuses the
    whole request anyway.
    """
    fields = fields_of(body.content)
    values: list[Any] = []
    for name in _PLAIN_PROMPTS.get(body.path, ()):
        value = msgspec.json.decode(fields[name]) if name in fields else None
        # A list of texts or lists is several prompts. A list of integers is one prompt, as token ids.
        if isinstance(value, list) and any(isinstance(item, (str, list)) for item in value):
            values += value
        else:
            values.append(value)
    valid_values = [value for value in values if isinstance(value, str) or _is_ids(value)]
    if body.path == SCORE_PATH:
        # A prompt is the query with an item. One of them may be empty, and then it has no tokens.
        return [value for value in valid_values if value]
    return valid_values


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(item is None or type(item) is int for item in prompt)


def _most_thinking(path: str, fields: dict[str, msgspec.Raw]) -> int | None:
    """Return the limit of thinking tokens in a chat's `reasoning: {max_tokens: …}`; None without one."""
    if path != CHAT_PATH or "reasoning" not in fields:
        return None
    reasoning = msgspec.json.decode(fields["reasoning"])
    limit = reasoning.get("max_tokens") if isinstance(reasoning, dict) else None
    # The exact type is compared, because True is an instance of int.
    return limit if type(limit) is int and limit >= 0 else None


def _with_budget(custom_params: msgspec.Raw | None, budget: int) -> msgspec.Raw:
    """Return a chat's `custom_params` with `budget` as the limit of thinking tokens."""
    parsed = msgspec.json.decode(custom_params) if custom_params is not None else None
    params = parsed if isinstance(parsed, dict) else {}
    return msgspec.Raw(msgspec.json.encode({**params, THINKING_BUDGET: budget}))


def _most_tokens(path: str, fields: dict[str, msgspec.Raw]) -> int:
    """Return a request's limit of output tokens, or an estimate if it has no limit."""
    if path in _WITHOUT_DECODING:
        # These endpoints generate no output, but the limit must be at least 1.
        return 1
    for name in _LIMITS:
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if type(value) is int and value > 0:
            return value
    return COMPLETION_TOKENS if path == COMPLETIONS_PATH else CHAT_TOKENS
