"""A server on loopback that answers as SGLang 0.5.23 does, and fails on demand.

Its replies have the shapes of replies that were recorded from a real server. It runs in a thread of its
own, so that the runner under test may be blocking, asynchronous or another process.
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from aiohttp import web

from tests.support.answers import (
    ABORTS,
    CHATS,
    REFUSALS,
    Body,
    Endless,
    EventAnswer,
    Growing,
    OnWire,
    Said,
    add_asked,
    bodies_of,
    embeddings,
    is_bundle,
    is_score,
    logprob_for,
    prompts_of,
    rows_of,
    score_of,
    vector_of,
)
from tests.support.server_thread import PATIENCE_S, ServerThread

Behaviour: TypeAlias = Literal[
    "answer",
    "too long",  # 400: final
    "bad schema",  # 400: final
    "busy 429",
    "busy 503",
    "gateway 504",
    "timeout 524",
    "denied 401",
    "broken 500",
    "abort",  # a 200 that says it was cut off
    "abort 400",  # a 200 that says the row was at fault
    "abort 503",  # a 200 that says the queue was full
    "empty",  # and cut there, so that it is no answer
    "said nothing",  # the model ended its answer at once
    "tool call",  # a chat's answer without text
    "thought",  # a chat's reasoning that was cut before the answer
    "not json",
    "no answer",  # a 200 of another program
    "disconnect",
    "hold",  # answers when the test says so
    "die",  # closes every connection and takes no other
]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that reached the server."""

    path: str
    prompt: str
    body: dict[str, Any]
    tries: int
    """How often this prompt has been sent, this one included."""
    together: int = 1
    """Rows of the request that it came in."""

    @property
    def row(self) -> int:
        """The number of its row: the first one in the prompt."""
        return int(re.findall(r"\d+", self.prompt)[0])


Bundles: TypeAlias = Literal["rows"] | Body | OnWire | Endless
"""What becomes of a request with several rows: each is answered by the script, or all have one answer."""
Script: TypeAlias = Callable[[Sent], Behaviour | Body | OnWire | Said | Growing]

TOKENS_OF_ABORTED = 7
SILENT = {"empty", "said nothing"}
"""Behaviours whose answer has no text."""


