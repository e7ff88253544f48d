"""Makes the engine that a job names. The modules of an engine are imported only for jobs that use it."""

import os
from pathlib import Path
from typing import assert_never

from batchrunner.core.errors import EngineStartError
from batchrunner.engines.base import Engine
from batchrunner.engines.http.server_info import BUDGET_PARSERS, check_architecture
from batchrunner.job.engine import (
    PARSER,
    STRICT_THINKING,
    THINK_LIMIT,
    AttachEngine,
    EngineSpec,
    GatewayEngine,
    ServerEngine,
    SimulatedEngine,
)
from batchrunner.job.spec import Job, LimitsSpec
from batchrunner.job.tasks import GENERATE, TASKS, TaskName, pooling_args
from batchrunner.sglang.device import MEAN_POOLING, on_cpu
from batchrunner.sglang.model_files import model_identity, read_config, takes_mean

UNLIMITED_THINKING = 1 << 20
"""Most tokens of thinking of a row without a limit of its own, where others have one."""


def make_engine(
    spec: EngineSpec,
    *,
    log_dir: Path,
    limits: LimitsSpec,
    task: TaskName = GENERATE,
    shape: str | None = None,
) -> Engine:
    """Return the engine that the spec describes, not yet open. A launched one logs to `log_dir`.

    Launched servers load the model for the `task`; attached ones must already serve it. With the `shape` of a
    job, the flags of launched servers are tuned during the run and remembered for such jobs.
    """
    spec = for_task(spec, task)
    match spec:
        case AttachEngine() | GatewayEngine():
            from batchrunner.engines.http.client import AttachedServers  # noqa: PLC0415

            urls, gateway = ((), spec.url) if isinstance(spec, GatewayEngine) else (spec.urls, None)
            api_key = os.environ.get(spec.api_key_env)
            if spec.api_key_file:
                api_key = _read_key(spec.api_key_file)
            engine_class = AttachedServers
            if spec.background:
                from batchrunner.engines.http.background import BackgroundServers  # noqa: PLC0415

                engine_class = BackgroundServers
            return engine_class(urls, gateway=gateway, api_key=api_key or None, limits=limits, task=task)
        case ServerEngine():
            from batchrunner.engines.launched.fleet import LaunchedFleet  # noqa: PLC0415

            return LaunchedFleet(spec, log_dir=log_dir, limits=limits, task=task, shape=shape)
        case SimulatedEngine():
            from batchrunner.engines.simulated import Simulator  # noqa: PLC0415

            return Simulator(spec)
        case _:
            assert_never(spec)


def engine_of(job: Job) -> EngineSpec:
    """Return the engine of a job, whose servers limit thinking where the job asks for it.

    The job's own arguments take precedence. Raises EngineStartError on a CPU, where SGLang cannot do it.
    """
    spec, budget = job.engine, job.sampling.max_thinking_tokens
    if budget is None or not isinstance(spec, ServerEngine):
        return spec
    if on_cpu(spec.device):
        raise EngineStartError(
            "sampling.max_thinking_tokens: SGLang's --enable-strict-thinking does not work on a CPU",
            hint="leave the field out, or run on a GPU",
        )
    args = {PARSER: "auto", STRICT_THINKING: True} | spec.args
    env = spec.env
    if args[PARSER] not in BUDGET_PARSERS:
        limit = budget if isinstance(budget, int) else UNLIMITED_THINKING
        env = {THINK_LIMIT: str(limit)} | env
    return spec.model_copy(update={"args": args, "env": env})


def _read_key(file: str) -> str:
    """Read an API key from a file; raises EngineStartError."""
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, ValueError) as failure:
        raise EngineStartError(f"engine.api_key_file {file}: cannot be read: {failure}") from None


def for_task(spec: EngineSpec, task: TaskName) -> EngineSpec:
    """Add the arguments and variables that a launched server needs for a task; the job's own take precedence.

    Raises EngineStartError if the model's architecture does not support the task.
    """
    forward_task = TASKS.get(task)
    if forward_task is None or not isinstance(spec, ServerEngine):
        return spec
    config = read_config(spec.model)
    check_architecture(task, config.get("architectures"), f"engine.model: {spec.model}")
    pooling = {} if forward_task.by_generation else pooling_args(config, cpu=on_cpu(spec.device))
    env = MEAN_POOLING | spec.env if takes_mean(spec.model) else spec.env
    return spec.model_copy(update={"args": pooling | spec.args, "env": env})


def model_of(spec: EngineSpec) -> str | None:
    """Return the identity of the engine's model; None if only a running engine can tell."""
    model = launched_model(spec)
    if model is not None:
        return model_identity(model)
    return "simulated" if isinstance(spec, SimulatedEngine) else None


def launched_model(spec: EngineSpec) -> str | None:
    """Return the model that the run's own servers load, as the job names it; None for other engines."""
    return spec.model if isinstance(spec, ServerEngine) else None
