"""No engine at all: made-up answers at a made-up speed, for tests, benchmarks and a look at the screen.

A row is answered in three parts: `answer` makes up what comes back, `Batch` decides which samples decode
together, and `Simulator` lets real time pass and speaks the engine protocol.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any
from zlib import crc32

from batchrunner.errors import RowRefusedError
from batchrunner.records import Completion, EngineInfo, Signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.job import SimulatedEngine
    from batchrunner.records import Request

MARK = "[simulated] "
"""Every answer starts with it, so that none is ever taken for a model's."""
LONGEST_TEXT_WORDS = 200
"""A text ends here, however many tokens it is said to have: a million rows must fit into memory."""
DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's own default."""

_NOTE = "simulated engine: answers are made up and speeds mean nothing"
_CHARACTERS_A_TOKEN = 4
_TOKENS_A_MESSAGE = 4  # a chat template's marks around a message
_MEDIAN_OUTPUT_TOKENS = 150
_SPREAD = 0.8  # sigma of the lognormal: the longest tenth has about three times the median
_VOCABULARY = (
    *("the", "a", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "by", "from", "this"),
    *("it", "an", "or", "which", "one", "two", "new", "long", "small", "early", "late", "model", "system"),
    *("value", "result", "data", "study", "text", "part", "case", "time", "way", "point", "order", "light"),
)

# Looked up, not computed: an answer must cost a few microseconds where benchmarks ask for a million.
_QUANTILES = 1024
_LENGTHS_TOKENS = [
    round(math.exp(math.log(_MEDIAN_OUTPUT_TOKENS) + _SPREAD * NormalDist().inv_cdf((i + 0.5) / _QUANTILES)))
    for i in range(_QUANTILES)
]
_TAPE_STARTS = 4096
_TAPE = [_VOCABULARY[crc32(b"%d" % i) % len(_VOCABULARY)] for i in range(_TAPE_STARTS + LONGEST_TEXT_WORDS)]


def answer(request: Request, room_tokens: int) -> Completion:
    """Make up the completion of a request: the same one for the same prompt and seed, in any process.

    `room_tokens` holds prompt and output together. Raises RowRefusedError, in SGLang's words, where the
    prompt leaves no room for an output; an output that would not fit is cut (finish reason `length`).
    """
    prompt_tokens = count_tokens(request)
    if prompt_tokens >= room_tokens:
        raise RowRefusedError(
            f"The input ({prompt_tokens} tokens) is longer than "
            f"the model's context length ({room_tokens} tokens)."
        )
    samples = _hashes(request)
    lengths = [_length(request.sampling, sample, room_tokens - prompt_tokens) for sample in samples]
    return Completion(
        texts=[_text(sample, tokens) for sample, (tokens, _) in zip(samples, lengths, strict=True)],
        finish_reasons=[reason for _, reason in lengths],
        completion_tokens=[tokens for tokens, _ in lengths],
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
    )


