"""Batch files in OpenAI's format: whole requests, what of them is sent, and where their prompts are.

`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Annotated, Any, Literal

import msgspec
from pyroaring import BitMap
from xxhash import xxh3_64_intdigest

from batchrunner.core.errors import InputError
from batchrunner.core.files import LONGEST_LINE_BYTES
from batchrunner.core.types import BATCH_PATHS, COMPLETIONS_PATH, EMBEDDINGS_PATH, RequestBody

log = logging.getLogger(__name__)

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
MOST_SHOWN = 5
"""Most lines, or custom_ids, that a message names."""
MOST_REPEATED = 100_000
"""Most custom_ids that are looked at as repeated: with ten million lines some 12,000 only seem so."""
CHARACTERS_SHOWN = 40
_HALF = (1 << 32) - 1
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Named(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]


class _NamedByAny(msgspec.Struct):
    custom_id: msgspec.Raw


class _Line(_Named):
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str | None = None


_read_name = msgspec.json.Decoder(_NamedByAny)
_read_line = msgspec.json.Decoder(_Line)
_read_body = msgspec.json.Decoder(_Body)


class _UnansweredError(ValueError):
    """A request is for an endpoint that no engine, or not that of the other lines, answers."""


def request_lines(
    lines: Iterable[bytes | None], path: str
) -> Iterator[tuple[int, dict[str, str], str | None, int]]:
    """Yield the number of each line, the request on it, why it is none, and its bytes.

    A line that is too long to be read is None. The first request says whether all are for vectors, and the
    first that names a model, which one. Raises InputError at the end where lines are for endpoints that are
    not answered; `path` names the file.
    """
    embeds: bool | None = None
    model: str | None = None
    unanswered = LineNumbers()
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
        except _UnansweredError as failure:
            row, problem = {}, str(failure)
            unanswered.add(number, problem)
        except (ValueError, RecursionError) as failure:  # among them those of msgspec, and of UTF-8
            row, problem = _named(text), f"not a request: {failure}"
        yield number, row, problem, len(line)
    if unanswered.count:
        raise InputError(
            f"{path}: {unanswered}: {unanswered.reason}",
            hint="take these lines out, or into a file of their own",
        )


@dataclass(slots=True)
class LineNumbers:
    """Lines of a file for a message, in bounded memory."""

    count: int = 0
    first: list[int] = field(default_factory=list)
    """The numbers of the first ones."""
    reason: str = ""
    """What is wrong with the first one."""

    def add(self, number: int, reason: str = "") -> None:
        """Add a line."""
        self.count += 1
        self.reason = self.reason or reason
        if len(self.first) < MOST_SHOWN:
            self.first.append(number)

    def __str__(self) -> str:
        """Return the numbers in words."""
        numbers = ", ".join(map(str, self.first))
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return f"line{'' if self.count == 1 else 's'} {numbers}{more}"


def reviewed(
    records: Iterable[tuple[int, dict[str, str], str | None, int]], path: str
) -> Iterator[tuple[int, dict[str, str], str | None, int]]:
    """Yield what `request_lines` yields; in the end log which lines are no requests or share a custom_id."""
    bad_lines, ids = LineNumbers(), _CustomIds()
    for record in records:
        number, row, problem, _ = record
        if problem is not None:
            bad_lines.add(number, problem)
        if CUSTOM_ID in row:
            ids.add(number, row[CUSTOM_ID])
        yield record
    if bad_lines.count:
        log.warning("%s: %s will fail: %s", path, bad_lines, bad_lines.reason)
    repeated = ids.repeated()
    if repeated:
        shown = "; ".join(f"{name!r} on {lines}" for name, lines in repeated[:MOST_SHOWN])
        more = f"; and {len(repeated) - MOST_SHOWN:,} more" if len(repeated) > MOST_SHOWN else ""
        log.warning("%s: each line is answered, also where a custom_id is repeated: %s%s", path, shown, more)


class _CustomIds:
    """The custom_ids of a file: finds those that are repeated with about 10 bytes a line."""

    def __init__(self) -> None:
        self._hashes = array("Q")  # of each line, from the first one on; 0 for one without a custom_id
        self._halves = BitMap()  # of the hashes, by which most repetitions are excluded
        self._names: dict[int, str] = {}  # of hashes that may be repeated

    def add(self, number: int, custom_id: str) -> None:
        self._hashes.extend(repeat(0, number - 1 - len(self._hashes)))
        digest = xxh3_64_intdigest(custom_id.encode())
        self._hashes.append(digest)
        half = digest & _HALF
        if half not in self._halves:
            self._halves.add(half)
        elif len(self._names) < MOST_REPEATED:
            self._names.setdefault(digest, custom_id[:CHARACTERS_SHOWN])

    def repeated(self) -> list[tuple[str, LineNumbers]]:
        """Return the beginnings of the custom_ids that are repeated, with their lines."""
        found: defaultdict[int, LineNumbers] = defaultdict(LineNumbers)
        if self._names:
            for number, digest in enumerate(self._hashes, 1):
                if digest in self._names:
                    found[digest].add(number)
        return [(self._names[digest], lines) for digest, lines in found.items() if lines.count > 1]


def _request_in(text: bytes) -> tuple[_Line, str | None]:
    """Return the request on a line, and the model that it names; raises ValueError or RecursionError."""
    text.decode()
    request = _read_line.decode(text)
    if request.url not in BATCH_PATHS:
        raise _UnansweredError(f"url should be {' or '.join(BATCH_PATHS)} (got {request.url!r:.60})")
    return request, _read_body.decode(request.body).model


def _check_alike(request: _Line, asked: str | None, embeds: bool | None, model: str | None) -> None:
    """Raise ValueError where a request needs another model than those before."""
    if embeds not in {None, request.url == EMBEDDINGS_PATH}:
        raise _UnansweredError(
            f"url is {request.url}, and an earlier line's is not: one model makes no embeddings and answers"
        )
    if None not in {asked, model} and asked != model:
        raise ValueError(f"asks for the model {asked!r}, an earlier line for {model!r}: divide the file")


def _named(text: bytes) -> dict[str, str]:
    """Return the custom_id of a line that is no request otherwise; one that is no text as JSON."""
    try:
        written = bytes(_read_name.decode(text).custom_id)
        name = msgspec.json.decode(written) if written.startswith(b'"') else written.decode()
    except (ValueError, RecursionError):
        return {}
    return {} if written == b"null" else {CUSTOM_ID: name}


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
