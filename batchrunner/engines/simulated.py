"""The simulated engine: synthetic answers at a simulated speed, for tests, benchmarks and demonstrations.

`answer` makes up a completion. `engines/simulation` computes the time at which SGLang's scheduler would have
finished the completion, and `Simulator` waits until then.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import (
    BYTES_PER_TOKEN,
    CHAT_PATH,
    CLASSIFY_PATH,
    EMBEDDINGS_PATH,
    NO_COLUMNS,
    RERANK_PATH,
    RESPONSES_PATH,
    SCORE_PATH,
    AskedColumns,
    Completion,
    PromptKind,
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
from batchrunner.job.output import CUT, REASONING, RESPONSE, TOOL_CALLS
from batchrunner.job.sampling import THINKING
from batchrunner.job.tasks import EMBEDDING, MODEL, EmbedTask, made_up_columns, reply_of

MARK = "[simulated] "
"""Prefix of every made-up text, so that nobody takes the text for a model's answer."""
LONGEST_TEXT_WORDS = 200
"""Maximum number of words of a made-up text, even if the output has more tokens. Without a maximum, the
answers of a million rows would not fit into memory."""
LEAST_TICK_S = 0.001
"""Minimum seconds between two steps of the simulation."""
STOPPED = "stop"
"""Finish reason of an answer that is not truncated and calls no tool."""
CALLED = "tool_calls"
"""Finish reason of an answer that calls a tool."""
CREATED = 1_750_000_000
"""Creation time (seconds since the epoch) of every response of an OpenAI endpoint. A constant, so that equal
requests have equal responses."""
_TOKENS_A_MESSAGE = 4
"""Number of tokens that a chat template is assumed to add to each message."""
_WORDS = (
    "the a of and to in is that for on with as by from this it an or which one two new long small early late "
    "model system value result data study text part case time way point order light"
)
_VOCABULARY = _WORDS.split()

# A benchmark requests a million answers, so making up one may take only a few microseconds. Lengths and words
# therefore come from tables.
_QUANTILES = 1024
_LENGTHS = [
    round(150 * math.exp(NormalDist(0, 0.8).inv_cdf((i + 0.5) / _QUANTILES))) for i in range(_QUANTILES)
]
"""Quantiles of the number of output tokens (log-normal; median 150; one answer in ten has 418 or more)."""
_TAPE_STARTS = 4096
_TAPE = [_VOCABULARY[crc32(b"%d" % i) % len(_VOCABULARY)] for i in range(_TAPE_STARTS + LONGEST_TEXT_WORDS)]
"""Random words. The text of an answer is a slice of this list, which begins at one of the first _TAPE_STARTS
words."""


def answer(request: Request, limit_tokens: int, dimensions: int = 384) -> Completion:
    """Make up the completion of a request. Equal prompts and seeds have equal completions in any process.

    Prompt and output together have at most `limit_tokens` tokens; a longer output is truncated (finish reason
    `length`). The vectors of an embedding task have `dimensions` numbers. Raises RowRefusedError, with
    SGLang's message, if the prompt leaves no token for an output.
    """
    if isinstance(request.prompt, RequestBody):
        try:
            return _answer_body(request.prompt, request.ref, limit_tokens, dimensions)
        # These errors are raised for a field of the body with a value of the wrong type or form.
        except (TypeError, ValueError, LookupError, AttributeError) as failure:
            raise RowRefusedError(f"400: {failure}") from None
    prompt_tokens = count_tokens(request)
    if prompt_tokens >= limit_tokens:
        raise RowRefusedError(
            f"400: The input ({prompt_tokens} tokens) is longer than "
            f"the model's context length ({limit_tokens} tokens)."
        )
    hashes = _hashes(request)
    if request.task is not None:
        if request.kind == "messages":
            raise RowRefusedError(f"task: {request.task.name} takes a text or token ids, and this is a chat")
        # Embeddings, scores and classes have no text: their results are columns.
        columns = made_up_columns(request.task, request, hashes[0], dimensions)
        return _completion([], prompt_tokens, columns)
    most_tokens = min(request.sampling["max_new_tokens"], limit_tokens - prompt_tokens)
    outputs = [_output(request, number, most_tokens) for number in hashes]
    if request.asks is None:
        return _completion(outputs, prompt_tokens, NO_COLUMNS)
    # Requested columns that cannot be made up, such as `logprobs`, stay null.
    asked_columns: dict[str, list[Any]] = {name: [None] * len(outputs) for name in request.asks.names}
    if TOOL_CALLS in asked_columns:
        asked_columns[TOOL_CALLS] = [output.calls for output in outputs]
    if REASONING in asked_columns:
        asked_columns[REASONING] = [output.thinking for output in outputs]
    return _completion(outputs, prompt_tokens, asked_columns)


