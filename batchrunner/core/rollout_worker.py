"""Rollouts in a worker process: coroutines of the job's function, for many rows side by side.

`dispatch.rollouts` starts them and answers their calls of `generate`. A frame has the number of a rollout,
the number of its call of `generate` (None for the rollout itself), and a value.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from batchrunner.core.hook_protocol import Channel, HookFacts, failure_text, frame, read_frame
from batchrunner.core.types import ROLLOUT

STEP_BYTES = 16
"""Size in bytes of the step memory, which this process shares with the run. It holds the start time of the
running step, and the number of the rollout that runs."""
_STARTED, _ROLLOUT = 0, 1


def step_memory(descriptor: int) -> memoryview[float]:
    """Return step memory as two numbers. Each is read and written as a whole, unlike with `struct`."""
    return memoryview(mmap.mmap(descriptor, STEP_BYTES)).cast("d")


def running_step(memory: memoryview[float]) -> tuple[int, float]:
    """Return the rollout whose code runs, 0 for none, and when this step started.

    The worker may write meanwhile. It writes the start before the rollout, so the rollout is read first.
    """
    return int(memory[_ROLLOUT]), memory[_STARTED]


class GenerateError(Exception):
    """Raised by `generate` in a rollout when there is no good answer; the message says why."""

    __module__ = "batchrunner"


@dataclass(frozen=True, slots=True)
class RolloutToolCall:
    """A tool call of the model."""

    id: str | None
    name: str
    arguments: Any
    """The arguments, parsed as JSON; the text itself where it is not JSON."""


@dataclass(frozen=True, slots=True)
class RolloutAnswer:
    """An answer of the model, as `generate` returns it."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    columns: dict[str, Any]
    """Columns of the job's `output.columns`, such as `logprobs`."""

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the model before its answer to a chat."""
        return self.columns.get("reasoning")

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, with its tool calls."""
        message = {"role": "assistant", "content": self.text}
        if tool_calls := self.columns.get("tool_calls"):
            message["tool_calls"] = tool_calls
        return message

    @property
    def tool_calls(self) -> list[RolloutToolCall]:
        """The tool calls."""
        return [
            RolloutToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=_parsed(call["function"]["arguments"]),
            )
            for call in self.columns.get("tool_calls") or ()
        ]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def run_rollouts(
    channel: Channel,
    step_descriptor: int,
    facts: Sequence[HookFacts],
    functions: Sequence[Callable[..., Any]],
) -> None:
    """Run rollouts until the other end closes, then end the process."""
    places = [function.where for function in facts]
    solve = functions[places.index(ROLLOUT)]
    loop = _Loop(step_memory(step_descriptor))
    try:
        loop.run_until_complete(_serve(solve, os.dup(channel.socket.fileno())))
    except (EOFError, ConnectionError):
        pass
    except BaseException:  # noqa: BLE001 - for example, the function has stopped the loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # Threads and other rows of the function may be busy for long.


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that records in step memory whose code runs."""

    def __init__(self, steps: memoryview[float]) -> None:
        self._steps = steps
        super().__init__()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Call a function in the next round, such as the next step of a coroutine."""
        return super().call_soon(self._call, callback, args, context=context)

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._steps[_STARTED] = time.monotonic()
        self._steps[_ROLLOUT] = _CURRENT.get()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            pass  # The exception would end the loop and all rows. The rollout gets it, too.
        finally:
            self._steps[_ROLLOUT] = 0


_CURRENT: ContextVar[int] = ContextVar("current rollout", default=0)
"""Number of the rollout that runs in this context."""


@dataclass(slots=True, eq=False)
class _Rollout:
    """The coroutine of a row, and its calls of `generate` that have no answer yet."""

    number: int
    send: Callable[[bytes], None]
    """Sends a frame to the run."""
    call_numbers: count[int] = field(default_factory=count)
    unanswered: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def run(self, solve: Callable[..., Coroutine[Any, Any, Any]], row: dict[str, Any]) -> None:
        """Run the function for a row, and send what it returns or the error of the row."""
        try:
            reply = frame(self.number, None, (await solve(row, self.generate), None))
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything
            reply = frame(self.number, None, ([], failure_text(ROLLOUT, failure)))
        for answer in self.unanswered.values():  # awaited by coroutines that the function did not end
            answer.cancel()
        self.send(reply)

    async def generate(
        self, prompt: Any, *, schema: Any = None, tools: Any = None, **sampling: Any
    ) -> RolloutAnswer:
        """Ask the model and return a good answer; raises GenerateError where there is none.

        `prompt` is a list of messages, a text or a list of token ids; `schema` is a JSON Schema or a pydantic
        model. `tools` and `sampling` take precedence over those of the job.
        """
        if schema is not None:
            is_model = hasattr(schema, "model_json_schema")
            sampling["json_schema"] = schema.model_json_schema() if is_model else schema
        try:
            request = json.dumps({"prompt": prompt, "tools": tools, "sampling": sampling}, default=_plain)
        except (TypeError, ValueError, RecursionError) as failure:
            raise GenerateError(f"the arguments of generate cannot be written as JSON: {failure}") from None
        loop = asyncio.get_running_loop()
        if not isinstance(loop, _Loop):
            raise GenerateError("generate was awaited in another event loop than the one of the rollout")
        number = next(self.call_numbers)
        answer = self.unanswered[number] = loop.create_future()
        self.send(frame(self.number, number, request))
        try:
            result: RolloutAnswer | str = await answer
        finally:
            del self.unanswered[number]
        if isinstance(result, str):
            raise GenerateError(result)
        return result


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither a scalar nor a list or dict of scalars")


async def _serve(solve: Callable[..., Coroutine[Any, Any, Any]], descriptor: int) -> None:
    """Start rollouts and pass their answers on; raises EOFError once the run has closed its end."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    running: dict[int, tuple[_Rollout, asyncio.Task[None]]] = {}

    def send(content: bytes) -> None:
        try:
            writer.write(content)
        except MemoryError:  # Part of the frame may be sent already: the connection is of no more use.
            os._exit(1)

    while True:
        number, call_number, value = await read_frame(reader)
        if call_number is None and value is not None:
            rollout = _Rollout(number, send)
            context = copy_context()
            context.run(_CURRENT.set, number)
            task = asyncio.create_task(rollout.run(solve, value), context=context)
            running[number] = rollout, task
            task.add_done_callback(partial(running.pop, number))
        elif number in running:
            rollout, task = running[number]
            if call_number is None:
                task.cancel()
            elif (answer := rollout.unanswered.get(call_number)) and not answer.done():
                answer.set_result(value)
