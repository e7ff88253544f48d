"""Servers that already run and serve their own users before the rows of a batch run.

The run's rows have the lowest priority, and can be preempted by SGLang's `/abort_request`. The answer of a
preempted row says that the row was aborted, and how many output tokens it had. Closing the connection instead
would take longer, because SGLang looks for closed connections only every 4 s.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.errors import EngineStartError, PreemptedError, RequestError
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, Request
from batchrunner.engines.http.client import AttachedServers
from batchrunner.engines.http.server import Endpoint, SentRequest

LOWEST = -(1 << 63)
"""Lowest value of a request's priority in SGLang. The flag `--schedule-low-priority-values-first` decides
whether such a request is served last or first."""
HIGHEST = (1 << 63) - 1
"""Highest value of a request's priority in SGLang."""
YIELDS = "--enable-priority-scheduling --default-priority-value 0 --retraction-policy priority"
"""Flags with which a server serves its users before requests of the lowest priority."""
_OUTPUT_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class BackgroundServers(AttachedServers):
    """Servers whose users go before the run: its rows can be preempted (see `Engine.preempt`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._preempted: dict[asyncio.Task[Any], int] = {}
        """Output tokens of the rows that are being preempted, by the asyncio task that waits for each row."""
        self._preemptions: set[asyncio.Task[None]] = set()
        """Tasks that preempt rows. The set keeps them from being garbage-collected."""

    async def open(self) -> EngineInfo:
        """Connect to the servers and describe them, with a note for their users; see `Engine.open`."""
        info = await super().open()
        if not self._reports_load:
            raise EngineStartError(
                f"{self.replicas[0]}: does not report its load, which engine.background needs",
                hint="use SGLang 0.5.23, or leave out engine.background",
            )
        yields = all(_yields(arguments) for arguments in self._known_arguments())
        if yields:
            note = "background: the server lets its users' requests go first"
        else:
            note = (
                "background: the server does not let its users' requests go first. They may wait for rows of "
                "this run, so the run leaves a part of the server free. To let users go first, start the "
                f"server with {YIELDS}"
            )
        return replace(
            info,
            yields=yields,
            one_by_one="each row can be preempted by itself",
            notes=(note, *info.notes),
        )

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`. Raises PreemptedError for a preempted row."""
        task = asyncio.current_task()
        assert task is not None
        try:
            return await super().generate(request, route)
        except RequestError as failure:
            if task not in self._preempted:
                raise
            preempted = PreemptedError(str(failure))
            # `_post` has read this number of output tokens from the reply to the aborted request.
            preempted.tokens = self._preempted[task]
            raise preempted from None
        finally:
            self._preempted.pop(task, None)

    def preempt(self, route: str, kept: int) -> None:
        """Preempt the youngest rows of a route, so that `kept` rows stay; see `Engine.preempt`."""
        endpoint = self.endpoints[route]
        # The oldest request comes first, so the requests after the first `kept` are the youngest.
        abortable = [(task, request) for task, request in endpoint.requests.items() if request.rids]
        for task, request in abortable[kept:]:
            if task not in self._preempted:
                self._preempted[task] = 0
                preemption = asyncio.create_task(self._preempt_row(endpoint, task, request))
                self._preemptions.add(preemption)
                preemption.add_done_callback(self._preemptions.discard)

    def _known_arguments(self) -> Iterator[Mapping[str, Any]]:
        """Yield the arguments of each server that answered at the start of the run."""
        for endpoint in self.endpoints.values():
            if endpoint.arguments is not None:
                yield endpoint.arguments

    def _added_fields(self, endpoint: Endpoint, path: str) -> dict[str, Any]:
        """Return the request id, and the priority with which the server serves the request last."""
        fields = super()._added_fields(endpoint, path)
        # A server that was away at the start is assumed to have the arguments of another replica.
        arguments = endpoint.arguments or next(self._known_arguments())
        if arguments.get("enable_priority_scheduling"):
            fields["priority"] = HIGHEST if arguments.get("schedule_low_priority_values_first") else LOWEST
        return fields

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> bytes:
        """Post a body and return the reply; if the row has been preempted, count its output tokens."""
        reply = await super()._post(endpoint, path, body)
        task = asyncio.current_task()
        if task in self._preempted:
            self._preempted[task] = sum(map(int, _OUTPUT_TOKENS.findall(reply)))
        return reply

    async def _abort(self, endpoint: Endpoint, rids: Sequence[str]) -> bool:
        """Abort requests by their ids. A preempted row is left out, because it has been aborted already."""
        if asyncio.current_task() in self._preempted:
            return True
        return await super()._abort(endpoint, rids)

    async def _preempt_row(self, endpoint: Endpoint, task: asyncio.Task[Any], request: SentRequest) -> None:
        """Abort a request. If the request goes on nevertheless, close its connection."""
        if await self._abort(endpoint, request.rids):
            # An aborted request ends within this time. Otherwise its connection is closed below.
            await asyncio.sleep(TIMING.status_timeout)
        is_still_in_flight = endpoint.requests.get(task) is request
        if is_still_in_flight:
            # A missing entry tells the task that the cancellation did not come from its caller.
            del endpoint.requests[task]
            task.cancel()


def _yields(server: Mapping[str, Any]) -> bool:
    """Tell from a server's arguments whether its users' requests go before requests of the lowest priority.

    The server must have a default priority. Without one, a user's request has the lowest priority too.
    """
    return bool(
        server.get("enable_priority_scheduling")
        and server.get("default_priority_value") is not None
        and not server.get("disable_priority_preemption")
    )
