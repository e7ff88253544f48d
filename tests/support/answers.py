"""Answers of the server that answers as SGLang does: texts, events, vectors, scores, and a test's own."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.fake_sglang import Sent


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an answer with status 200."""

    content: bytes


@dataclass(frozen=True, slots=True)
class OnWire:
    """All bytes of an HTTP answer, after which the connection ends."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Endless:
    """An answer of events that does not end after them."""

    events: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """The text of a good answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Growing:
    """An answer that is written event by event: each has the text up to then. One that `ends` is whole.

    Any other goes on until it is aborted.
    """

    texts: tuple[str, ...]
    ends: bool = False


TOOL_CALL: dict[str, Any] = {
    "id": "call_1",
    "index": 0,
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}
CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "thought": ("length", {"reasoning_content": "The user asks"}),
    "tool call": ("tool_calls", {"tool_calls": [TOOL_CALL]}),
}
"""What a chat without text has instead, after its finish reason."""

# what the real server says: in an answer with 200 whose finish reason is an abort, or as an HTTP error
ABORTS: dict[str, tuple[int, str]] = {
    "abort": (500, "Aborted by the engine"),
    "abort 400": (400, "The input is not for this model."),
    "abort 503": (503, "The request queue is full."),
}
REFUSALS: dict[str, tuple[int, str]] = {
    "busy 429": (429, "Too many requests"),
    "busy 503": (503, "The request queue is full."),
    "gateway 504": (504, "Gateway Time-out"),
    "timeout 524": (524, "A timeout occurred"),
    "denied 401": (401, "Unauthorized"),
    "broken 500": (500, "Out of memory of the last running request"),
    "too long": (400, "The input (6001 tokens) is longer than the model's context length (4096 tokens)."),
    "bad schema": (
        400,
        "Failed to compile json grammar: Expecting property name in double quotes: line 1 column 2 (char 1)",
    ),
}


ASKED = ("return_logprob", "return_text_in_logprobs", "top_logprobs_num", "logprob_start_len")
"""Fields of `/generate` that ask for it."""


def logprobs_of(words: Sequence[str]) -> list[list[Any]]:
    """Return the tokens of a text, which are its words: log probability, id and text of each."""
    return [[-0.5 - number, 100 + number, word] for number, word in enumerate(words)]


def add_asked(body: Mapping[str, Any], prompt: str, text: str, meta: dict[str, Any]) -> None:
    """Add to the `meta_info` of an answer what its request asks for."""
    if not (body.get("return_logprob") or body.get("logprobs")):
        return
    tokens = logprobs_of(text.split())
    meta["output_token_logprobs"] = tokens
    top = body.get("top_logprobs_num") or body.get("top_logprobs")
    if top:
        meta["output_top_logprobs"] = [[token] * top for token in tokens]
    if body.get("logprob_start_len") == 0:
        first, *rest = logprobs_of(prompt.split())
        meta["input_token_logprobs"] = [[None, *first[1:]], *rest]


