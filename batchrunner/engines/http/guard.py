"""Checks that a server still serves the run's model, before its answers count.

A connection leads to one process for as long as the connection lives. So a new connection takes a request
only after its server has named the run's model (`GuardedConnector`). Behind a proxy, a connection may lead to
any server. So after each sign that a server was away (`Endpoint.doubt`), the server is asked for its model
again before an answer counts (`ModelGuard.confirm`).

Polls and failed requests notice a server that is away for a while. The check of a new connection also notices
a server that is replaced without an absence, for example if a Kubernetes Service or a port forward leads to
another server. `AttachedServers` would notice this a second later, when answers of the other model are
already stored. The check costs next to nothing per row, because connections that open together share one
request.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from batchrunner.core.errors import AnotherModelError, BatchrunError, EngineDownError, EngineStartError
from batchrunner.engines.http.server import Endpoint, Model, ModelQuestion, ModelWatch

MODEL_FIELDS = {
    "model_path": "the model",
    "served_model_name": "the served name",
    "weight_version": "the weights' version",
    "revision": "the revision",
    "weight_gb": "the memory of the weights in GB",
}
"""Fields of `/model_info` and `/server_info` that identify a server's model, with their names in messages."""


def model_in(*replies: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's description in replies to `/model_info` and `/server_info`.

    If several replies have a field, the first one counts.
    """
    merged = {name: value for reply in reversed(replies) for name, value in reply.items()}
    return {name: str(merged[name]) for name in MODEL_FIELDS if merged.get(name) is not None}


def common_model(models: Sequence[Model]) -> dict[str, str]:
    """Return the fields that all replicas share; raises EngineStartError if their models differ.

    The names under which the replicas serve the model may differ.
    """
    for name, words in MODEL_FIELDS.items():
        values = {model[name] for model in models if name in model}
        if len(values) > 1 and name != "served_model_name":
            raise EngineStartError(
                f"the replicas serve different models: {words} is {' and '.join(sorted(values))}"
            )
    return {
        name: value for name, value in models[0].items() if all(model.get(name) == value for model in models)
    }


class ModelGuard:
    """Compares the servers' models with the run's. Simultaneous checks of a server share one request."""

    def __init__(self) -> None:
        self.model: Model = {}
        self.weights: str | None = None
        """Version of the weights in all answers so far; None before the first answer with a version."""
        self._endpoints: list[Endpoint] = []

    def watch(self, endpoint: Endpoint, question: ModelQuestion) -> None:
        """Let the guard check a server's model; `question` asks the server which model it serves."""
        endpoint.watch = ModelWatch(question)
        self._endpoints.append(endpoint)

    def endpoints_at(self, url: URL) -> list[Endpoint]:
        """Return the guarded servers at the host and port of a URL; a new connection leads to one of them."""
        return [endpoint for endpoint in self._endpoints if URL(endpoint.url).origin() == url.origin()]

    async def confirm(self, endpoint: Endpoint) -> None:
        """Ask a server for its model, and return once it has answered with the run's model.

        Raises AnotherModelError for another model, EngineDownError if there is no answer. Simultaneous
        callers share one request if it has not been sent yet. A request that is already in flight is not
        shared, because its answer may be older than the call.
        """
        watch = endpoint.watch
        if watch is None:
            return
        if watch.next_question is None:
            watch.next_question = asyncio.create_task(self._ask(endpoint, watch))
        error = await asyncio.shield(watch.next_question)
        if error is not None:
            raise error

    async def check_answer(self, endpoint: Endpoint, version: str | None) -> None:
        """Return once a server's answer may be used; raises AnotherModelError and EngineDownError.

        `version` is the version of the weights in the answer; None if the answer has none.
        """
        if endpoint.doubts:
            await self.confirm(endpoint)
        if version is None:
            return
        # The first answer with a version sets the version that all answers must have.
        self.weights = self.weights or version
        if version != self.weights:
            raise another_model(endpoint.url, "weight_version", self.weights, version)

    async def _ask(self, endpoint: Endpoint, watch: ModelWatch) -> BatchrunError | EngineDownError | None:
        """Ask a server which model it serves.

        Return None if the model is the run's, else the error for another model or for no answer.
        """
        async with watch.lock:
            # Callers that arrive before this line share the request that follows. A later caller sends its
            # own, because the answer to this one may be too old for it.
            await asyncio.sleep(0)
            watch.next_question = None
            doubts = endpoint.doubts
            try:
                refuse_another(endpoint.url, self.model, await watch.ask())
            except (BatchrunError, EngineDownError) as error:
                return error
            # A doubt that came while the request was in flight is not settled by the answer.
            if endpoint.doubts == doubts:
                endpoint.doubts = 0
            return None


def refuse_another(url: str, run_model: Model, model: Model) -> None:
    """Raise AnotherModelError if a field of a server's model differs from the run's model."""
    for name, run_value in run_model.items():
        if model.get(name, run_value) != run_value:
            raise another_model(url, name, run_value, model[name])


def another_model(url: str, name: str, was: str, now: str) -> AnotherModelError:
    """Return the error for a server whose model has changed: the field `name` was `was` and is `now`."""
    return AnotherModelError(
        f"{url} serves another model now ({MODEL_FIELDS[name]} was {was!r} and is {now!r})",
        hint="start the run's model there and run the job again to "
        "resume, or use another output.path for the new model",
    )


class GuardedConnector(aiohttp.TCPConnector):
    """Connector of aiohttp that uses a new connection only after its server has named the run's model."""

    def __init__(self, guard: ModelGuard, **options: Any) -> None:
        """Create a connector whose connections `guard` checks; `options` go to aiohttp's TCPConnector."""
        super().__init__(**options)
        self._guard = guard

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """Open a connection, and return it after its server has confirmed the model."""
        protocol = await super()._create_connection(req, traces, timeout)
        try:
            for endpoint in self._guard.endpoints_at(req.url):
                await self._guard.confirm(endpoint)
        except BaseException:
            protocol.close()
            raise
        # If the server died during the check, the answer may have come from another server.
        if not protocol.is_connected():
            protocol.close()
            raise EngineDownError(f"the connection to {req.url.origin()} was lost before it was used")
        return protocol
