"""One server of a fleet, watched: restarted if it dies or hangs, spared by the gateway while it stalls."""

from collections.abc import Sequence

from batchrunner.core.types import SchedulerLoad
from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http.endpoint import Endpoint
from batchrunner.engines.http.failures import FailureClassifier
from batchrunner.engines.launched.gateway import GatewayProcess
from batchrunner.engines.launched.sglang_server import SGLangServer
from batchrunner.engines.launched.supervisor import ServerSupervisor


class FleetReplica:
    """A server that a supervisor restarts; without a `gateway` all rows in flight are its own."""

    def __init__(
        self,
        server: SGLangServer,
        gateway: GatewayProcess | None,
        failures: FailureClassifier,
        incidents: IncidentQueue,
        *,
        hang_s: float,
    ) -> None:
        self.server = server
        self.url = server.url
        self.process = server.process
        self.supervisor = ServerSupervisor(self, incidents)
        self.is_up = True
        self._gateway = gateway
        self._failures = failures
        self._hangs = HangDetector(hang_s, alone=gateway is None)

    async def start(self) -> None:
        """Start the server and wait until it takes requests; raises EngineStartError where it does not."""
        await self.server.start()

    def heal(self) -> bool:
        """Change the next start's arguments by the cause of death; return whether any help."""
        return self.server.heal()

    async def went_down(self) -> None:
        """Take the server out of the gateway."""
        await self._set_up(up=False)

    async def came_up(self) -> None:
        """Put the server back into the gateway."""
        await self._set_up(up=True)

    def poll(self, loads: Sequence[SchedulerLoad], endpoint: Endpoint, now: float) -> None:
        """Restart the server if it hangs; let the gateway spare it while it stalls."""
        if not self.is_up:
            return
        own = [load for load in loads if load.server == self.url]
        answers = 0 if self._gateway else endpoint.answers
        hang = self._hangs.poll(now, own, in_flight=endpoint.in_flight, answers=answers)
        if hang:
            self.supervisor.hangs(hang)
        elif self._gateway:
            self._gateway.spare(self.url, stalls=self._hangs.stalls)

    async def _set_up(self, *, up: bool) -> None:
        self.is_up = up
        self._hangs.restarted()
        self._failures.record(self.url, alive=up)
        if self._gateway:
            await self._gateway.list_worker(self.url, listed=up)
