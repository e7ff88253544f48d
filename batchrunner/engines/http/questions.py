"""Questions to servers about themselves: at the start, where an odd answer ends the run, and later."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from batchrunner.core.errors import EngineDownError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.failures import in_words
from batchrunner.engines.http.model_guard import Model, ModelQuestion, model_in
from batchrunner.engines.http.status import KEY_REFUSED, MODEL_INFO, NOT_REACHED, SERVER_INFO, ServerStatus
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.job.tasks.table import GENERATE, TASKS, TaskName

log = logging.getLogger(__name__)


def check_does(task: TaskName, generates: object, who: str, architectures: object = None) -> None:
    """Raise EngineStartError where a model cannot do a task; `generates` is what its server says of it.

    `who` says in words which server it is, and which model it serves, `architectures` are the names of its
    classes. One that does not say may do anything.
    """
    kind = TASKS.get(task)
    by_generation = kind is None or kind.by_generation
    if by_generation and generates is False:
        raise EngineStartError(f"{who}, which does not generate text")
    if kind is not None and not by_generation and generates is True:
        raise EngineStartError(
            f"{who}, which {kind.wrong_model}", hint=f"start it with --is-embedding for task: {task}"
        )
    check_architecture(task, architectures, who)


def check_architecture(task: TaskName, architectures: object, who: str) -> None:
    """Raise EngineStartError where a model has no head for a task; one without architectures may have."""
    kind = TASKS.get(task)
    if kind is None or not kind.architectures or not isinstance(architectures, list) or not architectures:
        return
    names = ", ".join(map(str, architectures))
    if re.search(kind.architectures, names) is None:
        raise EngineStartError(f"{who}, whose architecture {names} has no head for task: {task}")


class ServerQuestions:
    """Asks servers what they are."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        behind_gateway: bool,
        has_detokenizer: bool,
        task: TaskName = GENERATE,
    ) -> None:
        """With a detokenizer (`has_detokenizer`) a server may be one without a tokenizer.

        A server must have a model for the `task`.
        """
        self._task = task
        self._session = session
        self._behind_gateway = behind_gateway
        self._has_detokenizer = has_detokenizer

    async def model_info(self, url: str) -> dict[str, Any]:
        """Return the server's model; raises EngineStartError where it cannot do the task."""
        status, model = await self._ask(url, MODEL_INFO)
        path = model.get("model_path")
        if not isinstance(path, str) or not path:
            raise EngineStartError(
                f"{url}: something answers, but it is not SGLang (GET {MODEL_INFO[0]} gave {status})"
            )
        check_does(
            self._task, model.get("is_generation"), f"{url}: serves {path}", model.get("architectures")
        )
        return model

    async def server_info(self, url: str) -> dict[str, Any]:
        """Return the server's arguments and limits; raises EngineStartError where it returns no text."""
        _, server = await self._ask(url, SERVER_INFO)
        if server.get("skip_tokenizer_init") and not self._has_detokenizer:
            raise EngineStartError(
                f"{url}: runs with --skip-tokenizer-init and returns no text", hint="start it without"
            )
        return server

    async def model(self, url: str, run_model: Model, timeout_s: float | None = None) -> dict[str, str]:
        """Return what a server says of its model now; raises EngineDownError where it does not say.

        It has `timeout_s` seconds for each answer, `TIMING.server_open` if none are given. Its arguments are
        read too only if the run's model has a field that they alone tell.
        """
        timeout_s = timeout_s or TIMING.server_open
        status, found = await self._ask_again(url, MODEL_INFO, timeout_s)
        if status in KEY_REFUSED:
            raise EngineDownError(f"{url}: refuses the API key ({status}): see engine.api_key_env")
        if "model_path" not in found:
            raise EngineDownError(f"{url}: GET {MODEL_INFO[0]} gave {status} and no model")
        if run_model.keys() - model_in(found).keys():
            _, server = await self._ask_again(url, SERVER_INFO, timeout_s)
            return model_in(found, server)
        return model_in(found)

    async def _ask_again(
        self, url: str, paths: tuple[str, ...], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        try:
            return await ServerStatus(self._session, url).mapping(paths, timeout_s)
        except NOT_REACHED as failure:
            raise EngineDownError(f"no connection to {url}: {in_words(failure)}") from None

    async def _ask(self, url: str, paths: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
        """Ask a server what it is; raises EngineStartError where it does not answer or refuses the key."""
        try:
            status, reply = await ServerStatus(self._session, url).mapping(paths, TIMING.server_open)
        except TimeoutError:
            raise EngineStartError(
                f"{url}: no answer to GET {paths[0]} within {TIMING.server_open:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as failure:
            remedy = (
                "the gateway's workers must be within reach from here too, for their load"
                if self._behind_gateway
                else "start the server, or correct engine.urls"
            )
            raise EngineStartError(f"{url}: no connection ({in_words(failure)})", hint=remedy) from None
        if status in KEY_REFUSED:
            raise EngineStartError(f"{url}: refuses the API key ({status})", hint="see engine.api_key_env")
        return status, reply


class ModelOfServer(ModelQuestion):
    """Asks one server for its model."""

    def __init__(self, questions: ServerQuestions, url: str, run_model: Model) -> None:
        self._questions = questions
        self._url = url
        self._run_model = run_model

    async def ask(self) -> Mapping[str, Model]:
        """Return what the server says; see `ModelQuestion.ask`."""
        return {self._url: await self._questions.model(self._url, self._run_model)}


class ModelsOfWorkers(ModelQuestion):
    """Asks all workers that a gateway lists now for their models."""

    def __init__(self, questions: ServerQuestions, workers: WorkerList, run_model: Model) -> None:
        self._questions = questions
        self._workers = workers
        self._run_model = run_model
        self._last: list[str] = []

    async def ask(self) -> Mapping[str, Model]:
        """Return what each worker says; one that does not answer answers no rows either, and is left out."""
        try:
            self._last = await self._workers.addresses()
        except EngineStartError as failure:  # the gateway ends: rows will find out
            log.debug("the gateway's workers: %s", failure)
        found = await asyncio.gather(*map(self._model, self._last))
        return {url: model for url, model in zip(self._last, found, strict=True) if model}

    async def _model(self, url: str) -> dict[str, str]:
        try:
            return await self._questions.model(url, self._run_model, TIMING.status_timeout)
        except EngineDownError as failure:
            log.debug("the model of %s: %s", url, failure)
            return {}
