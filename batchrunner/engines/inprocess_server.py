"""SGLang's class `Engine`, with the endpoints of its HTTP server: what runs in the thread of the engine.

Chat messages go through the server's own chat code, so that their tokens are those of the HTTP server.
"""

import atexit
import importlib
import signal
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from multiprocessing.resource_tracker import ensure_running
from typing import Any

import orjson

from batchrunner.core.child_processes import STOP_SIGNALS, children, kill_children
from batchrunner.core.endpoints import CHAT_PATH
from batchrunner.core.errors import EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Request, RequestBody
from batchrunner.engines.base import PlacedRequest
from batchrunner.engines.device import server_args
from batchrunner.engines.http import wire
from batchrunner.engines.http.reply_errors import error_of
from batchrunner.engines.inbox import Inbox
from batchrunner.engines.model_names import ModelNames
from batchrunner.input.request_bodies import with_model
from batchrunner.job.engine import InprocessEngine

_ENDPOINTS = {"/v1/embeddings": ("serving_embedding", "OpenAIServingEmbedding", "EmbeddingRequest")}
"""SGLang's module, its class of the endpoint and the class of its body, by a task's path."""

_NATIVE = {"/generate": "GenerateReqInput", "/encode": "EmbeddingReqInput"}
"""The class of the body of SGLang's own endpoints, by a task's path."""


