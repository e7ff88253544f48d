"""Multi-turn rollouts: an asynchronous function of the job sends several requests for one row.

`Rollouts` opens as many rows as keep the queue of requests filled. Each `generate` call of a function becomes
a request in the queue, and its answer goes back to the function.

The functions run in separate processes. If one blocks or kills its process, its row fails. The other rows of
the process are run again, and receive the answers that they already have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
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
"""Maximum seconds for the code of a function between two awaits (a step). A longer step keeps the other rows
of its process waiting."""
LONG_STEPS = 5
"""A process counts as blocked only if it had at least this many steps longer than LONG_STEP_S."""
BLOCKED_SHARE = 1 / 4
"""A process counts as blocked only if at least this fraction of the checks find it in a step longer than
LONG_STEP_S."""
LEAST_AHEAD = 8
"""New rows are opened while fewer requests than a threshold are queued or expected soon. This is the minimum
of the threshold."""
AHEAD_SHARE = 1 / 8
"""New rows are opened while fewer requests than a threshold are queued or expected soon. The threshold is
this fraction of the engine's slots, but at least LEAST_AHEAD."""
MOST_OPEN = 8192
"""Maximum number of unfinished rows, including those that wait for tools."""
ROWS_A_PROCESS = 16
"""Another process is started if each process runs at least this many rows."""
OWN_PROCESS_SUSPICION = 2
"""A row with this suspicion gets a process of its own. When a process dies, the row whose code was running
gets 2 points of suspicion. If no code was running, each row of the process gets 1."""


Result: TypeAlias = tuple[list[dict[str, Any]], str | None]
"""Result of a rollout function: the rows that it returned, and an error text (None if it succeeded)."""


@dataclass(slots=True, eq=False)
class Rollout:
    """An input row whose asynchronous function is still running."""

    request: Request
    """The base of the function's requests. Its prompt holds the input row."""
    answers: dict[TurnKey, asyncio.Future[Outcome]] = field(default_factory=dict)
    """Answers to the function's requests, including those of earlier runs of the function."""
    sent_counts: Counter[str] = field(default_factory=Counter)
    """For each request, how often the function has sent it since it last started."""
    last_request: str = ""
    """The function's last request, as JSON."""
    group: PrefixGroup | None = None
    """Makes all requests of the row go to one replica; None before the first request."""
    result: asyncio.Future[Result] = field(init=False)
    """Future of the function's result, created when the function starts."""

    @property
    def has_all_answers(self) -> bool:
        """Whether no request of the rollout is pending."""
        return all(answer.done() for answer in self.answers.values())

    @property
    def answered(self) -> int:
        """Number of its requests that were answered."""
        return sum(answer.done() for answer in self.answers.values())


def work_done(answered: Iterable[int], answers_a_row: float) -> float:
    """Return the work on open rows that is done, as a number of rows.

    `answered` has the number of answers of each row, and a finished row had `answers_a_row` on average.
    """
    return math.fsum(min(1.0, answers / answers_a_row) for answers in answered)


