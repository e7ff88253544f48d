"""The simulated engine: made-up answers at a made-up speed, for tests, benchmarks and demonstrations.

`answer` makes up a completion, `engines/simulation` decides when it is ready, as SGLang's scheduler
would, and `Simulator` waits for that in real time.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import (
    BYTES_PER_TOKEN,
    CHAT_PATH,
    EMBEDDINGS_PATH,
    AskedColumns,
    Completion,
    Request,
    RequestBody,
    RowRef,
    Tools,
)
from batchrunner.engines.base import Engine
from batchrunner.engines.request_limits import refuse_invalid
from batchrunner.engines.simulation.made_up import text_by_grammar, tool_call
from batchrunner.engines.simulation.replica import CostModel, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from batchrunner.input.request_bodies import prompts_in
from batchrunner.job.engine import SimulatedEngine
from batchrunner.job.output import CUT, RESPONSE, TOOL_CALLS
from batchrunner.job.tasks import EMBEDDING, MODEL, EmbedTask, made_up_columns, reply_of

MARK = "[simulated] "
"""Beginning of every answer, so that none is taken for a model's."""
LONGEST_TEXT_WORDS = 200
"""Most words of a text, whatever its number of tokens: a million rows must fit into memory."""
LEAST_TICK_S = 0.001
"""Least seconds between two steps of the simulation."""
ENDED, CALLED = "stop", "tool_calls"
"""Finish reasons of an answer that the model ended, and of one that calls a tool."""
CREATED = 1_750_000_000
"""Time of every whole answer: the same request has the same answer."""
_TOKENS_A_MESSAGE = 4  # those that a chat template puts around a message
_WORDS = (
    "the a of and to in is that for on with as by from this it an or which one two new long small early late "
    "model system value result data study text part case time way point order light"
)
_VOCABULARY = _WORDS.split()

# Tables, because an answer must take a few microseconds: benchmarks ask for a million.
_QUANTILES = 1024
# a median of 150 tokens, and about three times as many for the longest tenth
_LENGTHS = [
    round(150 * math.exp(NormalDist(0, 0.8).inv_cdf((i + 0.5) / _QUANTILES))) for i in range(_QUANTILES)
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
        try:
            return _answer_body(request.prompt, request.ref, limit_tokens, dimensions)
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
        ) as failure:  # a value that no server takes
            raise RowRefusedError(f"400: {failure}") from None
    prompt_tokens = count_tokens(request)
    if prompt_tokens >= limit_tokens:
        raise RowRefusedError(
            f"400: The input ({prompt_tokens} tokens) is longer than "
            f"the model's context length ({limit_tokens} tokens)."
        )
    samples = _hashes(request)
    if request.task is not None:
        if request.kind == "messages":
            raise RowRefusedError(f"task: {request.task.name} takes a text or token ids, and this is a chat")
        columns = made_up_columns(request.task, request, samples[0], dimensions)
        return Completion([], [], [], prompt_tokens, 0, columns=columns)
    most_tokens = min(request.sampling["max_new_tokens"], limit_tokens - prompt_tokens)
    answers = [_sample(request, sample, most_tokens) for sample in samples]
    completion = Completion(
        [each.text for each in answers],
        [each.reason for each in answers],
        [each.tokens for each in answers],
        prompt_tokens,
        0,
    )
    if request.asks is None:
        return completion
    asked: dict[str, list[Any]] = {name: [None] * len(answers) for name in request.asks.names}
    if TOOL_CALLS in asked:
        asked[TOOL_CALLS] = [each.calls for each in answers]
    return completion._replace(columns=asked)


class _Sample(NamedTuple):
    """A made-up output."""

    text: str
    tokens: int
    reason: str
    calls: list[dict[str, Any]] | None = None
    """Calls of tools, in OpenAI's form."""


def _sample(request: Request, number: int, most_tokens: int) -> _Sample:
    """Make up an output by its 32 bits; one that has more than the most tokens is cut there."""
    sampling = request.sampling
    most_characters = most_tokens * BYTES_PER_TOKEN
    text = text_by_grammar(sampling, number, most_characters + 1)
    call = tool_call(request, number) if text is None and request.kind == "messages" else None
    if call is not None:
        text = orjson.dumps(call["function"]).decode()
    if text is None:
        tokens, reason = _length(sampling, number, most_tokens)
        return _Sample(_text(number, tokens), tokens, reason)
    if len(text) > most_characters:
        return _Sample(text[:most_characters], most_tokens, CUT)
    tokens = max(1, math.ceil(len(text) / BYTES_PER_TOKEN))
    return _Sample(text, tokens, ENDED) if call is None else _Sample("", tokens, CALLED, [call])


