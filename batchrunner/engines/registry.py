"""The job's `engine` → an Engine; an engine's imports are made only when a job asks for it."""

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
    """Make the engine that the spec describes, not yet open; a launched one logs into `log_dir`.

    An engine that loads the model does so for the `task`; any other must have a model for it. With the
    `shape` of a job, the flags of launched servers are adapted to it.
    """
    spec = for_task(spec, task)
    match spec:
        case AttachEngine() | GatewayEngine():
            from batchrunner.engines.http.client import AttachedServers  # noqa: PLC0415

            urls, gateway = ((), spec.url) if isinstance(spec, GatewayEngine) else (spec.urls, None)
            key = _key_in(spec.api_key_file) if spec.api_key_file else os.environ.get(spec.api_key_env)
            kind = AttachedServers
            if spec.background:
                from batchrunner.engines.http.background import BackgroundServers  # noqa: PLC0415

                kind = BackgroundServers
            return kind(urls, gateway=gateway, api_key=key or None, limits=limits, task=task)
        case ServerEngine():
            from batchrunner.engines.launched.fleet import LaunchedFleet  # noqa: PLC0415

            return LaunchedFleet(spec, log_dir=log_dir, limits=limits, task=task, shape=shape)
        case SimulatedEngine():
            from batchrunner.engines.simulated import Simulator  # noqa: PLC0415

            return Simulator(spec)
        case _:
            assert_never(spec)


def _key_in(file: str) -> str:
    """Return the API key in a file; raises EngineStartError where it cannot be read."""
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, ValueError) as failure:
        raise EngineStartError(f"engine.api_key_file {file}: cannot be read: {failure}") from None


def for_task(spec: EngineSpec, task: TaskName) -> EngineSpec:
    """Return the engine with the arguments that a model which it loads needs for a task, below the job's."""
    kind, model = TASKS.get(task), launched_model(spec)
    if kind is None or model is None or not isinstance(spec, ServerEngine):
        return spec
    config = read_config(model)
    check_architecture(task, config.get("architectures"), f"engine.model: {model}")
    pooling = {} if kind.by_generation else pooling_args(config, cpu=on_cpu(spec.device))
    env = MEAN_POOLING | spec.env if takes_mean(model) else spec.env
    return spec.model_copy(update={"args": pooling | spec.args, "env": env})


def model_of(spec: EngineSpec) -> str | None:
    """Return the identity of the engine's model, or None where only the engine knows it."""
    model = launched_model(spec)
    if model is not None:
        return model_identity(model)
    return "simulated" if isinstance(spec, SimulatedEngine) else None


def launched_model(spec: EngineSpec) -> str | None:
    """Return the model that the run loads itself, by the job's name for it; None if it loads none."""
    return spec.model if isinstance(spec, ServerEngine) else None