class RolloutProcess(HookProcess):
    """A process that runs rollouts."""

    def __init__(self, setup: WorkerSetup, *, is_shared: bool) -> None:
        """Start the process. It loads the function in the background."""
        # The process writes its current step into memory that it shares with this process.
        with tempfile.TemporaryFile() as memory:
            memory.truncate(STEP_BYTES)
            self.step = partial(running_step, step_memory(memory.fileno()))
            """Returns the number of the rollout whose code runs now (0 if none), and the time at which its
            current step began, on the monotonic clock. A step is the code between two awaits."""
            super().__init__(setup, step_descriptor=memory.fileno())
        self.rollouts: dict[int, Rollout] = {}
        """Rollouts that run in the process, by the number that both sides use for them."""
        self.is_shared = is_shared
        """Whether several rollouts may run in the process."""
        self.kill_reason: str | None = None
        """Reason for which the process is to be killed; None if there is none."""
        self._checks = self._blocked_checks = 0
        """Number of checks, and how many of them found a long step."""
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

        If it exceeds `limit_s`, set `kill_reason`. A step is the function's code between two awaits. Steps
        over LONG_STEP_S are counted, to find functions that often block their process.
        """
        number, since = self.step()
        step_s = time.monotonic() - since if number else 0.0
        if step_s > limit_s:
            self.kill_reason = f"took more than {limit_s:g} s between two awaits (limits.python)"
        # With a single rollout in the process, a long step keeps no other row waiting.
        if len(self.rollouts) > 1 and self.is_loaded.is_set():
            self._checks += 1
            if step_s > LONG_STEP_S:
                self._blocked_checks += 1
                if len(self._long_steps) < LONG_STEPS:
                    self._long_steps.add(since)

    @property
    def is_blocked(self) -> bool:
        """Whether the code of one row often blocks the process, so that other rows wait."""
        is_often = self._blocked_checks >= BLOCKED_SHARE * self._checks
        return is_often and len(self._long_steps) >= LONG_STEPS

    def send(self, *values: Any) -> None:
        """Send a frame, unless the process has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(*values))

    async def run(self, number: int, rollout: Rollout, limit_s: float) -> Result:
        """Run a rollout's function from the start; raises ProcessEndedError, TimeoutError after `limit_s`."""
        rollout.sent_counts.clear()
        rollout.result = asyncio.get_running_loop().create_future()
        self.rollouts[number] = rollout
        try:
            await self.is_loaded.wait()
            # This message starts the function. The prompt of a rollout has a single item: the input row.
            self.send(number, None, rollout.request.prompt[0])
            async with asyncio.timeout(limit_s):
                return await rollout.result
        except TimeoutError:
            self.send(number, None, None)  # cancels the function in its process
            raise
        finally:
            del self.rollouts[number]


