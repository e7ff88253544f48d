"""Rollouts: rows that ask several times, by an asynchronous function of the job. One layer above the queue.

`Rollouts` takes the feeder's place. It opens as many rows as keep the queue filled; what their functions ask
are rows of the queue, whose answers go to the functions. These run in processes of their own: one that blocks
or dies fails its row, and the others are run again with the answers that they have had.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.core.hook_pool import HookPool, HookProcess
from batchrunner.core.hook_worker import ROLLOUT, WorkerSetup
from batchrunner.core.rollout_worker import STEP, frame, read_frame
from batchrunner.core.types import LEFT_OUT, Completion, Outcome, Request, Tools
from batchrunner.dispatch.queue import Backlog, PendingRow, ResultSink, RowSource, Slots
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.input.messages import ASSISTANT, conversation
from batchrunner.job.load import validated
from batchrunner.job.output import CONVERSATION, MADE_ROWS, REASONING, RESULT_COLUMNS, TOOL_CALLS, TURNS
from batchrunner.job.prompt import tool_problem
from batchrunner.job.sampling import GRAMMARS, SamplingSpec
from batchrunner.job.spec import Job
from batchrunner.output.counts import ASKED_AGAIN, AskedAgain, Rejected
from batchrunner.output.turns import TurnKey, TurnStore

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Pause between two looks whether a process is blocked; a rollout that has asked nothing for so long waits
for something else than the engine."""
LEAST_AHEAD, AHEAD_SHARE = 8, 1 / 8
"""Rows in the queue, or on their way there, up to which others are opened; the share is of the slots."""
MOST_OPEN, MOST_OPEN_BYTES = 8192, 512 << 20
"""Rows that are open at once, and the bytes of their turns."""
ROWS_A_PROCESS = 16
"""Open rows of each process before another one is started."""
MOST_DEATHS = 3
"""Deaths of its process, without a row that is why, after which a row fails."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request of a rollout."""

    rollout: Rollout
    key: TurnKey
    number: int | None = None
    """By which its function knows it; None where the function has not asked it since it was last started."""
    turn: str | None = None
    """The answer, or the error, as JSON."""

    @property
    def is_dropped(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.rollout.asks.get(self.key) is not self

    async def ended(self, outcome: Outcome) -> None:
        """Store the answer, then give it to the function. Raises StorageError."""
        await self.rollout.rollouts.answered(self, outcome)


@dataclass(slots=True, eq=False)
class Rollout:
    """An open row."""

    rollouts: Rollouts
    request: Request
    """The row's, without a prompt."""
    asks: dict[TurnKey, Ask] = field(default_factory=dict)
    asked: Counter[bytes] = field(default_factory=Counter)
    """How often its function has asked each request, since it was last started."""
    last: str = ""
    """What it asked last."""
    unanswered: int = 0
    first: PendingRow | None = None
    """The first row that it sent, to whose replica the others go."""
    process: RolloutProcess | None = None
    number: int = 0
    """By which the process knows it: another one at each start."""
    deaths: int = 0
    began: float = field(default_factory=time.monotonic)
    timer: asyncio.TimerHandle | None = None

    @property
    def row(self) -> int:
        """Ordinal of the row."""
        return self.request.ref.row


class RolloutProcess:
    """A process that runs rollouts."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Start it, and load the function; blocks. Raises HookLostError."""
        with tempfile.TemporaryFile() as memory:
            memory.truncate(STEP.size)
            self._steps = mmap.mmap(memory.fileno(), STEP.size)
            self.process = HookProcess(setup, "rollout_worker", memory.fileno())
        self.process.facts()
        self.rollouts: dict[int, Rollout] = {}
        """Those that run in it, by their numbers."""
        self.why: str | None = None
        """Why it was killed."""

    async def connect(self) -> None:
        """Open the connection to it."""
        connection = socket.socket(fileno=os.dup(self.process.channel.fileno()))
        self.reader, self._writer = await asyncio.open_connection(sock=connection)

    @property
    def step(self) -> tuple[int, float]:
        """Number of the rollout whose code runs, 0 for none, and since when."""
        number, since = STEP.unpack_from(self._steps)
        return number, since

    def send(self, *values: Any) -> None:
        """Send a frame, unless the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame(*values))

    def end(self) -> None:
        """Kill it, and wait for its end."""
        self._writer.close()
        self.process.end()


class Rollouts:
    """The rollouts of a run: opens rows, sends what they ask, and makes outcomes of what they return."""

    def __init__(
        self,
        job: Job,
        source: RowSource,
        functions: HookPool,
        tokenizer: RowTokenizer,
        backlog: Backlog,
        slots: Slots,
        results: ResultSink,
        turns: TurnStore | None,
    ) -> None:
        """Without `turns` nothing is stored, as of a program's rows."""
        self._limits, self._feedback = job.limits, job.accept.feedback
        self._source, self._functions, self._tokenizer = source, functions, tokenizer
        self._backlog, self._slots, self._results, self._turns = backlog, slots, results, turns
        self._label = f"{ROLLOUT}: {functions.facts[ROLLOUT].name}"
        self._taken = {*RESULT_COLUMNS, *job.input.carried_names}
        self._open: set[Rollout] = set()
        self._starting: set[Rollout] = set()
        self._processes: list[RolloutProcess] = []
        self._numbers = count(1)
        self._asked: list[tuple[Ask, str]] = []
        self._news = asyncio.Event()
        self._choosing = asyncio.Lock()
        self._bytes = 0
        self.turns = 0
        """Requests of rollouts that were answered, without those that were stored."""

    def state(self) -> dict[str, int]:
        """Return how many rows are open, how many of these wait for no answer, and the turns so far."""
        idle = sum(not rollout.unanswered for rollout in self._open)
        return {"open": len(self._open), "waiting_for_tools": idle, "turns": self.turns}

    async def run(self) -> None:
        """Open all rows, one after the other, and go on until cancelled.

        Raises what reading raises, HookLostError, StorageError, and CannotTokenizeError.
        """
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._watch())
                self._group.create_task(self._send())
                await self._open_all()
                self._backlog.finish_reading()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for rollout in self._open:
                if rollout.timer is not None:
                    rollout.timer.cancel()
            for process in self._processes:
                process.process.kill()
            await asyncio.gather(*(asyncio.to_thread(process.end) for process in self._processes))

    async def _open_all(self) -> None:
        batches = self._source.batches()
        while not self._backlog.is_stopping:
            batch = await asyncio.to_thread(next, batches, None)
            if batch is None:
                return
            for item in batch:
                if isinstance(item, Outcome):  # the row cannot be read
                    await self._results.put(item)
                    continue
                await self._backlog.wait_for_room(
                    max(LEAST_AHEAD, int(self._slots.window * AHEAD_SHARE)), self._coming
                )
                await self._open_row(item)

    def _coming(self) -> int:
        """Return how many rows come into the queue soon; many where no more can be open."""
        is_full = len(self._open) >= MOST_OPEN or self._bytes >= MOST_OPEN_BYTES
        return MOST_OPEN if is_full else len(self._starting)

    async def _open_row(self, request: Request) -> None:
        if self._backlog.is_stopping:
            return
        self._backlog.expect(1)
        rollout = Rollout(self, request)
        self._open.add(rollout)
        for key, turn in (self._turns.take(rollout.row) if self._turns is not None else {}).items():
            rollout.asks[key] = Ask(rollout, key, turn=turn)
            self._bytes += len(turn)
        loop, limit_s = asyncio.get_running_loop(), self._limits.rollout
        rollout.timer = loop.call_later(
            limit_s, self._fail, rollout, f"took more than {limit_s:g} s (limits.rollout)"
        )
        await self._start(rollout)

    async def _start(self, rollout: Rollout) -> None:
        """Run a rollout from its beginning, with the answers that it has had."""
        async with self._choosing:
            process = min(self._processes, key=lambda each: len(each.rollouts), default=None)
            is_busy = process is None or len(process.rollouts) >= ROWS_A_PROCESS
            if process is None or (is_busy and len(self._processes) < self._functions.most):
                process = await asyncio.to_thread(RolloutProcess, self._functions.setup)
                self._processes.append(process)
                await process.connect()
                self._group.create_task(self._listen(process))
        if rollout not in self._open:
            return
        rollout.asked.clear()
        for ask in rollout.asks.values():
            ask.number = None
        rollout.process, rollout.number = process, next(self._numbers)
        process.rollouts[rollout.number] = rollout
        self._starting.add(rollout)
        process.send(rollout.number, None, rollout.request.prompt[0])

    async def _listen(self, process: RolloutProcess) -> None:
        """Take what the rollouts of a process ask and return, until it ends."""
        try:
            while True:
                number, asked, value = await read_frame(process.reader)
                rollout = process.rollouts.get(number)
                if rollout is None:
                    continue
                if asked is not None:
                    self._ask(rollout, asked, value)
                elif any(ask.number is None for ask in rollout.asks.values()):
                    await self._start_anew(rollout)
                else:
                    await self._end(rollout, *value)
        except EOFError:
            await self._ended(process)

    def _ask(self, rollout: Rollout, number: int, text: str) -> None:
        """Take what a rollout asks: it has the answer already, or it is sent."""
        self._starting.discard(rollout)
        rollout.last = text
        digest = xxh3_128_digest(text.encode())
        rollout.asked[digest] += 1
        if rollout.asked.total() > self._limits.turns:
            self._fail(rollout, f"asked more than {self._limits.turns} times (limits.turns)")
            return
        key = digest, rollout.asked[digest]
        ask = rollout.asks.get(key)
        if ask is None:
            ask = rollout.asks[key] = Ask(rollout, key)
            rollout.unanswered += 1
            self._asked.append((ask, text))
            self._news.set()
        ask.number = number
        if ask.turn is not None:
            self._give(ask)

    async def _send(self) -> None:
        """Put what is asked into the queue; what comes in one turn of the loop is tokenised together."""
        while True:
            await self._news.wait()
            self._news.clear()
            asked, self._asked = self._asked, []
            made: list[tuple[Ask, int, Request]] = []
            for ask, text in asked:
                try:
                    made.append((ask, len(text), _request_of(ask.rollout.request, json.loads(text))))
                except RowRefusedError as refusal:
                    await self.answered(ask, Outcome(ask.rollout.request.ref, None, str(refusal), None, 0))
            ready = await self._tokenizer.tokenize([request for _, _, request in made])
            for (ask, size, request), item in zip(made, ready, strict=True):
                if isinstance(item, Outcome):  # it cannot be tokenised, or is too long
                    await self.answered(ask, item)
                    continue
                row = PendingRow(item, prompt_bytes=size, ask=ask)
                if self._feedback:
                    row.unencoded = request
                row.is_turn = ask.rollout.first is not None
                row.group = ask.rollout.first = ask.rollout.first or row
                self._backlog.add(row)
            self._backlog.wake_dispatcher()

    async def answered(self, ask: Ask, outcome: Outcome) -> None:
        """Store an answer, so that it is never asked for again, and give it to its function."""
        if ask.is_dropped:
            return
        turn = _turn_of(outcome)
        if outcome.error is None and self._turns is not None:
            await self._turns.put(ask.rollout.row, ask.key, turn)
        ask.turn = turn
        ask.rollout.unanswered -= 1
        self._bytes += len(turn) if ask.rollout in self._open else 0
        self.turns += 1
        self._give(ask)

    def _give(self, ask: Ask) -> None:
        if ask.number is not None and ask.rollout.process is not None:
            ask.rollout.process.send(ask.rollout.number, ask.number, ask.turn)

    def _fail(self, rollout: Rollout, why: str) -> None:
        """End a rollout that goes on."""
        if rollout.process is not None and rollout in self._open:
            rollout.process.send(rollout.number, None, None)
            self._group.create_task(self._end(rollout, None, f"{self._label}: {why}"))

    async def _start_anew(self, rollout: Rollout) -> None:
        """Run a rollout from its beginning without what it has had: run again it did not ask all of that."""
        log.warning(
            "row %d: %s asked otherwise when it was run again: it starts anew", rollout.row, self._label
        )
        self._leave(rollout)
        if self._turns is not None:
            await self._turns.forget(rollout.row)
        await self._start(rollout)

    def _leave(self, rollout: Rollout) -> None:
        """Forget what a rollout has asked, and its process."""
        if rollout.process is not None:
            rollout.process.rollouts.pop(rollout.number, None)
            rollout.process = None
        self._bytes -= sum(len(ask.turn or "") for ask in rollout.asks.values())
        rollout.asks.clear()
        rollout.unanswered, rollout.first = 0, None

    async def _end(self, rollout: Rollout, rows: list[dict[str, Any]] | None, error: str | None) -> None:
        """Make the outcome of a row, and store it. Raises StorageError."""
        if rollout not in self._open:
            return
        taken = next((name for row in rows or () for name in row if name in self._taken), None)
        if taken is not None:
            error = f"{self._label}: a result has a column {taken!r} already: name yours otherwise"
        turns = [json.loads(ask.turn) for ask in rollout.asks.values() if ask.turn is not None]
        outcome = _outcome_of(rollout, turns, rows or [], error)
        self._open.discard(rollout)
        self._starting.discard(rollout)
        if rollout.timer is not None:
            rollout.timer.cancel()
        self._leave(rollout)
        await self._backlog.end(PendingRow(rollout.request), outcome)
        self._backlog.wake_feeder()

    async def _ended(self, process: RolloutProcess) -> None:
        """Run the rollouts of a process that has ended again, but for the one that is why."""
        number, _ = process.step
        how = process.why or await asyncio.to_thread(process.process.how_it_ended)
        self._processes.remove(process)
        await asyncio.to_thread(process.end)
        again = []
        for rollout in process.rollouts.copy().values():
            rollout.deaths += number == 0
            if rollout.number == number or rollout.deaths >= MOST_DEATHS:
                await self._end(rollout, None, f"{self._label}: {how}")
            else:
                again.append(rollout)
        log.warning("%s: a process %s: its other %d rows are run again", self._label, how, len(again))
        for rollout in again:
            await self._start(rollout)

    async def _watch(self) -> None:
        """Kill processes whose loop is blocked."""
        limit_s = self._limits.python
        while True:
            await asyncio.sleep(LOOK_S)
            for process in self._processes:
                number, since = process.step
                if number and time.monotonic() - since > limit_s:
                    process.why = f"took more than {limit_s:g} s between two awaits (limits.python)"
                    process.process.kill()
            self._starting.clear()
            self._backlog.wake_feeder()