class FakeSGLang(ServerThread):
    """`with FakeSGLang(script) as server: ... server.url`; `script` says what becomes of each request."""

    weights_gb = 15.0
    """Memory of the model's weights, which the load tells."""

    def __init__(
        self,
        script: Script = lambda _: "answer",
        *,
        model: str = "fake/model",
        api_key: str | None = None,
        retry_after: str = "0",
        is_sglang: bool = True,
        max_running: int = 8,
        others: int = 0,
        delay_s: float = 0.0,
        port: int = 0,
        arguments: Mapping[str, Any] | None = None,
        tokenize: Callable[[dict[str, Any]], list[int]] | None = None,
    ) -> None:
        super().__init__()
        self.script = script
        self.model, self.api_key = model, api_key
        self.retry_after, self.is_sglang = retry_after, is_sglang
        self.max_running = max_running
        self.others = others
        """Requests of other clients, which never end."""
        self.delay_s = delay_s
        """Time that an answer takes; with one, `max_running` are answered at once and the others wait."""
        self.refusal_s = 0.0
        """Time until a row is refused, or its connection is closed."""
        self.port = port
        self.arguments = arguments or {}
        """Fields of the server and its model, which /server_info and /model_info return."""
        self.tokenize = tokenize
        """What /v1/tokenize makes of a body, which a ValueError refuses; None for a release without it."""
        self.sent, self.requests = list[Sent](), 0
        """Rows that arrived, in order; requests that they came in."""
        self.open_streams = 0
        """Answers that do not end, and whose client still listens."""
        self.bundles: Callable[[dict[str, Any]], Bundles] = lambda _: "rows"
        """What becomes of the body of a request with several rows."""
        self.most_in_flight = 0
        self.used_tokens = 0
        """Tokens of the KV pool that are in use, of 20,000."""
        self.load: Callable[[], bytes] | None = None
        """What /v1/loads answers in place of the load."""
        self.vector: Callable[[Sent], list[float]] = vector_of
        """What becomes of a prompt for an embedding."""
        self.written: Callable[[Sent], str] | None = None
        """The JSON of that in an answer, in place of the vector's own."""
        self.logprob: Callable[[str, int], float | None] = logprob_for
        self.classes = 3
        self.floats = False
        """Whether vectors are lists of numbers, as of a release without `encoding_format`."""
        self.weights, self.adapters = "default", set[str]()
        """Version of the weights, which the description and the answers tell; names of the LoRA adapters."""
        self.polls: Literal["answer", "hang", "gone", "error"] = "answer"
        self.polled = 0
        """How often the load was asked for and told."""
        self.on_poll: Callable[[], object] = lambda: None
        """Called in the server's own thread whenever the load is asked for, before it is told."""
        self.aborted: list[str] = []
        """Names of the requests that were to be aborted."""
        self.takes_aborts = True
        """False: aborts need the key of an admin."""
        self._named: dict[str | None, asyncio.Future[Any]] = {}
        self._in_flight, self._released, self._is_dead = 0, False, False
        self._tries: Counter[str] = Counter()
        self._news = threading.Condition()

    @property
    def prompts(self) -> list[str]:
        """What was sent, in order."""
        return [sent.prompt for sent in self.sent]

    def wait_for(self, count: int) -> None:
        """Return when so many requests have arrived."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.sent) >= count, PATIENCE_S), (
                f"{len(self.sent)} of {count}"
            )

    def answer_held(self) -> None:
        """Let everything that is held, or will be, be answered."""
        self._released = True
        self.ask_again()

    def ask_again(self) -> None:
        """Let what is held be answered where the script no longer says that it is."""
        self._loop.call_soon_threadsafe(self.wake_held)

    def wake_held(self) -> None:
        """Ask again, called in the server's own thread: by a script."""
        self._asked_again.set()  # it wakes those who wait now, and nobody later
        self._asked_again.clear()

    def forget(self, *, clients_stay: bool = False) -> None:
        """Start counting anew, once the clients have left whose requests are not to count any more."""
        if not clients_stay:
            self.wait_until_left()
        self.sent, self.most_in_flight, self.requests = [], 0, 0
        self._tries.clear()

    def add_routes(self, app: web.Application) -> None:
        self._asked_again = asyncio.Event()
        self._slots = asyncio.Semaphore(self.max_running)
        if self.is_sglang:
            app.router.add_get("/health", self._health)
            app.router.add_get("/model_info", self._model_info)
            app.router.add_get("/server_info", self._server_info)
            app.router.add_get("/get_model_info", self._model_info)  # a gateway asks by the older names
            app.router.add_get("/get_server_info", self._server_info)
            app.router.add_get("/v1/loads", self._loads)
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/tokenize", self._tokens)
            app.router.add_post("/generate", self._generate)
            app.router.add_post("/v1/chat/completions", self._generate)
            app.router.add_post("/v1/completions", self._generate)
            for path in ("responses", "score", "rerank", "classify"):
                app.router.add_post(f"/v1/{path}", self._generate)
            app.router.add_post("/v1/embeddings", self._embed)
            app.router.add_post("/encode", self._score)
            app.router.add_post("/abort_request", self._abort)
        else:
            app.router.add_get("/{anything:.*}", self._something_else)

    async def _something_else(self, request: web.Request) -> web.Response:
        return web.Response(text="<html>It works!</html>", content_type="text/html")

    def _locked(self, request: web.Request) -> web.Response | None:
        if self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}":
            return None
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()  # the real one asks for no key here

    async def _model_info(self, request: web.Request) -> web.Response:
        return self._locked(request) or web.json_response(
            {
                "model_path": self.model,
                "served_model_name": self.model,
                "tokenizer_path": self.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.weights,
                "model_type": "llama",
                **self.arguments,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        limits = {"max_running_requests": self.max_running, "max_total_tokens": 20000}
        return self._locked(request) or web.json_response(
            {
                "version": "0.5.23",
                "model_path": self.model,
                "context_length": 4096,
                "skip_tokenizer_init": False,
                **limits,
                "internal_states": [limits],
                **self.arguments,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": name, "parent": self.model} for name in sorted(self.adapters)]
        return self._locked(request) or web.json_response({"data": [{"id": self.model}, *cards]})

    def _refuses_adapter(self, sent: Sent) -> bool:
        """Tell whether a row is for an adapter that is not loaded, as the real server reads the name."""
        name = str(sent.body.get("model", ""))
        return ":" in name and name.partition(":")[2] not in self.adapters

    def _refuses_model(self, sent: Sent) -> bool:
        """Tell whether a row is for a model that is not served: only one endpoint of the real server asks."""
        return sent.path == "/v1/responses" and sent.body.get("model") not in {self.model, *self.adapters}

    async def _tokens(self, request: web.Request) -> web.Response:
        if self.tokenize is None:
            return web.Response(status=404)
        try:
            tokens = self.tokenize(await request.json())
        except ValueError as refusal:
            return web.json_response({"object": "error", "message": str(refusal), "code": 400}, status=400)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def _loads(self, request: web.Request) -> web.Response:
        self.on_poll()
        if self.polls == "hang":
            await self._over.wait()
        if self.polls in {"gone", "error"}:
            return web.Response(status=404 if self.polls == "gone" else 500)
        self.polled += 1
        if self.load is not None:
            return web.Response(body=self.load(), content_type="application/json")
        requests = self._in_flight + self.others
        load = {
            "timestamp": self.polled,
            "dp_rank": 0,
            "num_running_reqs": min(requests, self.max_running),
            "num_waiting_reqs": max(0, requests - self.max_running),
            "num_used_tokens": self.used_tokens,
            "max_total_num_tokens": 20000,
            "max_running_requests": self.max_running,
            "token_usage": self.used_tokens / 20000,
            "memory": {"weight_gb": self.weights_gb},
        }
        timestamp = datetime.now(UTC).isoformat()
        return self._locked(request) or web.json_response(
            {"timestamp": timestamp, "version": "0.5.23", "loads": [load]}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if refusal := self._locked(request):
            return refusal
        if self._is_dead and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if is_score(body):
            return await self._score(request)
        self.requests += 1
        if body.get("stream"):
            return await self._stream(request, body)
        sent = self._note(request.path, body)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            what = self.script(sent)  # at once: none skips a count
            answering = asyncio.ensure_future(self._answer(request, sent, what))
            self._named[body.get("rid", body.get("request_id"))] = answering
            await asyncio.wait([answering])
            return (
                web.json_response(aborted(sent, None, "Aborted"))
                if answering.cancelled()
                else answering.result()
            )
        finally:
            answering.cancel()
            self._in_flight -= 1

    async def _answer(self, request: web.Request, sent: Sent, what: Any) -> web.StreamResponse:
        if self.delay_s and _is_good(what):
            async with self._slots:
                await asyncio.sleep(self.delay_s)
        elif what == "disconnect" or what in REFUSALS:
            await asyncio.sleep(self.refusal_s)
        if self._refuses_adapter(sent):
            return self._error(sent, 400, "Got LoRA adapter that has never been loaded")
        if self._refuses_model(sent):
            return self._error(sent, 404, f"The model '{sent.body.get('model')}' does not exist")
        if isinstance(what, (Body, OnWire)):
            return self._write(request, what)
        return await self._react(request, sent, what)

    async def _abort(self, request: web.Request) -> web.Response:
        """Abort the request of a name, unless it has been answered."""
        name = (await request.json())["rid"]
        self.aborted.append(name)
        if self.takes_aborts and name in self._named:
            self._named[name].cancel()
        return web.Response(status=200 if self.takes_aborts else 401)

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        """Answer prompts with vectors: all of them, or as one that the script lets fail."""
        if refusal := self._locked(request):
            return refusal
        body = await request.json()
        self.requests += 1
        bodies = [{**body, "prompt": each} for each in prompts_of(body)]
        return await self._answer_list(request, bodies, lambda rows: self._embeddings(body, rows))

    def _embeddings(self, body: dict[str, Any], rows: Sequence[Sent]) -> dict[str, Any]:
        return embeddings(body, [self.vector(sent) for sent in rows], as_floats=self.floats)

    async def _score(self, request: web.Request) -> web.StreamResponse:
        """Answer prompts with scores: all of them, or as one that the script lets fail."""
        body = await request.json()
        self.requests += 1
        return await self._answer_list(
            request,
            bodies_of(body),
            lambda rows: [score_of(sent, self.logprob, self.classes) for sent in rows],
        )

    async def _answer_list(
        self, request: web.Request, bodies: Sequence[dict[str, Any]], reply_to: Callable[[list[Sent]], Any]
    ) -> web.StreamResponse:
        self._in_flight += len(bodies)
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            rows, whats = self._ask_script(request.path, bodies)
            for sent, what in zip(rows, whats, strict=True):
                if isinstance(what, (Body, OnWire)):
                    return self._write(request, what)
                if what == "hold":
                    await self._hold(sent)
                elif what != "answer":
                    return await self._react(request, sent, what)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            reply = reply_to(rows)
            if self.written is None:
                return web.json_response(reply)
            items = [f'{{"index":{at},"embedding":{self.written(sent)}}}' for at, sent in enumerate(rows)]
            return web.Response(text=f'{{"data":[{",".join(items)}]}}', content_type="application/json")
        finally:
            self._in_flight -= len(bodies)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer several rows as the real one does: each by an event, when it ends."""
        bodies = rows_of(body)
        how = self.bundles(body)
        if isinstance(how, (Body, OnWire)):
            return self._write(request, how)
        if isinstance(how, Endless):
            self.open_streams += 1
            try:
                return await EventAnswer(request).stay_open(how.events)
            finally:
                self.open_streams -= 1
        self._in_flight += len(bodies)
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        left = len(bodies)
        try:
            answer = EventAnswer(request)
            rows, whats = self._ask_script(request.path, bodies)
            if refused := {"too long", "bad schema"}.intersection(map(str, whats)):
                return await answer.refuse(*REFUSALS[refused.pop()])
            await answer.begin()
            endings = [
                asyncio.ensure_future(
                    self._end_row(answer, {"index": index} if is_bundle(body) else {}, sent, what)
                )
                for index, (sent, what) in enumerate(zip(rows, whats, strict=True))
                if what not in {"disconnect", "die"}
            ]
            try:
                for ending in asyncio.as_completed(endings):
                    await ending
                    self._in_flight -= 1
                    left -= 1
            finally:
                for ending in endings:
                    ending.cancel()
            for sent, what in zip(rows, whats, strict=True):
                if what in {"disconnect", "die"}:
                    return await self._react(request, sent, what)
            return await answer.finish()
        finally:
            self._in_flight -= left

    async def _grow(self, answer_to: EventAnswer, place: dict[str, int], sent: Sent, what: Growing) -> None:
        """Write an answer event by event, and then its end: its own, or that of an abort."""
        aborting = self._named[sent.body["rid"]] = asyncio.get_running_loop().create_future()
        for text in what.texts:
            event = _sample(sent, text)
            event["meta_info"]["finish_reason"] = None
            await answer_to.write_json({**event, **place})
        if not what.ends:
            await asyncio.wait([aborting], timeout=PATIENCE_S)
            await answer_to.write_json({**aborted(sent, None, "Aborted"), **place})
            return
        last = _sample(sent, what.texts[-1])
        last["meta_info"]["finish_reason"] = {"type": "length", "length": 0}
        await answer_to.write_json({**last, **place})

    async def _end_row(self, answer_to: EventAnswer, place: dict[str, int], sent: Sent, what: Any) -> None:
        if what == "hold":
            await self._hold(sent)
        if self.delay_s and _is_good(what):
            async with self._slots:
                await asyncio.sleep(self.delay_s)
        if isinstance(what, Growing):
            await self._grow(answer_to, place, sent, what)
            return
        if isinstance(what, Body):
            await answer_to.write(what.content)
            return
        if what in {"not json", "no answer"}:
            await answer_to.write(b"<html>" if what == "not json" else b'{"ok": true}')
            return
        error = {**ABORTS, **REFUSALS}.get(what)
        reply = aborted(sent, *error) if error else _answered(sent, what, self.weights)
        if error is None and what not in SILENT:
            begun = {**reply["meta_info"], "finish_reason": None, "completion_tokens": 1}
            await answer_to.write_json({"text": "answer", "meta_info": begun, **place})
        await answer_to.write_json({**reply, **place})

    def _note(self, path: str, body: dict[str, Any], together: int = 1) -> Sent:
        if path == "/generate":
            prompt = body["text"] if "text" in body else str(body["input_ids"])
            assert isinstance(body["sampling_params"], dict)
        else:
            named = next(name for name in ("messages", "prompt", "query", "input") if name in body)
            prompt = str(body["messages"][-1]["content"] if named == "messages" else body[named])
            assert body["model"]
        self._tries[prompt] += 1
        sent = Sent(path, prompt, body, self._tries[prompt], together)
        with self._news:
            self.sent.append(sent)
            self._news.notify_all()
        return sent

    def _ask_script(self, path: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[Sent], list[Any]]:
        """Note the rows of a request one by one, each before the script is asked: none skips a count."""
        asked = [(sent := self._note(path, body, len(bodies)), self.script(sent)) for body in bodies]
        return [sent for sent, _ in asked], [what for _, what in asked]

    def _write(self, request: web.Request, what: Body | OnWire) -> web.Response:
        if isinstance(what, Body):
            return web.Response(body=what.content, content_type="application/json")
        assert request.transport is not None
        request.transport.write(what.content)
        request.transport.close()
        return web.Response()

    async def _react(self, request: web.Request, sent: Sent, what: Behaviour | Said) -> web.StreamResponse:
        match what:
            case "hold":
                await self._hold(sent)
            case "disconnect" | "die":
                assert request.transport is not None
                if what == "die":
                    self._is_dead = True
                    self.server.stop_accepting()  # no new connection before the old break
                request.transport.abort()
                if what == "die":
                    self._dying = asyncio.ensure_future(self.server.end())
                return web.Response()
            case "not json":
                return web.Response(text="<html>gateway</html>")
            case "no answer":
                return web.json_response({"ok": True})
        if what in ABORTS:
            return web.json_response(aborted(sent, *ABORTS[what]))
        if what in REFUSALS:
            return self._error(sent, *REFUSALS[what])
        return web.json_response(_answered(sent, what, self.weights))

    async def _hold(self, sent: Sent) -> None:
        while not self._released:
            await self._asked_again.wait()
            if not self._released and self.script(sent) != "hold":
                break

    def _error(self, sent: Sent, status: int, message: str) -> web.Response:
        body: dict[str, Any] = {"error": {"message": message}}
        if sent.path != "/generate":
            kind = "BadRequestError"
            body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        wait = {"Retry-After": self.retry_after} if status in {429, 503} else {}
        return web.json_response(body, status=status, headers=wait)


def _is_good(what: Behaviour | Body | OnWire | Said) -> bool:
    return what == "answer" or isinstance(what, Said)


def answer(sent: Sent, text: str | None = None, *, weights: str = "default") -> Any:
    """Return a success as the real server words it."""
    sampling = sent.body.get("sampling_params", sent.body)
    samples = [
        _sample(sent, text if text is not None else f"answer {i} to {sent.prompt}", weights)
        for i in range(sampling.get("n") or 1)
    ]
    if sent.path == "/generate":
        return samples if len(samples) > 1 else samples[0]
    return _chat(sent, samples)


def _answered(sent: Sent, what: Behaviour | Said, weights: str) -> Any:
    """Return the success that a behaviour stands for."""
    text = what.text if isinstance(what, Said) else "" if what in {*SILENT, *CHATS} else None
    reply = answer(sent, text, weights=weights)
    if what == "empty":
        _cut(reply)
    elif what in CHATS:
        choice = reply["choices"][0]
        choice["finish_reason"], said = CHATS[what]
        choice["message"].update(said)
    return reply


def _cut(reply: Any) -> None:
    """Let all samples of an answer be cut, and not ended by the model."""
    samples = reply["choices"] if "choices" in reply else reply if isinstance(reply, list) else [reply]
    for sample in samples:
        if "message" in sample:
            sample["finish_reason"] = "length"
        if "meta_info" in sample:
            sample["meta_info"]["finish_reason"] = {"type": "length", "length": 0}


def aborted(sent: Sent, status: int | None, message: str) -> Any:
    """Return a reply with status 200 whose only content is that there is none."""
    sample = _sample(sent, "")
    sample["meta_info"]["finish_reason"] = {
        "type": "abort",
        "message": message,
        "status_code": status,
        "err_type": None,
    }
    sample["meta_info"]["completion_tokens"] = TOKENS_OF_ABORTED
    return sample if sent.path == "/generate" else _chat(sent, [sample])


def _sample(sent: Sent, text: str, weights: str = "default") -> dict[str, Any]:
    sample: dict[str, Any] = {
        "text": text,
        "output_ids": list(range(len(text.split()))),
        "meta_info": {
            "id": f"{sent.prompt}-{sent.tries}",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": len(sent.prompt.split()),
            "weight_version": weights,
            "num_retractions": 0,
            "completion_tokens": len(text.split()),
            "cached_tokens": 1,
            "dp_rank": None,
            "e2e_latency": 0.01,
        },
    }
    add_asked(sent.body, sent.prompt, text, sample["meta_info"])
    return sample


def _chat(sent: Sent, samples: list[dict[str, Any]]) -> dict[str, Any]:
    prompt_tokens = len(sent.prompt.split())
    tokens = sum(sample["meta_info"]["completion_tokens"] for sample in samples)
    choices = []
    for index, sample in enumerate(samples):
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": sample["text"], "reasoning_content": None},
            "logprobs": None,
            "finish_reason": sample["meta_info"]["finish_reason"]["type"],
            "matched_stop": 2,
        }
        if sent.body.get("return_meta_info"):
            choice["meta_info"] = sample["meta_info"]
        if "prompt" in sent.body:
            choice["text"] = choice.pop("message")["content"]
        choices.append(choice)
    ids = {"sglext": {"output_ids": [sample["output_ids"] for sample in samples]}}
    return {
        **(ids if sent.body.get("return_output_ids_in_sglext") else {}),
        "id": f"{sent.prompt}-{sent.tries}",
        "object": "text_completion" if "prompt" in sent.body else "chat.completion",
        "created": 1795261009,
        "model": sent.body["model"],
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {"weight_version": "default"},
    }