@dataclass(eq=False)
class Rollouts:
    """Runs the functions of a run's rows: opens rows, sends their requests, and stores their results."""

    job: Job
    source: RowSource
    functions: HookPool
    tokenizer: RowTokenizer
    backlog: Backlog
    routes: Routes
    results: ResultSink
    store: TurnStore | None
    """Store of the answers, for a resumed run. None if a Python program supplies the rows, because then
    answers are not stored."""
    turns: int = 0
    """Number of requests that were answered since the run was last started."""

    def __post_init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._limits = self.job.limits
        self._label = f"{ROLLOUT}: {self.functions.facts[ROLLOUT].name}"
        # A function may return its own value for the column `turns`.
        self._reserved_columns = {*RESULT_COLUMNS, *ROLLOUT_COLUMNS, *self.job.input.carried_names} - {TURNS}
        self._open: set[Rollout] = set()
        """Rollouts without a result so far."""
        self._ended = self._answers_of_ended = 0
        """Number of rollouts that have ended, and of all their answers."""
        self._starting: set[Rollout] = set()
        """Rollouts that are expected to send their first request soon."""
        self._processes: list[RolloutProcess] = []
        self._own_processes = asyncio.Semaphore(self.functions.most_processes)
        """Limits the number of processes that each run a single rollout."""
        self._numbers = count(1)
        self._warned_of_block = False

    @property
    def done_of_open(self) -> float:
        """Work on the open rows that is done, as a number of rows; 0 until a row with answers has ended."""
        if not self._answers_of_ended:
            return 0.0
        return work_done((rollout.answered for rollout in self._open), self._answers_of_ended / self._ended)

    def state(self) -> dict[str, int]:
        """Count the open rows, those that wait for tools or a blocked process, and the requests (turns)."""
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
        """Run the functions of all rows, and answer their requests, until cancelled.

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
        """Read the source. Start the function of each row as soon as another row may be opened."""
        batches = self.source.batches()
        while not self.backlog.is_stopping:
            batch = await asyncio.to_thread(next, batches, None)
            if batch is None:
                return
            for item in batch:
                if isinstance(item, Outcome):  # a row that cannot be read comes as an Outcome with its error
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
        """Tell whether another row may be opened: only few requests are queued or expected soon."""
        ahead = max(LEAST_AHEAD, int(self.routes.window * AHEAD_SHARE))
        return len(self._open) < MOST_OPEN and self.backlog.ready + len(self._starting) < ahead

    async def _run_rollout(self, rollout: Rollout) -> None:
        """Run the function of a row, and store its result. Raises StorageError."""
        began = time.monotonic()
        if self.store is not None:  # requests answered before a restart get the stored answers
            for key, outcome in self.store.take(rollout.request.ref).items():
                rollout.answers[key] = asyncio.get_running_loop().create_future()
                rollout.answers[key].set_result(outcome)
        rows, error = await self._result_of(rollout)
        outcome = _outcome_of(rollout, rows, error and hidden(error), time.monotonic() - began)
        self._ended += 1
        self._answers_of_ended += rollout.answered
        await self._drop_answers(rollout, is_done=error is None)
        self._open.discard(rollout)
        self._starting.discard(rollout)  # it may have ended without any request
        await self.backlog.end(PendingRow(rollout.request), outcome)
        self.backlog.wake()

    async def _drop_answers(self, rollout: Rollout, *, is_done: bool = False) -> None:
        """Forget the answers and pending requests of a rollout.

        If it is not done, delete its stored answers too.
        """
        for answer in rollout.answers.values():
            answer.cancel()
        rollout.answers.clear()
        rollout.group = None
        if not is_done and self.store is not None:
            await self.store.drop(rollout.request.ref.row)

    async def _result_of(self, rollout: Rollout) -> Result:
        """Return the result of a row's function.

        If its process ends, the function is run again. If it then sends different requests, it is run once
        more without the old answers. A row that killed a process, or may have killed two, gets a process of
        its own.
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
                    # The row has certainly killed the process, so it fails. Otherwise it is tried again.
                    if has_own_process or (process.kill_reason and is_guilty):
                        return [], f"{self._label}: {failure}"
                    if is_guilty:
                        suspicion += OWN_PROCESS_SUSPICION
                    elif not running_number:
                        # No row's code was running when the process ended, so each of its rows is suspected a
                        # little.
                        suspicion += 1
                    continue
                finally:
                    if has_own_process:
                        process.kill()
            # If the function left stored answers unused, it sent other requests than before. So its result
            # would not fit the stored answers.
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
        """Return the process with the fewest rows; a new one if all are busy and one more is allowed."""
        shared = [process for process in self._processes if process.is_shared]
        are_busy = all(len(process.rollouts) >= ROWS_A_PROCESS for process in shared)
        if are_busy and len(shared) < self.functions.most_processes:
            return self._new_process(is_shared=True)
        # Prefer processes that have already loaded the function.
        return min(shared, key=lambda process: (not process.is_loaded.is_set(), len(process.rollouts)))

    def _new_process(self, *, is_shared: bool) -> RolloutProcess:
        """Start a process, and an asyncio task that receives its requests and results."""
        process = RolloutProcess(self.functions.setup, is_shared=is_shared)
        self._processes.append(process)
        self._group.create_task(self._listen(process))
        return process

    async def _listen(self, process: RolloutProcess) -> None:
        """Receive the requests and results of a process until it ends."""
        reader = await process.connect()
        try:
            while True:
                number, question, value = await read_frame(reader)
                rollout = process.rollouts.get(number)
                if rollout is None or rollout.result.done():  # the rollout ended, maybe by a limit
                    continue
                if question is None:  # the function has ended, and `value` is its result
                    rollout.result.set_result(value)
                elif rollout.sent_counts.total() < self._limits.turns:
                    self._answer_request(process, number, rollout, question=question, text=value)
                else:
                    why = f"sent more than {self._limits.turns} requests (limits.turns)"
                    rollout.result.set_result(([], f"{self._label}: {why}"))
        except EOFError:
            process.is_shared = False  # no further rollout may start in the ended process
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
        # If a function sends the same request twice, the second one gets the second stored answer.
        key = digest, rollout.sent_counts[digest]
        answer = rollout.answers.pop(key, None)
        if answer is None:
            answer = self._group.create_task(self._send_request(rollout, key, text))
        # The answers stay in the order of the requests, even if they come from the store.
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
        # All requests of a rollout go to one replica: they are in one prefix group.
        turn = Turn(asyncio.get_running_loop().create_future(), is_first=rollout.group is None)
        answers = AnswerHistory(ready, unencoded=request)
        row = PendingRow(ready, prompt_bytes=len(text), answers=answers, turn=turn)
        if rollout.group is None:
            rollout.group = PrefixGroup(row)
        row.group = rollout.group
        # After its first request, the rollout no longer counts as starting.
        self._starting.discard(rollout)
        self.backlog.add(row)
        self.backlog.wake()
        outcome = await turn.outcome
        if self.store is not None:
            await self.store.put(key, outcome)
        self.turns += 1
        return outcome

    async def _watch(self) -> None:
        """Kill processes whose code runs too long without an await, and warn of rows that block others.

        Clean up after ended processes too.

        Rollouts that have sent no request for a while no longer count as starting.
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
    # Only parameters that the call itself sets replace those of the job. The adapter and `tool_choice` are
    # not sampling parameters: the request has its own fields for them, which are set below.
    parameters = spec.model_dump(include={*sampling} - {"n", "lora_path", "tool_choice"}, exclude_none=True)
    if isinstance(parameters.get("json_schema"), dict):
        # SGLang expects the schema as text.
        parameters["json_schema"] = json.dumps(parameters["json_schema"])
    job_parameters = dict(base.sampling)
    if parameters.keys() & {*GRAMMARS}:  # a request has one grammar, and the call's replaces the job's
        for grammar in GRAMMARS:
            job_parameters.pop(grammar, None)
    job_tools = base.tools or Tools(None)
    # Each call may have other tools (`by_row`), so they count as a part of the prompt (`prompt_bytes`).
    tools_of_call = Tools(tools or job_tools.tools, spec.tool_choice or job_tools.choice, by_row=True)
    # Additional result columns that the request asks the server for. Only the chat endpoint returns some.
    asks = base.asks
    if kind != "messages" and asks is not None:
        names = asks.names - {REASONING, TOOL_CALLS}
        asks = asks._replace(names=names) if names else None
    request = base._replace(
        sampling=job_parameters | parameters,
        lora_path=spec.lora_path or base.lora_path,
        tools=tools_of_call if tools_of_call.tools or tools_of_call.choice else None,
        asks=asks,
    )
    return with_prompt(request, "generate", kind, content)


def _answer_of(outcome: Outcome) -> RolloutAnswer | str:
    """Return the answer that `generate` returns, or the text of the error that it raises."""
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
    """Return the outcome of a row. Its tokens and retries are the sums over all its requests."""
    outcomes = [answer.result() for answer in rollout.answers.values() if answer.done()]
    completions = [outcome.completion for outcome in outcomes if outcome.completion is not None]
    # The row gets the text of the last answer, and the token counts of all answers.
    last = completions[-1] if completions else NO_ANSWER
    has_failed = error is not None
    # If a function returns no rows and does not fail, the results have no line for its row.
    is_left_out = not rows and not has_failed
    # The last request is kept for failed rows only, where it helps to find the cause.
    conversation = (rollout.last_request or None) if has_failed else None
    # One entry (AskedAgain) for each request of the row that was sent again after a rejected answer.
    asked_again = [totals for answer in completions for totals in answer.columns.get(ASKED_AGAIN, ())]
    completion = last._replace(
        finish_reasons=[LEFT_OUT] if is_left_out else last.finish_reasons,
        completion_tokens=[sum(answer.output_tokens for answer in completions)],
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in completions),
        cached_tokens=sum(answer.cached_tokens or 0 for answer in completions),
        thinking_cut=any(answer.thinking_cut for answer in completions),
        columns={
            TURNS: [len(outcomes)],
            MADE_ROWS: rows,
            CONVERSATION: [conversation],
            ASKED_AGAIN: asked_again,
        },
    )
    # Only further attempts of a request count as retries of the row.
    attempts = 1 + sum(max(0, outcome.attempts - 1) for outcome in outcomes)
    return Outcome(
        ref=rollout.request.ref, completion=completion, error=error, latency_s=latency_s, attempts=attempts
    )
