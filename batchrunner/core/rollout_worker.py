"""Multi-turn rollouts in a worker process: coroutines of the job's function, for many rows side by side.

`dispatch.rollouts` starts the rollouts and answers their calls of `generate`. A message between the processes
has the number of a rollout, the number of its call of `generate` (None for the rollout itself), and a value.
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
"""Size in bytes of the memory in which a worker process shows the run which rollout is running.

A step is the code that a rollout runs between two awaits. The memory has the start time of the running step
and the number of its rollout, so that the run can end a step that exceeds its time limit.
"""
_STARTED = 0
"""Index, in the shared memory, of the time at which the running step began (`time.monotonic`, in seconds)."""
_ROLLOUT = 1
"""Index, in the shared memory, of the number of the running rollout; 0 while none runs."""


def step_memory(descriptor: int) -> memoryview[float]:
    """Return the memory behind a file descriptor (see STEP_BYTES) as two doubles.

    A memoryview reads and writes a double as a whole; `struct` would do so byte by byte.
    """
    return memoryview(mmap.mmap(descriptor, STEP_BYTES)).cast("d")


def running_step(memory: memoryview[float]) -> tuple[int, float]:
    """Return the number of the rollout that is running (0 if none), and the time at which its step began.

    The worker may write at the same time: first the start time, then the number. This function reads them in
    the opposite order, so that the start time is never that of an earlier step.
    """
    return int(memory[_ROLLOUT]), memory[_STARTED]


class GenerateError(Exception):
    """`generate` has no good answer for a rollout; the message says why."""

    __module__ = "batchrunner"


@dataclass(frozen=True, slots=True)
class RolloutToolCall:
    """A tool call of the model."""

    id: str | None
    name: str
    arguments: Any
    """The arguments, parsed as JSON; the text itself if it is not JSON."""


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
        """Reasoning of the model before its answer to a chat; None if the job does not ask for it."""
        return self.columns.get("reasoning")

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message with its tool calls, to append to the conversation."""
        message = {"role": "assistant", "content": self.text}
        if tool_calls := self.columns.get("tool_calls"):
            message["tool_calls"] = tool_calls
        return message

    @property
    def tool_calls(self) -> list[RolloutToolCall]:
        """Tool calls of the answer, with parsed arguments."""
        return [
            RolloutToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=_parsed(call["function"]["arguments"]),
            )
            for call in self.columns.get("tool_calls") or ()
        ]


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; any other text unchanged."""
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
    """Run rollouts until the run closes its end of the channel, then end the process."""
    places = [function.where for function in facts]
    rollout_function = functions[places.index(ROLLOUT)]
    loop = _Loop(step_memory(step_descriptor))
    try:
        loop.run_until_complete(_serve(rollout_function, os.dup(channel.socket.fileno())))
    except (EOFError, ConnectionError):
        pass  # The run has closed its end of the channel, so it needs no more rollouts.
    except BaseException:  # noqa: BLE001 - for example, the function has stopped the loop
        traceback.print_exc()
        os._exit(1)
    # Unlike sys.exit, os._exit does not wait for threads that the function has started.
    os._exit(0)


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that records which rollout is running a step, and when the step began.

    The record is in memory shared with the main process (STEP_BYTES).
    """

    def __init__(self, steps: memoryview[float]) -> None:
        self._steps = steps
        super().__init__()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Call a function, such as the next step of a coroutine, in the next iteration of the loop."""
        return super().call_soon(self._call, callback, args, context=context)

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call a function as one step; record its rollout and start time in the shared memory."""
        # `running_step` expects that the start time is written before the number.
        self._steps[_STARTED] = time.monotonic()
        self._steps[_ROLLOUT] = _CURRENT.get()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            # The task of the rollout has stored the exception. If it were raised here, it would end all
            # rollouts.
            pass
        finally:
            self._steps[_ROLLOUT] = 0


_CURRENT: ContextVar[int] = ContextVar("current rollout", default=0)
"""Number of the rollout whose code runs in this context (`contextvars`)."""


@dataclass(slots=True, eq=False)
class _Rollout:
    """The rollout of one row, with its calls of `generate` that have no answer yet."""

    number: int
    """Number that identifies the rollout in messages to the run."""
    send: Callable[[bytes], None]
    """Sends a message to the run."""
    call_numbers: count[int] = field(default_factory=count)
    unanswered: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Answers that the run has not sent yet, by the number of the call."""

    async def run(
        self, rollout_function: Callable[..., Coroutine[Any, Any, Any]], row: dict[str, Any]
    ) -> None:
        """Run the function for a row, and send its result, or the error of the row, to the run."""
        # The reply is a pair of the result and the error, of which one is empty.
        try:
            reply = frame(self.number, None, (await rollout_function(row, self.generate), None))
        except BaseException as failure:  # noqa: BLE001 - a function may raise anything
            reply = frame(self.number, None, ([], failure_text(ROLLOUT, failure)))
        for answer in self.unanswered.values():
            answer.cancel()  # A coroutine that the function started still waits for this answer.
        self.send(reply)

    async def generate(
        self, prompt: Any, *, schema: Any = None, tools: Any = None, **sampling: Any
    ) -> RolloutAnswer:
        """Ask the model and return an accepted answer; raise GenerateError if there is none.

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
            raise GenerateError("generate must be awaited in the event loop of the rollout")
        number = next(self.call_numbers)
        answer = self.unanswered[number] = loop.create_future()
        self.send(frame(self.number, number, request))
        try:
            result: RolloutAnswer | str = await answer
        finally:
            del self.unanswered[number]
        if isinstance(result, str):  # A text says why there is no accepted answer.
            raise GenerateError(result)
        return result


def _plain(value: Any) -> Any:
    """Convert a NumPy array or scalar to plain Python values for JSON; raise TypeError for other objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither a scalar nor a list or dict of scalars")


async def _serve(rollout_function: Callable[..., Coroutine[Any, Any, Any]], descriptor: int) -> None:
    """Start, cancel and answer rollouts as the run asks; raise EOFError once the run closes its end.

    A message from the run has the number of a rollout, the number of a call of `generate` or None, and a
    value. With the number of a call, the value is the answer to it. Without, the value is the row for which a
    rollout starts, or None to cancel the rollout.
    """
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    running: dict[int, tuple[_Rollout, asyncio.Task[None]]] = {}

    def send(content: bytes) -> None:
        try:
            writer.write(content)
        except MemoryError:  # A part of the message may have been sent, so the connection is unusable now.
            os._exit(1)

    while True:
        number, call_number, value = await read_frame(reader)
        if call_number is None and value is not None:
            rollout = _Rollout(number, send)
            context = copy_context()
            context.run(_CURRENT.set, number)  # `_Loop` finds the rollout of a step in the task's context.
            task = asyncio.create_task(rollout.run(rollout_function, value), context=context)
            running[number] = rollout, task
            # The loop calls `running.pop(number, task)`, in which the task is only the default value.
            task.add_done_callback(partial(running.pop, number))
        elif number in running:  # A message for a rollout that has just ended is ignored.
            rollout, task = running[number]
            if call_number is None:
                task.cancel()
            elif (answer := rollout.unanswered.get(call_number)) and not answer.done():
                answer.set_result(value)
