"""Attached servers that serve others first: rows have the lowest priority, and are preempted on demand.

A row is preempted by SGLang's `/abort_request`. Its answer then says that it was aborted, and after how many
tokens. Closing the connection instead would be too slow: SGLang looks for closed connections only every 4 s.
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

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
"""Lowest and highest value of SGLang's priorities. A flag of the server says which of them is served last."""
YIELDS = "--enable-priority-scheduling --default-priority-value 0 --retraction-policy priority"
"""Flags by which a server lets its users go first."""
_OUTPUT_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class BackgroundServers(AttachedServers):
    """Servers whose users go first: see `Engine.preempt`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._preempted: dict[asyncio.Task[Any], int] = {}
        """Output tokens of the rows that are being preempted, by the asyncio task that waits for each row."""
        self._preemptions: set[asyncio.Task[None]] = set()

    async def open(self) -> EngineInfo:
        """Connect, and say what the users of these servers will notice; see `Engine.open`."""
        info = await super().open()
        if not self._reports_load:
            raise EngineStartError(
                f"{self.replicas[0]}: does not report its load, which engine.background needs",
                hint="use SGLang 0.5.23, or leave out engine.background",
            )
        yields = all(_yields(arguments) for arguments in self._known_arguments())
        note = (
            "background: the server lets its users' requests go first"
            if yields
            else "background: the server does not let its users' requests go first. They may wait for rows "
            f"of this run, which leaves a part of the server free for them: start it with {YIELDS}"
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
            preempted.tokens = self._preempted[task]
            raise preempted from None
        finally:
            self._preempted.pop(task, None)

    def preempt(self, route: str, kept: int) -> None:
        """Preempt the youngest rows of a route, so that `kept` rows stay; see `Engine.preempt`."""
        endpoint = self.endpoints[route]
        abortable = [(task, request) for task, request in endpoint.requests.items() if request.rids]
        for task, request in abortable[kept:]:
            if task not in self._preempted:
                self._preempted[task] = 0
                preemption = asyncio.create_task(self._preempt_row(endpoint, task, request))
                self._preemptions.add(preemption)
                preemption.add_done_callback(self._preemptions.discard)

    def _known_arguments(self) -> Iterator[Mapping[str, Any]]:
        """Yield the arguments of the servers that answered at the start."""
        for endpoint in self.endpoints.values():
            if endpoint.arguments is not None:
                yield endpoint.arguments

    def _added_fields(self, endpoint: Endpoint, path: str) -> dict[str, Any]:
        """Return the fields that let a request be aborted and give it the lowest priority."""
        fields = super()._added_fields(endpoint, path)
        arguments = endpoint.arguments or next(self._known_arguments())
        if arguments.get("enable_priority_scheduling"):
            fields["priority"] = HIGHEST if arguments.get("schedule_low_priority_values_first") else LOWEST
        return fields

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> bytes:
        """Post a body. If the row was preempted meanwhile, count the output tokens of its reply."""
        reply = await super()._post(endpoint, path, body)
        task = asyncio.current_task()
        if task in self._preempted:
            self._preempted[task] = sum(map(int, _OUTPUT_TOKENS.findall(reply)))
        return reply

    async def _abort(self, endpoint: Endpoint, rids: Sequence[str]) -> bool:
        """Abort requests, unless their row is being preempted: then they are aborted already."""
        return asyncio.current_task() in self._preempted or await super()._abort(endpoint, rids)

    async def _preempt_row(self, endpoint: Endpoint, task: asyncio.Task[Any], request: SentRequest) -> None:
        """Abort a request. If it goes on nevertheless, close its connection."""
        if await self._abort(endpoint, request.rids):
            await asyncio.sleep(TIMING.status_timeout)
        if endpoint.requests.get(task) is request:
            del endpoint.requests[task]
            task.cancel()


def _yields(server: Mapping[str, Any]) -> bool:
    """Tell by a server's arguments whether users' requests go before requests of the lowest priority.

    The server must have a default priority. Without one, a user's request has the lowest priority too.
    """
    return bool(
        server.get("enable_priority_scheduling")
        and server.get("default_priority_value") is not None
        and not server.get("disable_priority_preemption")
    )
