"""An open engine with the concurrency limits that its runs share."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from pathlib import Path

from batchrunner.core.engine_info import EngineInfo, QueueBand
from batchrunner.core.errors import EngineStartError
from batchrunner.core.media import KIND_OF_FIELD
from batchrunner.core.types import BYTES_PER_TOKEN
from batchrunner.dispatch.bundles import ForwardPasses
from batchrunner.dispatch.concurrency.law import (
    TYPICAL_PROMPT_TOKENS,
    UNKNOWN_ENGINE_WINDOW,
    tokens_a_row,
)
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.load_control import LoadControl, write_changes
from batchrunner.engines.base import Engine
from batchrunner.engines.registry import engine_of, make_engine
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import Job
from batchrunner.job.tasks import GENERATE, TaskName
from batchrunner.output.events import EventLog
from batchrunner.runner.control import Control

log = logging.getLogger(__name__)


class SharedEngine:
    """An open engine. Runs that use the engine at the same time share its concurrency limits."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.engine = engine
        self.info = info
        """Facts that the engine reports about itself, such as its model and its limits."""
        self._load_control: LoadControl | None = None
        """Load control of the runs that use the engine, or of the run that used it last."""

    async def load_control(
        self,
        job: Job,
        events: EventLog,
        *,
        unsent: int,
        now: float,
        decodes: bool = True,
        prompt_bytes: float | None = None,
    ) -> tuple[LoadControl, str]:
        """Return the load control for a run, and the reason for its first concurrency limit in words.

        The load control limits the requests in flight to each scheduler. Runs on the engine share one load
        control, unless their jobs set different limits (`window`). `unsent` is the number of rows to send,
        and `now` the time on the monotonic clock. `decodes` is whether the model generates text.
        `prompt_bytes` is the mean size of a row's prompt without cached prefixes; None if unknown.
        """
        fixed = None if job.window == "auto" else job.window
        prompt_tokens = None if prompt_bytes is None else prompt_bytes / BYTES_PER_TOKEN
        info = self.info
        # Without decoding, the limit follows from the number of rows that fill a forward pass. A batch
        # file of embeddings has no `job.forward`, so `decodes` is needed as well.
        passes = None if job.forward is None and decodes else ForwardPasses(info.prefill_tokens)
        concurrency = ConcurrencyLimits(
            info,
            QueueBand(),
            tokens_a_row(_most_new_tokens(job), prompt_tokens),
            most=max(1, (info.connections or sys.maxsize) // len(info.routes)),
            fixed=fixed,
            passes=passes,
            prompt_tokens=prompt_tokens or TYPICAL_PROMPT_TOKENS,
        )
        loads = await self.engine.loads()
        # Read this only after the await, because another run may have begun in the meantime.
        current = self._load_control
        if current is not None and current.in_use and current.concurrency.fixed == fixed:
            return current, "shared with other runs"
        control = self._load_control = LoadControl(self.engine, concurrency)
        if cost := _cost_of_connections(info, fixed):
            log.warning("%s", cost)
        first_windows = concurrency.begin(loads, now, unsent=unsent)
        if fixed is not None:
            return control, "set by the job"
        write_changes(events, first_windows)
        schedulers = f"; {len(first_windows)} schedulers" if len(first_windows) > 1 else ""
        return control, f"{first_windows[0].reason}{schedulers}"

    def check(self, job: Job) -> None:
        """Raise EngineStartError if the engine cannot run the job; otherwise log the engine's notes."""
        for name in job.prompt.media:
            kind = KIND_OF_FIELD[name]
            if getattr(self.info, f"takes_{kind.field}") is False:
                raise EngineStartError(
                    f"prompt.{name}: {self.info.model} does not accept {kind.field}",
                    hint="use a model that accepts them; if its encoder is off, add --enable-multimodal",
                )
        unsupported = self._unsupported_for(job)
        sampling = job.sampling.model_dump(exclude_defaults=True)
        features = {
            *job.output.columns,
            *(f"prompt.{name}" for name in job.prompt.media),
            *(f"sampling.{name}" for name in sampling),
        }
        for feature in sorted(features & unsupported.keys()):
            raise EngineStartError(f"{feature}: the engine does not support this: {unsupported[feature]}")
        if job.prompt.is_chat and not job.prompt.comes_from_function:
            self._check_chat_limits(job)
        if job.sampling.max_thinking_tokens is not None and self.info.no_thinking_budget is not None:
            raise EngineStartError(
                f"sampling.max_thinking_tokens: {self.info.no_thinking_budget}",
                hint="start the server with --enable-strict-thinking and a --reasoning-parser that supports "
                "this, such as qwen3, glm45 or deepseek-v3",
            )
        for note in self.info.notes:
            log.info("%s", note)

    def _unsupported_for(self, job: Job) -> dict[str, str]:
        """Return the parts of a job that the engine cannot do for its prompts, and why."""
        info = self.info
        in_chats, elsewhere = info.unsupported_in_chats, info.unsupported_elsewhere
        if job.prompt.comes_from_function:
            # The function may return prompts of both kinds. Each row is checked when it is sent.
            in_both = {part: elsewhere[part] for part in in_chats if part in elsewhere}
            return {**info.unsupported, **in_both}
        return {**info.unsupported, **(in_chats if job.prompt.is_chat else elsewhere)}

    def _check_chat_limits(self, job: Job) -> None:
        """Raise EngineStartError for a value that the engine refuses in chats."""
        stop = job.sampling.stop
        values = {
            "sampling.n": job.sampling.n,
            "sampling.stop": len(stop) if isinstance(stop, list) else 1,
            "output.top_logprobs": job.output.top_logprobs if "top_logprobs" in job.output.asked else 0,
        }
        for part, most in self.info.chat_limits.items():
            if values[part] > most:
                raise EngineStartError(f"{part}: the engine takes at most {most} in a chat")


async def open_engine_of(
    job: Job, task: TaskName, *, log_directory: Path, control: Control, stack: contextlib.AsyncExitStack
) -> SharedEngine:
    """Open the engine of a job, for what the model has to do (`task`). Raises BatchrunError.

    `stack` closes the engine, and `control` can interrupt its start.
    """
    shape = shape_of(job, task)  # jobs with the same digest share tuned flags
    making = make_engine(engine_of(job), log_dir=log_directory, limits=job.limits, task=task, shape=shape)
    engine = await control.wait_for(making, "while the engine was starting")
    stack.push_async_callback(engine.close)
    info = await control.wait_for(engine.open(), "while the engine was starting")
    return SharedEngine(engine, info)


def shape_of(job: Job, task: TaskName) -> str | None:
    """Return a digest of a job's prompt, sampling and engine. Jobs with the same digest share tuned flags.

    Return None if flag tuning is off for this job.
    """
    engine = job.engine
    if not isinstance(engine, ServerEngine) or engine.adapt == "off":
        return None
    if "config" in engine.args:  # an SGLang config file may set unknown flags
        return None
    # Flag tuning compares output tokens/s, which tasks without decoding lack. A fixed `window` also turns it
    # off.
    if task != GENERATE or job.window != "auto":
        return None
    compared_settings = job.model_dump_json(include={"prompt", "sampling", "engine"})
    return hashlib.sha256(compared_settings.encode()).hexdigest()[:12]


def _cost_of_connections(info: EngineInfo, fixed: int | None) -> str | None:
    """Return a warning if the limit of open files permits too few connections, else None.

    A job needs a connection for each request in flight: as many as `fixed`, if the job sets this limit, or
    else as many as the engine can run at once.
    """
    needed = fixed or info.max_running or UNKNOWN_ENGINE_WINDOW
    if info.connections is None or info.connections >= needed:
        return None
    reason = f"the job's window is {fixed}" if fixed else f"the engine can run {needed} at once"
    return (
        f"at most {info.connections} requests can be in flight, but {reason}: up to "
        f"{1 - info.connections / needed:.0%} of the speed is lost. The limit is {info.connections_by}: "
        "raise it (ulimit -Hn, LimitNOFILE, or the container's --ulimit nofile)"
    )


def _most_new_tokens(job: Job) -> int | None:
    """Return the maximum number of output tokens of each row; None if rows have no common maximum."""
    if job.forward is not None:
        return 0
    return job.sampling.max_new_tokens if isinstance(job.sampling.max_new_tokens, int) else None