def _answer_body(body: RequestBody, ref: RowRef, limit_tokens: int, dimensions: int) -> Completion:
    """Make up the response of an endpoint to a whole request."""
    fields = orjson.loads(body.content)
    if body.path == EMBEDDINGS_PATH:
        return _vectors(body, fields, ref, limit_tokens, dimensions)
    requests = _requests_in(body, fields, ref)
    answers = [answer(request, limit_tokens) for request in requests]
    is_chat = body.path == CHAT_PATH
    choices = [
        {"index": index, **content, "logprobs": None, "finish_reason": reason}
        for index, (content, reason) in enumerate(
            (_content(made, at, is_chat=is_chat), made.finish_reasons[at])
            for made in answers
            for at in range(len(made.texts))
        )
    ]
    prompt_tokens = sum(made.prompt_tokens or 0 for made in answers)
    output_tokens = sum(made.output_tokens for made in answers)
    name = f"{crc32(body.content):08x}"
    content = {
        "id": f"chatcmpl-{name}" if is_chat else f"cmpl-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": CREATED,
        "model": body.model or "simulated",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        },
    }
    return Completion(
        answers[0].texts[:1],
        answers[0].finish_reasons[:1],
        [output_tokens],
        prompt_tokens,
        0,
        columns={RESPONSE: [orjson.dumps(content).decode()]},
    )


def _content(made: Completion, at: int, *, is_chat: bool) -> dict[str, Any]:
    """Return the part of a choice that has the text of an output."""
    text = made.texts[at]
    if not is_chat:
        return {"text": text}
    calls = made.columns[TOOL_CALLS][at]
    message: dict[str, Any] = {"role": "assistant", "content": text if calls is None else None}
    return {"message": message if calls is None else {**message, "tool_calls": calls}}


_SAMPLING_OF_BODY = {"seed": "sampling_seed", "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos"}
"""Fields of a whole request that decide the answer, and what `/generate` calls them."""
_CALLS_ONLY = AskedColumns(frozenset({TOOL_CALLS}), 0, of_tokens=False)


def _requests_in(body: RequestBody, fields: dict[str, Any], ref: RowRef) -> list[Request]:
    """Return the requests that a whole one stands for: one for each of its prompts."""
    sampling: dict[str, Any] = {"max_new_tokens": body.most_tokens, "n": int(fields.get("n") or 1)}
    sampling |= {ours: fields[name] for name, ours in _SAMPLING_OF_BODY.items() if fields.get(name)}
    sampling |= {name: fields[name] for name in ("json_schema", "regex") if fields.get(name)}
    wanted = fields.get("response_format") or {}
    if wanted.get("type") == "json_object":
        sampling["json_schema"] = {"type": "object"}
    elif wanted.get("type") == "json_schema":
        sampling["json_schema"] = wanted["json_schema"]["schema"]
    if body.path == CHAT_PATH:
        tools = Tools(fields.get("tools"), fields.get("tool_choice"))
        return [Request(ref, "messages", fields["messages"], sampling, tools=tools, asks=_CALLS_ONLY)]
    return [
        Request(ref, "text" if isinstance(prompt, str) else "input_ids", prompt, sampling)
        for prompt in prompts_in(body)
    ]


def _vectors(
    body: RequestBody, fields: dict[str, Any], ref: RowRef, limit_tokens: int, dimensions: int
) -> Completion:
    """Make up the vectors of all inputs of a request."""
    task = EmbedTask(dimensions=fields.get("dimensions"))
    answers = [
        answer(
            Request(ref, "text" if isinstance(prompt, str) else "input_ids", prompt, {}, task=task),
            limit_tokens,
            dimensions,
        )
        for prompt in prompts_in(body)
    ]
    vectors = [made.columns[EMBEDDING][0] for made in answers]
    tokens = sum(made.prompt_tokens or 0 for made in answers)
    as_text = fields.get("encoding_format") == "base64"
    response = reply_of(vectors, tokens, body.model or MODEL, as_text=as_text)
    return Completion([""], [ENDED], [0], tokens, None, columns={RESPONSE: [response.decode()]})