def count_tokens(request: Request) -> int:
    """Estimate the tokens of the prompt: exact for token ids, else four characters each."""
    if request.kind == "input_ids":
        return len(request.prompt)
    if request.kind == "text":
        return len(request.prompt) // _CHARACTERS_A_TOKEN + 1
    characters = [len(str(message.get("content"))) for message in request.prompt]
    return sum(count // _CHARACTERS_A_TOKEN + 1 + _TOKENS_A_MESSAGE for count in characters)


def _hashes(request: Request) -> list[int]:
    """32 bits a sample, which decide its length and its words."""
    # repr, because a prompt of any kind has one; hash() would differ from process to process
    prompt = repr(request.prompt).encode("utf-8", "surrogatepass")
    first = crc32(prompt, crc32(b"%d" % (request.sampling.get("sampling_seed") or 0)))
    return [first, *(crc32(b"%d" % i, first) for i in range(1, request.sampling.get("n") or 1))]


def _length(sampling: dict[str, Any], sample: int, room_tokens: int) -> tuple[int, str]:
    """Output tokens of a sample, and why it ended."""
    asked = sampling.get("max_new_tokens")
    most = min(DEFAULT_MAX_NEW_TOKENS if asked is None else asked, room_tokens)
    wished = max(_LENGTHS_TOKENS[sample % _QUANTILES], sampling.get("min_new_tokens") or 0)
    if wished > most or sampling.get("ignore_eos"):
        return most, "length"
    return wished, "stop"


def _text(sample: int, tokens: int) -> str:
    start = (sample >> 10) % _TAPE_STARTS  # other bits than those that chose the length
    return MARK + " ".join(_TAPE[start : start + min(tokens, LONGEST_TEXT_WORDS)])


@dataclass(slots=True, eq=False)
class Sample:
    """One output on its way through a batch."""

    prompt_tokens: int
    output_tokens: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started_step: int | None = None
    """None while it waits."""
    over: bool = False
    """It ended or was dropped; the heap or the queue may still hold it and will skip it."""

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the pool that it takes from admission to its end."""
        return self.prompt_tokens + self.output_tokens


class Batch:
    """Continuous batching without a clock: every step gives each running sample one token.

    Samples are admitted first come, first served, as far as there are a slot and tokens. The real
    scheduler bets that outputs end early and retracts when the pool runs out; here the length of an
    output is known beforehand, so admission reserves all of it and the pool can never run out. A step
    costs O(ended + admitted), however many run: the ends are a heap, the tokens a running sum.
    """

    def __init__(self, max_running: int, max_total_tokens: int) -> None:
        self.max_running = max_running
        self.max_total_tokens = max_total_tokens
        self.running = 0
        self.queue = 0
        self.reserved_tokens = 0
        self._step = 0
        self._offset_tokens = 0  # sum over running samples of (prompt tokens - step when started)
        self._waiting: deque[Sample] = deque()
        self._ends: list[tuple[int, int, Sample]] = []  # (step, serial number, sample)
        self._serial = 0

    @property
    def used_tokens(self) -> int:
        """Tokens that running samples hold by now: their prompts and what they have put out."""
        return self._offset_tokens + self._step * self.running

    def submit(self, sample: Sample) -> None:
        """Put a sample at the end of the queue; it must fit into the pool on its own."""
        self._waiting.append(sample)
        self.queue += 1

    def admit(self) -> None:
        """Start the samples at the head of the queue as far as there is room."""
        while self._waiting and self.running < self.max_running:
            head = self._waiting[0]
            if not head.over and self.reserved_tokens + head.reserved_tokens > self.max_total_tokens:
                return
            self._waiting.popleft()
            if not head.over:
                self._start(head)

    def step(self) -> None:
        """Decode one token of each running sample and end those that have them all."""
        self._step += 1
        while self._ends and self._ends[0][0] <= self._step:
            sample = heapq.heappop(self._ends)[2]
            if not sample.over:
                self.drop(sample)
                sample.ended.set()

    def drop(self, sample: Sample) -> None:
        """Take a sample out wherever it is; harmless once it is over."""
        if sample.over:
            return
        sample.over = True
        if sample.started_step is None:
            self.queue -= 1
        else:
            self.running -= 1
            self.reserved_tokens -= sample.reserved_tokens
            self._offset_tokens -= sample.prompt_tokens - sample.started_step
        self._forget()

    def _start(self, sample: Sample) -> None:
        sample.started_step = self._step
        self.queue -= 1
        self.running += 1
        self.reserved_tokens += sample.reserved_tokens
        self._offset_tokens += sample.prompt_tokens - self._step
        self._serial += 1
        heapq.heappush(self._ends, (self._step + sample.output_tokens, self._serial, sample))

    def _forget(self) -> None:
        # dropped samples stay behind until they are met; an idle batch would meet them never
        if not self.queue:
            self._waiting.clear()
        if not self.running:
            self._ends.clear()


class Simulator:
    """The `simulated` engine: answers of `answer`, decoded by a `Batch` in real time.

    A step takes half of `step_s` for an empty batch and all of it for a full one; prefill takes no time.
    Grammars (`json_schema` and its like) are ignored. With `step_s: 0` rows are answered at once.
    """

    def __init__(self, spec: SimulatedEngine) -> None:
        self._spec = spec
        self._batch = Batch(spec.max_running, spec.max_total_tokens)
        self._room_tokens = min(spec.context_length, spec.max_total_tokens)
        self._stepping: asyncio.Task[None] | None = None

    async def open(self) -> EngineInfo:
        """Say what is simulated, and that it is."""
        return EngineInfo(
            kind="simulated",
            model="simulated",
            max_running=self._spec.max_running,
            max_total_tokens=self._spec.max_total_tokens,
            context_length=self._spec.context_length,
            simulated=True,
            notes=(_NOTE,),
        )

    async def generate(self, request: Request, route: str) -> Completion:  # noqa: ARG002 - there is one
        """Make up an answer and wait as long as decoding it would take.

        Raises RowRefusedError where the prompt is too long. A call that is pending when the engine is
        closed stays so until its caller cancels it.
        """
        completion = answer(request, self._room_tokens)
        if self._spec.step_s > 0:
            await self._decode(completion)
        return completion

    async def signals(self) -> Sequence[Signals]:
        """Return the load of the one made-up scheduler."""
        batch = self._batch
        return [
            Signals(
                scheduler="simulated",
                source="simulated",
                running=batch.running,
                queue=batch.queue,
                token_usage=batch.used_tokens / batch.max_total_tokens,
                used_tokens=batch.used_tokens,
                max_total_tokens=batch.max_total_tokens,
                max_running=batch.max_running,
            )
        ]

    async def close(self) -> None:
        """Stop decoding."""
        task, self._stepping = self._stepping, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _decode(self, completion: Completion) -> None:
        samples = [
            Sample(completion.prompt_tokens or 0, tokens or 0) for tokens in completion.completion_tokens
        ]
        for sample in samples:
            self._batch.submit(sample)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._run(), name="simulated engine")
        try:
            for sample in samples:
                await sample.ended.wait()
        finally:  # a caller that goes away takes its samples along
            for sample in samples:
                self._batch.drop(sample)

    async def _run(self) -> None:
        """Step while there is work."""
        batch = self._batch
        while batch.running or batch.queue:
            batch.admit()
            await asyncio.sleep(self._spec.step_s * (0.5 + 0.5 * batch.running / batch.max_running))
            batch.step()