class _Output(NamedTuple):
    """One synthetic output of a request."""

    text: str
    tokens: int
    """Number of output tokens, including the tokens of the thinking."""
    reason: str
    """Finish reason."""
    calls: list[dict[str, Any]] | None = None
    """Tool calls in OpenAI's format; None if the output calls no tool."""
    thinking: str | None = None
    """Text of the thinking; None if the request has no budget of thinking tokens."""
    is_thinking_cut: bool = False
    """Whether the thinking took the whole budget."""


def _completion(
    outputs: Sequence[_Output], prompt_tokens: int, columns: Mapping[str, list[Any]]
) -> Completion:
    """Combine the synthetic outputs for a prompt into one Completion, without prefix cache hits."""
    return Completion(
        texts=[output.text for output in outputs],
        finish_reasons=[output.reason for output in outputs],
        completion_tokens=[output.tokens for output in outputs],
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        columns=columns,
        thinking_cut=any(output.is_thinking_cut for output in outputs),
    )


def _output(request: Request, number: int, most_tokens: int) -> _Output:
    """Make up an output from a random 32-bit `number`, truncated at `most_tokens`.

    With a budget (`max_thinking_tokens`), an output begins with thinking, which the budget may truncate.
    """
    budget = request.sampling.get(THINKING) or 0
    if budget <= 0:
        return _output_without_thinking(request, number, most_tokens)
    # These bits of `number` choose neither the length of the answer nor its text. So the length of the
    # thinking is independent of both.
    thinking_tokens = min(_LENGTHS[number >> 22], budget, most_tokens)
    if thinking_tokens < most_tokens:
        output = _output_without_thinking(request, number, most_tokens - thinking_tokens)
    else:
        output = _Output("", 0, CUT)
    return output._replace(
        tokens=thinking_tokens + output.tokens,
        # The inverted number selects other words than those of the answer.
        thinking=_text(~number, thinking_tokens),
        is_thinking_cut=thinking_tokens == budget,
    )


def _output_without_thinking(request: Request, number: int, most_tokens: int) -> _Output:
    """Make up an output: a text that follows the request's grammar, a tool call, or random words."""
    sampling = request.sampling
    most_characters = most_tokens * BYTES_PER_TOKEN
    # If the text has one character more than allowed, it must be truncated.
    text = text_by_grammar(sampling, number, most_characters + 1)
    call = tool_call(request, number) if text is None and request.kind == "messages" else None
    if call is not None:
        text = orjson.dumps(call["function"]).decode()
    if text is None:
        tokens, reason = _length(sampling, number, most_tokens)
        return _Output(_text(number, tokens), tokens, reason)
    if len(text) > most_characters:
        return _Output(text[:most_characters], most_tokens, CUT)
    tokens = max(1, math.ceil(len(text) / BYTES_PER_TOKEN))
    return _Output(text, tokens, STOPPED) if call is None else _Output("", tokens, CALLED, calls=[call])


