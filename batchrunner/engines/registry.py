"""Makes the engine that a job names. The modules of an engine are imported only for jobs that use them."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

from batchrunner.core.errors import EngineStartError
from batchrunner.engines.base import Engine
from batchrunner.engines.http.server_info import BUDGET_PARSERS, check_architecture, is_gateway
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
from batchrunner.sglang.flags import MAX_BLANKS_FLAG, MOST_BLANKS, is_at_least, version_of
from batchrunner.sglang.model_files import model_identity, read_config, takes_mean

log = logging.getLogger(__name__)
UNLIMITED_THINKING = 1 << 20
"""Budget of thinking tokens that a server applies to all rows, if a column of the input has a budget for each
row. It is too large to have an effect of its own."""


async def make_engine(
    spec: EngineSpec,
    *,
    log_dir: Path,
    limits: LimitsSpec,
    task: TaskName = GENERATE,
    shape: str | None = None,
) -> Engine:
    """Return the engine that `spec` describes, not yet open.

    Launched servers log to `log_dir`, and load the model for `task`. Servers that already run must have
    loaded their model for `task`. `shape` is a digest of the job: with it, the flags of launched servers are
    tuned during the run, and remembered for later jobs with the same digest. A gateway is asked for its
    workers, because their addresses decide whether rows go through the gateway. Raises EngineStartError if
    the engine cannot be used for the job.
    """
    spec = for_task(spec, task)
    match spec:
        case AttachEngine() | GatewayEngine():
            return await _running_servers(spec, limits, task)
        case ServerEngine():
            from batchrunner.engines.launched.fleet import LaunchedFleet  # noqa: PLC0415

            if task == GENERATE:
                # Limit the blanks in JSON answers, which only text generation has. The call starts an
                # interpreter to ask for SGLang's version, so it runs in a thread.
                spec = await asyncio.to_thread(bound_blanks, spec)
            return LaunchedFleet(spec, log_dir=log_dir, limits=limits, task=task, shape=shape)
        case SimulatedEngine():
            from batchrunner.engines.simulated import Simulator  # noqa: PLC0415

            return Simulator(spec)
        case _:
            assert_never(spec)


async def _running_servers(spec: AttachEngine | GatewayEngine, limits: LimitsSpec, task: TaskName) -> Engine:
    """Return the engine of servers that already run, reached directly or through a gateway."""
    api_key = _read_key(spec.api_key_file) if spec.api_key_file else os.environ.get(spec.api_key_env)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The only URL may turn out to be that of a gateway.
    if isinstance(spec, AttachEngine) and len(spec.urls) == 1 and await is_gateway(spec.urls[0], headers):
        log.info("%s is a Model Gateway: it is used as `engine: {kind: gateway}`", spec.urls[0])
        fields = spec.model_dump(exclude={"kind", "urls"})
        spec = GatewayEngine(kind="gateway", url=spec.urls[0], **fields)
    options = dict[str, Any](api_key=api_key or None, limits=limits, task=task)
    if isinstance(spec, AttachEngine):
        return _direct_servers(spec.urls, gateway=None, background=spec.background, options=options)

    why = await _reason_for_gateway(spec, headers)
    if why is None:
        # All workers can be reached directly, or the job says so.
        return _direct_servers((), gateway=spec, background=spec.background, options=options)
    if spec.background:
        raise EngineStartError(
            f"engine.background: rows would go through the gateway {spec.url} ({why}), which reports the "
            "load of its workers too late for rows to make way for their users",
            hint="set `engine.route: workers` if this machine reaches the workers, or remove "
            "engine.background",
        )
    from batchrunner.engines.http.gateway import ThroughGateway  # noqa: PLC0415

    return ThroughGateway(spec, why=why, **options)


def _direct_servers(
    urls: Sequence[str], *, gateway: GatewayEngine | None, background: bool, options: dict[str, Any]
) -> Engine:
    """Return the engine that sends rows directly to servers: `urls`, or the workers of a `gateway`."""
    if background:
        from batchrunner.engines.http.background import BackgroundServers  # noqa: PLC0415

        return BackgroundServers(urls, gateway=gateway, **options)
    from batchrunner.engines.http.client import AttachedServers  # noqa: PLC0415

    return AttachedServers(urls, gateway=gateway, **options)


async def _reason_for_gateway(spec: GatewayEngine, api_key_header: Mapping[str, str]) -> str | None:
    """Return why rows must go through the gateway; None if they go to its workers directly.

    `api_key_header` is empty without an API key.
    """
    if spec.route == "workers":
        return None
    if spec.route == "gateway":
        return "engine.route"
    from batchrunner.engines.http.gateway import reason_to_go_through  # noqa: PLC0415

    return await reason_to_go_through(spec, api_key_header)


def engine_of(job: Job) -> EngineSpec:
    """Return the engine of a job, with the arguments that launched servers need to limit thinking.

    These arguments are added only if the job sets `sampling.max_thinking_tokens`. The job's own arguments
    take precedence. Raises EngineStartError on a CPU, where SGLang cannot limit thinking.
    """
    spec, budget = job.engine, job.sampling.max_thinking_tokens
    if budget is None or not isinstance(spec, ServerEngine):
        return spec
    from batchrunner.sglang.device import on_cpu  # noqa: PLC0415 - for launched servers alone

    if on_cpu(spec.device):
        raise EngineStartError(
            "sampling.max_thinking_tokens: SGLang's --enable-strict-thinking does not work on a CPU",
            hint="leave the field out, or run on a GPU",
        )
    args = {PARSER: "auto", STRICT_THINKING: True} | spec.args
    env = spec.env
    # Some parsers ignore the budgets of single rows, but apply a budget for all rows that an environment
    # variable sets.
    if args[PARSER] not in BUDGET_PARSERS:
        limit = budget if isinstance(budget, int) else UNLIMITED_THINKING
        env = {THINK_LIMIT: str(limit)} | env
    return spec.model_copy(update={"args": args, "env": env})


def _read_key(file: str) -> str:
    """Return the API key in a file; raises EngineStartError if the file cannot be read."""
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, ValueError) as failure:
        raise EngineStartError(f"engine.api_key_file {file}: cannot be read: {failure}") from None


def for_task(spec: EngineSpec, task: TaskName) -> EngineSpec:
    """Return an engine with the arguments and variables that a launched server needs for a task.

    The job's own arguments and variables take precedence. Raises EngineStartError if the model's architecture
    does not support the task.
    """
    forward_task = TASKS.get(task)
    if forward_task is None or not isinstance(spec, ServerEngine):
        return spec
    from batchrunner.sglang.device import MEAN_POOLING, on_cpu  # noqa: PLC0415 - for launched servers alone

    config = read_config(spec.model)
    check_architecture(task, config.get("architectures"), subject=f"engine.model: {spec.model}")
    # A task that needs a generative model must not get `--is-embedding`, one of the pooling arguments.
    pooling = {} if forward_task.by_generation else pooling_args(config, cpu=on_cpu(spec.device))
    env = MEAN_POOLING | spec.env if takes_mean(spec.model) else spec.env
    return spec.model_copy(update={"args": pooling | spec.args, "env": env})


def bound_blanks(spec: ServerEngine) -> ServerEngine:
    """Return an engine whose servers limit the blanks in JSON that follows a schema.

    Without a limit, a model may write blanks until `max_new_tokens`. A limit that the job sets takes
    precedence.
    """
    # Versions of SGLang before 0.5.23 may lack the flag.
    if not is_at_least(version_of(spec.python, spec.env), 0, 5, 23):
        return spec
    return spec.model_copy(update={"args": {MAX_BLANKS_FLAG: MOST_BLANKS, **spec.args}})


def model_of(spec: EngineSpec) -> str | None:
    """Return the identity of the engine's model; None if only a running server knows the model."""
    model = launched_model(spec)
    if model is not None:
        return model_identity(model)
    return "simulated" if isinstance(spec, SimulatedEngine) else None


def launched_model(spec: EngineSpec) -> str | None:
    """Return the model that the run's own servers load, as the job names it; None for other engines."""
    return spec.model if isinstance(spec, ServerEngine) else None
