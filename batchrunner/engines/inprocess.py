"""The engine `sglang.Engine` in this process: no HTTP between the runner and the scheduler.

It has a thread with an event loop of its own, so that loading does not stop the runner's loop, and SGLang
leaves the signal handlers alone, which it replaces in the main thread. Chat messages go through the server's
own chat code, so that their tokens are those of the HTTP server.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from anyio.from_thread import BlockingPortal, start_blocking_portal

from batchrunner.core.endpoints import CHAT_PATH
from batchrunner.core.errors import (
    BundleRefusedError,
    EngineBusyError,
    EngineLostError,
    EngineStartError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.types import Completion, EngineInfo, Request, RequestBody, SchedulerLoad
from batchrunner.engines.base import Engine, PlacedRequest, RowAnswers
from batchrunner.engines.device import (
    CPU_NOTE,
    CPU_SHIM,
    MEAN_POOLING,
    SERVER_MODULES,
    card_name,
    cpu_environment,
    on_cpu,
    server_args,
    with_server_modules,
)
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.body_replies import completion_of_body
from batchrunner.engines.http.questions import check_does
from batchrunner.engines.http.server_info import (
    answers_in_pieces,
    prefill_tokens,
    takes_images,
    tokenizer_info,
)
from batchrunner.engines.http.task_replies import answer_of, answers_of
from batchrunner.engines.inbox import Inbox
from batchrunner.engines.model_files import check_model, model_identity, takes_mean, vocabulary_of
from batchrunner.engines.model_names import ModelNames
from batchrunner.engines.parallelism import with_tp
from batchrunner.engines.recovery.fits import split_over
from batchrunner.input.request_bodies import with_model
from batchrunner.job.engine import InprocessEngine
from batchrunner.job.tasks.table import GENERATE, TaskName

log = logging.getLogger(__name__)


_ENDPOINTS = {"/v1/embeddings": ("serving_embedding", "OpenAIServingEmbedding", "EmbeddingRequest")}
"""SGLang's module, its class of the endpoint and the class of its body, by a task's path."""

_NATIVE = {"/generate": "GenerateReqInput", "/encode": "EmbeddingReqInput"}
"""The class of the body of SGLang's own endpoints, by a task's path."""


class InprocessSGLang(Engine):
    """SGLang's offline engine."""

    def __init__(self, spec: InprocessEngine, *, request_timeout_s: float, task: TaskName = GENERATE) -> None:
        self._task = task
        self._spec = spec
        self._timeout_s = request_timeout_s
        self._stack = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._engine: Any = None
        self._chat: Any = None
        self._children: list[Any] = []
        self._vocabulary = vocabulary_of(spec.model)
        served = str(spec.args.get("served-model-name", spec.model))
        self._names = ModelNames([spec.model, served], wire.ANY_MODEL)
        self._pending: set[asyncio.Future[Any]] = set()
        self._dead = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that handles SIGQUIT

    async def open(self) -> EngineInfo:
        """Load the model; see `Engine.open`."""
        check_model(self._spec.model)
        self._spec = await asyncio.to_thread(with_tp, self._spec)
        cpu = on_cpu(self._spec.device)
        if cpu:
            # for SGLang and the processes that it spawns; before it is first imported
            os.environ.update(cpu_environment(dict(os.environ)))
            sys.path.insert(0, str(CPU_SHIM))
        if self._task != GENERATE and takes_mean(self._spec.model):
            os.environ.update(MEAN_POOLING, PYTHONPATH=with_server_modules(os.environ))
            sys.path.append(str(SERVER_MODULES))
        self._portal = self._stack.enter_context(start_blocking_portal("asyncio"))
        self._watch_for_death()
        log.info("starting sglang.Engine for %s", self._spec.model)
        try:
            with _interrupts_ignored():
                version = await self._in_thread(self._load, cpu)
        except ImportError as failure:
            raise EngineStartError(
                f"no usable SGLang here ({failure})", hint="install batchrunner[engine]"
            ) from None
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - it fails in as many ways as there are flags
            raise EngineStartError(f"the engine did not start: {type(failure).__name__}: {failure}") from None
        load = (await self._in_thread(self._loads))[0]
        manager = self._engine.tokenizer_manager
        names = manager.model_config.hf_config.architectures
        check_does(self._task, manager.is_generation, f"the engine serves {self._spec.model}", names)
        return EngineInfo(
            kind="inprocess",
            model=model_identity(self._spec.model),
            version=version,
            max_running=load.max_running_requests,
            max_total_tokens=load.max_total_num_tokens,
            context_length=manager.model_config.context_len,
            prefill_tokens=prefill_tokens(vars(self._engine.server_args)),
            caches_prefixes=not self._engine.server_args.disable_radix_cache,
            tokenizing=tokenizer_info(_model_info(manager), manager.server_args.resolved_dict()),
            takes_images=takes_images([_model_info(manager)]),
            card=None if cpu else await asyncio.to_thread(card_name),
            tp=split_over(self._spec.args),
            one_by_one=answers_in_pieces(vars(self._engine.server_args)),
            notes=(CPU_NOTE,) if cpu else (),
        )

    async def generate(self, request: Request, route: str) -> Completion:  # noqa: ARG002 - there is one
        """Send one request once; see `Engine.generate`."""
        wire.refuse_deadly(request, self._vocabulary)
        asks: dict[str, Callable[..., Awaitable[Any]]]
        asks = {"messages": self._ask_chat, "body": self._ask_endpoint}
        ask = self._ask_task if request.task is not None else asks.get(request.kind, self._ask)
        try:
            reply = await asyncio.wait_for(self._in_thread(ask, request), self._timeout_s)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {self._timeout_s:g} s") from None
        except (ValueError, TypeError) as failure:  # SGLang's server answers these with 400
            raise RowRefusedError(" ".join(str(failure).split())) from None
        if request.kind == "body":
            return completion_of_body(request.prompt, reply)
        if request.task is not None:
            return answer_of(request, reply)
        return replies.completion_of(request, reply)

    async def generate_many(self, requests: Sequence[Request], route: str, answers: RowAnswers) -> None:  # noqa: ARG002
        """Send several requests in one; see `Engine.generate_many`."""
        rows: list[PlacedRequest] = []
        for place, request in enumerate(requests):
            try:
                wire.refuse_deadly(request, self._vocabulary)
                rows.append(PlacedRequest(place, request))
            except RowRefusedError as refusal:
                answers.ended(place, refusal)
        if not rows:
            return
        inbox = Inbox(asyncio.get_running_loop(), rows, answers)
        sent = [row.request for row in rows]
        try:
            if sent[0].task is None:
                await asyncio.wait_for(self._in_thread(self._ask_many, rows, inbox), self._timeout_s)
                return
            reply = await asyncio.wait_for(self._in_thread(self._ask_task, *sent), self._timeout_s)
            for row, result in zip(rows, answers_of(sent, reply), strict=True):
                answers.ended(row.place, result)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {self._timeout_s:g} s") from None
        except EngineBusyError:
            raise
        except (ValueError, TypeError, RequestError) as failure:  # one of them is refused
            raise BundleRefusedError(str(failure)) from None

    async def tokens_of(self, request: Request, *, special: bool = True) -> list[int] | None:
        """Ask SGLang's own `/v1/tokenize`; see `Engine.tokens_of`."""
        try:
            return replies.tokens_in(await self._in_thread(self._tokenize, request, special))
        except (ValueError, TypeError) as failure:  # as in `generate`
            raise RowRefusedError(str(failure)) from None

    async def loads(self) -> list[SchedulerLoad]:
        """Return the scheduler's load now."""
        return [
            SchedulerLoad(
                scheduler=f"inprocess#dp{load.dp_rank}",
                source="engine",
                running=load.num_running_reqs,
                queue=load.num_waiting_reqs,
                token_usage=load.token_usage,
                used_tokens=load.num_used_tokens,
                max_total_tokens=load.max_total_num_tokens,
                max_running=load.max_running_requests,
                taken_at=load.timestamp,
            )
            for load in ([] if self._dead else await self._in_thread(self._loads))
        ]

    async def close(self) -> None:
        """End the engine's processes, and only those: SGLang's own shutdown ends every child process."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            atexit.unregister(engine.shutdown)
            watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
            if watchdog is not None:
                watchdog.stop()
            from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

            for child in self._children:
                kill_process_tree(child.pid)
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
            self._loop = None
        await asyncio.to_thread(self._stack.close)

    async def _in_thread(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Call a function in the engine's thread, and wait for it in the runner's loop."""
        assert self._portal is not None
        waiting = asyncio.wrap_future(self._portal.start_task_soon(function, *args))
        self._pending.add(waiting)
        try:
            return await waiting
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            if self._dead:
                raise EngineLostError(
                    "the engine's scheduler died (its reason is on standard error)"
                ) from None
            raise
        finally:
            self._pending.discard(waiting)

    async def _load(self, cpu: bool) -> str:
        import sglang  # noqa: PLC0415 - heavy, and only where this engine is asked for
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: PLC0415

        args = {
            name.replace("-", "_"): value for name, value in server_args(self._spec.args, cpu=cpu).items()
        }
        before = set(multiprocessing.active_children())
        self._engine = sglang.Engine(model_path=self._spec.model, **args)
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self._chat = OpenAIServingChat(self._engine.tokenizer_manager, self._engine.template_manager)
        return str(sglang.__version__)

    async def _loads(self) -> list[Any]:
        return list(await self._engine.tokenizer_manager.get_loads(include=["core"]))

    async def _ask(self, request: Request) -> Any:
        return await anext(self._generate(wire.generate_body(request)))

    async def _ask_many(self, rows: Sequence[PlacedRequest], inbox: Inbox) -> None:
        async for output in self._generate(wire.bundle_body([row.request for row in rows])):
            inbox.put(output)

    def _generate(self, body: dict[str, Any]) -> Any:
        """Do what `/generate` does; `Engine.async_generate` leaves out return_text_in_logprobs."""
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        return self._engine.tokenizer_manager.generate_request(GenerateReqInput(**body), None)

    async def _ask_chat(self, request: Request) -> Any:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest  # noqa: PLC0415

        reply = await self._chat.handle_request(ChatCompletionRequest(**wire.chat_body(request)), None)
        return _content_of(reply)

    async def _ask_endpoint(self, request: Request) -> bytes:
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
        serving = OpenAIServingCompletion(self._engine.tokenizer_manager, self._engine.template_manager)
        return _content_of(await serving.handle_request(CompletionRequest(**fields), None))

    async def _ask_task(self, *requests: Request) -> bytes:
        """Do what the HTTP server does for a task without decoding."""
        task = requests[0].task
        assert task is not None
        return task.whole([await self._ask_step(task.path, body) for body in task.steps(requests)])

    async def _ask_step(self, path: str, asked: dict[str, Any]) -> bytes:
        if path in _NATIVE:
            structs = importlib.import_module("sglang.srt.managers.io_struct")
            question = getattr(structs, _NATIVE[path])(**asked)
            return orjson.dumps(await anext(self._engine.tokenizer_manager.generate_request(question, None)))
        home, serving, kind = _ENDPOINTS[path]
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        make = getattr(importlib.import_module(f"sglang.srt.entrypoints.openai.{home}"), serving)
        endpoint = make(self._engine.tokenizer_manager, self._engine.template_manager)
        return _content_of(await endpoint.handle_request(getattr(protocol, kind)(**asked), None))

    async def _tokenize(self, request: Request, special: bool) -> Any:
        from sglang.srt.entrypoints.openai.protocol import TokenizeRequest  # noqa: PLC0415
        from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize  # noqa: PLC0415

        serving = OpenAIServingTokenize(self._engine.tokenizer_manager, self._engine.template_manager)
        asked = TokenizeRequest(**wire.tokenize_body(request, special=special))
        reply = await serving.handle_request(asked, None)
        if hasattr(reply, "model_dump"):
            return reply.model_dump()
        raise replies.error_of(reply.status_code, reply.body)

    def _watch_for_death(self) -> None:
        """Handle SIGQUIT, with which a dying scheduler ends its parent; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._loop = asyncio.get_running_loop()
            self._loop.add_signal_handler(signal.SIGQUIT, self._died)

    def _died(self) -> None:
        self._dead = True
        for waiting in list(self._pending):
            waiting.cancel()


def _content_of(reply: Any) -> bytes:
    """Return the JSON of an answer of SGLang's endpoints; raises RequestError for a refusal."""
    if hasattr(reply, "model_dump_json"):
        return bytes(reply.model_dump_json().encode())
    if reply.status_code != HTTPStatus.OK:
        raise replies.error_of(reply.status_code, reply.body)
    return bytes(reply.body)


def _model_info(manager: Any) -> dict[str, Any]:
    """Return the fields of the HTTP server's `/model_info` that are read."""
    model = manager.model_config
    return {
        "model_path": manager.model_path,
        "model_type": getattr(model.hf_config, "model_type", None),
        "has_image_understanding": model.is_image_understandable_model,
        "has_audio_understanding": model.is_audio_understandable_model,
    }


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Have SGLang's processes ignore SIGINT: a Ctrl-C reaches them too, and would end rows in flight."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
