"""Writes requests for SGLang's HTTP endpoints: makes their bodies, and posts them on a connection."""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from batchrunner.core.errors import EngineDownError, RowRefusedError
from batchrunner.core.media import PromptFile, file_of_part
from batchrunner.core.types import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    RESPONSES_PATH,
    AskedColumns,
    RepeatedText,
    Request,
    RequestBody,
)
from batchrunner.engines.http.proxies import proxy_of
from batchrunner.input.request_bodies import THINKING_BUDGET, prompts_in
from batchrunner.job.answers import LEAST_ROOM
from batchrunner.job.output import OF_TOKENS
from batchrunner.job.sampling import THINKING

_CHAT_NAMES = {
    "max_new_tokens": "max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Names of sampling parameters at `/v1/chat/completions`, by their names at `/generate`, if they differ."""
GENERATE_PATH, TOKENIZE_PATH, ABORT_PATH = "/generate", "/v1/tokenize", "/abort_request"
RID_FIELDS = {
    GENERATE_PATH: "rid",
    CHAT_PATH: "rid",
    COMPLETIONS_PATH: "rid",
    RESPONSES_PATH: "request_id",
}
"""Name of the request field with the id by which SGLang can abort the request, for each endpoint that
generates text. Requests to other endpoints take one forward pass, which cannot be aborted."""
ANY_MODEL = "default"
"""Model name that SGLang accepts for the model it serves, whatever that model is called."""


def path_of(request: Request) -> str:
    """Return the path of the endpoint for a request, by the kind of its prompt.

    Messages go to the chat endpoint, because the server must render the chat template.
    """
    if request.task is not None:
        return request.task.path
    if request.kind == "messages":
        return CHAT_PATH
    return GENERATE_PATH if request.kind != "body" else str(request.prompt.path)


def refuse_deadly(request: Request, vocabulary: int | None) -> None:
    """Raise RowRefusedError for a prompt that would crash a server, or for a chat in a task without chats.

    In SGLang 0.5.23, an empty `text` or a token id outside the vocabulary crashes the scheduler, and with it
    every row in flight. `vocabulary` is the number of tokens in the vocabulary; None if unknown.
    """
    if request.kind == "messages":
        if request.task is not None:
            raise RowRefusedError(f"task: {request.task.name} takes a text or token ids, and this is a chat")
        return
    if isinstance(request.prompt, RequestBody):
        for prompt in prompts_in(request.prompt):
            _refuse_deadly_prompt(prompt, vocabulary)
    else:
        _refuse_deadly_prompt(request.prompt, vocabulary)


def _refuse_deadly_prompt(prompt: Any, vocabulary: int | None) -> None:
    if not prompt:
        raise RowRefusedError("the prompt is empty")
    if isinstance(prompt, list):
        try:
            # Only the smallest and the largest id are checked. `sorted` finds them faster than `min` and
            # `max`. The additional 0 makes a list of a single null fail too.
            ids = sorted((0, *prompt))
        except TypeError:
            raise RowRefusedError("a token id is null") from None
        for token_id in (ids[0], ids[-1]):
            if token_id < 0 or (vocabulary is not None and token_id >= vocabulary):
                valid_ids = f" (0 to {vocabulary - 1})" if vocabulary else ""
                raise RowRefusedError(f"token id {token_id} is not in the model's vocabulary{valid_ids}")


def body_of(request: Request) -> dict[str, Any]:
    """Return the body of a request for its endpoint (see `path_of`)."""
    if request.task is not None:
        return request.task.bodies([request])[0]
    return chat_body(request) if request.kind == "messages" else generate_body(request)


def bytes_of(body: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a body as JSON; raises RowRefusedError for a value that neither JSON nor `default` can write."""
    try:
        return orjson.dumps(body, default=default)
    except TypeError as failure:
        # A template may write a text that JSON cannot hold, such as an unpaired surrogate.
        raise RowRefusedError(f"the prompt cannot be sent: {failure}") from None


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a body with `fields` added, which override fields of the same names in the body.

    The body is not decoded: the fields are appended, because a JSON parser uses the last of several values.
    """
    body_without_brace = body.rstrip()[:-1].rstrip()
    comma = b"" if body_without_brace == b"{" else b","
    return b"%b%b%b" % (body_without_brace, comma, orjson.dumps(fields)[1:])


def generate_body(request: Request) -> dict[str, Any]:
    """Return the body of a request for `/generate`."""
    body = {request.kind: request.prompt, "sampling_params": request.sampling}
    if THINKING in request.sampling:
        body |= {"sampling_params": _with_budget(request.sampling), "require_reasoning": True}
    if request.media:
        body.update(_media_fields(request))
    if request.lora_path is not None:
        body["lora_path"] = request.lora_path
    if request.asks is not None and request.asks.of_tokens:
        body.update(_generate_logprob_fields(request.asks))
    return body


def _with_budget(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with `max_thinking_tokens` moved to `custom_params`.

    SGLang's scheduler reads the budget there. `/generate` also has a field `max_thinking_tokens` with the
    same effect, but the chat endpoint has no such field.
    """
    sent = {**sampling}
    if THINKING in sent:
        sent["custom_params"] = {**(sent.get("custom_params") or {}), THINKING_BUDGET: sent.pop(THINKING)}
    return sent


def _data_urls(file: PromptFile) -> list[str]:
    """Return a file as data URLs: one for each page of a document, else a single one."""
    return [
        f"data:{file.kind.media_type};base64,{b64encode(content).decode()}" for content in file.ready or ()
    ]


def _media_fields(request: Request) -> dict[str, Any]:
    """Return the fields of `/generate` that contain the files of a request.

    If a request asks for several outputs (`n`), SGLang 0.5.23 gives each output one item of the list of
    files. So all files are put into a single item.
    """
    urls_by_field = dict[str, list[Any]]()
    for file in request.media:
        urls_by_field.setdefault(file.kind.data_field, []).extend(_data_urls(file))
    if _output_count(request) == 1:
        return urls_by_field
    return {name: [urls] for name, urls in urls_by_field.items()}


def _output_count(request: Request) -> int:
    return request.sampling.get("n") or 1


def _refuse_split_files(request: Request) -> None:
    """Raise RowRefusedError for a chat with several outputs (`n`) and several files of a kind.

    SGLang 0.5.23 would give each output only one of the files.
    """
    if _output_count(request) == 1:
        return
    counts = Counter[str]()
    for file in request.media:
        counts[file.kind.field] += 1 if file.ready is None else len(file.ready)
    for field, count in counts.items():
        if count > 1:
            raise RowRefusedError(
                f"sampling.n: in a chat SGLang gives each sample one of the row's {count} {field}: "
                "set n to 1, or give prompt.text"
            )


def _messages_of(request: Request) -> Any:
    """Return the messages of a request, with the contents of their files, for the chat endpoint."""
    if not request.media:
        return request.prompt
    messages = []
    for message in request.prompt:
        content = message.get("content")
        if isinstance(content, list):
            content_with_urls = []
            for part in content:
                content_with_urls += _with_urls(part, request.media)
            messages.append({**message, "content": content_with_urls})
        else:
            messages.append(message)
    return messages


def _with_urls(part: Any, files: Sequence[PromptFile]) -> list[Any]:
    """Return a content part of a message, in which a reference to one of the `files` becomes a data URL.

    A document becomes several parts, one for each page.
    """
    file_number = file_of_part(part)
    if file_number is None:
        return [part]
    file = files[file_number]
    part_type = file.kind.url_part
    return [{"type": part_type, part_type: {"url": url}} for url in _data_urls(file)]


def _generate_logprob_fields(asks: AskedColumns) -> dict[str, Any]:
    """Return the fields of `/generate` that request probabilities. Token ids need no field."""
    if asks.names.isdisjoint(OF_TOKENS):
        return {}
    fields: dict[str, Any] = {"return_logprob": True, "return_text_in_logprobs": True}
    if "top_logprobs" in asks.names:
        fields["top_logprobs_num"] = asks.top_logprobs
    if "prompt_logprobs" in asks.names:
        fields["logprob_start_len"] = 0
    return fields


def _chat_logprob_fields(asks: AskedColumns) -> dict[str, Any]:
    """Return the fields of a chat that request token ids and probabilities.

    Raises RowRefusedError for probabilities of the prompt, which a chat cannot have.
    """
    if "prompt_logprobs" in asks.names:
        raise RowRefusedError(
            "output.columns: prompt_logprobs: SGLang returns none for a chat that the server tokenizes"
        )
    fields: dict[str, Any] = {}
    if "output_ids" in asks.names:
        fields["return_output_ids_in_sglext"] = True
    if not asks.names.isdisjoint(OF_TOKENS):
        fields["logprobs"] = True
    if "top_logprobs" in asks.names:
        fields["top_logprobs"] = asks.top_logprobs
    return fields


STREAM_INTERVAL = 1 << 30
"""Number of tokens between two events of the stream of an answer that is not watched for repetition. It is so
large that only two events come: one after the first token, and one at the end."""
LEAST_TOKENS: Mapping[RepeatedText, int] = {"any": 1024, "prose": LEAST_ROOM}
"""Minimum `max_new_tokens` of an answer that is watched for repetition. Shorter answers have no room for
it."""
LEAST_BETWEEN = 256
"""Minimum number of tokens between two events of the stream of an answer that is watched for repetition."""
MOST_EVENTS = 32
"""Approximate maximum number of events of the stream of an answer that is watched for repetition. Each event
has the whole text so far, so more events would cost too much."""
UNLIMITED_TOKENS = 16_384
"""Assumed `max_new_tokens` of a row that sets none."""
_DEMANDS = frozenset({"ignore_eos", "regex", "ebnf", "structural_tag", "stop_regex"})
"""Sampling parameters, except `json_schema`, that may demand repetition, or whose end is not certain in an
answer that comes as events (`stop_regex`)."""
_DEMANDS_OF_PROSE = _DEMANDS | {"json_schema", "min_new_tokens"}
"""Sampling parameters with which an answer is not stopped by default."""


def tokens_between_events(request: Request) -> int | None:
    """Return the number of tokens between two checks of an answer for repetition; None for no checks.

    An answer is not checked if the request may demand repetition: by `ignore_eos`, by a JSON schema with
    lists, or by any other grammar. By default, an answer with any schema or with `min_new_tokens` is not
    checked either.
    """
    repeated = request.stops_repetition
    if repeated is None or request.kind not in {"text", "input_ids"}:
        return None
    sampling = request.sampling
    most_tokens = sampling.get("max_new_tokens") or UNLIMITED_TOKENS
    if most_tokens < LEAST_TOKENS[repeated] or _output_count(request) > 1:
        return None
    demands = _DEMANDS_OF_PROSE if repeated == "prose" else _DEMANDS
    # Few rows have any of these parameters.
    if not demands.isdisjoint(sampling) and any(sampling.get(name) for name in demands):
        return None
    schema = sampling.get("json_schema")
    if schema and ('"array"' in str(schema) or '"items"' in str(schema)):
        return None
    return max(LEAST_BETWEEN, int(most_tokens) // MOST_EVENTS)


def watched_body(request: Request, interval: int) -> dict[str, Any]:
    """Return the body for `/generate` of one row whose answer comes as events, every `interval` tokens."""
    body = generate_body(request)
    sampling = {**body["sampling_params"], "stream_interval": interval}
    return {**body, "sampling_params": sampling, "stream": True}


def bundle_body(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the body of one streamed `/generate` request for several prompts of token ids."""
    samplings = [
        {**request.sampling, "stream_interval": tokens_between_events(request) or STREAM_INTERVAL}
        for request in requests
    ]
    are_equal = all(sampling == samplings[0] for sampling in samplings)
    body: dict[str, Any] = {
        "input_ids": [request.prompt for request in requests],
        "sampling_params": samplings[0] if are_equal else samplings,
        "stream": True,
    }
    if any(request.lora_path is not None for request in requests):
        body["lora_path"] = [request.lora_path for request in requests]
    # All rows of a job ask for the same columns.
    asks = requests[0].asks
    if asks is not None and asks.of_tokens:
        body.update(_generate_logprob_fields(asks))
    return body


def chat_body(request: Request) -> dict[str, Any]:
    """Return the body for `/v1/chat/completions`; `return_meta_info` requests the counts of each output."""
    if request.media:
        _refuse_split_files(request)
    sampling = _with_budget(request.sampling)
    body: dict[str, Any] = {"model": ANY_MODEL, "messages": _messages_of(request), "return_meta_info": True}
    if request.continues:
        body["continue_final_message"] = True
    template_kwargs = dict(request.chat_template_kwargs or {})
    # The chat endpoint takes these two grammars as `response_format`, like OpenAI's.
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
    # The chat endpoint of SGLang 0.5 reads `spaces_between_special_tokens` in `chat_template_kwargs`.
    if spaces is not None:
        template_kwargs["spaces_between_special_tokens"] = spaces
    # All other sampling parameters are fields of the body, some of them under other names.
    body.update({_CHAT_NAMES.get(name, name): value for name, value in sampling.items()})
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    if request.lora_path is not None:
        body["lora_path"] = request.lora_path
    if request.tools is not None:
        tool_fields = {"tools": request.tools.tools, "tool_choice": request.tools.choice}
        body.update({name: value for name, value in tool_fields.items() if value is not None})
    if request.asks is not None and request.asks.of_tokens:
        body.update(_chat_logprob_fields(request.asks))
    return body


def tokenize_body(request: Request, *, special: bool = True) -> dict[str, Any]:
    """Return the body for `/v1/tokenize`, which returns the token ids of a prompt.

    With `special` the ids of a text include the tokens that begin and end a prompt (BOS, EOS).
    """
    if request.kind == "messages":
        body = {"messages": _messages_of(request), "chat_template_kwargs": request.chat_template_kwargs}
        if request.continues:
            body["continue_final_message"] = True
        return {"model": ANY_MODEL, **body}
    options = {} if special else {"add_special_tokens": False}
    return {"model": ANY_MODEL, "prompt": request.prompt, **options}


def _json(value: Any, name: str) -> Any:
    """Return the value of a sampling parameter, decoded if it is JSON text; raises RowRefusedError."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as failure:
        raise RowRefusedError(f"{name} is not valid JSON: {failure}") from None


JSON = "application/json"
_REDIRECTS = {301, 302, 303, 307, 308}
_NEWEST_KNOWN = (3, 14)
"""Newest version (major, minor) of aiohttp with which requests are posted directly on a connection of the
pool. The pool is not a public interface, so with a newer version requests are posted by aiohttp's session."""


class DirectAnswer(msgspec.Struct):
    """An answer on a connection in aiohttp's pool: its status and headers, and a stream of its body."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader
    connection: Connection

    def release(self) -> None:
        """Give the connection back to the pool; close it if the body was not read to its end."""
        self.connection.release()


PostedAnswer = DirectAnswer | aiohttp.ClientResponse
"""The answer to a POST, as PostSender returns it or as aiohttp's session does."""


class PostSender:
    """Posts JSON to one URL, on connections of an aiohttp session's pool.

    It exists because `aiohttp.ClientSession.post` creates a request, a writer with its own asyncio task, and
    a response for each row, which takes 44 % more instructions for a plain row. This class makes the head of
    the request only once. aiohttp still does the connecting, TLS, pooling and parsing of HTTP. A request
    through a proxy is posted by aiohttp's session.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: URL, *, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Post to `url` with the session's headers and further `headers`."""
        assert session.connector is not None
        self._session = session
        self._connector = session.connector
        self._url = url
        self._headers = headers
        # `_request` is never sent. It tells the connector where to connect, and has the headers that aiohttp
        # adds.
        self._request = aiohttp.ClientRequest(
            "POST", url, headers={**session.headers, "Content-Type": JSON, **headers}
        )
        self._head = f"POST {url.raw_path_qs} HTTP/1.1\r\n{_lines(self._request.headers)}".encode()
        version = tuple(int(number) for number in aiohttp.__version__.split(".")[:2])
        self._proxy = proxy_of(str(url))
        self.is_direct = version <= _NEWEST_KNOWN and self._proxy is None
        """Whether requests are posted directly on a connection, and not by aiohttp's session."""

    async def post(self, body: bytes) -> PostedAnswer:
        """Send a body, and wait for the status and headers of the answer.

        Raises aiohttp.ClientError and OSError. A redirect raises EngineDownError: to follow it would send the
        API key to another server.
        """
        answer = await (self._post_directly(body) if self.is_direct else self._post_by_session(body))
        if answer.status in _REDIRECTS:
            answer.release()
            target = answer.headers.get("Location", "nowhere")
            raise EngineDownError(
                f"{self._url} redirects to {target} (status {answer.status}): correct engine.urls"
            )
        return answer

    async def _post_directly(self, body: bytes) -> PostedAnswer:
        """Post a body on a connection of the pool."""
        try:
            connection = await self._connector.connect(self._request, [], self._session.timeout)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self._url}") from None
        try:
            protocol = connection.protocol
            assert protocol is not None
            assert protocol.transport is not None
            protocol.set_response_params(read_until_eof=True)
            protocol.transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body))
            message, content = await protocol.read()
            while message.code < 200:  # noqa: PLR2004 - an interim answer, such as 100 Continue
                message, content = await protocol.read()
        except BaseException as failure:
            # The connection may still carry the rest of this answer, so no other request may use it.
            connection.close()
            if isinstance(failure, HttpProcessingError):
                raise aiohttp.ClientPayloadError(failure.message) from None
            raise
        return DirectAnswer(message.code, message.headers, content, connection)

    async def _post_by_session(self, body: bytes) -> PostedAnswer:
        """Post a body by aiohttp's session, through the proxy if there is one."""
        payload = aiohttp.BytesPayload(body, content_type=JSON)
        options = self._proxy.options if self._proxy else {}
        return await self._session.post(
            self._url, data=payload, headers=self._headers, allow_redirects=False, **options
        )


def _lines(headers: Mapping[str, str]) -> str:
    """Return the header lines of an HTTP request, without the length of the body."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "Content-Length")
