"""A process in which the rollouts of many rows run side by side: coroutines of the job's function.

Its other end, `dispatch.rollouts`, starts them and answers what they ask. A frame on the socket
between them is the length of a pickled tuple and this tuple.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import pickle
import socket
import struct
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from batchrunner.core.hook_worker import ROLLOUT, UnusableValueError, failure_text, load

STEP = struct.Struct("=qd")
"""In shared memory: the rollout whose code runs, 0 for none, and the monotonic time since which it runs."""
_LENGTH = struct.Struct("=I")


def frame(*values: Any) -> bytes:
    """Return a frame with these values."""
    content = pickle.dumps(values)
    return _LENGTH.pack(len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    """Read a frame; raises EOFError where the other end has closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        values: tuple[Any, ...] = pickle.loads(await reader.readexactly(length))  # noqa: S301 - the run's own
    except (asyncio.IncompleteReadError, OSError):
        raise EOFError from None
    return values


class GenerateError(Exception):
    """What `generate` raises in a rollout: there is no good answer, and the message says why."""

    __module__ = "batchrunner"


@dataclass(frozen=True, slots=True)
class RolloutToolCall:
    """A call of a tool."""

    id: str | None
    name: str
    arguments: Any
    """The arguments, as JSON has them; the text itself where it is no JSON."""


@dataclass(frozen=True, slots=True)
class RolloutAnswer:
    """What `generate` returns."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    columns: dict[str, Any]
    """What `output.columns` of the job asks for, such as `logprobs`."""

    @property
    def reasoning(self) -> str | None:
        """What the model thought before its answer to a chat."""
        return self.columns.get("reasoning")

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, with its calls of tools."""
        calls = self.columns.get("tool_calls")
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}

    @property
    def tool_calls(self) -> list[RolloutToolCall]:
        """The calls of tools."""
        return [
            RolloutToolCall(call["id"], call["function"]["name"], _parsed(call["function"]["arguments"]))
            for call in self.columns.get("tool_calls") or ()
        ]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def main(descriptor: int, steps: int) -> None:
    """Load the function, and run rollouts until the other end closes; `steps` is the shared memory."""
    channel = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        if loaded := load(channel):
            _, facts, functions = loaded
            solve = functions[[found.where for found in facts].index(ROLLOUT)]
            asyncio.run(_Worker(solve, mmap.mmap(steps, STEP.size)).serve(os.dup(descriptor)))
    os._exit(0)  # whatever threads of the function are at


@dataclass(slots=True, eq=False)
class _Rollout:
    """A row's coroutine, and what it asked and has no answer to."""

    number: int
    worker: _Worker
    task: asyncio.Task[None] | None = None
    asked: count[int] = field(default_factory=count)
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def generate(
        self, prompt: Any, *, schema: Any = None, tools: Any = None, **sampling: Any
    ) -> RolloutAnswer:
        """Ask the model, and return a good answer; raises GenerateError where there is none.

        `prompt` is a list of messages, a text or a list of token ids; `schema` a JSON Schema or a pydantic
        model. `tools` and `sampling` go before those of the job.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if schema is not None:
            sampling["json_schema"] = schema
        try:
            ask = json.dumps({"prompt": prompt, "tools": tools, "sampling": sampling}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as failure:
            raise GenerateError(f"no JSON can hold what generate is called with: {failure}") from None
        number = next(self.asked)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        self.worker.send(self.number, number, ask)
        try:
            completion, error = await answer
        finally:
            del self.waiting[number]
        if error is not None:
            raise GenerateError(error)
        columns = {name: values[0] for name, values in completion.columns.items()}
        return RolloutAnswer(
            completion.texts[0], completion.finish_reasons[0], completion.prompt_tokens,
            completion.cached_tokens, completion.completion_tokens[0], columns,
        )  # fmt: skip


_CURRENT: ContextVar[_Rollout | None] = ContextVar("rollout", default=None)


@types.coroutine
def _steps(coroutine: Any, rollout: _Rollout) -> Generator[Any, Any, Any]:
    """Run a coroutine of a rollout; while its code runs, the shared memory says whose and since when."""
    step, given = coroutine.send, None
    while True:
        STEP.pack_into(rollout.worker.steps, 0, rollout.number, time.monotonic())
        try:
            awaited = step(given)
        except StopIteration as end:
            return end.value
        except (SystemExit, KeyboardInterrupt) as ended:  # they would end the loop, and with it all rows
            raise RuntimeError(f"{type(ended).__name__}: {ended}") from ended
        finally:
            STEP.pack_into(rollout.worker.steps, 0, 0, 0.0)
        try:
            step, given = coroutine.send, (yield awaited)
        except BaseException as failure:  # noqa: BLE001 - it is the coroutine's
            step, given = coroutine.throw, failure


async def _marked(coroutine: Any, rollout: _Rollout) -> Any:
    return await _steps(coroutine, rollout)


class _Worker:
    """The rollouts of this process."""

    def __init__(self, solve: Callable[..., Coroutine[Any, Any, Any]], steps: mmap.mmap) -> None:
        self._solve = solve
        self.steps = steps
        self._rollouts: dict[int, _Rollout] = {}

    def send(self, *values: Any) -> None:
        """Send a frame to the run."""
        self._writer.write(frame(*values))

    async def serve(self, descriptor: int) -> None:
        """Start rollouts and hand them their answers; raises EOFError when the run has closed."""
        asyncio.get_running_loop().set_task_factory(_task)
        reader, self._writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        while True:
            number, asked, value = await read_frame(reader)
            rollout = self._rollouts.get(number)
            if rollout is None and asked is None:
                rollout = self._rollouts[number] = _Rollout(number, self)
                context = copy_context()
                context.run(_CURRENT.set, rollout)
                rollout.task = context.run(asyncio.create_task, self._run(rollout, value))
            elif rollout is not None and asked is None and rollout.task is not None:
                rollout.task.cancel()
            elif rollout is not None and (answer := rollout.waiting.get(asked)) and not answer.done():
                answer.set_result(value)

    async def _run(self, rollout: _Rollout, row: dict[str, Any]) -> None:
        value, error = None, None
        try:
            value = await self._solve(row, rollout.generate)
        except UnusableValueError as failure:
            error = f"{ROLLOUT}: {failure}"
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything
            error = failure_text(ROLLOUT, failure)
        del self._rollouts[rollout.number]
        for answer in rollout.waiting.values():  # of tasks that the function has left behind
            answer.cancel()
        self.send(rollout.number, None, (value, error))


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    rollout = _CURRENT.get()
    if rollout is not None and asyncio.iscoroutine(coroutine):
        coroutine = _marked(coroutine, rollout)
    return asyncio.Task(coroutine, loop=loop, **options)