class InprocessServer:
    """`sglang.Engine`, asked as its HTTP server would be. Each coroutine runs in the thread of the engine."""

    def __init__(self, spec: InprocessEngine) -> None:
        self.engine: Any = None
        """The `sglang.Engine`; None before `load` and after `stop`."""
        self._chat: Any = None
        self._others: set[int] | None = None  # processes that ran before it began to start its own
        self._own: set[int] = set()
        self._is_stopped = False
        self._has_loaded = threading.Event()
        self._has_loaded.set()
        served = str(spec.args.get("served-model-name", spec.model))
        self._names = ModelNames([spec.model, served], wire.ANY_MODEL)

    async def load(self, spec: InprocessEngine, cpu: bool) -> str:
        """Load the model, and return the version of SGLang; raises EngineStartError after `stop`."""
        self._has_loaded.clear()
        try:
            return self._load(spec, cpu=cpu)
        finally:
            self._has_loaded.set()

    def _load(self, spec: InprocessEngine, *, cpu: bool) -> str:
        self._refuse_if_stopped()
        import sglang  # noqa: PLC0415 - heavy, and only where this engine is asked for
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: PLC0415

        args = {name.replace("-", "_"): value for name, value in server_args(spec.args, cpu=cpu).items()}
        self._refuse_if_stopped()  # the import took seconds
        _keep_stop_signals()
        self._others = children()
        self.engine = sglang.Engine(model_path=spec.model, **args)
        self._own = children() - self._others
        self._chat = OpenAIServingChat(self.engine.tokenizer_manager, self.engine.template_manager)
        return str(sglang.__version__)

    def _refuse_if_stopped(self) -> None:
        if self._is_stopped:
            raise EngineStartError("the engine did not start: it was stopped")

    def stop(self) -> bool:
        """End the engine's processes, and only those: SGLang's own shutdown ends every child process.

        Return whether nothing is loaded any more: what loads without its processes fails, but an import goes
        on to its end. Blocks for TIMING.stop_start at most.
        """
        self._is_stopped = True
        began = time.monotonic()
        while not self._has_loaded.wait(TIMING.stop_poll) and time.monotonic() - began < TIMING.stop_start:
            if self._others is not None:
                kill_children(children() - self._others)
        self._end_engine()
        return self._has_loaded.is_set()

    def _end_engine(self) -> None:
        if self.engine is None:
            return
        engine, self.engine = self.engine, None
        atexit.unregister(engine.shutdown)
        watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        kill_children(self._own)

    async def loads(self) -> list[Any]:
        """Return the load of each scheduler, as SGLang has it."""
        return list(await self.engine.tokenizer_manager.get_loads(include=["core"]))

    async def ask(self, request: Request) -> Any:
        """Do what `/generate` does for a request, and return its output."""
        return await anext(self._generate(wire.generate_body(request)))

    async def ask_many(self, rows: Sequence[PlacedRequest], inbox: Inbox) -> None:
        """Do what `/generate` does for several rows; their outputs go into the inbox as they come."""
        async for output in self._generate(wire.bundle_body([row.request for row in rows])):
            inbox.put(output)

    def _generate(self, body: dict[str, Any]) -> Any:
        """Do what `/generate` does; `Engine.async_generate` leaves out return_text_in_logprobs."""
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        return self.engine.tokenizer_manager.generate_request(GenerateReqInput(**body), None)

    async def ask_chat(self, request: Request) -> Any:
        """Do what `/v1/chat/completions` does, and return its reply. Raises RequestError."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest  # noqa: PLC0415

        reply = await self._chat.handle_request(ChatCompletionRequest(**wire.chat_body(request)), None)
        return _content_of(reply)

    async def ask_endpoint(self, request: Request) -> bytes:
        """Do what the path of a whole body does, and return its reply. Raises RequestError."""
        from sglang.srt.entrypoints.openai.protocol import (  # noqa: PLC0415
            ChatCompletionRequest,
            CompletionRequest,
        )
        from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion  # noqa: PLC0415

        body: RequestBody = request.prompt
        fields = orjson.loads(with_model(body, self._names.sent(body)))
        if body.path in _ENDPOINTS:
            return await self._ask_step(body.path, fields)
        if body.path == CHAT_PATH:
            return _content_of(await self._chat.handle_request(ChatCompletionRequest(**fields), None))
        serving = OpenAIServingCompletion(self.engine.tokenizer_manager, self.engine.template_manager)
        return _content_of(await serving.handle_request(CompletionRequest(**fields), None))

    async def ask_task(self, *requests: Request) -> bytes:
        """Do what the HTTP server does for a task without decoding."""
        task = requests[0].task
        assert task is not None
        return task.whole([await self._ask_step(task.path, body) for body in task.steps(requests)])

    async def _ask_step(self, path: str, asked: dict[str, Any]) -> bytes:
        if path in _NATIVE:
            structs = importlib.import_module("sglang.srt.managers.io_struct")
            question = getattr(structs, _NATIVE[path])(**asked)
            return orjson.dumps(await anext(self.engine.tokenizer_manager.generate_request(question, None)))
        home, serving, kind = _ENDPOINTS[path]
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        make = getattr(importlib.import_module(f"sglang.srt.entrypoints.openai.{home}"), serving)
        endpoint = make(self.engine.tokenizer_manager, self.engine.template_manager)
        return _content_of(await endpoint.handle_request(getattr(protocol, kind)(**asked), None))

    async def tokenize(self, request: Request, special: bool) -> Any:
        """Do what `/v1/tokenize` does, and return its reply. Raises RequestError."""
        from sglang.srt.entrypoints.openai.protocol import TokenizeRequest  # noqa: PLC0415
        from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize  # noqa: PLC0415

        serving = OpenAIServingTokenize(self.engine.tokenizer_manager, self.engine.template_manager)
        asked = TokenizeRequest(**wire.tokenize_body(request, special=special))
        reply = await serving.handle_request(asked, None)
        if hasattr(reply, "model_dump"):
            return reply.model_dump()
        raise error_of(reply.status_code, reply.body)


def _keep_stop_signals() -> None:
    """Let no process that this thread starts see a signal that stops the run: it would cut rows in flight.

    A process begins with the signals blocked that the thread has blocked; this process has other threads to
    take them. The first start of the tracker of `multiprocessing` would unblock some again.
    """
    ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _content_of(reply: Any) -> bytes:
    """Return the JSON of an answer of SGLang's endpoints; raises RequestError for a refusal."""
    if hasattr(reply, "model_dump_json"):
        return bytes(reply.model_dump_json().encode())
    if reply.status_code != HTTPStatus.OK:
        raise error_of(reply.status_code, reply.body)
    return bytes(reply.body)
