"""Multi-turn rollouts: an asynchronous function of the job sends several requests for one row.

`Rollouts` takes the feeder's place, one layer above the queue. It opens as many rows as keep the queue
filled. The requests of their functions become rows of the queue, and the answers go back to the functions.
The functions run in separate processes. If one blocks or kills its process, its row fails. The other rows
of the process are run again, and receive the answers that they already have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from xxhash import xxh3_128_hexdigest

from batchrunner.core.errors import JobError, RowRefusedError, hidden
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.hook_process import HookProcess, ProcessEndedError
from batchrunner.core.hook_protocol import WorkerSetup, frame, read_frame
from batchrunner.core.rollout_worker import STEP_BYTES, RolloutAnswer, running_step, step_memory
from batchrunner.core.types import LEFT_OUT, ROLLOUT, Outcome, Request, Tools
from batchrunner.dispatch.queue import (
    AnswerHistory,
    Backlog,
    PendingRow,
    PrefixGroup,
    ResultSink,
    RowSource,
    Turn,
)
from batchrunner.dispatch.route import Routes
from batchrunner.dispatch.tokenize import RowTokenizer
from batchrunner.input.python_prompts import with_prompt
from batchrunner.job.hook_loading import kind_of_prompt
from batchrunner.job.load import validated
from batchrunner.job.output import (
    CONVERSATION,
    MADE_ROWS,
    REASONING,
    RESULT_COLUMNS,
    ROLLOUT_COLUMNS,
    TOOL_CALLS,
    TURNS,
)
from batchrunner.job.prompt import tool_problem
from batchrunner.job.sampling import GRAMMARS, FromColumn, SamplingSpec
from batchrunner.job.spec import Job
from batchrunner.output.columns import NO_ANSWER
from batchrunner.output.counts import ASKED_AGAIN
from batchrunner.output.turns import TurnKey, TurnStore

log = logging.getLogger(__name__)

CHECK_S = 0.2
"""Seconds between two checks of the processes that run rollouts. If a new rollout has sent no request by the
next check, it is assumed to wait for something other than the engine."""
LONG_STEP_S = 0.05
"""Maximum seconds of a normal step, the code between two awaits. A longer step keeps the other rows of its
process waiting."""
LONG_STEPS = 5
"""Minimum number of long steps (see LONG_STEP_S) of a process that counts as blocked."""
BLOCKED_SHARE = 1 / 4
"""Minimum fraction of the checks that find a long step (see LONG_STEP_S) in a process that counts as
blocked."""
LEAST_AHEAD = 8
"""Rows are opened only while fewer requests than a threshold are queued or expected soon. The threshold is
AHEAD_SHARE of the slots, but at least this number of requests."""
AHEAD_SHARE = 1 / 8
"""Rows are opened only while fewer requests than a threshold are queued or expected soon. The threshold is
this share of the slots, but at least LEAST_AHEAD requests."""
MOST_OPEN = 8192
"""Maximum number of open rows, including those that wait for tools."""
ROWS_A_PROCESS = 16
"""Another process is started if each process has at least this many open rows."""
OWN_PROCESS_SUSPICION = 2
"""Suspicion at which a row gets a process of its own. If a process dies, the suspicion of the row whose code
was running rises by 2. If no code was running, that of each row of the process rises by 1."""


Result: TypeAlias = tuple[list[dict[str, Any]], str | None]
"""Result of a rollout function: the rows that it returns, and the error of its input row (None if it
succeeded)."""


@dataclass(slots=True, eq=False)
class Rollout:
    """A rollout: a row whose function has not ended yet."""

    request: Request
    """Request of the row; its prompt holds the row itself."""
    answers: dict[TurnKey, asyncio.Future[Outcome]] = field(default_factory=dict)
    """Answers to its requests, including answers from earlier runs of its function."""
    sent_counts: Counter[str] = field(default_factory=Counter)
    """For each request, how often the rollout function has sent it since the function last started."""
    last_request: str = ""
    """The last request of its function, as JSON."""
    group: PrefixGroup | None = None
    """Prefix group of its requests, which all go to one replica; None before the first request."""
    result: asyncio.Future[Result] = field(init=False)
    """Future of the function's result, created when the function starts."""

    @property
    def has_all_answers(self) -> bool:
        """Whether no request of the rollout is pending."""
        return all(answer.done() for answer in self.answers.values())


