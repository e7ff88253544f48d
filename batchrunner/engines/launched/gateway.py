"""One `sglang_router` (the Model Gateway) on loopback, with the arguments that batch work needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchrunner.engines.http.connections import free_port
from batchrunner.engines.launched.process import LaunchedProcess, answers, plain_environment, to_argv

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

    from batchrunner.job.spec import GatewayEngine

START_S = 120.0
"""It imports torch where SGLang is installed: 5 s of CPU time, more on a busy machine."""
KEEP_TOGETHER: dict[str, Any] = {
    "policy": "manual",
    "assignment-mode": "min_load",
    "max-idle-secs": 300,
    "eviction-interval-secs": 60,
}
"""A new key goes to the replica that has the fewest requests, and the same one follows it. There is one for
each row, so they are forgotten after a while (the gateway's own limit is four hours)."""
LATER_S = 60.0
"""The gateway gives up on a request this long after the runner, who then says so in its own words."""


def gateway_process(
    spec: GatewayEngine, *, key: str, log_dir: Path, request_timeout_s: float
) -> tuple[LaunchedProcess, str]:
    """Return the program, not yet started, and its URL. It starts without workers: they are added later.

    So one way of adding them serves the first start, a replica that comes back and a gateway that does, and
    their key is in no command line. Bodies up to 512 MB pass by default.
    """
    port = free_port()
    args: dict[str, Any] = {
        **(KEEP_TOGETHER if spec.policy == "auto" else {"policy": spec.policy}),
        # the runner repeats and paces; the gateway would repeat a refusal five times within half a second
        "disable-retries": True,
        # … and after ten failures of a replica answer 503 for it for a minute
        "disable-circuit-breaker": True,
        "max-concurrent-requests": -1,  # no limit, and so no queue of its own
        "request-timeout-secs": math.ceil(request_timeout_s + LATER_S),
        # SGLang's /health takes up to 20 s before it says no; processes that end are seen by us at once
        "health-check-interval-secs": 30,
        "health-check-timeout-secs": 25,
        "shutdown-grace-period-secs": 1,
        "log-level": "warn",  # `info` is two lines a row
        # its metrics cannot be turned off, and two gateways cannot share the default port
        "prometheus-host": "127.0.0.1",
        "prometheus-port": free_port(),
        **spec.gateway_args,
    }
    process = LaunchedProcess(
        module="sglang_router.launch_router",
        argv=["--host", "127.0.0.1", "--port", str(port), *to_argv(args)],
        key=key,
        environ={**plain_environment(), **spec.env},
        log_path=log_dir / "engine-gateway.log",
        python=spec.python,
        name="the gateway",
        needs="sglang_router: install batchrunner[gateway], or set engine.python",
    )
    return process, f"http://127.0.0.1:{port}"


async def start_gateway(process: LaunchedProcess, url: str) -> None:
    """Start it and wait until it takes workers; raises EngineStartError where it does not."""

    async def is_up(session: aiohttp.ClientSession) -> bool:
        return await answers(session, url, "/health")  # /readiness is 503 before there is a worker

    await process.start()
    await process.wait_until_ready(is_up, START_S)
