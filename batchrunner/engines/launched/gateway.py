"""One `sglang_router` (the Model Gateway) on loopback, with the arguments that batch work needs."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EngineStartError
from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.device import program_environment
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.engines.launched.supervisor import LaunchedProcess, ServerSupervisor, Supervised, to_argv
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.spec import LimitsSpec

log = logging.getLogger(__name__)

START_S = 120.0
"""It imports torch where SGLang is installed: 5 s of CPU time, more on a busy machine."""
KEEP_TOGETHER: dict[str, Any] = {
    "policy": "manual",
    "assignment-mode": "min_load",
    "max-idle-secs": 300,
    "eviction-interval-secs": 60,
}
"""A new affinity key goes to the replica with the fewest requests, and the same key follows it. Rows without
a common prefix have a key each, so keys are forgotten after 300 s (the gateway's own limit is four hours)."""
LATER_S = 60.0
"""Seconds that the gateway waits for an answer beyond the runner's own limit, which is to end first."""


class GatewayProcess(Supervised):
    """A gateway that a supervisor restarts, and the list of workers that it should have.

    It starts without workers, and they are added over HTTP. So there is one way to add them at the first
    start, when a replica comes back and when the gateway does, and their key is in no command line.
    """

    def __init__(
        self, spec: GatewayEngine, incidents: IncidentQueue, *, key: str, log_dir: Path, limits: LimitsSpec
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = LaunchedProcess(
            module="sglang_router.launch_router",
            argv=["--host", "127.0.0.1", "--port", str(port), *to_argv(_arguments(spec, limits))],
            key=key,
            environ=program_environment(spec.env),
            log_path=log_dir / "engine-gateway.log",
            python=spec.python,
            name="the gateway",
            needs="sglang_router: install batchrunner[gateway], or set engine.python",
        )
        self.supervisor = ServerSupervisor(self, incidents)
        self._workers = WorkerList(self.url, key)
        self._listed: set[str] = set()

    async def start(self) -> None:
        """Start it and wait until it takes workers; raises EngineStartError where it does not."""
        await self.process.start()
        # not /readiness, which is 503 before there is a worker
        await self.process.wait_until_ready(self.url + "/health", START_S)

    async def set_up(self, *, up: bool) -> None:
        """Give a restarted gateway its workers again."""
        if up:
            await self._workers.bring_to(self._listed)

    async def take_workers(self, urls: Sequence[str]) -> None:
        """Give the gateway its first workers; raises EngineStartError where it does not take them."""
        self._listed.update(urls)
        if not await self._workers.bring_to(self._listed):
            raise EngineStartError(self.process.failure_message("the gateway did not take the replicas"))

    async def list_worker(self, url: str, *, listed: bool) -> None:
        """Put a worker on the gateway's list, or take it off."""
        (self._listed.add if listed else self._listed.discard)(url)
        if not await self._workers.bring_to(self._listed):
            log.warning("the gateway's list is not what it should be: %s", ", ".join(sorted(self._listed)))

    async def close(self) -> None:
        """End the gateway."""
        await self._workers.close()
        await self.process.stop()


def _arguments(spec: GatewayEngine, limits: LimitsSpec) -> dict[str, Any]:
    """Return the gateway's arguments. Bodies up to 512 MB pass by default."""
    return {
        **(KEEP_TOGETHER if spec.policy == "auto" else {"policy": spec.policy}),
        # the runner retries, with pauses; the gateway would repeat a refusal five times within half a second
        "disable-retries": True,
        # … and after ten failures of a replica answer 503 for it for a minute
        "disable-circuit-breaker": True,
        "max-concurrent-requests": -1,  # no limit, and so no queue of its own
        "request-timeout-secs": math.ceil(limits.request_timeout + LATER_S),
        # SGLang's /health takes up to 20 s before it says no; supervisors see at once when a process ends
        "health-check-interval-secs": 30,
        "health-check-timeout-secs": 25,
        "shutdown-grace-period-secs": 1,
        "log-level": "warn",  # `info` is two lines a row
        # its metrics cannot be turned off, and two gateways cannot share the default port
        "prometheus-host": "127.0.0.1",
        "prometheus-port": free_port(),
        **spec.gateway_args,
    }