def count_tokens(request: Request) -> int:
    """Estimate the tokens of the prompt: exact for token ids, else four characters each."""
    if request.kind == "input_ids":
        return len(request.prompt)
    media = sum(file.tokens for file in request.media)
    if request.kind == "text":
        return media + len(request.prompt) // BYTES_PER_TOKEN + 1
    characters = [len(str(message.get("content"))) for message in request.prompt]
    return media + sum(count // BYTES_PER_TOKEN + 1 + _TOKENS_A_MESSAGE for count in characters)


def _hashes(request: Request) -> list[int]:
    """Return 32 bits for each sample, which decide its length and its words."""
    # repr, because a prompt of any kind has one; hash() would differ from process to process
    prompt = repr(request.prompt).encode("utf-8", "surrogatepass")
    prompt += b"".join(file.key for file in request.media)
    first = crc32(prompt, crc32(b"%d" % (request.sampling.get("sampling_seed") or 0)))
    return [first, *(crc32(b"%d" % i, first) for i in range(1, request.sampling.get("n") or 1))]


def _length(sampling: dict[str, Any], sample: int, most: int) -> tuple[int, str]:
    """Return the output tokens of a text, and why it ended."""
    wished = max(_LENGTHS[sample % _QUANTILES], sampling.get("min_new_tokens") or 0)
    return (most, CUT) if wished > most or sampling.get("ignore_eos") else (wished, ENDED)


def _text(sample: int, tokens: int) -> str:
    start = (sample >> 10) % _TAPE_STARTS  # other bits than those that chose the length
    return MARK + " ".join(_TAPE[start : start + min(tokens, LONGEST_TEXT_WORDS)])


class Simulator(Engine):
    """The `simulated` engine: made-up answers, scheduled as SGLang would, in real time.

    A decode pass takes half of `step_s` for an empty batch and all of it for a full one; a prefill takes
    as long again for a full budget of tokens. A text is made up for a `json_schema` or `regex`; other
    grammars are ignored. Tools are called in a turn or two of a chat. Prompts share no prefix. With
    `step_s: 0` rows are answered at once.
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
        self._valid: dict[str, Any] | None = None

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
            notes=("simulated engine: answers are made up and speeds mean nothing",),
        )

    async def generate(self, request: Request, route: str) -> Completion:  # noqa: ARG002 - there is one
        """Make up an answer and wait as long as decoding it would take.

        Raises RowRefusedError where the prompt is too long, or SGLang refuses the request. A call that is
        pending when the engine is closed stays so until its caller cancels it.
        """
        if request.sampling is not self._valid:  # the same object where no column has a parameter
            refuse_invalid(request)
            self._valid = request.sampling
        completion = answer(request, self._limit_tokens, self._spec.dimensions)
        return await self._decode(request, completion) if self._spec.step_s > 0 else completion

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the load that the one simulated scheduler reported last."""
        return [self._replica.load]

    async def close(self) -> None:
        """Stop decoding."""
        task, self._stepping = self._stepping, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _decode(self, request: Request, completion: Completion) -> Completion:
        most = request.sampling.get("max_new_tokens", 1)
        samples = [
            SimulatedRequest(
                completion.prompt_tokens or 1, tokens or 1, most,
                ignore_eos=bool(request.sampling.get("ignore_eos")), payload=asyncio.Event(),
            )
            for tokens in completion.completion_tokens or [1]  # without decoding: a prefill pass
        ]  # fmt: skip
        self._advance()
        for sample in samples:
            self._replica.scheduler.submit(sample)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run(), name="simulated engine")
        for sample in samples:  # they decode to their ends also where the caller goes away
            await sample.payload.wait()
        return completion._replace(retractions=sum(sample.retractions for sample in samples))

    def _advance(self) -> None:
        for end in self._replica.advance(time.monotonic() - self._began):
            end.sample.payload.set()

    async def _run(self) -> None:
        """Advance the simulation in real time while there is work."""
        while self._replica.busy:
            await asyncio.sleep(max(LEAST_TICK_S, self._spec.step_s / 2))
            self._advance()
