"""The engine `sglang.Engine` in this process: no HTTP between the runner and the scheduler.

It has a thread with an event loop of its own, so that loading does not stop the runner's loop, and SGLang
leaves the signal handlers alone, which it replaces in the main thread.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.core.errors import (
    BundleRefusedError,
    EngineBusyError,
    EngineLostError,
    EngineStartError,
    NoAnswerError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.types import Completion, Request
from batchrunner.engines.base import Engine, PlacedRequest, RowAnswers
from batchrunner.engines.device import (
    CPU_NOTE,
    CPU_SHIM,
    MEAN_POOLING,
    SERVER_MODULES,
    card_name,
    cpu_environment,
    on_cpu,
    with_server_modules,
)
from batchrunner.engines.http import replies, wire
from batchrunner.engines.http.body_replies import completion_of_body
from batchrunner.engines.http.questions import check_does
from batchrunner.engines.http.server_info import (
    answers_in_pieces,
    prefill_tokens,
    tokenizer_info,
)
from batchrunner.engines.http.task_replies import answer_of, answers_of
from batchrunner.engines.inbox import Inbox
from batchrunner.engines.inprocess_server import InprocessServer
from batchrunner.engines.media_facts import media_taken
from batchrunner.engines.model_files import check_model, model_identity, takes_mean, vocabulary_of
from batchrunner.engines.parallelism import with_tp
from batchrunner.engines.recovery.fits import split_over
from batchrunner.engines.vector_facts import MATRYOSHKA, lengths_of
from batchrunner.job.engine import InprocessEngine
from batchrunner.job.tasks.table import GENERATE, TaskName

log = logging.getLogger(__name__)


class InprocessSGLang(Engine):
    """SGLang's offline engine."""

    def __init__(self, spec: InprocessEngine, *, request_timeout_s: float, task: TaskName = GENERATE) -> None:
        self._task = task
        self._spec = spec
        self._timeout_s = request_timeout_s
        self._stack = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._server = InprocessServer(spec)
        self._vocabulary = vocabulary_of(spec.model)
        self._pending: set[asyncio.Future[Any]] = set()
        self._dead = False
        self._is_closing = False
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
            version = await self._in_thread(self._server.load, self._spec, cpu)
        except ImportError as failure:
            raise EngineStartError(
                f"no usable SGLang here ({failure})", hint="install batchrunner[engine]"
            ) from None
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - it fails in as many ways as there are flags
            raise EngineStartError(f"the engine did not start: {type(failure).__name__}: {failure}") from None
        load = (await self._in_thread(self._server.loads))[0]
        engine = self._server.engine
        manager = engine.tokenizer_manager
        names = manager.model_config.hf_config.architectures
        media = media_taken([_model_info(manager)], version)
        check_does(self._task, manager.is_generation, f"the engine serves {self._spec.model}", names)
        return EngineInfo(
            kind="inprocess",
            model=model_identity(self._spec.model),
            version=version,
            max_running=load.max_running_requests,
            max_total_tokens=load.max_total_num_tokens,
            context_length=manager.model_config.context_len,
            prefill_tokens=prefill_tokens(vars(engine.server_args)),
            caches_prefixes=not engine.server_args.disable_radix_cache,
            tokenizing=tokenizer_info(_model_info(manager), manager.server_args.resolved_dict()),
            vector_lengths=lengths_of(
                {name: getattr(manager.model_config, name, None) for name in MATRYOSHKA}
            ),
            takes_images=media.images,
            takes_audio=media.audio,
            takes_videos=media.videos,
            card=None if cpu else await asyncio.to_thread(card_name),
            tp=split_over(self._spec.args),
            one_by_one=answers_in_pieces(vars(engine.server_args)),
            notes=(CPU_NOTE,) if cpu else (),
        )

    async def generate(self, request: Request, route: str) -> Completion:  # noqa: ARG002 - there is one
        """Send one request once; see `Engine.generate`."""
        wire.refuse_deadly(request, self._vocabulary)
        asks: dict[str, Callable[..., Awaitable[Any]]]
        asks = {"messages": self._server.ask_chat, "body": self._server.ask_endpoint}
        ask = self._server.ask_task if request.task is not None else asks.get(request.kind, self._server.ask)
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
                await asyncio.wait_for(self._in_thread(self._server.ask_many, rows, inbox), self._timeout_s)
                return
            reply = await asyncio.wait_for(self._in_thread(self._server.ask_task, *sent), self._timeout_s)
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
            return replies.tokens_in(await self._in_thread(self._server.tokenize, request, special))
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
            for load in ([] if self._dead else await self._in_thread(self._server.loads))
        ]

    async def close(self) -> None:
        """End the engine's processes and its thread; one that imports SGLang is left behind."""
        self._is_closing = True
        has_ended = await asyncio.to_thread(self._server.stop)
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
            self._loop = None
        if has_ended:
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

    def _watch_for_death(self) -> None:
        """Handle SIGQUIT, with which a dying scheduler ends its parent; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            self._loop = asyncio.get_running_loop()
            self._loop.add_signal_handler(signal.SIGQUIT, self._died)

    def _died(self) -> None:
        if self._is_closing:  # it is what ends the scheduler
            return
        self._dead = True
        for waiting in list(self._pending):
            waiting.cancel()


def _model_info(manager: Any) -> dict[str, Any]:
    """Return the fields of the HTTP server's `/model_info` that are read."""
    model = manager.model_config
    return {
        "model_path": manager.model_path,
        "model_type": getattr(model.hf_config, "model_type", None),
        "architectures": getattr(model.hf_config, "architectures", None),
        "has_image_understanding": model.is_image_understandable_model,
        "has_audio_understanding": model.is_audio_understandable_model,
    }
