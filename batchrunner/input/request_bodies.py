"""Batch files in OpenAI's format: whole requests, what of them is sent, and where their prompts are.

`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from batchrunner.core.files import LONGEST_LINE_BYTES
from batchrunner.core.types import BATCH_PATHS, COMPLETIONS_PATH, EMBEDDINGS_PATH, RequestBody

CUSTOM_ID, URL, BODY = BATCH_COLUMNS = ("custom_id", "url", "body")
"""Columns of a batch file: the ID of a request, and what makes it."""
PROMPT_FIELDS = ("tools", "messages", "prompt", "input_ids", "input")
"""Fields whose values begin the prompt, in the order in which chat templates write them."""
_PLAIN_PROMPTS = ("prompt", "input_ids")
_TO_EMBED = ("input",)
_LIMITS = ("max_completion_tokens", "max_tokens")
CHAT_TOKENS, COMPLETION_TOKENS = 1024, 16
"""Output tokens that are expected of a request without a limit; SGLang's own limit of completions is 16."""
TOO_LONG = f"is longer than {LONGEST_LINE_BYTES >> 20} MiB"
_STREAMED = ("stream", "stream_options")
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Named(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]


class _Line(_Named):
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str | None = None


_read_name = msgspec.json.Decoder(_Named)
_read_line = msgspec.json.Decoder(_Line)
_read_body = msgspec.json.Decoder(_Body)


def request_lines(lines: Iterable[bytes | None]) -> Iterator[tuple[int, dict[str, str], str | None, int]]:
    """Yield the number of each line, the request on it, why it is none, and its bytes.

    A line that is too long to be read is None. The first request says whether all are for vectors, and the
    first that names a model, which one.
    """
    embeds: bool | None = None
    model: str | None = None
    for number, line in enumerate(lines, 1):
        if line is None:
            yield number, {}, f"not a request: it {TOO_LONG}", 0
            continue
        text, problem = line.strip(), None
        if not text:
            continue
        try:
            request, asked = _request_in(text)
            _check_alike(request, asked, embeds, model)
            embeds, model = request.url == EMBEDDINGS_PATH, model or asked
            row = {CUSTOM_ID: request.custom_id, URL: request.url, BODY: bytes(request.body).decode()}
        except (ValueError, RecursionError) as failure:  # among them those of msgspec, and of UTF-8
            row, problem = _named(text), f"not a request: {failure}"
        yield number, row, problem, len(line)


def _request_in(text: bytes) -> tuple[_Line, str | None]:
    """Return the request on a line, and the model that it names; raises ValueError or RecursionError."""
    text.decode()
    request = _read_line.decode(text)
    if request.url not in BATCH_PATHS:
        raise ValueError(f"url should be {' or '.join(BATCH_PATHS)} (got {request.url!r:.60})")
    return request, _read_body.decode(request.body).model


def _check_alike(request: _Line, asked: str | None, embeds: bool | None, model: str | None) -> None:
    """Raise ValueError where a request needs another model than those before."""
    if embeds not in {None, request.url == EMBEDDINGS_PATH}:
        raise ValueError("one model makes no embeddings and answers")
    if None not in {asked, model} and asked != model:
        raise ValueError(f"asks for the model {asked!r}, an earlier line for {model!r}: divide the file")


def _named(text: bytes) -> dict[str, str]:
    """Return the custom_id of a line that is no request otherwise."""
    try:
        return {CUSTOM_ID: _read_name.decode(text).custom_id}
    except (ValueError, RecursionError):
        return {}


def request_of(row: dict[str, Any]) -> RequestBody:
    """Return the request of a row, with the values of its body as they stand in the file."""
    fields = fields_of(row[BODY].encode())
    model = fields.pop("model", None)
    for name in _STREAMED:  # each answer comes whole
        fields.pop(name, None)
    return RequestBody(
        path=row[URL],
        content=msgspec.json.encode(fields),
        model=None if model is None else msgspec.json.decode(model),
        most_tokens=_most_tokens(row[URL], fields),
    )


def fields_of(content: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object with their values as they stand in it."""
    return _read_fields.decode(content)


def with_model(body: RequestBody, model: str | None) -> bytes:
    """Return a body as it is sent, with the name of a model unless that is None."""
    if model is None:
        return body.content
    return msgspec.json.encode({"model": model, **fields_of(body.content)})


def prompt_of(body: RequestBody) -> bytes:
    """Return the JSON of what begins the prompt, by which requests with a common prefix are found."""
    fields = fields_of(body.content)
    return b"".join(fields[name] for name in PROMPT_FIELDS if name in fields)


def prompts_in(body: RequestBody) -> list[Any]:
    """Return the texts and lists of token ids among what is sent to the model without a chat template.

    A list of texts or of lists has several prompts. What is none of these is left to the server to refuse.
    """
    fields = fields_of(body.content)
    found: list[Any] = []
    for name in _TO_EMBED if body.path == EMBEDDINGS_PATH else _PLAIN_PROMPTS:
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if isinstance(value, list) and any(isinstance(item, (str, list)) for item in value):
            found += value
        else:
            found.append(value)
    return [prompt for prompt in found if isinstance(prompt, str) or _is_ids(prompt)]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(item is None or type(item) is int for item in prompt)


def _most_tokens(path: str, fields: dict[str, msgspec.Raw]) -> int:
    if path == EMBEDDINGS_PATH:
        return 1
    for name in _LIMITS:
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if type(value) is int and value > 0:
            return value
    return COMPLETION_TOKENS if path == COMPLETIONS_PATH else CHAT_TOKENS
