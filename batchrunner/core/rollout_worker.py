"""A process in which the rollouts of many rows run side by side: coroutines of the job's function.

Its other end, `dispatch.rollouts`, starts them and answers what they ask. A frame on the socket
between them is the length of a pickled tuple and this tuple.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import pickle
import socket
import struct
import time
import traceback
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from batchrunner.core.hook_worker import ROLLOUT, failure_text, load

STEP_BYTES = 16
"""Size of the shared memory that tells whose code runs: the time of the last step, and its rollout."""
_SINCE, _RUNS = 0, 1
_LENGTH = struct.Struct("=I")


def step_memory(descriptor: int) -> memoryview[float]:
    """Return the shared memory as two numbers: each is read and written whole, unlike by `struct`."""
    return memoryview(mmap.mmap(descriptor, STEP_BYTES)).cast("d")


def step_in(memory: memoryview[float]) -> tuple[int, float]:
    """Return the rollout whose code runs, 0 for none, and since when.

    It is read while it is written: the time is written before the rollout, and read after it.
    """
    return int(memory[_RUNS]), memory[_SINCE]


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
    try:
        if loaded := load(channel):
            _, facts, functions = loaded
            solve = functions[[found.where for found in facts].index(ROLLOUT)]
            _Loop(step_memory(steps)).run_until_complete(_serve(solve, os.dup(descriptor)))
    except (EOFError, ConnectionError):
        pass
    except BaseException:  # noqa: BLE001 - such as a function that has stopped the loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # whatever threads and other rows of the function are at


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that writes into shared memory whose code runs."""

    def __init__(self, steps: memoryview[float]) -> None:
        self._steps = steps
        super().__init__()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Call a function in the next round, such as the next step of a task."""
        return super().call_soon(self._call, callback, args, context=context)

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._steps[_SINCE] = time.monotonic()
        self._steps[_RUNS] = _NUMBER.get()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            pass  # it would end the loop, and with it all rows; the task has it too
        finally:
            self._steps[_RUNS] = 0


_NUMBER: ContextVar[int] = ContextVar("number", default=0)
"""Number of the rollout to which a task belongs."""


@dataclass(slots=True, eq=False)
class _Rollout:
    """A row's coroutine, and what it asked and has no answer to."""

    number: int
    send: Callable[[bytes], None]
    """Sends a frame to the run."""
    asked: count[int] = field(default_factory=count)
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def run(self, solve: Callable[..., Coroutine[Any, Any, Any]], row: dict[str, Any]) -> None:
        """Run the function for a row, and send what it returns, or the error of the row."""
        try:
            reply = frame(self.number, None, (await solve(row, self.generate), None))
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything
            reply = frame(self.number, None, ([], failure_text(ROLLOUT, failure)))
        for answer in self.waiting.values():  # of tasks that the function has left behind
            answer.cancel()
        self.send(reply)

    async def generate(
        self, prompt: Any, *, schema: Any = None, tools: Any = None, **sampling: Any
    ) -> RolloutAnswer:
        """Ask the model, and return a good answer; raises GenerateError where there is none.

        `prompt` is a list of messages, a text or a list of token ids; `schema` a JSON Schema or a pydantic
        model. `tools` and `sampling` go before those of the job.
        """
        if schema is not None:
            is_model = hasattr(schema, "model_json_schema")
            sampling["json_schema"] = schema.model_json_schema() if is_model else schema
        try:
            ask = json.dumps({"prompt": prompt, "tools": tools, "sampling": sampling}, default=_plain)
        except (TypeError, ValueError, RecursionError) as failure:
            raise GenerateError(f"no JSON can hold what generate is called with: {failure}") from None
        loop = asyncio.get_running_loop()
        if not isinstance(loop, _Loop):
            raise GenerateError("generate is awaited in the loop that runs the function, and in no other")
        number = next(self.asked)
        answer = self.waiting[number] = loop.create_future()
        self.send(frame(self.number, number, ask))
        try:
            found: RolloutAnswer | str = await answer
        finally:
            del self.waiting[number]
        if isinstance(found, str):
            raise GenerateError(found)
        return found


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither a scalar nor a list or dict of such")


async def _serve(solve: Callable[..., Coroutine[Any, Any, Any]], descriptor: int) -> None:
    """Start rollouts and hand them their answers; raises EOFError when the run has closed."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    running: dict[int, tuple[_Rollout, asyncio.Task[None]]] = {}

    def send(content: bytes) -> None:
        try:
            writer.write(content)
        except MemoryError:  # a part of it may be on its way
            os._exit(1)

    while True:
        number, asked, value = await read_frame(reader)
        if asked is None and value is not None:
            rollout = _Rollout(number, send)
            context = copy_context()
            context.run(_NUMBER.set, number)
            task = asyncio.create_task(rollout.run(solve, value), context=context)
            running[number] = rollout, task
            task.add_done_callback(partial(running.pop, number))
        elif number in running:
            rollout, task = running[number]
            if asked is None:
                task.cancel()
            elif (answer := rollout.waiting.get(asked)) and not answer.done():
                answer.set_result(value)