def _request_of(base: Request, given: Mapping[str, Any]) -> Request:
    """Return what `generate` asks as a request; raises RowRefusedError for what cannot be sent."""
    prompt, tools, own = given["prompt"], given["tools"], given["sampling"]
    try:
        spec = validated(SamplingSpec, own, "generate")
    except JobError as failure:
        raise RowRefusedError(failure.message) from None
    if spec.n != 1:
        raise RowRefusedError("generate: n: await several calls instead (asyncio.gather)")
    sampling = {**base.sampling}
    if any(name in own for name in GRAMMARS):
        sampling = {name: value for name, value in sampling.items() if name not in GRAMMARS}
    sampling |= spec.model_dump(include={*own} - {"n", "lora_path", "tool_choice"})
    if isinstance(sampling.get("json_schema"), dict):
        sampling["json_schema"] = json.dumps(sampling["json_schema"], ensure_ascii=False)
    request = base._replace(
        sampling={name: value for name, value in sampling.items() if value is not None},
        lora_path=spec.lora_path or base.lora_path,
    )
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) for item in prompt):
        messages = conversation("generate", prompt, continues=True)
        if tools is not None and (problem := tool_problem(tools)):
            raise RowRefusedError(f"generate: tools: {problem}")
        known = base.tools or Tools(None)
        found = Tools(tools or known.tools, spec.tool_choice or known.choice, by_row=True)
        return request._replace(
            kind="messages", prompt=messages, continues=messages[-1]["role"] == ASSISTANT,
            tools=found if found.tools or found.choice else None,
        )  # fmt: skip
    asks = base.asks and base.asks._replace(names=base.asks.names - {REASONING, TOOL_CALLS})
    request = request._replace(
        tools=None, chat_template_kwargs=None, asks=asks if asks and asks.names else None, continues=False
    )
    if tools is not None:
        raise RowRefusedError("generate: tools go with messages")
    if isinstance(prompt, str) and prompt:
        return request._replace(kind="text", prompt=prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return request._replace(kind="input_ids", prompt=prompt)
    raise RowRefusedError("generate: give messages, a text or token ids")


def _turn_of(outcome: Outcome) -> str:
    """Return an answer, or an error, as the function and the disk get it."""
    found = outcome.completion
    columns = dict(found.columns) if found else {}
    asked = columns.pop(ASKED_AGAIN, [None])[0]
    return json.dumps(
        {
            "text": found.texts[0] if found else None,
            "finish_reason": found.finish_reasons[0] if found else None,
            "prompt_tokens": found.prompt_tokens if found else None,
            "cached_tokens": found.cached_tokens if found else None,
            "completion_tokens": found.completion_tokens[0] if found else None,
            "columns": {name: values[0] for name, values in columns.items()},
            "error": outcome.error,
            "attempts": outcome.attempts,
            "rejected": asked.rejected if asked else (),
        }
    )


def _outcome_of(
    rollout: Rollout, turns: Sequence[Mapping[str, Any]], rows: list[dict[str, Any]], error: str | None
) -> Outcome:
    """Return the outcome of a row: tokens and tries are sums over its turns."""

    def total(name: str) -> int | None:
        known = [turn[name] for turn in turns if turn[name] is not None]
        return sum(known) if known else None

    good = [turn for turn in turns if turn["error"] is None]
    last = good[-1] if good else {"text": None, "finish_reason": None}
    text: Any = last["text"]
    columns: dict[str, Any] = {TURNS: [len(turns)]}
    if error is None:
        columns[MADE_ROWS] = rows
    elif rollout.last:
        columns[CONVERSATION] = [_conversation(rollout, last["text"])]
    rejected = tuple(Rejected(*each) for turn in turns for each in turn["rejected"])
    if rejected:
        columns[ASKED_AGAIN] = [AskedAgain(1 + len(rejected), rejected, error is None)]
    reason = last["finish_reason"] if rows or error is not None else LEFT_OUT
    completion = Completion(
        [text], [reason], [total("completion_tokens")], total("prompt_tokens"),
        total("cached_tokens"), columns=columns,
    )  # fmt: skip
    again = sum(max(0, turn["attempts"] - 1) for turn in turns)
    seconds = time.monotonic() - rollout.began
    return Outcome(rollout.request.ref, completion, error, seconds, 1 + again)


def _conversation(rollout: Rollout, answer: str | None) -> str:
    """Return what a rollout asked last as JSON, with the answer where it had one."""
    prompt = json.loads(rollout.last)["prompt"]
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
    messages = [*prompt] if is_chat else [{"role": "user", "content": prompt}]
    if not rollout.unanswered and answer is not None:
        messages.append({"role": ASSISTANT, "content": answer})
    return msgspec.json.encode(messages).decode()
