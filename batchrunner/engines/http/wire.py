"""Requests as SGLang's HTTP interface takes them: their bodies, and how these are written to a connection."""

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
    Request,
    RequestBody,
)
from batchrunner.engines.http.proxies import proxy_of
from batchrunner.input.request_bodies import THINKING_BUDGET, prompts_in
from batchrunner.job.output import OF_TOKENS
from batchrunner.job.sampling import THINKING

# /generate's name → /v1/chat/completions' name, where they differ
_CHAT_NAMES = {
    "max_new_tokens": "max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


GENERATE_PATH, TOKENIZE_PATH, ABORT_PATH = "/generate", "/v1/tokenize", "/abort_request"
RID_FIELDS = {
    GENERATE_PATH: "rid",
    CHAT_PATH: "rid",
    COMPLETIONS_PATH: "rid",
    RESPONSES_PATH: "request_id",
}
"""Field with the ID by which a request can be aborted, by path. At other paths a row ends with its forward
pass anyway."""
ANY_MODEL = "default"
"""Model name that SGLang accepts for the model it serves, whatever that model is called."""


def path_of(request: Request) -> str:
    """Return the endpoint for this kind of prompt: the server renders the chat template of messages."""
    if request.task is not None:
        return request.task.path
    if request.kind == "messages":
        return CHAT_PATH
    return GENERATE_PATH if request.kind != "body" else str(request.prompt.path)


def refuse_deadly(request: Request, vocabulary: int | None) -> None:
    """Raise RowRefusedError for a prompt that would kill a server, or that its task cannot take.

    In SGLang 0.5.23 an empty `text` and a token id that the model does not have end the scheduler, and with
    it every row in flight.
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
            # `sorted` is faster than `min` and `max` for a list of integers. With 0, a single null fails too.
            ids = sorted((0, *prompt))
        except TypeError:
            raise RowRefusedError("a token id is null") from None
        for bad in (ids[0], ids[-1]):
            if bad < 0 or (vocabulary is not None and bad >= vocabulary):
                ids_in_use = f" (0 to {vocabulary - 1})" if vocabulary else ""
                raise RowRefusedError(f"token id {bad} is not in the model's vocabulary{ids_in_use}")


def body_of(request: Request) -> dict[str, Any]:
    """Make the body for the endpoint of this kind of prompt."""
    if request.task is not None:
        return request.task.bodies([request])[0]
    return chat_body(request) if request.kind == "messages" else generate_body(request)


def bytes_of(body: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a body as JSON; raises RowRefusedError for values that neither JSON nor `default` can write."""
    try:
        return orjson.dumps(body, default=default)
    except TypeError as failure:  # an unpaired surrogate, which a template can write
        raise RowRefusedError(f"the prompt cannot be sent: {failure}") from None


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a body with further fields, which override its own fields of the same names."""
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head == b"{" else b","
    return b"%b%b%b" % (head, comma, orjson.dumps(fields)[1:])


def generate_body(request: Request) -> dict[str, Any]:
    """Make the body for `/generate`."""
    body = {request.kind: request.prompt, "sampling_params": request.sampling}
    if THINKING in request.sampling:
        body |= {"sampling_params": _as_sent(request.sampling), "require_reasoning": True}
    if request.media:
        body.update(_data_of(request))
    if request.lora_path is not None:
        body["lora_path"] = request.lora_path
    if request.asks is not None and request.asks.of_tokens:
        body.update(_generate_logprob_fields(request.asks))
    return body


def _as_sent(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with the limit of thinking where SGLang's scheduler reads it.

    The field `max_thinking_tokens` of `/generate` comes to the same, but chats have none.
    """
    sent = {**sampling}
    if THINKING in sent:
        sent["custom_params"] = {**(sent.get("custom_params") or {}), THINKING_BUDGET: sent.pop(THINKING)}
    return sent


def _urls(file: PromptFile) -> list[str]:
    """Return the data URLs of a file, or of the pages of a document."""
    return [
        f"data:{file.kind.media_type};base64,{b64encode(content).decode()}" for content in file.ready or ()
    ]


def _data_of(request: Request) -> dict[str, Any]:
    """Return the fields of `/generate` with the files of a request.

    If a request asks for several samples, SGLang 0.5.23 gives each of them one item of the list. So all files
    are put into a single item.
    """
    data = dict[str, list[Any]]()
    for file in request.media:
        data.setdefault(file.kind.data_field, []).extend(_urls(file))
    return {name: [urls] if _samples(request) > 1 else urls for name, urls in data.items()}


def _samples(request: Request) -> int:
    return request.sampling.get("n") or 1


def _refuse_split_files(request: Request) -> None:
    """Raise RowRefusedError for a chat with several samples and files: SGLang gives each sample one file."""
    if _samples(request) == 1:
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
    """Return the messages of a request as the chat endpoint takes them, with their files."""
    if not request.media:
        return request.prompt
    messages = []
    for message in request.prompt:
        content = message.get("content")
        if isinstance(content, list):
            parts = [new_part for part in content for new_part in _with_urls(part, request.media)]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return messages


def _with_urls(part: Any, files: Sequence[PromptFile]) -> list[Any]:
    """Return a part of a message in the form that is sent: a data URL for a file, or one for each page."""
    number = file_of_part(part)
    if number is None:
        return [part]
    file = files[number]
    name = file.kind.url_part
    return [{"type": name, name: {"url": url}} for url in _urls(file)]


def _generate_logprob_fields(asks: AskedColumns) -> dict[str, Any]:
    """Return the fields of `/generate` that request probabilities; token ids come without a request."""
    if asks.names.isdisjoint(OF_TOKENS):
        return {}
    fields: dict[str, Any] = {"return_logprob": True, "return_text_in_logprobs": True}
    if "top_logprobs" in asks.names:
        fields["top_logprobs_num"] = asks.top_logprobs
    if "prompt_logprobs" in asks.names:
        fields["logprob_start_len"] = 0
    return fields


def _chat_logprob_fields(asks: AskedColumns) -> dict[str, Any]:
    """Return the fields of a chat that request token ids and probabilities; raises RowRefusedError."""
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
"""Tokens between two events of a row that is not watched for repetition. The number is so large that only two
events come: one after the first token, and one at the end."""


LEAST_TOKENS = 1024
"""An answer is watched only if `max_new_tokens` is at least this. A shorter answer has no room for
repetition."""
LEAST_BETWEEN, MOST_EVENTS = 256, 32
"""Minimum number of tokens between two events of a watched row, and about the maximum number of its events.
More events would cost too much, since each has the whole text so far."""
UNLIMITED_TOKENS = 16_384
"""Assumed `max_new_tokens` of a row that sets none."""
_GRAMMARS = ("regex", "ebnf", "structural_tag")


def tokens_between_events(request: Request) -> int | None:
    """Return the number of tokens after which an answer is checked for repetition again; None for never.

    A row is not checked if its grammar or parameters may ask for repetition: lists, patterns, `ignore_eos`.
    """
    if not request.stops_repetition:
        return None
    sampling = request.sampling
    most = sampling.get("max_new_tokens") or UNLIMITED_TOKENS
    if request.kind not in {"text", "input_ids"} or most < LEAST_TOKENS:
        return None
    if (sampling.get("n") or 1) > 1 or _may_ask_for_repetition(sampling):
        return None
    return max(LEAST_BETWEEN, int(most) // MOST_EVENTS)


def _may_ask_for_repetition(sampling: Mapping[str, Any]) -> bool:
    schema = str(sampling.get("json_schema") or "")
    has_lists = '"array"' in schema or '"items"' in schema
    return has_lists or bool(sampling.get("ignore_eos")) or any(sampling.get(name) for name in _GRAMMARS)


def _streamed(request: Request, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a row whose answer comes as events."""
    return {**sampling, "stream_interval": tokens_between_events(request) or STREAM_INTERVAL}


def watched_body(request: Request) -> dict[str, Any]:
    """Make the body for `/generate` of one row whose answer is watched while it is written."""
    body = generate_body(request)
    return {**body, "sampling_params": _streamed(request, body["sampling_params"]), "stream": True}


def bundle_body(requests: Sequence[Request]) -> dict[str, Any]:
    """Make the body for `/generate` with several prompts of token ids, each answered by an event."""
    samplings = [_streamed(request, request.sampling) for request in requests]
    alike = all(sampling == samplings[0] for sampling in samplings)
    body: dict[str, Any] = {
        "input_ids": [request.prompt for request in requests],
        "sampling_params": samplings[0] if alike else samplings,
        "stream": True,
    }
    if any(request.lora_path is not None for request in requests):
        body["lora_path"] = [request.lora_path for request in requests]
    asks = requests[0].asks  # all rows of a job ask for the same
    if asks is not None and asks.of_tokens:
        body.update(_generate_logprob_fields(asks))
    return body


def chat_body(request: Request) -> dict[str, Any]:
    """Make the body for `/v1/chat/completions`, with `return_meta_info` for the counts of each sample."""
    if request.media:
        _refuse_split_files(request)
    sampling = _as_sent(request.sampling)
    body: dict[str, Any] = {"model": ANY_MODEL, "messages": _messages_of(request), "return_meta_info": True}
    if request.continues:
        body["continue_final_message"] = True
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
    if spaces is not None:  # the chat endpoint of SGLang 0.5 takes it from chat_template_kwargs
        template_kwargs["spaces_between_special_tokens"] = spaces
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
    """Make the body for `/v1/tokenize`, which returns the tokens that the prompt's endpoint would use.

    With `special` these include the tokens that begin and end a prompt.
    """
    if request.kind == "messages":
        body = {"messages": _messages_of(request), "chat_template_kwargs": request.chat_template_kwargs}
        if request.continues:
            body["continue_final_message"] = True
        return {"model": ANY_MODEL, **body}
    inside = {} if special else {"add_special_tokens": False}
    return {"model": ANY_MODEL, "prompt": request.prompt, **inside}


def _json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as failure:
        raise RowRefusedError(f"{name} is not JSON: {failure}") from None


JSON = "application/json"
_REDIRECTS = {301, 302, 303, 307, 308}
_NEWEST_KNOWN = (3, 14)
"""Newest version of aiohttp whose connection pool is known. The pool is no public interface, so with a newer
version requests are sent by the session."""


class DirectAnswer(msgspec.Struct):
    """An answer on a connection of aiohttp's pool. Its head has been read."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader
    connection: Connection

    def release(self) -> None:
        """Give the connection back to the pool; close it if the body was not read to its end."""
        self.connection.release()


PostedAnswer = DirectAnswer | aiohttp.ClientResponse


class PostSender:
    """Posts JSON to one URL, on a connection of the pool of an aiohttp session.

    For each row, `aiohttp.ClientSession.post` creates a request, a writer with its own asyncio task, and a
    response. With these, a plain row costs 44 % more instructions. Here the head of the request is made only
    once. Connecting, TLS, the pool and the reading of HTTP are left to aiohttp. A request through a proxy is
    sent by aiohttp's session.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: URL, *, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Post to `url` with the session's headers and the `headers` given here."""
        assert session.connector is not None
        self._session = session
        self._connector = session.connector
        self._url = url
        # `_request` tells the connector where to connect, and has the headers that aiohttp adds.
        self._headers = headers
        self._request = aiohttp.ClientRequest(
            "POST", url, headers={**session.headers, "Content-Type": JSON, **headers}
        )
        self._head = f"POST {url.raw_path_qs} HTTP/1.1\r\n{_lines(self._request.headers)}".encode()
        is_known = tuple(int(part) for part in aiohttp.__version__.split(".")[:2]) <= _NEWEST_KNOWN
        self._proxy = proxy_of(str(url))
        self.is_direct = is_known and self._proxy is None

    async def post(self, body: bytes) -> PostedAnswer:
        """Send a body, and wait for the head of the answer.

        Raises aiohttp.ClientError and OSError. Raises EngineDownError for a redirect, which would send the
        API key to another server.
        """
        answer = await (self._post_directly(body) if self.is_direct else self._post_by_session(body))
        if answer.status in _REDIRECTS:
            answer.release()
            place = answer.headers.get("Location", "nowhere")
            raise EngineDownError(f"{answer.status}: {self._url} leads to {place}: correct engine.urls")
        return answer

    async def _post_directly(self, body: bytes) -> PostedAnswer:
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
            while message.code < 200:  # noqa: PLR2004 - it only announces an answer, such as 100 Continue
                message, content = await protocol.read()
        except BaseException as failure:
            connection.close()
            if isinstance(failure, HttpProcessingError):
                raise aiohttp.ClientPayloadError(failure.message) from None
            raise
        return DirectAnswer(message.code, message.headers, content, connection)

    async def _post_by_session(self, body: bytes) -> PostedAnswer:
        payload = aiohttp.BytesPayload(body, content_type=JSON)
        options = self._proxy.options if self._proxy else {}
        return await self._session.post(
            self._url, data=payload, headers=self._headers, allow_redirects=False, **options
        )


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items() if name != "Content-Length")
