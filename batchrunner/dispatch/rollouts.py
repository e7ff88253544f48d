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
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from xxhash import xxh3_128_digest

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.core.hook_pool import HookPool, HookProcess
from batchrunner.core.hook_worker import ROLLOUT, WorkerSetup
from batchrunner.core.rollout_worker import STEP, frame, read_frame
from batchrunner.core.types import LEFT_OUT, Completion, Outcome, Request, Tools
from batchrunner.dispatch.queue import Backlog, PendingRow, ResultSink, RowSource, Slots
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.input.python_prompts import with_prompt
from batchrunner.job.hook_loading import kind_of_prompt
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
"""Rows that are open at once, and the bytes of their answers."""
ROWS_A_PROCESS = 16
"""Open rows of each process before another one is started."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request of a rollout."""

    rollout: Rollout
    key: TurnKey
    outcome: Outcome | None = None
    number: int | None = None
    """By which its function knows it; None where the function has not asked it since it was last started."""

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
    first: PendingRow | None = None
    """The first row that it sent, to whose replica the others go."""
    process: RolloutProcess | None = None
    number: int = 0
    """By which the process knows it: another one at each start."""
    deaths: int = 0
    """Deaths of its process for which no row is known to be why."""
    began: float = field(default_factory=time.monotonic)
    timer: asyncio.TimerHandle | None = None


