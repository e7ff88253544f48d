"""Starts a Model Gateway (`smg`) in front of a run's servers, so that other clients need only one address.

The run sends its own rows to the replicas directly. If the gateway dies, it is restarted. The gateway never
outlives this process.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.http.gateway_workers import GatewayQuestions, GatewayWorker
from batchrunner.engines.launched.server import end_launched, launch
from batchrunner.sglang.device import output_of, program_environment

log = logging.getLogger(__name__)

MODULE = "smg.launch_router"
ARGUMENTS = (
    *("--policy", "cache_aware", "--routing-key-override", "--routing-key-headers", "x-smg-routing-key"),
    *("--max-concurrent-requests", "0", "--health-check-interval-secs", "5"),
    *("--disable-worker-overload-protection", "--load-monitor-interval", "1"),
)
"""Arguments of the gateway. Requests with a common prefix go to the same replica, unless a routing key names
another. No limit of the gateway refuses a request. A restarted replica is used again within seconds. Overload
protection is off: by default, a replica with 8 waiting requests gets no more, but a run keeps at least 100
waiting at each replica. Load reports are at most 1 s old, for runs that send rows through the gateway."""
START_S = 120.0
"""Maximum number of seconds until the gateway lists all replicas."""


def check_installed(python: str | None) -> None:
    """Raise EngineStartError if the interpreter `python` has no gateway.

    To load the model of the servers takes minutes, so this is checked before they start.
    """
    interpreter = python or sys.executable
    command = [interpreter, "-c", "import importlib.util; print(importlib.util.find_spec('smg') is None)"]
    # An interpreter that cannot be run is reported when a server starts.
    if output_of(command, TIMING.server_open, program_environment({})).strip() == "True":
        raise EngineStartError(
            f"engine.gateway: {interpreter} has no module smg",
            hint="install it for this interpreter: pip install smg",
        )


class LaunchedGateway:
    """One `smg` process in front of the replicas of this run."""

    def __init__(self, *, python: str | None, key: str, log_path: Path) -> None:
        """`python` has the module `smg`, and `key` is the API key of the gateway and of the replicas."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self._python = python or sys.executable
        self._key = key
        self._log_path = log_path
        self._replicas: Sequence[str] = ()
        """URLs of the replicas; empty before `start`."""
        self._process: asyncio.subprocess.Process | None = None
        """Process of the launcher; None before `start` and after `close`."""

    async def start(self, replicas: Sequence[str]) -> None:
        """Start the gateway for the URLs of the replicas, and wait until it lists all of them.

        Raises EngineStartError if the process ends, or if a replica is not listed within START_S seconds.
        """
        self._replicas = replicas
        await self._launch()
        deadline = asyncio.get_running_loop().time() + START_S
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}) as session:
            questions = GatewayQuestions(session, self.url)
            while not {worker.url for worker in await _listed(questions)} >= {*replicas}:
                if self._process is None or self._process.returncode is not None:
                    raise EngineStartError(
                        f"engine.gateway: smg did not start with {self._python} [{self._log_path}]"
                    )
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineStartError(
                        f"engine.gateway: smg did not find the replicas in {START_S:g} s [{self._log_path}]"
                    )
                await asyncio.sleep(TIMING.launch_poll)

    async def watch(self) -> None:
        """Restart the gateway whenever its process ends, until cancelled."""
        while self._process is not None:
            status = await self._process.wait()
            log.warning("the gateway ended with exit status %s and is restarted [%s]", status, self._log_path)
            await asyncio.sleep(TIMING.first_restart)
            await self._launch()

    async def close(self) -> None:
        """Stop the gateway, and wait for the end of its process."""
        process, self._process = self._process, None
        if process is not None:
            await end_launched(process)

    async def _launch(self) -> None:
        """Start the process of the gateway; raises EngineStartError if the interpreter cannot be run."""
        port = self.url.rpartition(":")[2]
        address = ["--host", "127.0.0.1", "--port", port]
        # The default port of the metrics may be in use, for example by another gateway.
        metrics_address = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        config = {
            "module": MODULE,
            "argv": [*address, *metrics_address, *ARGUMENTS, "--worker-urls", *self._replicas],
            "key": self._key,
            "log": str(self._log_path),
        }
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process = await launch(self._python, config, environ=program_environment({}))


async def _listed(questions: GatewayQuestions) -> list[GatewayWorker]:
    """Return the workers that a gateway lists; empty if the gateway does not answer."""
    try:
        return await questions.workers(TIMING.status_timeout)
    except EngineDownError:
        return []