def is_bundle(body: dict[str, Any]) -> bool:
    """Tell whether a body has several prompts of token ids."""
    ids = body.get("input_ids")
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def rows_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the body that each row would have alone."""
    assert body["stream"] is True
    if not is_bundle(body):
        return [body]
    prompts, sampling, lora = body["input_ids"], body["sampling_params"], body.get("lora_path")
    samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    loras = lora if isinstance(lora, list) else [lora] * len(prompts)
    rid = body["rid"]
    rids = rid if isinstance(rid, list) else [f"{rid}_{index}" for index in range(len(prompts))]
    rows = []
    for name, prompt, own, path in zip(rids, prompts, samplings, loras, strict=True):
        row = {"input_ids": prompt, "sampling_params": own, "rid": name}
        row |= {name: body[name] for name in ASKED if name in body}
        rows.append(row if path is None else {**row, "lora_path": path})
    return rows


class EventAnswer:
    """An answer of events."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

    async def begin(self) -> None:
        """Send the head."""
        await self._response.prepare(self._request)

    async def write(self, event: bytes) -> None:
        """Send an event."""
        await self._response.write(b"data: " + event + b"\n\n")

    async def write_json(self, event: dict[str, Any]) -> None:
        """Send an event of JSON."""
        await self.write(orjson.dumps(event))

    async def refuse(self, status: int, message: str) -> web.StreamResponse:
        """Refuse all rows: the status is 200 by then, so the error is an event."""
        await self.begin()
        error = {"message": message, "type": "invalid_request_error", "code": status, "retryable": False}
        await self.write_json({"error": error})
        return await self.finish()

    async def stay_open(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send events, and nothing more until the client goes away."""
        await self.begin()
        for event in events:
            await self.write(event)
        await asyncio.Event().wait()
        return self._response

    async def finish(self) -> web.StreamResponse:
        """End the answer."""
        await self.write(b"[DONE]")
        await self._response.write_eof()
        return self._response


LENGTH = 8
"""Numbers of a vector."""


def prompts_of(body: dict[str, Any]) -> list[Any]:
    """Return the prompts of a body: one, or a list of texts or of token ids."""
    given = body["input"]
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    return given if is_list else [given]


def vector_for(prompt: str) -> list[float]:
    """Return the vector of a prompt, in numbers that 16 bits hold."""
    return [((crc32(f"{prompt} {n}".encode()) % 2001) - 1000) / 1024 for n in range(LENGTH)]


def vector_of(sent: Sent) -> list[float]:
    """Return the vector of a prompt; of the length that was asked for."""
    return vector_for(sent.prompt)[: sent.body.get("dimensions")]


def embeddings(body: dict[str, Any], vectors: Sequence[list[float]], *, as_floats: bool) -> dict[str, Any]:
    """Return the reply with these vectors."""
    prompts = prompts_of(body)
    tokens = sum(len(prompt) if isinstance(prompt, list) else len(prompt.split()) for prompt in prompts)
    as_text = body.get("encoding_format") == "base64" and not as_floats
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            if as_text
            else [number if math.isfinite(number) else None for number in vector],
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}


HEAD = {"is_generation": False, "architectures": ["BertForSequenceClassification"]}
"""What a server of a model with a head for scores says of it."""


def is_score(body: dict[str, Any]) -> bool:
    """Tell whether a body asks for probabilities, and for no new token."""
    return bool(body.get("return_logprob")) and body["sampling_params"].get("max_new_tokens") == 0


def bodies_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bodies of single prompts that a body with lists stands for."""
    count = len(body["input_ids"] if "input_ids" in body else body["text"])
    if "sampling_params" not in body:  # /encode
        prompts = body["input_ids"] if "input_ids" in body else body["text"]
        return [{**body, "model": "any", "prompt": prompt} for prompt in prompts]
    lists = {name: value for name, value in body.items() if isinstance(value, list)}
    assert {len(value) for value in lists.values()} == {count}
    return [{**body, **{name: value[at] for name, value in lists.items()}} for at in range(count)]


def logprob_for(prompt: str, token: int) -> float:
    """Return the logarithm of a made-up probability of a token after a prompt, below 1/8."""
    return math.log((crc32(f"{prompt} {token}".encode()) % 1000 + 1) / 8008)


def score_of(sent: Sent, logprob: Callable[[str, int], float | None], classes: int = 3) -> dict[str, Any]:
    """Return the result of a prompt; the tokens of its end have probabilities where they are asked for."""
    if sent.path == "/encode":
        numbers = [logprob(sent.prompt, number) for number in range(classes)]
        return {
            "embedding": numbers[0] if sent.body.get("is_cross_encoder_request") else numbers,
            "meta_info": {"prompt_tokens": 5, "cached_tokens": 0, "weight_version": "default"},
        }
    ids = sent.body.get("input_ids")
    meta: dict[str, Any] = {
        "id": f"{sent.prompt}-{sent.tries}",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids) if ids is not None else len(sent.prompt.split()),
        "cached_tokens": 1,
        "completion_tokens": 0,
        "weight_version": "default",
        "input_token_logprobs": [],
        "output_token_logprobs": [],
    }
    if labels := sent.body.get("token_ids_logprob"):
        scores = [[logprob(sent.prompt, label), label, None] for label in labels]
        meta["input_token_ids_logprobs"], meta["output_token_ids_logprobs"] = [], [scores]
    start = sent.body["logprob_start_len"]
    if ids is not None and start >= 0:
        told = [[logprob(str(ids[:at]), ids[at]), ids[at], None] for at in range(start + 1, len(ids))]
        meta["input_token_logprobs"] = [[None, ids[start], None], *told]
    return {"text": "", "output_ids": [], "meta_info": meta}
