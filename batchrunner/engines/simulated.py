"""The simulated engine: made-up answers at a made-up speed, for tests, benchmarks and demonstrations.

`answer` makes up a completion, `engines/simulation` decides when it is ready, as SGLang's scheduler
would, and `Simulator` waits for that in real time.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any
from zlib import crc32

import msgspec
import orjson

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import RowRefusedError
from batchrunner.core.exact_json import part_at
from batchrunner.core.types import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    AskedColumns,
    Completion,
    Request,
    RequestBody,
    RowRef,
)
from batchrunner.engines.base import Engine
from batchrunner.engines.http.replies import answer_of
from batchrunner.engines.simulation.replica import CostModel, Replica
from batchrunner.engines.simulation.request import SchedulerConfig, SimulatedRequest
from batchrunner.input.request_bodies import fields_of, prompt_of, prompts_in
from batchrunner.job.engine import SimulatedEngine
from batchrunner.job.output import CUT, RESPONSE
from batchrunner.job.tasks import MODEL, EmbedTask, reply_of

MOST_DEPTH = 16
_WORD = "simulated"


def made_up(schema: Any, number: int) -> str:
    """Return JSON for a schema, given as a mapping or as JSON text; the same for the same `number`."""
    try:
        root = orjson.loads(schema) if isinstance(schema, str) else schema
    except orjson.JSONDecodeError:
        root = {}
    return orjson.dumps(_value(root, root, number, 0)).decode()


def _value(schema: Any, root: Any, number: int, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if "$ref" in schema:
        return _value(_referred(schema["$ref"], root), root, number, depth + 1)
    if "const" in schema:
        return schema["const"]
    choices = schema.get("enum")
    if choices:
        return choices[number % len(choices)]
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if parts:
        return _value(parts[0], root, number, depth + 1)
    return _of_type(schema, root, number, depth)


def _of_type(schema: dict[str, Any], root: Any, number: int, depth: int) -> Any:
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _value(part, root, number, depth + 1) for name, part in properties.items()}
    if kind == "array":
        count = max(schema.get("minItems", 1), 0)
        return [_value(schema.get("items", {}), root, number + at, depth + 1) for at in range(count)]
    if kind in {"integer", "number"}:
        least, most = schema.get("minimum", 0), schema.get("maximum")
        value = least + number % 10
        return value if most is None else min(value, most)
    if kind == "boolean":
        return number % 2 == 0
    if kind == "null":
        return None
    text = _WORD + "." * max(0, schema.get("minLength", 0) - len(_WORD))
    return text[: schema.get("maxLength", len(text))]


def _referred(reference: Any, root: Any) -> Any:
    try:
        return part_at(root, str(reference))
    except LookupError:
        return None


MARK = "[simulated] "
"""Beginning of every answer, so that none is taken for a model's."""
LONGEST_TEXT_WORDS = 200
"""Most words of a text, whatever its number of tokens: a million rows must fit into memory."""
DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own default."""

MOST_SAMPLES = 128
"""Most samples of a whole request."""
LEAST_TICK_S = 0.001
"""Least seconds between two steps of the simulation."""

ENDED = "stop"
_NOTE = "simulated engine: answers are made up and speeds mean nothing"
_CHARACTERS_A_TOKEN = 4
_TOKENS_A_MESSAGE = 4  # those that a chat template puts around a message
_MEDIAN_OUTPUT_TOKENS = 150
_SPREAD = 0.8  # sigma of the lognormal: the longest tenth has about three times the median
_VOCABULARY_SIZE = 32_000
_LOGPROB = -1.0
_VOCABULARY = (
    *("the", "a", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "by", "from", "this"),
    *("it", "an", "or", "which", "one", "two", "new", "long", "small", "early", "late", "model", "system"),
    *("value", "result", "data", "study", "text", "part", "case", "time", "way", "point", "order", "light"),
)

# Tables, because an answer must take a few microseconds: benchmarks ask for a million.
_QUANTILES = 1024
_LENGTHS_TOKENS = [
    round(math.exp(math.log(_MEDIAN_OUTPUT_TOKENS) + _SPREAD * NormalDist().inv_cdf((i + 0.5) / _QUANTILES)))
    for i in range(_QUANTILES)
]
_TAPE_STARTS = 4096
_TAPE = [_VOCABULARY[crc32(b"%d" % i) % len(_VOCABULARY)] for i in range(_TAPE_STARTS + LONGEST_TEXT_WORDS)]


def answer(request: Request, limit_tokens: int, dimensions: int = 384) -> Completion:
    """Make up the completion of a request: the same one for the same prompt and seed, in any process.

    Prompt and output have `limit_tokens` together; vectors have `dimensions` numbers. Raises
    RowRefusedError, in SGLang's words, where the prompt leaves none for an output; an output that is too
    long is cut (finish reason `length`).
    """
    if isinstance(request.prompt, RequestBody):
        if request.prompt.path == EMBEDDINGS_PATH:
            return _answer_embeddings(request.prompt, request.ref, limit_tokens, dimensions)
        return _answer_body(request.prompt, request.ref, limit_tokens)
    prompt_tokens = count_tokens(request)
    if prompt_tokens >= limit_tokens:
        raise RowRefusedError(
            f"400: The input ({prompt_tokens} tokens) is longer than "
            f"the model's context length ({limit_tokens} tokens)."
        )
    if request.task is not None:
        if request.kind == "messages":
            raise RowRefusedError(f"task: {request.task.name} takes a text or token ids, and this is a chat")
        (seed,) = _hashes(request)
        return answer_of(request, request.task.made_up_reply(request, seed, prompt_tokens, dimensions))
    samples = _hashes(request)
    lengths = [_length(request.sampling, sample, limit_tokens - prompt_tokens) for sample in samples]
    texts = [_text(sample, tokens) for sample, (tokens, _) in zip(samples, lengths, strict=True)]
    reasons: list[str | None] = [reason for _, reason in lengths]
    if schema := request.sampling.get("json_schema"):  # a grammar ends where its value does
        texts, reasons = [made_up(schema, sample) for sample in samples], [ENDED] * len(samples)
    completion = Completion(
        texts=texts,
        finish_reasons=reasons,
        completion_tokens=[tokens for tokens, _ in lengths],
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
    )
    if request.asks is None:
        return completion
    return completion._replace(columns=_columns(request.asks, completion))


def _columns(asks: AskedColumns, completion: Completion) -> dict[str, list[Any]]:
    """Make up what is asked for besides the text: tokens are words, and each is as likely as the next."""
    words = [text.split() for text in completion.texts]
    ids = [[crc32(word.encode()) % _VOCABULARY_SIZE for word in some] for some in words]
    tokens = [
        [{"id": number, "token": word, "logprob": _LOGPROB} for number, word in zip(*some, strict=True)]
        for some in zip(ids, words, strict=True)
    ]
    found: dict[str, list[Any]] = {
        "output_ids": ids,
        "logprobs": tokens,
        "top_logprobs": [[[token] * asks.top_logprobs for token in some] for some in tokens],
        "prompt_logprobs": [[]],
    }
    return {name: found.get(name, [None] * len(words)) for name in asks.names}


def _answer_body(body: RequestBody, ref: RowRef, limit_tokens: int) -> Completion:
    """Make up the answer of an endpoint to a whole request."""
    fields = fields_of(body.content)
    samples = msgspec.json.decode(fields["n"]) if "n" in fields else 1
    if type(samples) is not int or not 1 <= samples <= MOST_SAMPLES:
        raise RowRefusedError(f"400: n should be 1 to {MOST_SAMPLES} (got {bytes(fields['n']).decode()})")
    sampling = {"max_new_tokens": body.most_tokens, "n": samples}
    prompt = prompt_of(body).decode()
    made = answer(Request(ref, "text", prompt, sampling), limit_tokens)
    is_chat = body.path == CHAT_PATH
    choices = [
        {
            "index": index,
            **({"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": reason,
        }
        for index, (text, reason) in enumerate(zip(made.texts, made.finish_reasons, strict=True))
    ]
    prompt_tokens, tokens = made.prompt_tokens or 0, made.output_tokens
    content = {
        "id": f"simulated-{crc32(prompt.encode()):08x}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": body.model or "simulated",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }
    return made._replace(
        texts=made.texts[:1],
        finish_reasons=made.finish_reasons[:1],
        completion_tokens=[tokens],
        columns={RESPONSE: [msgspec.json.encode(content).decode()]},
    )


def _answer_embeddings(body: RequestBody, ref: RowRef, limit_tokens: int, dimensions: int) -> Completion:
    """Make up the vectors that a whole request asks for."""
    fields = {name: msgspec.json.decode(value) for name, value in fields_of(body.content).items()}
    length = fields.get("dimensions")
    if length is not None and (type(length) is not int or length < 1):
        raise RowRefusedError(f"400: dimensions should be a number from 1 on (got {length!r})")
    prompts = prompts_in(body)
    if not prompts:
        raise RowRefusedError("400: input should be a text, token ids, or a list of either")
    task = EmbedTask(dimensions=length)
    answers = [
        answer(
            Request(ref, "text" if isinstance(p, str) else "input_ids", p, {}, task=task),
            limit_tokens,
            dimensions,
        )
        for p in prompts
    ]
    vectors = [made.columns[name][0] for made in answers for name in made.columns]
    tokens = sum(made.prompt_tokens or 0 for made in answers)
    is_text = fields.get("encoding_format") == "base64"
    content = reply_of(vectors, tokens, body.model or MODEL, as_text=is_text)
    return Completion([""], [ENDED], [0], tokens, None, columns={RESPONSE: [content.decode()]})


def count_tokens(request: Request) -> int:
    """Estimate the tokens of the prompt: exact for token ids, else four characters each."""
    if request.kind == "input_ids":
        return len(request.prompt)
    media = sum(file.tokens for file in request.media)
    if request.kind == "text":
        return media + len(request.prompt) // _CHARACTERS_A_TOKEN + 1
    characters = [len(str(message.get("content"))) for message in request.prompt]
    return media + sum(count // _CHARACTERS_A_TOKEN + 1 + _TOKENS_A_MESSAGE for count in characters)


def _hashes(request: Request) -> list[int]:
    """Return 32 bits for each sample, which decide its length and its words."""
    # repr, because a prompt of any kind has one; hash() would differ from process to process
    prompt = repr(request.prompt).encode("utf-8", "surrogatepass")
    prompt += b"".join(file.key for file in request.media)
    first = crc32(prompt, crc32(b"%d" % (request.sampling.get("sampling_seed") or 0)))
    return [first, *(crc32(b"%d" % i, first) for i in range(1, request.sampling.get("n") or 1))]


def _length(sampling: dict[str, Any], sample: int, limit_tokens: int) -> tuple[int, str]:
    """Return the output tokens of a sample, and why it ended."""
    asked = sampling.get("max_new_tokens")
    most = min(DEFAULT_MAX_NEW_TOKENS if asked is None else asked, limit_tokens)
    wished = max(_LENGTHS_TOKENS[sample % _QUANTILES], sampling.get("min_new_tokens") or 0)
    if wished > most or sampling.get("ignore_eos"):
        return most, CUT
    return wished, "stop"


def _text(sample: int, tokens: int) -> str:
    start = (sample >> 10) % _TAPE_STARTS  # other bits than those that chose the length
    return MARK + " ".join(_TAPE[start : start + min(tokens, LONGEST_TEXT_WORDS)])


class Simulator(Engine):
    """The `simulated` engine: made-up answers, scheduled as SGLang would, in real time.

    A decode pass takes half of `step_s` for an empty batch and all of it for a full one; a prefill takes
    as long again for a full budget of tokens. JSON is made up for a `json_schema`; other grammars are
    ignored, and prompts share no prefix. With `step_s: 0` rows are answered at once.
    """

    def __init__(self, spec: SimulatedEngine) -> None:
        self._spec = spec
        config = SchedulerConfig(spec.max_running, spec.max_total_tokens, spec.context_length)
        half_s = spec.step_s / 2
        cost = CostModel(half_s, half_s / spec.max_running, 0.0, half_s / config.max_prefill_tokens)
        self._replica = Replica(config, cost)
        self._limit_tokens = min(spec.context_length, spec.max_total_tokens)
        self._stepping: asyncio.Task[None] | None = None
        self._began = time.monotonic()

    async def open(self) -> EngineInfo:
        """Describe the engine, with a note that it is simulated."""
        return EngineInfo(
            kind="simulated",
            model="simulated",
            max_running=self._spec.max_running,
            max_total_tokens=self._spec.max_total_tokens,
            context_length=self._spec.context_length,
            caches_prefixes=False,
            takes_images=True,
            takes_audio=True,
            takes_videos=True,
            simulated=True,
            notes=(_NOTE,),
        )

    async def generate(self, request: Request, route: str) -> Completion:  # noqa: ARG002 - there is one
        """Make up an answer and wait as long as decoding it would take.

        Raises RowRefusedError where the prompt is too long. A call that is pending when the engine is
        closed stays so until its caller cancels it.
        """
        completion = answer(request, self._limit_tokens, self._spec.dimensions)
        return await self._decode(request, completion) if self._spec.step_s > 0 else completion

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load that the one simulated scheduler reported last."""
        gauges = self._replica.gauges
        return [
            SchedulerLoad(
                scheduler="simulated",
                source="simulated",
                running=gauges.running,
                queue=gauges.queue,
                token_usage=gauges.token_usage,
                used_tokens=gauges.used_tokens,
                max_total_tokens=gauges.max_total_tokens,
                max_running=gauges.max_running,
                taken_at=gauges.at_s,
            )
        ]

    async def close(self) -> None:
        """Stop decoding."""
        task, self._stepping = self._stepping, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _decode(self, request: Request, completion: Completion) -> Completion:
        most = request.sampling.get("max_new_tokens") or DEFAULT_MAX_NEW_TOKENS
        samples = [
            SimulatedRequest(
                completion.prompt_tokens or 1, tokens or 1, most,
                ignore_eos=bool(request.sampling.get("ignore_eos")), payload=asyncio.Event(),
            )
            for tokens in completion.completion_tokens or [1]  # without decoding: a prefill pass
        ]  # fmt: skip
        self._advance()
        for sample in samples:
            self._replica.submit(sample)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run(), name="simulated engine")
        try:
            for sample in samples:
                await sample.payload.wait()
        finally:  # a caller that goes away takes its samples along
            for sample in samples:
                if not sample.payload.is_set():
                    self._replica.drop(sample)
        return completion._replace(retractions=sum(sample.retractions for sample in samples))

    def _advance(self) -> None:
        for end in self._replica.advance(time.monotonic() - self._began):
            end.sample.payload.set()

    async def _run(self) -> None:
        """Advance the simulation in real time while there is work."""
        while self._replica.busy:
            await asyncio.sleep(max(LEAST_TICK_S, self._spec.step_s / 2))
            self._advance()