class RolloutProcess(HookProcess):
    """A process that runs rollouts."""

    def __init__(self, setup: WorkerSetup, *, is_shared: bool) -> None:
        """Start the process, which loads the function while the run goes on."""
        # The process writes its current step into memory that it shares with this process.
        with tempfile.TemporaryFile() as memory:
            memory.truncate(STEP_BYTES)
            self.step = partial(running_step, step_memory(memory.fileno()))
            """Returns the number of the rollout whose code runs now (0 if none), and the time at which its
            current step began, on the monotonic clock. A step is the code between two awaits."""
            super().__init__(setup, step_descriptor=memory.fileno())
        self.rollouts: dict[int, Rollout] = {}
        """Rollouts that run in the process, by the number under which the process knows them."""
        self.is_shared = is_shared
        """Whether several rollouts may run in the process."""
        self.kill_reason: str | None = None
        """Reason for killing the process; None if there is none."""
        self._checks = self._blocked_checks = 0
        """Number of checks of the process, and of those that found a long step."""
        self._long_steps = set[float]()
        """Start times of long steps. At most LONG_STEPS are kept."""
        self.is_loaded = asyncio.Event()
        """Set once the process has loaded the function."""
        self._writer: asyncio.StreamWriter | None = None
        """Writer of the connection to the process; None until the connection is open."""

    async def connect(self) -> asyncio.StreamReader:
        """Open the connection to the process once its function is loaded. Raises HookLostError."""
        await asyncio.to_thread(self.facts)  # This blocks until the process has loaded the function.
        # The connection closes its socket, so it gets a duplicate.
        connection = socket.socket(fileno=os.dup(self.channel.socket.fileno()))
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self.is_loaded.set()
        return reader

    def disconnect(self) -> None:
        """Close the connection to the process."""
        if self._writer is not None:
            self._writer.close()

    def check_step(self, limit_s: float) -> None:
        """Check how long the current step of the process has been running.

        Set `kill_reason` if that exceeds `limit_s`. Count a step over LONG_STEP_S as well, to find processes
        that are often blocked.
        """
        number, since = self.step()
        step_s = time.monotonic() - since if number else 0.0
        if step_s > limit_s:
            self.kill_reason = f"took more than {limit_s:g} s between two awaits (limits.python)"
        # If the process runs only one rollout, a long step keeps no other row waiting.
        if len(self.rollouts) > 1 and self.is_loaded.is_set():
            self._checks += 1
            if step_s > LONG_STEP_S:
                self._blocked_checks += 1
                if len(self._long_steps) < LONG_STEPS:
                    self._long_steps.add(since)

    @property
    def is_blocked(self) -> bool:
        """Whether the code of one rollout often blocks the process, so that its other rollouts wait."""
        is_often = self._blocked_checks >= BLOCKED_SHARE * self._checks
        return is_often and len(self._long_steps) >= LONG_STEPS

    def send(self, *values: Any) -> None:
        """Send a frame, unless the process has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(*values))

    async def run(self, number: int, rollout: Rollout, limit_s: float) -> Result:
        """Run a function from its beginning; raises ProcessEndedError, and TimeoutError after `limit_s`."""
        rollout.sent_counts.clear()
        rollout.result = asyncio.get_running_loop().create_future()
        self.rollouts[number] = rollout
        try:
            await self.is_loaded.wait()
            # This frame starts the function. The prompt of a rollout has a single item: the row.
            self.send(number, None, rollout.request.prompt[0])
            async with asyncio.timeout(limit_s):
                return await rollout.result
        except TimeoutError:
            self.send(number, None, None)  # cancel the function in its process, where it is still running
            raise
        finally:
            del self.rollouts[number]


@dataclass(eq=False)
class Rollouts:
    """The rollouts of a run: opens rows, sends their requests, and builds outcomes from their results."""

    job: Job
    source: RowSource
    functions: HookPool
    tokenizer: RowTokenizer
    backlog: Backlog
    routes: Routes
    results: ResultSink
    store: TurnStore | None
    """Store of the answers; None if answers are not stored, because a Python program supplies the rows."""
    turns: int = 0
    """Number of requests that were answered in this attempt."""

    def __post_init__(self) -> None:
        """Open no row yet."""
        self._group = asyncio.TaskGroup()
        self._limits = self.job.limits
        self._label = f"{ROLLOUT}: {self.functions.facts[ROLLOUT].name}"
        # `turns` is not reserved here, so a function may return its own value of it.
        self._reserved_columns = {*RESULT_COLUMNS, *ROLLOUT_COLUMNS, *self.job.input.carried_names} - {TURNS}
        self._open: set[Rollout] = set()
        """Rollouts that have no outcome yet."""
        self._starting: set[Rollout] = set()
        """Open rollouts that are about to send their first request."""
        self._processes: list[RolloutProcess] = []
        self._own_processes = asyncio.Semaphore(self.functions.most_processes)
        """Limits the processes that each run a single rollout."""
        self._numbers = count(1)
        self._warned_of_block = False

    def state(self) -> dict[str, int]:
        """Return the numbers of open rows, of rows that wait for tools or a blocked process, and of turns."""
        # A rollout without a pending request waits for a tool, or for a rollout that blocks its process.
        idle = {rollout for rollout in self._open if rollout.has_all_answers}
        in_blocked = set[Rollout]()
        for process in self._processes:
            if process.is_blocked:
                in_blocked.update(process.rollouts.values())
        return {
            "open": len(self._open),
            "waiting_for_tools": len(idle - in_blocked),
            "blocked": len(idle & in_blocked),
            "turns": self.turns,
        }

    async def run(self) -> None:
        """Open all rows, one after the other, and answer their requests until cancelled.

        Raises the errors of the source, HookLostError, StorageError, and CannotTokenizeError.
        """
        try:
            async with self._group:
                self._group.create_task(self._watch())
                await self._open_all()
                self.backlog.finish_reading()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await asyncio.gather(*(asyncio.to_thread(process.close) for process in self._processes))

    async def _open_all(self) -> None:
        """Read the source, and start the function of each row as soon as another row may be opened."""
        batches = self.source.batches()
        while not self.backlog.is_stopping:
            batch = await asyncio.to_thread(next, batches, None)
            if batch is None:
                return
            for item in batch:
                if isinstance(item, Outcome):  # An Outcome comes for a row that cannot be read.
                    await self.results.put(item)
                    continue
                await self.backlog.wait_for_room(self._may_open)
                if not self.backlog.is_stopping:
                    self.backlog.expect(1)
                    rollout = Rollout(item)
                    self._open.add(rollout)
                    self._starting.add(rollout)
                    self._group.create_task(self._run_rollout(rollout))

    def _may_open(self) -> bool:
        """Tell whether another row may be opened: few requests are queued, or about to be."""
        ahead = max(LEAST_AHEAD, int(self.routes.window * AHEAD_SHARE))
        return len(self._open) < MOST_OPEN and self.backlog.ready + len(self._starting) < ahead

    async def _run_rollout(self, rollout: Rollout) -> None:
        """Run the function of a row, and store what it returned. Raises StorageError."""
        began = time.monotonic()
        if self.store is not None:  # Requests that an earlier start answered get the stored answers.
            for key, outcome in self.store.take(rollout.request.ref).items():
                rollout.answers[key] = asyncio.get_running_loop().create_future()
                rollout.answers[key].set_result(outcome)
        rows, error = await self._result_of(rollout)
        outcome = _outcome_of(rollout, rows, error and hidden(error), time.monotonic() - began)
        await self._drop_answers(rollout, is_done=error is None)
        self._open.discard(rollout)
        self._starting.discard(rollout)  # It is still among the starting ones if it sent no request.
        await self.backlog.end(PendingRow(rollout.request), outcome)
        self.backlog.wake()

    async def _drop_answers(self, rollout: Rollout, *, is_done: bool = False) -> None:
        """Drop the answers and pending requests of a rollout.

        If it is not done, drop its stored answers too.
        """
        for answer in rollout.answers.values():
            answer.cancel()
        rollout.answers.clear()
        rollout.group = None
        if not is_done and self.store is not None:
            await self.store.drop(rollout.request.ref.row)

    async def _result_of(self, rollout: Rollout) -> Result:
        """Return the result of a row's function.

        The function is run again if its process ends, or if a repeated run sends different requests. If the
        row ended a process, or twice may have ended one, its function is run in a process of its own.
        """
        suspicion = 0
        while True:
            number = next(self._numbers)
            has_own_process = suspicion >= OWN_PROCESS_SUSPICION
            async with self._own_processes if has_own_process else contextlib.nullcontext():
                process = self._new_process(is_shared=False) if has_own_process else self._shared_process()
                try:
                    rows, error = await process.run(number, rollout, self._limits.rollout)
                except TimeoutError:
                    limit = f"{self._limits.rollout:g} s (limits.rollout)"
                    return [], f"{self._label}: took more than {limit}"
                except ProcessEndedError as failure:
                    running_number, _ = process.step()
                    is_guilty = running_number == number
                    # Without doubt the row ended the process, so it fails. Otherwise it is tried again.
                    if has_own_process or (process.kill_reason and is_guilty):
                        return [], f"{self._label}: {failure}"
                    if is_guilty:
                        suspicion += OWN_PROCESS_SUSPICION
                    elif not running_number:
                        # No row's code was running when the process ended, so any of its rows may have ended
                        # it.
                        suspicion += 1
                    continue
                finally:
                    if has_own_process:
                        process.kill()
            # If the repeated function leaves stored answers unused, it has sent other requests than before,
            # so its result would not fit the stored answers.
            if rollout.sent_counts.total() < len(rollout.answers):
                log.warning(
                    "row %d: %s sent other requests when it was run again, so the row starts anew",
                    rollout.request.ref.row,
                    self._label,
                )
                await self._drop_answers(rollout)
                continue
            reserved = next((name for row in rows for name in row if name in self._reserved_columns), None)
            if reserved is not None:
                return [], f"{self._label}: results have a column {reserved!r} of their own: rename yours"
            return rows, error

    def _shared_process(self) -> RolloutProcess:
        """Return a new process if all processes are busy and one more is allowed, else the least busy one."""
        shared = [process for process in self._processes if process.is_shared]
        # `all` is true if there is no process yet.
        are_busy = all(len(process.rollouts) >= ROWS_A_PROCESS for process in shared)
        if are_busy and len(shared) < self.functions.most_processes:
            return self._new_process(is_shared=True)
        # A process that has not loaded the function yet is the last choice.
        return min(shared, key=lambda process: (not process.is_loaded.is_set(), len(process.rollouts)))

    def _new_process(self, *, is_shared: bool) -> RolloutProcess:
        """Start a process, and a job of the event loop that receives its requests and results."""
        process = RolloutProcess(self.functions.setup, is_shared=is_shared)
        self._processes.append(process)
        self._group.create_task(self._listen(process))
        return process

    async def _listen(self, process: RolloutProcess) -> None:
        """Receive the requests and results of the rollouts of a process until it ends."""
        reader = await process.connect()
        try:
            while True:
                number, question, value = await read_frame(reader)
                rollout = process.rollouts.get(number)
                if rollout is None or rollout.result.done():  # The rollout has ended, maybe by a limit.
                    continue
                if question is None:  # The function has ended, and `value` is its result.
                    rollout.result.set_result(value)
                elif rollout.sent_counts.total() < self._limits.turns:
                    self._answer_request(process, number, rollout, question=question, text=value)
                else:
                    why = f"sent more than {self._limits.turns} requests (limits.turns)"
                    rollout.result.set_result(([], f"{self._label}: {why}"))
        except EOFError:
            process.is_shared = False  # The process has ended, so no further rollout may start in it.
            reason = process.kill_reason or await asyncio.to_thread(process.how_it_ended)
            if process.rollouts:
                log.warning("%s: %s", self._label, reason)
            for rollout in process.rollouts.values():
                if not rollout.result.done():
                    rollout.result.set_exception(ProcessEndedError(reason))
            await asyncio.to_thread(process.close)
            self._processes.remove(process)
        finally:
            process.disconnect()

    def _answer_request(
        self, process: RolloutProcess, number: int, rollout: Rollout, *, question: int, text: str
    ) -> None:
        """Answer a request of a rollout: with an answer of an earlier run, or by sending the request."""
        rollout.last_request = text
        digest = xxh3_128_hexdigest(text.encode())
        rollout.sent_counts[digest] += 1
        # Equal requests of a rollout get their stored answers in order: the second one, the second answer.
        key = digest, rollout.sent_counts[digest]
        answer = rollout.answers.pop(key, None)
        if answer is None:
            answer = self._group.create_task(self._send_request(rollout, key, text))
        # The dict keeps the order of the requests, even if their answers come from the store.
        rollout.answers[key] = answer

        def send_answer(answer: asyncio.Future[Outcome]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                process.send(number, question, _answer_of(answer.result()))

        answer.add_done_callback(send_answer)

    async def _send_request(self, rollout: Rollout, key: TurnKey, text: str) -> Outcome:
        """Send a request of a rollout, and store its answer. Raises StorageError."""
        ref = rollout.request.ref
        try:
            request = _request_of(rollout.request, **json.loads(text))
            (ready,) = await self.tokenizer.tokenize([request])
        except (RowRefusedError, RecursionError) as refusal:
            return Outcome(ref=ref, completion=None, error=str(refusal), latency_s=None, attempts=0)
        if isinstance(ready, Outcome):  # the prompt cannot be tokenized, or is too long
            return ready
        # All requests of a rollout are in one prefix group, which the first request creates.
        turn = Turn(asyncio.get_running_loop().create_future(), is_first=rollout.group is None)
        answers = AnswerHistory(ready, unencoded=request)
        row = PendingRow(ready, prompt_bytes=len(text), answers=answers, turn=turn)
        if rollout.group is None:
            rollout.group = PrefixGroup(row)
        row.group = rollout.group
        # From its first request on, the rollout counts as a queued row, and no longer as a starting one.
        self._starting.discard(rollout)
        self.backlog.add(row)
        self.backlog.wake()
        outcome = await turn.outcome
        if self.store is not None:
            await self.store.put(key, outcome)
        self.turns += 1
        return outcome

    async def _watch(self) -> None:
        """Kill processes whose step takes too long, and what remains of ended processes; warn of blocking.

        A rollout whose process has loaded the function no longer counts as starting.
        """
        limit_s = self._limits.python
        while True:
            await asyncio.sleep(CHECK_S)
            for process in self._processes:
                process.check_step(limit_s)
                if process.is_blocked and not self._warned_of_block:
                    self._warned_of_block = True
                    log.warning(
                        "%s blocks: all rows of its process wait while the code of one row runs between two "
                        "awaits. Write `await asyncio.to_thread(tool, …)` for a tool that waits, such as "
                        "time.sleep or requests; for a tool that computes, raise limits.python_processes",
                        self._label,
                    )
                if process.kill_reason or process.has_ended():
                    process.kill()
                if process.is_loaded.is_set():
                    self._starting.difference_update(process.rollouts.values())
            self.backlog.wake()


def _request_of(base: Request, prompt: Any, tools: Any, sampling: dict[str, Any]) -> Request:
    """Return the request of a `generate` call; raises RowRefusedError if it cannot be sent."""
    try:
        kind, content = kind_of_prompt(prompt)
        spec = validated(SamplingSpec, sampling, "generate")
    except (ValueError, JobError) as failure:
        # Unlike a job file, a call cannot take a value from a column.
        why = str(failure).removeprefix("generate: ").replace(", or should be {column: NAME}", "")
        raise RowRefusedError(f"generate: {why}") from None
    problem = None if tools is None else tool_problem(tools)
    for name, value in spec:
        if isinstance(value, FromColumn):
            problem = f"{name}: give a value, not a column"
    if spec.n != 1:
        problem = "n: must be 1; for several answers, await several calls with asyncio.gather"
    if problem is not None:
        raise RowRefusedError(f"generate: {problem}")
    # Only parameters that the call gives replace those of the job.
    parameters = spec.model_dump(include={*sampling} - {"n", "lora_path", "tool_choice"}, exclude_none=True)
    if isinstance(parameters.get("json_schema"), dict):
        parameters["json_schema"] = json.dumps(parameters["json_schema"])
    job_parameters = dict(base.sampling)
    if parameters.keys() & {*GRAMMARS}:  # A request has one grammar: that of the call replaces the job's.
        for grammar in GRAMMARS:
            job_parameters.pop(grammar, None)
    job_tools, asks = base.tools or Tools(None), base.asks
    all_tools = Tools(tools or job_tools.tools, spec.tool_choice or job_tools.choice, by_row=True)
    if kind != "messages" and asks is not None:  # Only the chat endpoint returns these columns.
        names = asks.names - {REASONING, TOOL_CALLS}
        asks = asks._replace(names=names) if names else None
    request = base._replace(
        sampling=job_parameters | parameters,
        lora_path=spec.lora_path or base.lora_path,
        tools=all_tools if all_tools.tools or all_tools.choice else None,
        asks=asks,
    )
    return with_prompt(request, "generate", kind, content)


def _answer_of(outcome: Outcome) -> RolloutAnswer | str:
    """Return the answer that `generate` returns to the function, or the text of the error that it raises."""
    answer = outcome.completion
    if answer is None or outcome.error is not None:
        return str(outcome.error)
    columns = {name: values[0] for name, values in answer.columns.items()}
    return RolloutAnswer(
        text=answer.texts[0],
        finish_reason=answer.finish_reasons[0],
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens[0],
        columns=columns,
    )


def _outcome_of(rollout: Rollout, rows: list[dict[str, Any]], error: str | None, latency_s: float) -> Outcome:
    """Return the outcome of a row; tokens and retries are summed over its answers."""
    outcomes = [answer.result() for answer in rollout.answers.values() if answer.done()]
    completions = [outcome.completion for outcome in outcomes if outcome.completion is not None]
    # The result has the text of the last answer, and the sums of the token counts of all answers.
    last = completions[-1] if completions else NO_ANSWER
    completion = last._replace(
        # A function that returns no rows leaves the row out of the results.
        finish_reasons=last.finish_reasons if rows or error is not None else [LEFT_OUT],
        completion_tokens=[sum(answer.output_tokens for answer in completions)],
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in completions),
        cached_tokens=sum(answer.cached_tokens or 0 for answer in completions),
        thinking_cut=any(answer.thinking_cut for answer in completions),
        columns={
            TURNS: [len(outcomes)],
            MADE_ROWS: rows,
            # The last request is kept for a failed row only, where it helps to find the cause.
            CONVERSATION: [rollout.last_request if error is not None and rollout.last_request else None],
            ASKED_AGAIN: [totals for answer in completions for totals in answer.columns.get(ASKED_AGAIN, ())],
        },
    )
    # The first attempt of each answer is not a retry of the row, so only the further attempts count.
    attempts = 1 + sum(max(0, outcome.attempts - 1) for outcome in outcomes)
    return Outcome(
        ref=rollout.request.ref, completion=completion, error=error, latency_s=latency_s, attempts=attempts
    )