def _answer_body(body: RequestBody, ref: RowRef, limit_tokens: int, dimensions: int) -> Completion:
    """Make up the response of one of OpenAI's endpoints to a body, which may have several prompts."""
    fields = orjson.loads(body.content)
    if body.path == EMBEDDINGS_PATH:
        return _embeddings_response(body, fields, ref=ref, limit_tokens=limit_tokens, dimensions=dimensions)
    if body.path in {SCORE_PATH, RERANK_PATH, CLASSIFY_PATH}:
        values, tokens = _values_of(body, fields)
        columns = {RESPONSE: [orjson.dumps(values).decode()]}
        completion = _completion([_Output("", 0, STOPPED)], tokens, columns)
        # SGLang reports no cached tokens for embeddings, scores and classes.
        return completion._replace(cached_tokens=None)
    completions = [answer(request, limit_tokens) for request in _requests_in(body, fields, ref)]
    is_chat = body.path == CHAT_PATH
    choices: list[dict[str, Any]] = []
    for completion in completions:
        for index, reason in enumerate(completion.finish_reasons):
            content = _choice_content(completion, index, is_chat=is_chat)
            choices.append({"index": len(choices), **content, "logprobs": None, "finish_reason": reason})
    prompt_tokens = sum(completion.prompt_tokens or 0 for completion in completions)
    output_tokens = sum(completion.output_tokens for completion in completions)
    body_hash = f"{crc32(body.content):08x}"
    response = {
        "id": f"chatcmpl-{body_hash}" if is_chat else f"cmpl-{body_hash}",
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
    # The row's result has only the first choice, with the token counts of all choices. The response body has
    # all choices.
    first_completion = completions[0]
    if body.path == RESPONSES_PATH:
        response = _response_object(body, fields, first_completion)
    return first_completion._replace(
        texts=first_completion.texts[:1],
        finish_reasons=first_completion.finish_reasons[:1],
        completion_tokens=[output_tokens],
        prompt_tokens=prompt_tokens,
        columns={RESPONSE: [orjson.dumps(response).decode()]},
    )


def _values_of(body: RequestBody, fields: dict[str, Any]) -> tuple[Any, int]:
    """Make up the response to a request for scores or classes; return it with the number of prompt tokens."""
    items_field = {SCORE_PATH: "items", RERANK_PATH: "documents"}.get(body.path, "input")
    items = fields.get(items_field)
    texts = items if isinstance(items, list) else [items]
    tokens = [len(orjson.dumps(text)) // BYTES_PER_TOKEN + 1 for text in texts]
    # One pseudo-random number from 0 to 1 for each text; equal queries and texts give equal numbers.
    numbers = [crc32(orjson.dumps([fields.get("query"), text])) / (1 << 32) for text in texts]
    usage = {"prompt_tokens": sum(tokens), "completion_tokens": 0, "total_tokens": sum(tokens)}
    head = {"model": body.model or "simulated", "usage": usage}
    if body.path == SCORE_PATH:
        labels = len(fields.get("label_token_ids") or [0])
        return {"object": "scoring", "scores": [[number] * labels for number in numbers], **head}, sum(tokens)
    if body.path == CLASSIFY_PATH:
        data = [
            {"index": index, "label": "made up", "probs": [number, 1 - number], "num_classes": 2}
            for index, number in enumerate(numbers)
        ]
        name = f"classify-{crc32(body.content):08x}"
        return {"id": name, "object": "list", "created": CREATED, "data": data, **head}, sum(tokens)
    ranks = sorted(enumerate(numbers), key=lambda rank: -rank[1])[: fields.get("top_n")]
    results = [{"score": number, "document": texts[index], "index": index} for index, number in ranks]
    return results, sum(tokens)


def _response_object(body: RequestBody, fields: dict[str, Any], completion: Completion) -> dict[str, Any]:
    """Return the body of an answer of `/v1/responses`."""
    name = f"{crc32(body.content):08x}"
    is_cut = completion.finish_reasons[0] == CUT
    status = "incomplete" if is_cut else "completed"
    text = {"type": "output_text", "text": completion.texts[0], "annotations": []}
    message = {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text],
    }
    prompt_tokens, output_tokens = completion.prompt_tokens or 0, completion.output_tokens
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": CREATED,
        "model": body.model or "simulated",
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": [message],
        "instructions": fields.get("instructions"),
        "metadata": fields.get("metadata"),
        "parallel_tool_calls": True,
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "temperature": fields.get("temperature"),
        "top_p": fields.get("top_p"),
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + output_tokens,
        },
    }


def _choice_content(completion: Completion, index: int, *, is_chat: bool) -> dict[str, Any]:
    """Return one output of a completion as a field of a choice: `message` for a chat, else `text`."""
    text = completion.texts[index]
    if not is_chat:
        return {"text": text}
    calls = completion.columns[TOOL_CALLS][index]
    thinking = completion.columns[REASONING][index]
    message = {"role": "assistant", "content": text if calls is None else None}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls is not None:
        message["tool_calls"] = calls
    return {"message": message}


_SAMPLING_OF_BODY = {
    "seed": "sampling_seed", "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos",
    "json_schema": "json_schema", "regex": "regex",
}  # fmt: skip
"""Sampling parameters of `/generate`, by their names in OpenAI's requests. Only those that change a made-up
answer are listed."""
_CHAT_COLUMNS = AskedColumns(frozenset({TOOL_CALLS, REASONING}), 0, of_tokens=False)
"""Columns of a chat's completion that the response contains."""