class RolloutProcess(HookProcess):
    """A process that runs rollouts."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Start it, and load the function; blocks. Raises HookLostError."""
        with tempfile.TemporaryFile() as memory:
            memory.truncate(STEP.size)
            self._step = mmap.mmap(memory.fileno(), STEP.size)
            super().__init__(setup, "rollout_worker", memory.fileno())
        self.facts()
        self.rollouts: dict[int, Rollout] = {}
        """Those that run in it, by their numbers."""
        self.is_alone = False
        """Whether it takes only one."""
        self.why: str | None = None
        """Why it was killed."""

    async def connect(self) -> None:
        """Open the connection to it."""
        connection = socket.socket(fileno=os.dup(self.channel.fileno()))
        self.reader, self._writer = await asyncio.open_connection(sock=connection)

    @property
    def step(self) -> tuple[Any, ...]:
        """Number of the rollout whose code runs, 0 for none, and since when."""
        return STEP.unpack_from(self._step)

    def send(self, *values: Any) -> None:
        """Send a frame, unless the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame(*values))

    async def shut(self) -> None:
        """Kill it, and wait for its end."""
        self._writer.close()
        await asyncio.to_thread(self.end)


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
        self._choosing, self._alone = asyncio.Lock(), asyncio.Semaphore(functions.most)
        self._numbers = count(1)
        self._asked: list[tuple[Ask, str]] = []
        self._news = asyncio.Event()
        self._bytes = 0
        self.turns = 0
        """Requests of rollouts that were answered, without those that were stored."""

    def state(self) -> dict[str, int]:
        """Return how many rows are open, how many of these wait for no answer, and the turns so far."""
        idle = sum(all(ask.outcome for ask in rollout.asks.values()) for rollout in self._open)
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
            await asyncio.gather(*(process.shut() for process in self._processes))

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
                ahead = max(LEAST_AHEAD, int(self._slots.window * AHEAD_SHARE))
                await self._backlog.wait_for_room(ahead, self._coming)
                if not self._backlog.is_stopping:
                    await self._open_row(item)

    def _coming(self) -> int:
        """Return how many rows come into the queue soon; many where no more can be open."""
        is_full = len(self._open) >= MOST_OPEN or self._bytes >= MOST_OPEN_BYTES
        return MOST_OPEN if is_full else len(self._starting)

    async def _open_row(self, request: Request) -> None:
        self._backlog.expect(1)
        rollout = Rollout(self, request)
        self._open.add(rollout)
        if self._turns is not None:
            for key, (completion, attempts) in self._turns.take(request.ref.row).items():
                known = Outcome(request.ref, completion, None, None, attempts)
                rollout.asks[key] = Ask(rollout, key, known)
        limit_s = self._limits.rollout
        why = f"took more than {limit_s:g} s (limits.rollout)"
        rollout.timer = asyncio.get_running_loop().call_later(limit_s, self._fail, rollout, why)
        await self._start(rollout)

    async def _start(self, rollout: Rollout) -> None:
        """Run a rollout from its beginning, with the answers that it has had."""
        async with self._choosing:
            some = [process for process in self._processes if not process.is_alone]
            process = min(some, key=lambda each: len(each.rollouts), default=None)
            is_busy = process is not None and len(process.rollouts) >= ROWS_A_PROCESS
            if process is None or (is_busy and len(some) < self._functions.most):
                process = await self._new_process()
                self._group.create_task(self._listen(process))
        self._place(rollout, process)

    async def _start_alone(self, rollout: Rollout) -> None:
        """Run a rollout in a process of its own: with its next death it is known to be why."""
        async with self._alone:
            process = await self._new_process()
            process.is_alone = True
            self._place(rollout, process)
            if not process.rollouts:  # the row took too long meanwhile
                process.kill()
            await self._listen(process)

    async def _new_process(self) -> RolloutProcess:
        process = await asyncio.to_thread(RolloutProcess, self._functions.setup)
        self._processes.append(process)
        await process.connect()
        return process

    def _place(self, rollout: Rollout, process: RolloutProcess) -> None:
        if rollout not in self._open:  # it took too long
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
                    row = rollout.request.ref.row
                    log.warning(
                        "row %d: %s asked otherwise when it was run again: it starts anew", row, self._label
                    )
                    self._leave(rollout)
                    await self._start(rollout)
                else:
                    await self._end(rollout, *value)
        except EOFError:
            await self._run_again(process)

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
            self._asked.append((ask, text))
            self._news.set()
        ask.number = number
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
        completion = outcome.completion
        if completion is not None and outcome.error is None and self._turns is not None:
            await self._turns.put(outcome.ref.row, ask.key, completion, outcome.attempts)
        self._bytes += _bytes_of(outcome)
        self.turns += 1
        ask.outcome = outcome
        self._give(ask)

    def _give(self, ask: Ask) -> None:
        if ask.outcome is not None and ask.number is not None and ask.rollout.process is not None:
            _, found, error, *_ = ask.outcome
            answer = found and found._replace(columns=dict(found.columns))
            ask.rollout.process.send(ask.rollout.number, ask.number, (answer, error))

    def _fail(self, rollout: Rollout, why: str) -> None:
        """End a rollout that goes on."""
        if rollout.process is not None:
            rollout.process.send(rollout.number, None, None)
        self._group.create_task(self._end(rollout, None, f"{self._label}: {why}"))

    def _leave(self, rollout: Rollout) -> None:
        """Forget what a rollout has asked, and its process."""
        if rollout.process is not None:
            rollout.process.rollouts.pop(rollout.number, None)
            if rollout.process.is_alone:
                rollout.process.kill()
        self._bytes -= sum(_bytes_of(ask.outcome) for ask in rollout.asks.values() if ask.outcome)
        rollout.asks.clear()
        rollout.process = rollout.first = None

    async def _end(self, rollout: Rollout, rows: list[dict[str, Any]] | None, error: str | None) -> None:
        """Make the outcome of a row, and store it. Raises StorageError."""
        if rollout not in self._open:
            return
        taken = next((name for row in rows or () for name in row if name in self._taken), None)
        if taken is not None:
            error = f"{self._label}: a result has a column {taken!r} already: name yours otherwise"
        outcome = _outcome_of(rollout, rows or [], error)
        self._open.discard(rollout)
        self._starting.discard(rollout)
        if rollout.timer is not None:
            rollout.timer.cancel()
        self._leave(rollout)
        await self._backlog.end(PendingRow(rollout.request), outcome)
        self._backlog.wake_feeder()

    async def _run_again(self, process: RolloutProcess) -> None:
        """Run the rollouts of a process that has ended again, but for the one that is why."""
        number, _ = process.step
        how = process.why or await asyncio.to_thread(process.how_it_ended)
        self._processes.remove(process)
        if process.rollouts:
            log.warning("%s: %s", self._label, how)
        await process.shut()
        for rollout in [*process.rollouts.values()]:
            rollout.deaths += number == 0
            if rollout.number == number or process.is_alone:
                await self._end(rollout, None, f"{self._label}: {how}")
            elif rollout.deaths > 1:
                self._group.create_task(self._start_alone(rollout))
            else:
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
                    process.kill()
            self._starting.clear()
            self._backlog.wake_feeder()


def _bytes_of(outcome: Outcome) -> int:
    return len(outcome.completion.texts[0] or "") if outcome.completion is not None else 0


def _request_of(base: Request, given: Mapping[str, Any]) -> Request:
    """Return what `generate` asks as a request; raises RowRefusedError for what cannot be sent."""
    own, tools = given["sampling"], given["tools"]
    try:
        kind, prompt = kind_of_prompt(given["prompt"])
        spec = validated(SamplingSpec, own, "generate")
    except (ValueError, JobError) as failure:
        raise RowRefusedError(f"generate: {failure}".replace("generate: generate", "generate")) from None
    problem = None if tools is None else tool_problem(tools)
    if problem is not None or spec.n != 1:
        raise RowRefusedError(f"generate: {problem or 'n: await several calls, by asyncio.gather'}")
    sampling = {
        name: value
        for name, value in base.sampling.items()
        if name not in GRAMMARS or not {*GRAMMARS} & own.keys()
    }
    sampling |= spec.model_dump(include={*own} - {"n", "lora_path", "tool_choice"}, exclude_none=True)
    if isinstance(sampling.get("json_schema"), dict):
        sampling["json_schema"] = json.dumps(sampling["json_schema"])
    known, asks = base.tools or Tools(None), base.asks
    found = Tools(tools or known.tools, spec.tool_choice or known.choice, by_row=True)
    if kind != "messages" and asks is not None:
        names = asks.names - {REASONING, TOOL_CALLS}
        asks = asks._replace(names=names) if names else None
    request = base._replace(
        sampling=sampling,
        lora_path=spec.lora_path or base.lora_path,
        tools=found if found.tools or found.choice else None,
        asks=asks,
    )
    return with_prompt(request, "generate", kind, prompt)


def _outcome_of(rollout: Rollout, rows: list[dict[str, Any]], error: str | None) -> Outcome:
    """Return the outcome of a row: tokens and tries are sums over its answers."""
    outcomes = [ask.outcome for ask in rollout.asks.values() if ask.outcome is not None]
    known = [outcome.completion for outcome in outcomes if outcome.completion is not None]
    good = [outcome.completion for outcome in outcomes if outcome.completion and outcome.error is None]
    rejected = [each for found in known for asked in found.columns.get(ASKED_AGAIN, ()) for each in asked[1]]
    columns: dict[str, Any] = {TURNS: [len(outcomes)], MADE_ROWS: rows}
    if rejected:
        found = AskedAgain(1 + len(rejected), tuple(Rejected(*each) for each in rejected), error is None)
        columns[ASKED_AGAIN] = [found]
    if error is not None and rollout.last:
        columns[CONVERSATION] = [rollout.last]
    last: Any = good[-1] if good else Completion([None], [None], [None], None, None)  # type: ignore[list-item]
    completion = Completion(
        last.texts,
        last.finish_reasons if rows or error is not None else [LEFT_OUT],
        [sum(each.output_tokens for each in good)],
        sum(each.prompt_tokens or 0 for each in good),
        sum(each.cached_tokens or 0 for each in good),
        columns=columns,
    )
    attempts = 1 + sum(max(0, outcome.attempts - 1) for outcome in outcomes)
    return Outcome(rollout.request.ref, completion, error, time.monotonic() - rollout.began, attempts)
