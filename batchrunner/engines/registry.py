"""Makes the engine that a job names. The modules of an engine are imported only for jobs that use it."""

import os
from pathlib import Path
from typing import assert_never

from batchrunner.core.errors import EngineStartError
from batchrunner.engines.base import Engine
from batchrunner.engines.http.server_info import check_architecture
from batchrunner.job.engine import (
    AttachEngine,
    EngineSpec,
    GatewayEngine,
    ServerEngine,
    SimulatedEngine,
)
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import GENERATE, TASKS, TaskName, pooling_args
from batchrunner.sglang.device import MEAN_POOLING, on_cpu
from batchrunner.sglang.model_files import model_identity, read_config, takes_mean


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

            spec = bound_blanks(spec) if task == GENERATE else spec
            return LaunchedFleet(spec, log_dir=log_dir, limits=limits, task=task, shape=shape)
        case SimulatedEngine():
            from batchrunner.engines.simulated import Simulator  # noqa: PLC0415

            return Simulator(spec)
        case _:
            assert_never(spec)


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


def bound_blanks(spec: ServerEngine) -> ServerEngine:
    """Bound the blanks in JSON that follows a schema: SGLang lets a model pad it up to `max_new_tokens`.

    A bound of the job's own stays.
    """
    from batchrunner.sglang.flags import (  # noqa: PLC0415 - only for servers that the run starts
        MAX_BLANKS_FLAG,
        MOST_BLANKS,
        is_at_least,
        version_of,
    )

    if not is_at_least(version_of(spec.python, spec.env), 0, 5, 23):  # older ones may lack the flag
        return spec
    return spec.model_copy(update={"args": {MAX_BLANKS_FLAG: MOST_BLANKS, **spec.args}})


def model_of(spec: EngineSpec) -> str | None:
    """Return the identity of the engine's model; None if only a running engine can tell."""
    model = launched_model(spec)
    if model is not None:
        return model_identity(model)
    return "simulated" if isinstance(spec, SimulatedEngine) else None


def launched_model(spec: EngineSpec) -> str | None:
    """Return the model that the run's own servers load, as the job names it; None for other engines."""
    return spec.model if isinstance(spec, ServerEngine) else None