def _requests_in(body: RequestBody, fields: dict[str, Any], ref: RowRef) -> list[Request]:
    """Return a request for each prompt in the body."""
    sampling = _sampling_in(body, fields)
    if body.path == CHAT_PATH:
        tools = Tools(fields.get("tools"), fields.get("tool_choice"))
        return [Request(ref, "messages", fields["messages"], sampling, tools=tools, asks=_CHAT_COLUMNS)]
    if body.path == RESPONSES_PATH:
        question = {"role": "user", "content": [fields.get("instructions"), fields["input"]]}
        return [Request(ref, "messages", [question], sampling)]
    return [_prompt_request(ref, prompt, sampling) for prompt in prompts_in(body)]


def _sampling_in(body: RequestBody, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a body under their names in `/generate`."""
    sampling: dict[str, Any] = {
        "max_new_tokens": body.most_tokens,
        "n": int(fields.get("n") or 1),
        THINKING: body.most_thinking,
    }
    for name, sglang_name in _SAMPLING_OF_BODY.items():
        if fields.get(name):
            sampling[sglang_name] = fields[name]
    # Chats and completions name a schema in `response_format`, responses in `text`.
    response_format = fields.get("response_format") or {}
    if response_format.get("type") == "json_object":
        sampling["json_schema"] = {"type": "object"}
    elif response_format.get("type") == "json_schema":
        sampling["json_schema"] = response_format["json_schema"]["schema"]
    format_of_response = (fields.get("text") or {}).get("format") or {}
    if format_of_response.get("type") == "json_schema":
        sampling["json_schema"] = format_of_response["schema"]
    return sampling


def _prompt_request(
    ref: RowRef, prompt: Any, sampling: dict[str, Any], task: EmbedTask | None = None
) -> Request:
    kind: PromptKind = "text" if isinstance(prompt, str) else "input_ids"
    return Request(ref, kind, prompt, sampling, task=task)


def _embeddings_response(
    body: RequestBody, fields: dict[str, Any], *, ref: RowRef, limit_tokens: int, dimensions: int
) -> Completion:
    """Make up the response of the embeddings endpoint, with a vector for each input of the body."""
    task = EmbedTask(dimensions=fields.get("dimensions"))
    requests = [_prompt_request(ref, prompt, {}, task) for prompt in prompts_in(body)]
    completions = [answer(request, limit_tokens, dimensions) for request in requests]
    vectors = [completion.columns[EMBEDDING][0] for completion in completions]
    tokens = sum(completion.prompt_tokens or 0 for completion in completions)
    as_text = fields.get("encoding_format") == "base64"
    response = reply_of(vectors, tokens, body.model or MODEL, as_text=as_text)
    completion = _completion([_Output("", 0, STOPPED)], tokens, {RESPONSE: [response.decode()]})
    # SGLang reports no cached tokens for embeddings.
    return completion._replace(cached_tokens=None)


def count_tokens(request: Request) -> int:
    """Return the number of prompt tokens: exact for token ids, else one token for four characters."""
    if request.kind == "input_ids":
        return len(request.prompt)
    media = sum(file.tokens for file in request.media)
    if request.kind == "text":
        return media + len(request.prompt) // BYTES_PER_TOKEN + 1
    characters = [len(str(message.get("content"))) for message in request.prompt]
    return media + sum(count // BYTES_PER_TOKEN + 1 + _TOKENS_A_MESSAGE for count in characters)


def _hashes(request: Request) -> list[int]:
    """Return 32 pseudo-random bits for each output of a request, which decide its length and its words."""
    # Every kind of prompt has a `repr`. `hash` would give other bits in another process.
    prompt = repr(request.prompt).encode("utf-8", "surrogatepass")
    prompt += b"".join(file.key for file in request.media)
    seed = request.sampling.get("sampling_seed") or 0
    outputs = request.sampling.get("n") or 1
    first_hash = crc32(prompt, crc32(b"%d" % seed))
    return [first_hash, *(crc32(b"%d" % index, first_hash) for index in range(1, outputs))]


def _length(sampling: dict[str, Any], number: int, most_tokens: int) -> tuple[int, str]:
    """Return the number of output tokens of a text, and its finish reason."""
    tokens = max(_LENGTHS[number % _QUANTILES], sampling.get("min_new_tokens") or 0)
    if tokens > most_tokens or sampling.get("ignore_eos"):
        return most_tokens, CUT
    return tokens, STOPPED


def _text(number: int, tokens: int) -> str:
    """Return a text that begins with MARK and has one word per token, at most LONGEST_TEXT_WORDS."""
    # The last 10 bits choose the length, so they are left out here: text and length are then independent.
    start = (number >> 10) % _TAPE_STARTS
    return MARK + " ".join(_TAPE[start : start + min(tokens, LONGEST_TEXT_WORDS)])


class Simulator(Engine):
    """The `simulated` engine: synthetic answers in real time, scheduled as by SGLang.

    A decode pass takes half of `step_s` for an empty batch, and `step_s` for a full batch. A prefill pass
    takes up to half of `step_s` more, in proportion to its tokens. With `step_s: 0` rows are answered at
    once. Prompts share no prefix.

    Answers follow a `json_schema` or `regex`; other grammars are ignored. In a chat with tools, one or two
    turns call a tool. With `max_thinking_tokens` answers begin with thinking, which obeys the budget.
    """

    def __init__(self, spec: SimulatedEngine) -> None:
        self._spec = spec
        config = SchedulerConfig(
            max_running=spec.max_running,
            max_total_tokens=spec.max_total_tokens,
            context_tokens=spec.context_length,
        )
        # A decode pass takes half of `step_s` for an empty batch, and all of it for a full batch.
        half_step_s = spec.step_s / 2
        cost = CostModel(
            base_s=half_step_s,
            sample_s=half_step_s / spec.max_running,
            kv_token_s=0.0,
            prefill_token_s=half_step_s / config.max_prefill_tokens,
        )
        self._replica = Replica(config, cost)
        self._limit_tokens = min(spec.context_length, spec.max_total_tokens)
        """Maximum number of tokens of a prompt and its output."""
        self._simulation: asyncio.Task[None] | None = None
        """Task that advances the simulation; None before the first request."""
        self._start = time.monotonic()
        """Time at which the clock of the simulation began."""
        self._valid_sampling: dict[str, Any] | None = None
        """The last sampling parameters that passed the checks."""

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
        """Make up an answer, and wait for as long as SGLang would take to generate it.

        Raises RowRefusedError if SGLang would refuse the request, for instance because the prompt is too
        long. A call that is pending when the engine is closed stays pending until its caller cancels it.
        """
        # Usually all rows share one object with the sampling parameters, so it is checked once.
        if request.sampling is not self._valid_sampling:
            refuse_invalid(request)
            self._valid_sampling = request.sampling
        completion = answer(request, self._limit_tokens, self._spec.dimensions)
        return await self._decode(request, completion) if self._spec.step_s > 0 else completion

    async def loads(self) -> Sequence[SchedulerLoad]:
        """Return the last load sample of the simulated scheduler."""
        return [self._replica.load]

    async def close(self) -> None:
        """Stop the simulation."""
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            simulation.cancel()
            await asyncio.gather(simulation, return_exceptions=True)

    async def _decode(self, request: Request, completion: Completion) -> Completion:
        """Wait until the scheduler has decoded a completion; return it with its number of retractions."""
        # A task without decoding (embeddings, scores) takes one prefill pass, like an output of one token.
        output_lengths = completion.completion_tokens or [1]
        samples = [
            SimulatedRequest(
                prompt_tokens=completion.prompt_tokens or 1,
                output_tokens=output_tokens or 1,
                max_new_tokens=request.sampling.get("max_new_tokens", 1),
                ignore_eos=bool(request.sampling.get("ignore_eos")),
                payload=asyncio.Event(),
            )
            for output_tokens in output_lengths
        ]
        # New samples enter the scheduler's next pass, so its clock must first catch up with the present.
        self._advance()
        for sample in samples:
            self._replica.scheduler.submit(sample)
        if self._simulation is None or self._simulation.done():
            self._simulation = asyncio.create_task(self._run(), name="simulated engine")
        # If the caller is cancelled here, the scheduler still decodes the samples to their ends.
        for sample in samples:
            await sample.payload.wait()
        return completion._replace(retractions=sum(sample.retractions for sample in samples))

    def _advance(self) -> None:
        """Advance the simulation to the present, and wake the callers whose samples have ended."""
        for end in self._replica.advance(time.monotonic() - self._start):
            end.sample.payload.set()

    async def _run(self) -> None:
        """Advance the simulation in real time until it has no more work."""
        while self._replica.busy:
            await asyncio.sleep(max(LEAST_TICK_S, self._spec.step_s / 2))
            self._advance()
