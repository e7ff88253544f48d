"""The calls for operators: the server's health, and its figures for Prometheus."""

from collections import Counter

from aiohttp import web

from batchrunner.serve.api_errors import ApiError
from batchrunner.serve.records import OWNER_OF_CALL
from batchrunner.serve.state import BATCHES, FILES, Record, State


class MetricsApi:
    """Handlers of the calls for operators."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def health(self, _: web.Request) -> Record:
        """Tell that the server handles calls."""
        return {"status": "ok"}

    async def metrics(self, request: web.Request) -> web.Response:
        """Return counts of files, batches and lines in the format of Prometheus; only for admins."""
        if not request[OWNER_OF_CALL].admin:
            raise ApiError(403, "Only an admin may read the metrics.")
        batches = self._state.records[BATCHES].values()
        figures: Counter[str] = Counter(f'batches{{status="{batch["status"]}"}}' for batch in batches)
        figures["files"] = len(self._state.records[FILES])
        for batch in batches:
            for name, count in batch["request_counts"].items():
                figures[f'lines{{state="{name}"}}'] += count
        return web.Response(text="".join(f"batchrunner_{name} {value}\n" for name, value in figures.items()))
